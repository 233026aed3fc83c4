"""Save packed caches and load them: one safetensors file (``container.py``), described in ``docs/format.md``."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from packedkv.cache.layer import LayerCache
from packedkv.checks import check_constant, check_constants, largest
from packedkv.codec import LIMIT, ROLES, Constant, Params, Role, Site
from packedkv.errors import FormatError, KVError
from packedkv.files.container import BROKEN_JSON, Kind, check_target, load_params, read, store_params, write
from packedkv.layout import PageLayout
from packedkv.registry import from_json
from packedkv.store.pages import PageStore
from packedkv.store.site import (
    MEAN,
    LayerSite,
    MeanRemoval,
    RoleSite,
    RoleState,
    check_role,
    codec_params,
    mean_constant,
)

KIND = Kind("packedkv-cache", 1, "cache", "save", "save the cache again")
ENERGY = "energy"
"""Name of the queries' mean squares, ``LayerSite.energy``."""
DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}
COUNTS = 1 << 31
"""Above every number of tokens, pages, sequences and heads, as kernels count in int32."""


def save_layers(path: str | Path, layers: Sequence[LayerCache], meta: Mapping[str, Any]) -> None:
    """Write caches to one file; an older file of that name is replaced only when the new one is complete.

    ``load_layers`` returns them in this order, empty ones too. ``meta`` holds plain JSON values of the caller (model
    name, spec, ...), else TypeError; OSError, or a subclass, if the path cannot be written.
    """
    path = Path(path)
    check_target(path, KIND)  # before copying gigabytes
    tensors: dict[str, Tensor] = {}
    schemes: list[str] = []
    states = [_layer_state(str(i), layer, tensors, schemes) for i, layer in enumerate(layers)]
    try:
        plain = json.loads(json.dumps(dict(meta)))
    except TypeError as error:
        raise TypeError(f"meta cannot be saved: {error}; pass strings, numbers, booleans, lists and dicts.") from error
    write(path, KIND, {"schemes": schemes, "layers": states, "meta": plain}, tensors)


def load_layers(path: str | Path, *, device: torch.device | str = "cpu") -> tuple[list[LayerCache], dict[str, Any]]:
    """Read caches of ``save_layers`` onto a device, and their ``meta``.

    The caches dequantize to the same bits and continue as the saved ones would. Errors as in ``container.read``.
    """
    path = Path(path)
    header, tensors = read(path, KIND)
    try:
        where = torch.device(device)
        saved = _Saved(header["schemes"], tensors, where)
        layers = [_rebuild(str(i), state, saved) for i, state in enumerate(header["layers"])]
        return layers, dict(header["meta"])
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except (KVError, RuntimeError, MemoryError, OSError, *BROKEN_JSON) as error:
        raise FormatError(
            f"{path} was written by packedkv {header.get('packedkv')} and its state does not fit this version: {error}"
            f"; load it with that version, or save the cache again."
        ) from error


# -- one layer to JSON and tensors -------------------------------------------------------------------------------------


