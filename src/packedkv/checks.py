"""Validate tensors and constants: shapes, dtypes, NaN, Inf, numbers beyond fp16."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from packedkv.codec import FP16_MAX, ROLES, Codec, Constant, Params, Role, Site
from packedkv.errors import FitError, KVError, ShapeError, SpecError


def largest(x: Tensor) -> Tensor:
    """Largest magnitude of ``x``, without synchronising: 0-d on its device, NaN if ``x`` has one; 0 if it is empty."""
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    if x.device.type != "cpu":
        return torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)  # one launch
    low, high = x.detach().aminmax()
    return torch.maximum(-low, high)


def check_tensor(name: str, x: Tensor) -> None:
    """Validate that codecs can store a tensor: floating ``[B, H, N, D]`` (ShapeError), no NaN, Inf or above 65504.

    The latter raise ValueError, which names the tensor and the first position.
    """
    if not isinstance(x, Tensor) or x.ndim != 4 or not x.is_floating_point():
        came = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(f"{name}: got {came}; expected a floating point tensor [batch, kv_heads, tokens, head_dim].")
    if x.numel() == 0:
        return
    if float(largest(x)) <= FP16_MAX:  # false for NaN
        return
    bad = (~(x.abs().float() <= FP16_MAX)).nonzero()[0].tolist()
    value = x[tuple(bad)].item()
    what = "is not finite" if value != value or abs(value) == float("inf") else "is above 65504"
    raise ValueError(
        f"{name}[batch={bad[0]}, head={bad[1]}, token={bad[2]}, channel={bad[3]}] = {value} {what}; "
        f"codecs store finite values within the fp16 range. Check the model's dtype (fp16 overflow?) "
        f"or the attention mask of that token."
    )


def check_tensors(keys: Tensor, values: Tensor, *more: Tensor) -> list[float]:
    """``check_tensor`` of both, by one synchronisation; also returns the numbers of ``more``, tensors ``[1]``."""
    both = (keys, values)
    fit = all(isinstance(x, Tensor) and x.ndim == 4 and x.is_floating_point() and x.numel() for x in both)
    if fit and keys.device.type == values.device.type == "cpu":  # numbers, not tensors: much faster for one token
        if all(-FP16_MAX <= bound.item() <= FP16_MAX for x in both for bound in x.aminmax()):  # false for NaN
            return [x.item() for x in more]
    elif fit and keys.device == values.device:
        key, value, *told = torch.cat([*(largest(x).float().view(1) for x in both), *more]).tolist()
        if key <= FP16_MAX and value <= FP16_MAX:  # false for NaN
            return told
    check_tensor("keys", keys)
    check_tensor("values", values)
    return [x.item() for x in more]


def check_shapes(keys: Tensor, values: Tensor, cached: Sequence[Tensor] = (), dtype: torch.dtype | None = None) -> None:
    """Raise ShapeError unless new tokens ``[B, H, n, D]`` fit each other and the cached tokens.

    ``cached``: some cached keys and values, of which t may be 0; an empty sequence: nothing is cached. ``dtype``: of
    the tensors that were appended.
    """
    if keys.shape[:3] != values.shape[:3]:
        raise ShapeError(
            f"keys {tuple(keys.shape)} and values {tuple(values.shape)} differ in batch, heads or tokens; "
            f"pass both as [batch, kv_heads, tokens, head_dim]."
        )
    if keys.dtype != values.dtype or dtype not in (None, keys.dtype):
        filled = "" if dtype is None else f"; the cache was filled with {dtype}"
        raise ShapeError(f"keys are {keys.dtype}, values {values.dtype}{filled}; use one dtype throughout.")
    for role, x, old in zip(ROLES, (keys, values), cached, strict=False):
        batch, heads, _, head_dim = old.shape
        if (x.shape[0], x.shape[1], x.shape[3]) != (batch, heads, head_dim):
            raise ShapeError(
                f"{role}s {tuple(x.shape)} do not fit the cache, which holds batch={batch}, "
                f"kv_heads={heads}, head_dim={head_dim}; use another cache or reset() this one."
            )


def check_fitted(method: str, site: Site, given: Mapping[str, Tensor]) -> None:
    """Raise FitError unless the tensors of a calibration are ``[B, H or HQ, N, D]`` of at least one token."""
    for name, x in given.items():
        if x.ndim != 4 or not x.numel() or x.shape[-1] != site.head_dim:
            raise FitError(
                f"{method}: got {name} {tuple(x.shape)} for head_dim={site.head_dim}; a fit takes at least one token "
                f"[batch, heads, tokens, head_dim] of that head_dim. Calibrate on a longer text."
            )


def needed(method: str, x: Tensor | None, other: str = "") -> Tensor:
    """Return the keys or values that constants are fitted on; FitError if there are none, ``other`` a way without."""
    if x is None:
        raise FitError(
            f"{method} needs sample keys or values [batch, kv_heads, tokens, head_dim]; got none. Pass a sample to fit"
            f"{other}, or run `packedkv fit MODEL SPEC --text FILE -o PARAMS` and pass params."
        )
    return x


def params_by_role(given: Mapping[Role, Params] | None) -> Mapping[Role, Params]:
    """Return constants that a caller gave by role; None gives none. Raises SpecError if they have another form."""
    form = "pass {'key': Params, 'value': Params}, a Params being a mapping of names to tensors, or None."
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(params, Mapping) for params in given.values()):
        raise SpecError(f"params={given!r:.80}: {form}")
    if strangers := [repr(role) for role in given if role not in ROLES]:
        raise SpecError(f"params are given for {', '.join(strangers)}; {form}")
    return given


def check_constants(codec: Codec, site: Site, given: Params, batch: int | None = None) -> None:
    """Raise FitError unless constants are as a codec declares them: kernels use them as indices, widths and divisors.

    ``batch`` is the number of sequences of the cache; None: any.
    """
    where = f"the {site.role} constants of layer {site.layer}"
    cure = "pass what codec.fit or `packedkv fit` made for this model and spec, or leave the params out."
    declared = codec.constants(replace(site, device=torch.device("cpu")))
    if given.keys() != declared.keys():
        raise FitError(
            f"{where} are {sorted(map(str, given))}; {type(codec).__name__} takes {sorted(declared) or 'none'}: {cure}"
        )
    for name, constant in declared.items():
        check_constant(f"{where}: {name}", constant, given[name], batch, f"; {cure}")
    if len(sizes := {len(given[name]) for name, constant in declared.items() if constant.each}) > 1:
        raise FitError(f"{where} are of {' and of '.join(map(str, sorted(sizes)))} sequences; {cure}")


def check_constant(
    name: str,
    constant: Constant,
    x: Tensor,
    batch: int | None = None,
    cure: str = ".",
    error: type[KVError] = FitError,
) -> None:
    """Raise ``error`` unless a tensor has the dtype, shape, range and rule of a constant.

    ``name`` is the subject of the error's sentence, ``cure`` its end; ``batch`` as in ``check_constants``.
    """
    if not isinstance(x, Tensor) or x.dtype != constant.dtype:
        raise error(f"{name} is {x.dtype if isinstance(x, Tensor) else type(x).__name__}, not {constant.dtype}{cure}")
    leads = (1, len(x) if batch is None else batch) if x.ndim and constant.each else (1,)
    if tuple(x.shape[1:]) != constant.shape or (x.ndim and len(x) not in leads):
        shape = ["1 or the batch" if constant.each else 1, *constant.shape]
        raise error(f"{name} has shape {list(x.shape)}, not {shape}{cure}")
    if not x.numel():
        return
    low, high = (float(bound) for bound in x.aminmax())
    if not constant.low <= low <= high <= constant.high:  # NaN neither
        span = f"{constant.low:.6g} and {constant.high:.6g}"
        raise error(f"{name} has numbers from {low:.6g} to {high:.6g}, not within {span}{cure}")
    if constant.rule is not None and not constant.rule(x):
        raise error(f"{name} is not {constant.text}{cure}")
