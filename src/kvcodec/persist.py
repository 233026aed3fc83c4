"""Save packed caches and load them: one safetensors file, versioned, checked, written whole or not at all.

The pages go to disk as they lie in memory (``layout.py``); sinks and windows follow in 16 bit. Constants that derive
from the seed are not written: they are drawn again, and a fingerprint tells whether the draw still gives the same.
Constants that were fitted on data are written once, however many layers share them. See ``docs/format.md``.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from kvcodec.cache import LayerCache, RoleState
from kvcodec.codec import ROLES, Params, Role, Site
from kvcodec.errors import FormatError, KVError
from kvcodec.layout import PageLayout
from kvcodec.pages import PageStore
from kvcodec.registry import from_json

FORMAT = "kvcodec-cache"  # the one metadata entry of the file: more would come in random order
VERSION = 1


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
    from kvcodec import __version__

    path = Path(path)
    _check_target(path)
    tensors: dict[str, Tensor] = {}
    schemes: list[str] = []
    states = [_layer_state(str(i), layer, tensors, schemes) for i, layer in enumerate(layers)]
    header: dict[str, Any] = {"version": VERSION, "kvcodec": __version__, "schemes": schemes, "layers": states}
    try:
        header["meta"] = json.loads(json.dumps(dict(meta)))
    except TypeError as error:
        raise TypeError(f"meta cannot be saved: {error}; pass strings, numbers, booleans, lists and dicts.") from error
    header["sha256"] = _digest(header, tensors)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(tensors, partial, metadata={FORMAT: json.dumps(header, sort_keys=True)})
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise OSError(f"cannot write {path}: {error}; check the folder's rights and the free space.") from error
    finally:
        partial.unlink(missing_ok=True)


def load_layers(path: str | Path, *, device: torch.device | str = "cpu") -> tuple[list[LayerCache], dict[str, Any]]:
    """Read what ``save_layers`` wrote.

    Parameters
    ----------
    path : str or Path
    device : torch.device or str
        Where the caches shall live.

    Returns
    -------
    (list of LayerCache, dict)
        Caches that decode to the same bits and go on as the saved ones would; and ``meta``.

    Raises
    ------
    FileNotFoundError, IsADirectoryError
        No file there.
    FormatError
        The file is cut, altered, foreign, or newer than this kvcodec; the text says which and what to do.
    """
    path = Path(path)
    header = _read_header(path)
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise FormatError(f"{path} is damaged: {error}; save the cache again.") from error
    stored = header.pop("sha256", "")
    if _digest(header, tensors) != stored:
        raise FormatError(
            f"{path} was altered after it was written: its sha256 does not match; copy it again or save it again."
        )
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


def _check_target(path: Path) -> None:
    folder = path.parent
    if not folder.exists():
        raise FileNotFoundError(f"cannot save to {path}: the folder {folder} does not exist; create it first.")
    if not folder.is_dir():
        raise NotADirectoryError(f"cannot save to {path}: {folder} is a file, not a folder.")
    if path.is_dir():
        raise IsADirectoryError(
            f"cannot save to {path}: that is a folder; name a file in it, e.g. {path / 'cache.safetensors'}."
        )
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"cannot save to {path}: the folder {folder} is not writable; choose another one.")


def _read_header(path: Path) -> dict[str, Any]:
    """Read and check the metadata alone, so that every refusal can say what is wrong."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; pass the file that was saved.")
    if not path.exists():
        raise FileNotFoundError(f"{path} was not found; pass the file that was saved.")
    foreign = f"{path} is not a kvcodec cache"
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise FormatError(f"{foreign}, or it is cut ({size} bytes); pass a file written by save, or save it again.")
        text = file.read(length)
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__", {})
        end = max((e["data_offsets"][1] for e in entries.values()), default=0)
        header = json.loads(metadata[FORMAT]) if FORMAT in metadata else None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise FormatError(f"{foreign}: its header is not safetensors JSON, or was altered; save it again.") from error
    if header is None:
        raise FormatError(f"{foreign}: a safetensors file without the mark {FORMAT!r}; pass a file written by save.")
    if not isinstance(header, dict) or not isinstance(version := header.get("version"), int):
        raise FormatError(f"{path} was altered: its header names no version; save the cache again.")
    if version > VERSION:
        raise FormatError(
            f"{path} has format version {version}, written by kvcodec {header.get('kvcodec', 'unknown')}; this kvcodec "
            f"reads up to version {VERSION}. Update kvcodec (pip install --upgrade kvcodec)."
        )
    if size != 8 + length + end:
        raise FormatError(
            f"{path} is cut: {size} bytes of {8 + length + end}; copy it again or save the cache again."
            if size < 8 + length + end
            else f"{path} was altered: {size - 8 - length - end} bytes follow its end; copy or save it again."
        )
    return header


