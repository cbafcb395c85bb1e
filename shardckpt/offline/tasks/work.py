"""Interface: how the work of one verb is planned, shared and committed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, get_args, get_type_hints

from shardckpt.errors import UsageError, require_keywords
from shardckpt.events.progress import OnProgress
from shardckpt.offline.tasks.task_plan import TaskPlan, WorkPart

__all__ = ["Results", "Work", "bind_arguments"]

Results = Mapping[str, Mapping[str, Any]]  # by the part's name


class Work(Protocol):
    """How one verb is planned, shared and committed."""

    def bind(self, positional: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the verb's arguments by name. Raises UsageError."""

    def plan(self, new: TaskPlan, count: int, url: str) -> tuple[TaskPlan, Sequence[bytes]]:
        """Return the plan with its tasks, at most `count`, or as many as are useful for 0; and their inputs."""

    def run(self, plan: TaskPlan, parts: Sequence[WorkPart], on_progress: OnProgress | None) -> None:
        """Do some parts, and store the result of each."""

    def is_done(self, plan: TaskPlan, part: WorkPart, result: Mapping[str, Any]) -> bool:
        """Return True if a part with this result need not be done again."""

    def commit(self, plan: TaskPlan, results: Results, on_progress: OnProgress | None) -> Any:
        """Join the results; return what the verb returns."""

    def discard(self, plan: TaskPlan, *, has_commit: bool) -> None:
        """Remove what tasks have written outside the plan's folder; after a commit has started, only what it spares."""


def bind_arguments(function: Any, positional: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name. Raises UsageError for another number of them, or unknown names."""
    try:
        bound = inspect.signature(function).bind(*positional, **given)
        require_keywords(function.__name__, given, _list_names(function))
    except TypeError as error:
        raise UsageError(
            "the call that is planned is not complete", where=function.__name__, found=str(error)
        ) from error
    return {**given, **{name: value for name, value in bound.arguments.items() if name not in ("options", "arguments")}}


def _list_names(function: Any) -> set[str]:
    """Return the names of a function's arguments, with the fields of `**options`."""
    hints, names = get_type_hints(function), set()
    for name, parameter in inspect.signature(function).parameters.items():
        is_open = parameter.kind is inspect.Parameter.VAR_KEYWORD
        names |= {*get_args(hints[name])[0].__annotations__} if is_open else {name}
    return names
