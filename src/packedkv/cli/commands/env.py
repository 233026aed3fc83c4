"""``packedkv env``: versions, kernels, GPUs and cache folders of this installation, for a bug report."""

import argparse
from pathlib import Path
from typing import Any

from packedkv.cli.arguments import Result

PACKAGES = (
    "transformers", "vllm", "packedkv-lab", "lm-eval", "safetensors", "numpy", "scikit-learn", "gguf", "triton",
    "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc",
)  # fmt: skip


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add nothing: the command has no arguments of its own."""


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
        "cpu": device_name(cpu),
        "cpu kernels": library.refusal(cpu) or library.variant(),
        "gpus": [_gpu(torch.device("cuda", i), build) for i in range(torch.cuda.device_count())],
        "cache folders": {str(folder): _held(folder) for folder in (cache_dir(), build.cache_folder())},
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


def _held(folder: Path) -> str:
    files = [path for path in folder.glob("*") if path.is_file()]
    return f"{len(files)} files, {sum(path.stat().st_size for path in files) / 1e6:.1f} MB"
