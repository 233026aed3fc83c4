"""Results folders written by hand, as `packedkv eval` writes them, for pages whose every number is known."""

import json
from pathlib import Path
from typing import Any

UNCOMPRESSED = "(uncompressed)"
SPECS = ("int-4", "saw-int4", "kivi-2", "fp8")
BITS = {UNCOMPRESSED: 16.0, "int-4": 4.5, "saw-int4": 4.375, "kivi-2": 3.25, "fp8": 8.25}
KL = {UNCOMPRESSED: 0.0, "int-4": 0.1, "saw-int4": 0.05, "kivi-2": 0.4, "fp8": 0.003}
RECALL = {UNCOMPRESSED: 0.75, "int-4": 0.5, "saw-int4": 0.75, "kivi-2": 0.125, "fp8": 0.75}
LENGTHS, DEPTHS = (256, 1024), (0.0, 0.5, 1.0)
SHAPE = {"layers": 4, "kv_heads": 2, "head_dim": 64}
VERSIONS = {"packedkv": "0.1.0", "torch": "2.13.0"}


def metric(better: str, text: str) -> dict[str, Any]:
    return {"better": better, "text": text, "of": "", "exp": False}


def about(**changed: Any) -> dict[str, Any]:
    return {
        "format": "packedkv-eval",
        "version": 1,
        "model": {"name": "tiny-llama", "sha256": "ab" * 32, "dtype": "float32", **SHAPE},
        "versions": VERSIONS,
        "device": "cpu",
        "seed": 7,
        "settings": {"prefill": "decoded"},
        "tasks": {
            "kl": {"items": 8, "metrics": {"kl": metric("lower", "mean KL, nats")}, "window_tokens": 512},
            "needle": {"items": 6, "metrics": {"recall": metric("higher", "answers that hold it")}, "chance": None},
            "piqa": {"items": 4, "metrics": {"accuracy": metric("higher", "right ones")}, "chance": 0.5},
        },
        "specs": list(SPECS),
        "notes": {"int-4": ["breaks on outlier keys"]},
    } | changed  # fmt: skip


def row(spec: str, task: str, name: str, value: float | None, spread: float, **changed: Any) -> dict[str, Any]:
    base = {"kl": KL, "needle": RECALL}.get(task, dict.fromkeys(BITS, 0.5))[UNCOMPRESSED]
    against = None if spec == UNCOMPRESSED or value is None else value - base
    return {
        "spec": spec, "task": task, "metric": name, "value": value,
        "low": None if value is None else value - spread, "high": None if value is None else value + spread,
        "items": 8, "count": 8.0, "better": "lower" if name == "kl" else "higher",
        "difference": against, "difference_low": None if against is None else against - spread / 2,
        "difference_high": None if against is None else against + spread / 2,
        "group": None, "effective_bits": BITS[spec], "key_bits": None if spec == UNCOMPRESSED else BITS[spec],
        "value_bits": None if spec == UNCOMPRESSED else BITS[spec], "cache_bytes": BITS[spec] * 65536 / 8,
        "ratio_to_16bit": 16 / BITS[spec], "prefill": "decoded", "seconds": 1.5, "failed": 0, "planned": 8,
        "status": "complete", "partial": False, "model": "tiny-llama", "versions": VERSIONS, "seed": 7,
    } | changed  # fmt: skip


def rows() -> list[dict[str, Any]]:
    found = []
    for spec in (UNCOMPRESSED, *SPECS):
        found.append(row(spec, "kl", "kl", KL[spec], KL[spec] / 10))
        found.append(row(spec, "kl", "top1", 1 - KL[spec] / 2, 0.01))
        for part, times in (("0-255", 0.5), ("256-511", 1.5)):
            found.append(row(spec, "kl", "kl", KL[spec] * times, 0.0, group={"positions": part}))
        found.append(row(spec, "needle", "recall", RECALL[spec], 0.125))
        for length in LENGTHS:
            for depth in DEPTHS:
                value = round(RECALL[spec] * (1 - depth / 8) * (256 / length) ** 0.1, 6)
                cell = {"group": {"length": length, "depth": depth}, "items": 1, "planned": 8}
                found.append(row(spec, "needle", "recall", value, 0.1, **cell))
        found.append(row(spec, "piqa", "accuracy", 0.5, 0.25))
    return found


def items() -> list[dict[str, Any]]:
    return [
        {"spec": spec, "task": "needle", "item": f"{i:016x}", "group": {"length": 256, "depth": i / 2}, "scores": {},
         "output": f"{1234567 + i}" if spec != "kivi-2" else f"12345{i}"}
        for spec in (UNCOMPRESSED, *SPECS) for i in range(2)
    ]  # fmt: skip


def write(folder: Path, run: Any = None, results: Any = None, lines: Any = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(about() if run is None else run))
    (folder / "results.json").write_text(json.dumps({"rows": rows() if results is None else results}))
    found = items() if lines is None else lines
    (folder / "items.jsonl").write_text("".join(json.dumps(line) + "\n" for line in found))
    return folder


def write_layers(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    sensitivity = [
        {"layer": layer, "role": role, "spec": "int-4", "kl": 0.001 * (layer + 1) * (3 if role == "key" else 1)}
        for role in ("key", "value") for layer in range(4)
    ]  # fmt: skip
    keys = [{"layer": layer, "worst_head_ratio": 2.0 + layer} for layer in range(4)]
    data = {"model": "tiny-llama", "sensitivity": sensitivity, "keys": keys}
    (folder / "advice.json").write_text(json.dumps(data))
    return folder


def write_times(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    found = [
        {"spec": spec, "effective_bits": BITS.get(spec, 4.0), "metric": "speedup_vs_bf16_cold", "unit": "x",
         "values": {"p20": 1.9, "p50": speed, "p80": 2.3}, "shape": "b32_8k", "gpu": "A GPU", "run": "2026"}
        for spec, speed in (("int-4", 2.0), ("saw-int4", 2.25), ("octopus-3", 3.0))
    ]  # fmt: skip
    (folder / "decode.json").write_text(json.dumps(found))
    return folder
