"""Compile the kernels of a served model when the engine starts, and log which they are."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from packedkv.kernels.cuda.build import architecture, compiled
from packedkv.kernels.cuda.engine import CudaEngine
from packedkv.kernels.cuda.launch import machine
from packedkv.kernels.cuda.programs import LabelledProgram, Steps, compile_programs, of_codecs

logger = init_logger("vllm.packedkv")


def precompile(impls: Sequence[Any], page_tokens: int, config: VllmConfig, device: torch.device, queries: int) -> None:
    """Compile the programs that ``PackedImpl``s need; ``queries``: most query tokens of a request in a decode step."""
    capacity = -(-config.model_config.max_model_len // page_tokens) * page_tokens
    arch, asked = architecture(device), set()
    needed: dict[LabelledProgram, None] = {}
    for impl in impls:
        layer, engine = impl.packed, impl.packed.engine(page_tokens)
        assert isinstance(engine, CudaEngine)
        given = engine.codecs["key"], engine.codecs["value"], impl.head_size, page_tokens
        pairs = 0 if engine.mean is None else engine.mean.pairs
        if (this := (given, impl.num_heads, layer.heads, impl.rules.seen.softcap > 0, pairs, layer.sink > 0)) in asked:
            continue
        asked.add(this)
        # launch constants depend on batch size and capacity, so one layer may need several programs
        heads = tuple(layer.heads * n for n in range(1, config.scheduler_config.max_num_seqs + 1))
        dense = (layer.dtype if layer.holds_dense else None,)
        steps = Steps((impl.num_heads // layer.heads,), dense, impl.rules.seen.softcap > 0, heads, capacity)
        several = queries if layer.takes_several(impl.rules) else 1
        more = {"pairs": pairs, "sink": layer.sink > 0, "queries": several}
        needed |= dict.fromkeys(of_codecs(*given, machine(device), steps, **more))
    missing = [one for one in needed if compiled(one.program, arch) is None]
    logger.info("packedkv: %d programs, of which %d are compiled now", len(needed), len(missing))
    begun = time.monotonic()
    for one in compile_programs(missing, arch):
        logger.info("packedkv: compiled %s: %.1f s, %.0f KB", one.label, one.seconds, one.nbytes / 1024)
    if missing:
        logger.info("packedkv: compiled %d programs in %.1f s", len(missing), time.monotonic() - begun)
