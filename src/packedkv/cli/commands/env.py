"""``packedkv env``: versions, processors, a self-test of the kernels, and cache folders, for a bug report."""

import argparse
from pathlib import Path
from typing import Any

from packedkv.cli.arguments import Result

PACKAGES = (
    "transformers", "vllm", "packedkv-lab", "lm-eval", "safetensors", "numpy", "scikit-learn", "gguf", "triton",
    "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc",
)  # fmt: skip


TESTED = ("saw-int4", "kivi-2", "ghost-4")
"""Presets of the self-test: per-token codes, blocks of tokens, widths by channel."""
MOST_ERROR = 0.01
"""Largest relative error of attention by kernels; that of 16-bit sums is about 0.003."""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add the option of this command."""
    p.add_argument("--no-test", action="store_true", help="without the self-test of the kernels, which takes seconds")


def run(args: argparse.Namespace) -> Result:
    import platform

    import torch

    from packedkv.atomic import cache_dir
    from packedkv.cli.stamp import commit, device_name, versions
    from packedkv.kernels.cpu import library
    from packedkv.kernels.cuda import build

    cpu = torch.device("cpu")
    found: dict[str, Any] = {
        "platform": platform.platform(),
        "versions": versions(PACKAGES),
        "commit": commit(),
        "installed in": str(Path(__file__).parents[2]),
        "cpu": f"{device_name(cpu)}; {torch.backends.cpu.get_cpu_capability()}",
        "cpu kernels": library.refusal(cpu) or library.variant(),
        "gpus": [_gpu(torch.device("cuda", i), build) for i in range(torch.cuda.device_count())],
        "cache folders": {str(folder): _held(folder) for folder in (cache_dir(), build.cache_folder())},
    }
    if not args.no_test:
        devices = [cpu, *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]
        found["self-test, attention by kernels and over dequantized K and V"] = {
            f"{device}, {spec}:": _tested(spec, device) for device in devices for spec in TESTED
        }
    lines = []
    for name, value in found.items():
        if isinstance(value, dict):
            lines += [f"{name}:", *(f"  {key} {text}" for key, text in value.items())]
        elif isinstance(value, list):
            lines += [f"{name}:" + (" none" if not value else ""), *(f"  {text}" for text in value)]
        else:
            lines.append(f"{name}: {value}")
    return Result(found, "\n".join(lines))


def _gpu(device: Any, build: Any) -> str:
    """Name, compute capability and memory of a GPU, and whether the CUDA kernels run there."""
    import torch

    about = torch.cuda.get_device_properties(device)
    kernels = build.refusal(device) or "the CUDA kernels run here"
    return f"{about.name}, sm_{about.major}{about.minor}, {about.total_memory / 2**30:.1f} GiB; {kernels}"


def _tested(spec: str, device: Any) -> str:
    """Relative error of decode attention by kernels, and the seconds that it took, with their compilation."""
    import time

    import torch

    from packedkv.cache.fused import FusedLayerCache
    from packedkv.errors import KVError
    from packedkv.registry import get

    generator, dtype = torch.Generator().manual_seed(0), torch.float32 if device.type == "cpu" else torch.bfloat16
    sizes = ((2, 700), (2, 700), (8, 1))
    k, v, q = (torch.randn(1, h, n, 128, generator=generator).to(device, dtype) for h, n in sizes)
    begun = time.perf_counter()
    try:
        cache = FusedLayerCache(get(spec))
        cache.append(k, v)
        out = cache.attend(q).float()
    except (KVError, RuntimeError) as failure:
        return f"no kernels: {failure}"
    seconds = time.perf_counter() - begun
    keys, values = cache.decode(0, len(cache))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    wanted = sdpa(q.float(), keys.float(), values.float(), enable_gqa=True)
    error = float((out - wanted).norm() / wanted.norm())
    result = "ok" if error <= MOST_ERROR else f"WRONG: the limit is {MOST_ERROR}"
    return f"relative error {error:.1e}, {seconds:.1f} s, {result}"


def _held(folder: Path) -> str:
    files = [path for path in folder.glob("*") if path.is_file()]
    return f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB"
