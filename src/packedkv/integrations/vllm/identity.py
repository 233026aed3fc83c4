"""The identity of a server's pages: a digest, so that no engine reads another's bytes as its own.

The digest and the block size are part of the backend's name, which servers compare before they exchange pages (NIXL,
Mooncake), and are noted in folders of KV connectors. Engines may copy rows of tokens between blocks of two sizes.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from packedkv.errors import UnsupportedError
from packedkv.integrations.vllm.options import Options
from packedkv.scheme import Mean

NOTE = "packedkv.json"
"""File in a connector's folder with the identity of its pages."""
_FOLDERS = ("shared_storage_path", "root_dir", "storage_path")
"""Keys under which connectors take a folder."""
WHOLE_BLOCKS = ("ExampleConnector", "OffloadingConnector", "SimpleCPUOffloadConnector")
"""Connectors that hand over full blocks only. Others also hand over the last block, whose incomplete groups are not in
its pages."""


def digest_of(options: Options, head_dim: int, dtype: torch.dtype, means: Sequence[Mean] = ()) -> str:
    """Hash what decides the meaning of a server's bytes to 12 hexadecimal digits; ``means``: of the layers, decided."""
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
    """List the folders that a connector's configuration names, at any depth; none without a connector."""
    paths, values = list[Path](), [] if transfer is None else [transfer.kv_connector_extra_config]
    for value in values:  # the list grows
        if isinstance(value, dict):
            paths += [Path(x) for key, x in value.items() if key in _FOLDERS and isinstance(x, str)]
            values += value.values()
        elif isinstance(value, list):
            values += value
    return paths


def claim(transfer: Any, digest: str, what: str) -> None:
    """Note the identity of this server's pages in a connector's folders; refuse a folder with other pages.

    ``transfer``: vLLM's ``kv_transfer_config``, or None. ``what``: preset and seed in words.
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
            record = json.loads(note.read_text())
        if record["digest"] != digest:
            raise UnsupportedError(
                f"packedkv: {folder} holds pages of {record['what']} ({record['digest']}), this server's are of {what} "
                f"({digest}) and mean other numbers; give the connector another folder."
            )
