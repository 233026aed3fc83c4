"""Save packed caches and load them: one safetensors file (``container.py``), written atomically.

The pages go to disk as they lie in memory (``layout.py``); sinks and windows follow in 16 bit. Constants that derive
from the seed are not written: they are drawn again, and a fingerprint verifies that the draw gives the same constants.
Constants that were fitted on data are written once, however many layers share them. See ``docs/format.md``.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvcodec.cache.host import LayerCache
from kvcodec.cache.pages import PageStore
from kvcodec.cache.role import RoleState
from kvcodec.cache.site import MEAN, LayerSite, MeanRemoval, RoleSite, codec_params
from kvcodec.codec import ROLES, Params, Role, Site
from kvcodec.errors import FormatError, KVError
from kvcodec.files.container import Kind, check_target, load_params, read, store_params, write
from kvcodec.layout import PageLayout
from kvcodec.registry import from_json

KIND = Kind("kvcodec-cache", 1, "cache", "save", "save the cache again")


def save_layers(path: str | Path, layers: Sequence[LayerCache], meta: Mapping[str, Any]) -> None:
    """Write caches to one file; an older file of that name is replaced only when the new one is complete.

    Parameters
    ----------
    path : str or Path
        The folder must exist.
    layers : sequence of LayerCache
        In the order in which ``load_layers`` gives them back; empty ones are kept as such.
    meta : mapping
        Plain JSON values of the caller (model name, spec, ...).

    Raises
    ------
    FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, OSError
        The path cannot be written; the text says why.
    TypeError
        ``meta`` is not plain JSON.
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
    """Read what ``save_layers`` wrote.

    Parameters
    ----------
    path : str or Path
    device : torch.device or str
        Device of the loaded caches.

    Returns
    -------
    (list of LayerCache, dict)
        Caches that decode to the same bits and continue as the saved ones would; and ``meta``.

    Raises
    ------
    FileNotFoundError, IsADirectoryError
        No file there.
    FormatError
        The file is cut, altered, foreign, or newer than this kvcodec; the text says which and what to do.
    """
    path = Path(path)
    header, tensors = read(path, KIND)
    try:
        where = torch.device(device)
        layers = [_rebuild(str(i), s, header["schemes"], tensors, where) for i, s in enumerate(header["layers"])]
        return layers, dict(header["meta"])
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error
    except (KVError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise FormatError(
            f"{path} was written by kvcodec {header.get('kvcodec')} and its state does not fit this version: {error}; "
            f"load it with that version, or save the cache again."
        ) from error


# -- one layer to JSON and tensors -------------------------------------------------------------------------------------


def _layer_state(name: str, layer: LayerCache, tensors: dict[str, Tensor], schemes: list[str]) -> dict[str, Any]:
    layer.nbytes()  # a static cache keeps its lengths on the device: any host operation brings them here
    scheme = layer.scheme.to_json()
    if scheme not in schemes:
        schemes.append(scheme)
    state: dict[str, Any] = {
        "scheme": schemes.index(scheme),
        "layer": layer.layer,
        "seed": layer.seed,
        "page_tokens": layer.page_tokens,
        "capacity": layer.reserve,
        **({"most": layer.site.most} if layer.places_tokens else {}),
        "fitted": {role: store_params(params, tensors) for role, params in layer.fitted.items()},
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
    for role, held in layer.roles.items():
        for part, dense in (("sink", held.sink), ("window", held.window)):
            tensors[f"{name}.{role}.{part}"] = dense.detach().cpu().contiguous().clone()
        entry: dict[str, Any] = {
            "head_dim": held.site.head_dim,
            "layout_version": (page.key if role == "key" else page.value).version,
            "runs": [list(run) for run in held.runs],
        }
        if held.params is not None and (held.codec.needs_sample or codec_params(layer.fitted, role) is not None):
            entry["params"] = store_params(held.params, tensors)
        elif held.params is not None:
            entry["fingerprint"] = _fingerprint(held.params)
        state["held"]["roles"][role] = entry
    return state


def _live_pages(layer: LayerCache, columns: int) -> Tensor:
    """Pages in the table's order, ``[B * columns, H, page_bytes]``; bytes of forgotten tokens are zeroed."""
    assert layer.store is not None
    page = layer.store.layout
    table = layer.store.table[:, :columns].flatten().long()
    pages = layer.store.pages[table].cpu().contiguous()
    kept = torch.zeros_like(pages)
    for plane in page.planes:
        tokens = page.page_tokens // plane.blocks
        live = torch.zeros(columns * plane.blocks, dtype=torch.bool)
        for first, last in layer.roles[_role(plane.role)].runs:
            live[first // tokens : -(-last // tokens)] = True
        mask = live.view(1, columns, 1, plane.blocks).expand(layer.batch, -1, layer.store.heads, -1).flatten(0, 1)
        page.view(kept, plane)[mask] = page.view(pages, plane)[mask]
    return kept


def _fingerprint(params: Params) -> dict[str, list[Any]]:
    """Shape and two moments per constant: distinguishes another draw from rounding on another machine."""
    out: dict[str, list[Any]] = {}
    for name, value in params.items():
        x = value.detach().cpu().double().flatten()
        ramp = torch.linspace(0.5, 1.5, len(x), dtype=torch.float64)
        out[name] = [list(value.shape), float(x.sum()), float(x @ ramp), float(x.abs().sum())]
    return out


def _same_draw(now: Mapping[str, Sequence[Any]], then: Mapping[str, Sequence[Any]]) -> bool:
    return now.keys() == then.keys() and all(
        list(a[0]) == list(b[0]) and all(abs(p - q) <= 1e-4 * b[3] + 1e-12 for p, q in zip(a[1:], b[1:], strict=True))
        for a, b in ((now[name], then[name]) for name in now)
    )


# -- and back ----------------------------------------------------------------------------------------------------------


def _rebuild(
    name: str, state: Mapping[str, Any], schemes: Sequence[str], tensors: Mapping[str, Tensor], device: torch.device
) -> LayerCache:
    scheme = from_json(schemes[state["scheme"]])
    fitted = {_role(role): load_params(p, tensors, device) for role, p in state["fitted"].items()}
    mean = MeanRemoval("pre") if scheme.mean == "pre" else None  # how keys are turned is in the model, not in the file
    site = LayerSite(scheme, state["layer"], state["seed"], fitted, mean=mean, most=state.get("most"))
    layer = LayerCache(site, page_tokens=state["page_tokens"], capacity=state["capacity"])
    held = state.get("held")
    if held is None:
        return layer
    for role in ROLES:
        layer.roles[role] = _rebuild_role(f"{name}.{role}", role, held, layer, tensors, device)
    layouts = [role.codec.layout(role.site.head_dim) for role in layer.roles.values()]
    for role, layout in zip(ROLES, layouts, strict=True):
        saved = held["roles"][role]["layout_version"]
        if saved != layout.version:
            cure = "update kvcodec" if saved > layout.version else "load it with the kvcodec that wrote it"
            codec = type(layer.roles[role].codec).__name__
            raise FormatError(f"the bytes of {codec} have version {saved}, this kvcodec has {layout.version}; {cure}.")
    page = PageLayout(layouts[0], layouts[1], held["page_tokens"])
    pages = tensors[f"{name}.pages"].to(device)
    if page.page_bytes != held["page_bytes"] or pages.shape[1:] != (held["heads"], page.page_bytes):
        raise FormatError(
            f"layer {name} has pages of {held['page_bytes']} bytes, its scheme {page.page_bytes}; "
            f"load it with the kvcodec that wrote it."
        )
    store = PageStore(page, held["batch"], held["heads"], device, layer.reserve)
    columns = len(pages) // max(held["batch"], 1)
    store.ensure(columns * page.page_tokens, exact=True)
    store.pages[store.table[:, :columns].flatten().long()] = pages
    layer.store, layer.start, layer.length = store, held["start"], held["length"]
    if layer.recent is not None:
        layer.recent = _rebuild(f"{name}.recent", state["recent"], schemes, tensors, device)
    layer._dtype = getattr(torch, held["dtype"])
    layer.positions.runs = [(int(n), torch.tensor(at, device=device)) for n, at in held.get("positions", [])]
    if "mean" in held:
        layer.mean = load_params(held["mean"], tensors, device)[MEAN]
    for held_role in layer.roles.values():
        live = held_role.encoded + held_role.dense_tokens + (0 if layer.recent is None else len(layer.recent))
        if live != layer.length or held_role.next_slot > store.capacity:
            raise FormatError(f"layer {name} holds {live} {held_role.role} tokens, not {layer.length}; save it again.")
    return layer


def _rebuild_role(
    name: str,
    role: Role,
    held: Mapping[str, Any],
    layer: LayerCache,
    tensors: Mapping[str, Tensor],
    device: torch.device,
) -> RoleState:
    entry = held["roles"][role]
    site = Site(layer.layer, role, held["heads"], entry["head_dim"], layer.seed, device)
    of = RoleSite(role, layer.scheme.codec(role).for_dtype(getattr(torch, held["dtype"])), site)
    state = RoleState(of, *(tensors[f"{name}.{part}"].to(device) for part in ("sink", "window")))
    state.runs = [(int(first), int(last)) for first, last in entry["runs"]]
    if "params" in entry:
        state.params = load_params(entry["params"], tensors, device)
    elif "fingerprint" in entry:
        state.params = state.codec.fit(site)
        if not _same_draw(_fingerprint(state.params), entry["fingerprint"]):
            raise FormatError(
                f"the constants that {type(state.codec).__name__} draws from seed {layer.seed} are not those the file "
                f"was written with; load it with the kvcodec and torch that wrote it."
            )
    return state


def _role(text: str) -> Role:
    roles: Iterable[Role] = ROLES
    return next(role for role in roles if role == text)
