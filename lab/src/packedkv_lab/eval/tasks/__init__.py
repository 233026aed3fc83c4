"""The tasks of ``packedkv eval``: what each reads, and how it is scored."""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from packedkv.errors import SpecError, nearest

if TYPE_CHECKING:
    from packedkv_lab.eval.tasks.base import Task

_TASKS = {
    "perplexity": "text.Perplexity",
    "kl": "text.Divergence",
    "needle": "needle.Needle",
    "needle_multikey": "needle.MultiKeyNeedle",
    "kv_retrieval": "kv.KeyValue",
    "variable_tracking": "ruler.VariableTracking",
    "common_words": "ruler.CommonWords",
}
"""Name -> class, imported on first use: ``packedkv eval --help`` needs only the names."""
HARNESS = {
    "hellaswag": "hellaswag",
    "squad": "squadv2",
    "hotpot": "longbench_hotpotqa",
    "piqa": "piqa",
    "arc_easy": "arc_easy",
    "arc_challenge": "arc_challenge",
    "mmlu": "mmlu",
    "truthfulqa": "truthfulqa_mc1",
}
"""Tasks of the lm-evaluation-harness by the names that users ask for here."""


def task_names() -> list[str]:
    """Names of all tasks, in the order of the documentation."""
    return list(_TASKS)


@cache
def get_task(name: str) -> "Task":
    """Return the task of a name; ``SpecError`` names the nearest, or the command of the lm-evaluation-harness."""
    if name in HARNESS:
        raise SpecError(
            f"{name} is a task of the lm-evaluation-harness; run: packedkv-lm-eval --model packedkv --model_args "
            f"pretrained=MODEL,spec=SPEC --tasks {HARNESS[name]}"
        )
    if name not in _TASKS:
        raise SpecError(f"unknown task {name!r}.{nearest(name, _TASKS)} Tasks: {', '.join(_TASKS)}.")
    module, _, kind = _TASKS[name].partition(".")
    task: Task = getattr(import_module(f"packedkv_lab.eval.tasks.{module}"), kind)()
    return task
