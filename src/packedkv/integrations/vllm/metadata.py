"""One step's batch, as all layers of a group read it, and the tensors computed from it once for all of them."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionMetadata, CommonAttentionMetadata

from packedkv.integrations.vllm.layer import Live, Several
from packedkv.kernels.cuda.prompts import Chunk
from packedkv.store.positions import shared


class Prompts(NamedTuple):
    """Chunks of a step's prompts on a GPU.

    Parameters
    ----------
    together : list of Chunks or of GroupChunks
        Those of many requests in one.
    alone : list of Chunk
        Those that are too long for it.
    """

    together: list[Any]
    alone: list[Chunk]


@dataclass
class PackedMetadata(AttentionMetadata):  # type: ignore[misc]
    """One step's batch.

    Parameters
    ----------
    decodes : int
        Queries at the front for the kernels, each a sequence of its own: one of each request, or with speculative
        decoding a request's newest token and its drafts.
    chunks : list of Chunk
        The others.
    table : Tensor int32 ``[B, M]``
        Of the requests.
    seq_lens : Tensor int32 ``[decodes]`` or longer
        Tokens that each of the queries at the front sees, itself included.
    tables : Tensor int32 ``[decodes, M]`` or longer
        Of these queries.
    several : Several, optional
        The same queries by request, where kernels read the pages of a request once for all of its queries.
    totals : Tensor int32 ``[B]``, optional
        With ``several``: tokens of each request.
    prompts : dict of int to Prompts
        On a GPU: the chunks as layers with each sliding window read them.
    """

    decodes: int
    chunks: list[Chunk]
    table: Tensor
    seq_lens: Tensor
    tables: Tensor
    prompts: dict[int, Prompts] = field(default_factory=dict)
    several: Several | None = None
    totals: Tensor | None = None


def metadata_of(layer: Any) -> PackedMetadata | None:
    """Metadata of this step for a layer; None in vLLM's profiling runs."""
    found = get_forward_context().attn_metadata
    own = found.get(layer.layer_name) if isinstance(found, dict) else None
    return own if isinstance(own, PackedMetadata) else None


def longest_sequence(config: VllmConfig) -> int:
    """Tokens of the longest request, or of a step if those are more."""
    return int(max(config.model_config.max_model_len, config.scheduler_config.max_num_batched_tokens))


class Expanded:
    """The queries of a step with drafts as sequences of their own: query i of q sees ``length - (q - 1 - i)`` tokens.

    Computed on the device: which drafts were accepted is known only there. The tensors keep their addresses.

    Parameters
    ----------
    queries, columns : int
        Upper bound for a step, and the width of block tables.
    device : torch.device
    """

    def __init__(self, queries: int, columns: int, device: torch.device) -> None:
        self.lengths = torch.zeros(queries, dtype=torch.int32, device=device)
        self.tables = torch.zeros(queries, columns, dtype=torch.int32, device=device)
        self.at = torch.arange(queries, dtype=torch.int32, device=device)

    def put(self, c: CommonAttentionMetadata, rows: int, queries: int, most: int) -> None:
        """Set the numbers of the first ``queries`` queries, of the first ``rows`` rows; ``most``: longest request."""
        self.lengths.zero_()  # a graph may hold more queries than the step has
        if queries:
            at, ends = self.at[:queries], c.query_start_loc[1 : rows + 1]
            row = torch.searchsorted(ends, at, right=True).clamp_(max=rows - 1)
            seen = c.seq_lens[:rows][row] - (ends[row] - 1 - at)
            self.lengths[:queries] = seen.clamp_(min=0, max=most)
            self.tables[:queries] = c.block_table_tensor[:rows][row]


class SharedStep:
    """What layers that share blocks compute once in a step: positions, what each request sees; and their workspace.

    The first of them computes it (``PackedImpl.leads``). The tensors keep their addresses, because captured graphs hold
    them.

    Parameters
    ----------
    tokens, requests : int
        Upper bounds for a step.
    device : torch.device
    """

    def __init__(self, tokens: int, requests: int, device: torch.device) -> None:
        self.start, self.sunk, self.sunk_from = (
            torch.zeros(requests, dtype=torch.int32, device=device) for _ in range(3)
        )
        self.newest = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.positions: Tensor | None = None
        self.workspace: Tensor | None = None
        self.most = requests
        """Queries of a step's decode steps."""
        self.queries = 1
        """Most of a request."""

    def positions_of(self, count: int, m: PackedMetadata | None) -> Tensor:
        """Positions of a step's tokens ``[1, count]``, once for all layers; those behind the requests' mean nothing."""
        if self.positions is None:
            steps = count if m is None or not m.chunks else m.decodes
            known = 0 if m is None else min(steps, m.seq_lens.shape[0])
            if m is not None:
                self.newest[:known] = m.seq_lens[:known] - 1
            found = self.newest[:steps].clamp(min=0)
            if m is not None and m.chunks:
                parts, at = [found], steps
                for _, _, last, length in m.chunks:  # a draft behind the longest request is in none
                    parts.append(torch.arange(length - (last - at), length, device=found.device))
                    at = last
                parts.append(found.new_zeros(count - at))
                found = torch.cat(parts)
            self.positions = shared(found[None])
        return self.positions

    def see(self, seq_lens: Tensor, sink: int, window: int) -> None:
        """Set what each request sees."""
        held = (self.start, self.sunk, self.sunk_from)
        for to, found in zip(held, Live.of(seq_lens, sink, window), strict=True):
            if found is not None:
                to[: found.shape[0]] = found

    def live(self, requests: int, sink: int, window: int) -> Live:
        """Return what ``see`` has set for so many requests."""
        there = (sink or window, sink, sink and window)
        held = (self.start, self.sunk, self.sunk_from)
        return Live(*(x[:requests] if any_ else None for x, any_ in zip(held, there, strict=True)))