def _digest(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """sha256 over the metadata and every tensor's name, dtype, shape and bytes."""
    found = hashlib.sha256(json.dumps(dict(header), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        found.update(_bytes(tensor))
    return found.hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(array)


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
        "fitted": {role: _store_params(params, tensors) for role, params in layer.fitted.items()},
    }
    if layer.store is None:
        return state
    page = layer.store.layout
    slots = max(role.next_slot for role in layer.roles.values())
    tensors[f"{name}.pages"] = _live_pages(layer, -(-slots // page.page_tokens))
    state["held"] = {
        "dtype": str(layer.dtype).removeprefix("torch."),
        "batch": layer.batch,
        "heads": layer.store.heads,
        "start": layer.start,
        "length": layer.length,
        "page_tokens": page.page_tokens,
        "page_bytes": page.page_bytes,
        "roles": {},
    }
    for role, held in layer.roles.items():
        for part in ("sink", "window"):
            tensors[f"{name}.{role}.{part}"] = held.dense(part).detach().cpu().contiguous().clone()
        entry: dict[str, Any] = {
            "head_dim": held.site.head_dim,
            "layout_version": (page.key if role == "key" else page.value).version,
            "runs": [list(run) for run in held.runs],
        }
        if held.params is not None and (held.codec.needs_sample or role in layer.fitted):
            entry["params"] = _store_params(held.params, tensors)
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


def _store_params(params: Params, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Store constants under the hash of their bytes, so that layers share what is equal."""
    names = {}
    for key, value in params.items():
        kind = json.dumps([str(value.dtype), list(value.shape)]).encode()
        name = f"params.{hashlib.sha256(kind + _bytes(value)).hexdigest()[:16]}"
        tensors.setdefault(name, value.detach().cpu().contiguous().clone())
        names[key] = name
    return names


def _fingerprint(params: Params) -> dict[str, list[Any]]:
    """Shape and two moments per constant: tells another draw from rounding on another machine."""
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
    layer = LayerCache(
        from_json(schemes[state["scheme"]]),
        layer=state["layer"],
        seed=state["seed"],
        params={_role(role): _load_params(p, tensors, device) for role, p in state["fitted"].items()},
        page_tokens=state["page_tokens"],
        capacity=state["capacity"],
    )
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
    layer._dtype = getattr(torch, held["dtype"])
    for held_role in layer.roles.values():
        live = held_role.dense("sink").shape[2] + held_role.encoded + held_role.dense("window").shape[2]
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
    state = RoleState(role, layer.scheme.codec(role).for_dtype(getattr(torch, held["dtype"])), site)
    state.sink, state.window = (tensors[f"{name}.{part}"].to(device) for part in ("sink", "window"))
    state.runs = [(int(first), int(last)) for first, last in entry["runs"]]
    if "params" in entry:
        state.params = _load_params(entry["params"], tensors, device)
    elif "fingerprint" in entry:
        state.params = state.codec.fit(site)
        if not _same_draw(_fingerprint(state.params), entry["fingerprint"]):
            raise FormatError(
                f"the constants that {type(state.codec).__name__} draws from seed {layer.seed} are not those the file "
                f"was written with; load it with the kvcodec and torch that wrote it."
            )
    return state


def _load_params(names: Mapping[str, str], tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {key: tensors[name].to(device) for key, name in names.items()}


def _role(text: str) -> Role:
    roles: Iterable[Role] = ROLES
    return next(role for role in roles if role == text)
