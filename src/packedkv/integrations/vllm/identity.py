"""Which numbers a server's pages mean: an identity, so that no engine reads another's bytes as its own.

Pages leave a process through KV connectors: to a folder, to another tier of memory, to another server. Two presets, two
seeds or two files of constants can give pages of one size. The digest is part of the name of the backend, which
servers compare before they exchange pages (NIXL, Mooncake), and is written into folders that outlive a server. So is
the size of a block: planes of a page are not rows of tokens, which engines may copy between blocks of two sizes.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from packedkv.errors import UnsupportedError
from packedkv.integrations.vllm.options import Options
from packedkv.scheme import Mean

NOTE = "packedkv.json"
"""File in a connector's folder that says whose pages it holds."""
_FOLDERS = ("shared_storage_path", "root_dir", "storage_path")
"""Keys under which connectors take a folder."""
WHOLE_BLOCKS = ("ExampleConnector", "OffloadingConnector", "SimpleCPUOffloadConnector")
"""Connectors that hand over the tokens of full blocks only. Others announce those of the last block as well, of which
a block has the groups that are complete."""


def digest_of(options: Options, head_dim: int, dtype: torch.dtype, means: Sequence[Mean] = ()) -> str:
    """Return 12 hexadecimal digits of what a server's bytes mean.

    That is codecs, layouts, how many first tokens are dense, seed, fitted constants, and ``means``: what each layer's
    keys are held without, as ``mean=auto`` was decided.
    """
    scheme = replace(options.scheme, spec="")
    identity = {
        "scheme": json.loads(scheme.to_json()),
        "layout": scheme.layout_versions(head_dim),
        "dtype": str(dtype),
        "seed": options.seed,
        "means": list(means),
        "params": None if options.params is None else options.params.sha256,
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:12]


def folders(transfer: Any) -> list[Path]:
    """Return the folders that a connector's configuration names, at any depth; none without a connector."""

    def named(value: Any) -> Iterable[Path]:
        if isinstance(value, dict):
            for key, own in value.items():
                if key in _FOLDERS and isinstance(own, str):
                    yield Path(own)
                else:
                    yield from named(own)
        elif isinstance(value, list):
            for own in value:
                yield from named(own)

    return [] if transfer is None else list(named(transfer.kv_connector_extra_config))


def claim(transfer: Any, digest: str, what: str) -> None:
    """Note in a connector's folders whose pages they hold.

    Parameters
    ----------
    transfer
        vLLM's ``kv_transfer_config``, or None.
    digest, what : str
        ``digest_of`` this server, and its preset and seed in words.

    Raises
    ------
    UnsupportedError
        A folder holds other pages, or the connector would take one that others use.
    """
    if transfer is not None and transfer.kv_connector == "ExampleConnector" and not folders(transfer):
        raise UnsupportedError(
            "packedkv: ExampleConnector keeps pages in /tmp unless it is told; give its kv_connector_extra_config a "
            "shared_storage_path."
        )
    for folder in folders(transfer):
        folder.mkdir(parents=True, exist_ok=True)
        note = folder / NOTE
        try:
            with note.open("x") as new:
                json.dump({"digest": digest, "what": what}, new)
            continue
        except FileExistsError:
            held = json.loads(note.read_text())
        if held["digest"] != digest:
            raise UnsupportedError(
                f"packedkv: {folder} holds pages of {held['what']} ({held['digest']}), this server's are of {what} "
                f"({digest}) and mean other numbers; give the connector another folder."
            )
