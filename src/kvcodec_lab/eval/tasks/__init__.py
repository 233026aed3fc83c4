"""The tasks of ``kvcodec eval``: what each reads, and how it is scored."""

from kvcodec.errors import SpecError, nearest
from kvcodec_lab.eval.tasks.base import Task
from kvcodec_lab.eval.tasks.choice import ArcChallenge, ArcEasy, HellaSwag, Mmlu, Piqa, TruthfulQa
from kvcodec_lab.eval.tasks.kv import KeyValue
from kvcodec_lab.eval.tasks.needle import MultiKeyNeedle, Needle
from kvcodec_lab.eval.tasks.qa import Hotpot, Squad
from kvcodec_lab.eval.tasks.ruler import CommonWords, VariableTracking
from kvcodec_lab.eval.tasks.text import Divergence, Perplexity

_TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *(Perplexity(), Divergence()),
        *(Needle(), MultiKeyNeedle(), KeyValue(), VariableTracking(), CommonWords(), Squad(), Hotpot()),
        *(HellaSwag(), Piqa(), ArcEasy(), ArcChallenge(), Mmlu(), TruthfulQa()),
    )
}


def task_names() -> list[str]:
    """Names of all tasks, in the order of the documentation."""
    return list(_TASKS)


def get_task(name: str) -> Task:
    """Return the task of a name.

    Raises
    ------
    SpecError
        If there is none; names the nearest.
    """
    if name not in _TASKS:
        raise SpecError(f"unknown task {name!r}.{nearest(name, _TASKS)} Tasks: {', '.join(_TASKS)}.")
    return _TASKS[name]