def _layer_state(name: str, layer: LayerCache, tensors: dict[str, Tensor], schemes: list[str]) -> dict[str, Any]:
    layer.nbytes()  # a static cache keeps its lengths on the device: any host operation brings them here
    scheme = layer.scheme.to_json()
    if scheme not in schemes:
        schemes.append(scheme)
    state: dict[str, Any] = {
        "scheme": schemes.index(scheme),
        "layer": layer.site.layer,
        "seed": layer.site.seed,
        "page_tokens": layer.page_tokens,
        "capacity": layer.reserve,
        "first_head": layer.site.first_head,
        "most": layer.site.most,
        **({} if layer.together is None else {"together": layer.together}),
        **({} if layer.site.energy is None else {"energy": store_params({ENERGY: layer.site.energy}, tensors)}),
        "fitted": {role: store_params(params, tensors) for role, params in layer.site.fitted.items()},
    }
    if layer.store is None:
        return state
    page = layer.store.layout
    slots = max(role.next_slot for role in layer.roles.values())
    tensors[f"{name}.pages"] = _live_pages(layer, -(-slots // page.page_tokens))
    if layer.recent is not None:
        state["recent"] = _layer_state(f"{name}.recent", layer.recent, tensors, schemes)
    state["held"] = {
        "dtype": str(layer.dtype).removeprefix("torch."),
        "batch": layer.batch,
        "heads": layer.store.heads,
        "start": layer.start,
        "length": layer.length,
        **({"positions": [[n, at.tolist()] for n, at in layer.positions.runs]} if layer.places_tokens else {}),
        **({} if layer.mean is None else {"mean": store_params({MEAN: layer.mean}, tensors)}),
        "page_tokens": page.page_tokens,
        "page_bytes": page.page_bytes,
        "roles": {},
    }
    for role, side in layer.roles.items():
        for part, dense in (("sink", side.sink), ("window", side.window)):
            tensors[f"{name}.{role}.{part}"] = dense.detach().cpu().contiguous().clone()
        entry: dict[str, Any] = {
            "head_dim": side.site.head_dim,
            "layout_version": (page.key if role == "key" else page.value).version,
            "runs": [list(run) for run in side.runs],
        }
        if side.params is not None and (side.codec.needs or codec_params(layer.site.fitted, role) is not None):
            entry["params"] = store_params(side.params, tensors)
        elif side.params is not None:
            entry["fingerprint"] = _fingerprint(side.params)
        state["held"]["roles"][role] = entry
    return state


def _live_pages(layer: LayerCache, columns: int) -> Tensor:
    """Pages in the table's order, ``[B * columns, H, page_bytes]``; bytes of forgotten tokens are zeroed."""
    assert layer.store is not None
    page = layer.store.layout
    table = layer.store.table[:, :columns].flatten().long()
    pages = layer.store.pages[table].cpu().contiguous()
    copy = torch.zeros_like(pages)
    for role, plane in ((role, plane) for plane in page.planes for role in ROLES if role == plane.role):
        tokens = page.page_tokens // plane.blocks
        live = torch.zeros(columns * plane.blocks, dtype=torch.bool)
        for first, last in layer.roles[role].runs:
            live[first // tokens : -(-last // tokens)] = True
        mask = live.view(1, columns, 1, plane.blocks).expand(layer.batch, -1, layer.store.heads, -1).flatten(0, 1)
        page.view_plane(copy, plane)[mask] = page.view_plane(pages, plane)[mask]
    return copy


def _fingerprint(params: Params) -> dict[str, list[Any]]:
    """Shape and two moments per constant: distinguishes other samples from rounding on another machine."""
    out: dict[str, list[Any]] = {}
    for name, value in params.items():
        x = value.detach().cpu().double().flatten()
        ramp = torch.linspace(0.5, 1.5, len(x), dtype=torch.float64)
        out[name] = [list(value.shape), float(x.sum()), float(x @ ramp), float(x.abs().sum())]
    return out


def _same_sample(now: Mapping[str, Sequence[Any]], then: Mapping[str, Sequence[Any]]) -> bool:
    return now.keys() == then.keys() and all(
        list(a[0]) == list(b[0]) and all(abs(p - q) <= 1e-4 * b[3] + 1e-12 for p, q in zip(a[1:], b[1:], strict=True))
        for a, b in ((now[name], then[name]) for name in now)
    )


# -- and back ----------------------------------------------------------------------------------------------------------


class _Saved(NamedTuple):
    """Contents of a file, from which its layers are rebuilt."""

    schemes: Sequence[str]
    tensors: Mapping[str, Tensor]
    device: torch.device

    def dense(self, name: str, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """Take tokens ``[B, H, n, D]`` for ``shape`` of B, H, D."""
        x = self.tensors[name]
        if x.ndim != 4 or (x.shape[0], x.shape[1], x.shape[3]) != shape or x.dtype != dtype:
            raise FormatError(
                f"{name} is {x.dtype} {list(x.shape)}; expected {dtype} of batch, heads, head_dim {shape}."
            )
        _check_numbers(name, x)
        return x.to(self.device)


def _rebuild(name: str, state: Mapping[str, Any], saved: _Saved, aged: LayerCache | None = None) -> LayerCache:
    """Rebuild a layer; of age tiers the newest, where ``aged`` has the tokens behind it."""
    scheme = from_json(saved.schemes[_count(state, "scheme")])
    if aged is not None and (aged.site.recent is None or scheme != aged.site.recent.scheme):
        raise FormatError(f"{name} is saved as {scheme}, which is not the newest tier of {aged.scheme}.")
    fitted = {role: load_params(p, saved.tensors, saved.device) for role, p in state["fitted"].items()}
    mean = MeanRemoval("pre") if scheme.mean == "pre" else None  # the rotation of keys is in the model, not in the file
    first_head = _count(state, "first_head") if "first_head" in state else 0
    most = None if state.get("most") is None else _count(state, "most", 1)
    seed = state["seed"]
    if type(seed) is not int:
        raise FormatError(f"the seed is {seed!r}, no whole number.")
    site = LayerSite(scheme, _count(state, "layer"), seed, fitted, first_head, mean=mean, most=most)
    page_tokens = None if state["page_tokens"] is None else _count(state, "page_tokens", 1)
    layer = LayerCache(site, page_tokens=page_tokens, capacity=_count(state, "capacity"))
    if "together" in state:
        layer.together = math.lcm(scheme.key.block_tokens, scheme.value.block_tokens)
        if state["together"] != layer.together:
            raise FormatError(
                f"together is {state['together']!r}, and blocks of the scheme fill {layer.together} tokens."
            )
    if "energy" in state:
        site.energy = load_params(state["energy"], saved.tensors, saved.device)[ENERGY]
        dtype = torch.float32 if site.energy.dtype == torch.float32 else torch.float64
        energies = f"the energies of layer {name}'s queries: the tensor"
        check_constant(energies, Constant(tuple(site.energy.shape[1:]), dtype, 0.0), site.energy, error=FormatError)
    if (contents := state.get("held")) is None:
        return layer
    batch, heads, length = _count(contents, "batch"), _count(contents, "heads", 1), _count(contents, "length")
    dtype, pages = DTYPES[contents["dtype"]], saved.tensors[f"{name}.pages"]
    layouts = []
    for role in ROLES:
        entry, codec = contents["roles"][role], scheme.codec(role).for_dtype(dtype)
        layouts.append(codec.layout(_count(entry, "head_dim", 1)))
        if aged is not None:
            b, h, _, d = aged.roles[role].sink.shape
            if (b, h, d, aged.dtype) != (batch, heads, entry["head_dim"], dtype):
                raise FormatError(f"{name} has other heads or sequences than the tokens behind it; save it again.")
        if (version := _count(entry, "layout_version")) != layouts[-1].version:
            cure = "update packedkv" if version > layouts[-1].version else "load it with the packedkv that wrote it"
            raise FormatError(
                f"the bytes of {type(codec).__name__} have version {version}, this packedkv has {layouts[-1].version}; "
                f"{cure}."
            )
    page = PageLayout(layouts[0], layouts[1], _count(contents, "page_tokens", 1))
    if page.page_bytes != contents["page_bytes"]:
        raise FormatError(
            f"layer {name} has pages of {contents['page_bytes']} bytes, its scheme {page.page_bytes}; "
            f"load it with the packedkv that wrote it."
        )
    columns = len(pages) // max(batch, 1) if pages.ndim else 0
    if pages.dtype != torch.uint8 or pages.shape != (batch * columns, heads, page.page_bytes):
        raise FormatError(
            f"layer {name} has pages {pages.dtype} {list(pages.shape)}; expected uint8 [{batch} x columns, {heads}, "
            f"{page.page_bytes}]."
        )
    for plane in page.planes:
        _check_numbers(
            f"{name}.pages, {plane.role}.{plane.field.name}", page.view_plane(pages, plane), plane.field.reads
        )
    for role in ROLES:
        state_of = _rebuild_role(f"{name}.{role}", role, contents, layer, saved, dtype, columns * page.page_tokens)
        check_role(state_of.codec, state_of.site, fitted)
        layer.roles[role] = state_of
    store = PageStore(page, batch, heads, saved.device, layer.reserve)
    store.ensure(columns * page.page_tokens, exact=True)
    store.pages[store.table[:, :columns].flatten().long()] = pages.to(saved.device)
    layer.store, layer.start, layer.length, layer.dtype = store, _count(contents, "start"), length, dtype
    key = layer.roles["key"]
    if layer.recent is not None:
        layer.recent = _rebuild(f"{name}.recent", state["recent"], saved, layer)
    site.check_energy(key.site)
    if "mean" in contents:
        layer.mean = load_params(contents["mean"], saved.tensors, saved.device)[MEAN]
        check_constant(f"the keys' mean of layer {name}", mean_constant(key.site), layer.mean, batch, error=FormatError)
    layer.positions.runs = [_positions(run, batch, saved.device) for run in contents.get("positions", [])]
    if layer.places_tokens and len(layer.positions) != length:
        raise FormatError(f"layer {name} has positions of {len(layer.positions)} tokens, not {length}; save it again.")
    for side in layer.roles.values():
        live = side.encoded + side.dense_tokens + (0 if layer.recent is None else len(layer.recent))
        if live != length:
            raise FormatError(f"layer {name} holds {live} {side.role} tokens, not {length}; save it again.")
    if layer.roles["value"].sink.shape[2] != key.sink.shape[2] or key.sink.shape[2] > scheme.sink:
        raise FormatError(f"layer {name} has a sink of {key.sink.shape[2]} tokens, its scheme one of {scheme.sink}.")
    return layer


def _rebuild_role(
    name: str, role: Role, contents: Mapping[str, Any], layer: LayerCache, saved: _Saved, dtype: torch.dtype, slots: int
) -> RoleState:
    entry, batch = contents["roles"][role], contents["batch"]
    where = layer.site
    site = Site(where.layer, role, contents["heads"], entry["head_dim"], where.seed, saved.device, where.first_head)
    of = RoleSite(role, layer.scheme.codec(role).for_dtype(dtype), site)
    shape = batch, site.num_heads, site.head_dim
    dense = [saved.dense(f"{name}.{part}", shape, of.codec.held_dtype(dtype)) for part in ("sink", "window")]
    state = RoleState(of, *dense)
    last = 0
    for run in entry["runs"]:
        first, last_before = _count(run, 0), last
        last = _count(run, 1)
        if not last_before <= first < last <= slots or len(run) != 2:
            raise FormatError(f"{name} has runs {entry['runs']}; expected ranges in order, of {slots} slots.")
        state.runs.append((first, last))
    if "params" in entry:
        state.params = load_params(entry["params"], saved.tensors, saved.device)
        check_constants(state.codec, site, state.params, batch)
    elif "fingerprint" in entry:
        state.params = state.codec.fit(site)
        if not _same_sample(_fingerprint(state.params), entry["fingerprint"]):
            raise FormatError(
                f"the constants that {type(state.codec).__name__} draws from seed {site.seed} are not those the file "
                f"was written with; load it with the packedkv and torch that wrote it."
            )
    elif state.runs:
        raise FormatError(f"{name} has no constants, though tokens are encoded; save the cache again.")
    return state


def _positions(run: Sequence[Any], batch: int, device: torch.device) -> tuple[int, Tensor]:
    _, first = run
    if len(first) not in (1, batch) or not all(type(at) is int and abs(at) < COUNTS for at in first):
        raise FormatError(f"a run of positions begins at {first}; expected whole numbers, one or {batch} of them.")
    return _count(run, 0, 1), torch.tensor(first, dtype=torch.int64, device=device)


def _count(of: Any, name: Any, least: int = 0) -> int:
    """Read a whole number from ``least`` on."""
    value = of[name]
    if type(value) is not int or not least <= value < COUNTS:
        raise FormatError(f"{name} is {value!r}; expected a whole number from {least} to {COUNTS - 1}.")
    return value


def _check_numbers(name: str, x: Tensor, reads: str = "") -> None:
    """Validate that floating point numbers are some that a codec can have written."""
    if reads:
        x = x.view(getattr(torch, reads)).float()
    if x.is_floating_point() and x.numel() and not float(largest(x)) <= LIMIT:
        raise FormatError(f"{name} has a number that is not finite, or too large; the file is damaged.")
