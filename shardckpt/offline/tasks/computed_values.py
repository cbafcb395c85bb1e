"""Tasks that read checkpoints: each computes some parts of a result, such as the checksums of a file.

As for tasks that write, each makes the verb's own call. The commit makes it once more, with the stored values.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from shardckpt.encodings import typed_json
from shardckpt.errors import FormatError
from shardckpt.events.progress import OnProgress
from shardckpt.offline.results.computed_parts import Compute, ComputedPart, compute_by
from shardckpt.offline.tasks.part_results import PartResults, changed_source_error
from shardckpt.offline.tasks.source_versions import digest_paths
from shardckpt.offline.tasks.task_plan import TaskPlan, WorkPart, list_paths, share_parts
from shardckpt.offline.tasks.work import Results, bind_arguments
from shardckpt.storage.resolve_url import split

__all__ = ["ComputedWork"]

Records = tuple[Any, ...]


class Undo(NamedTuple):
    """How to undo what a verb wrote."""

    record: type  # describes what was written
    find: Callable[[Mapping[str, Any], Records], Records]  # from the verb's arguments: the records of what is there
    remove: Callable[[Mapping[str, Any], Records], None]


class _Ended(BaseException):
    """Ends a verb's call once a plan or a task has what it needs. Not an Exception, so that verbs do not handle it."""


class ComputedWork:
    """The work of a verb that only reads.

    Args:
        call: The verb; takes its JSON arguments by name.
        undo: Removes what the verb wrote, if it writes.
    """

    def __init__(self, call: Callable[..., Any], undo: Undo | None = None) -> None:
        self._call, self._undo = call, undo

    def bind(self, positional: Sequence[Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the verb's arguments by name. Raises UsageError."""
        return bind_arguments(self._call, positional, given)

    def plan(self, new: TaskPlan, count: int, url: str) -> tuple[TaskPlan, Sequence[bytes]]:
        """Return the plan with the parts, shared among at most `count` tasks; 0 for a task a part."""
        found: list[WorkPart] = []

        def list_parts(parts: Iterable[ComputedPart], _record: type) -> Iterator[tuple[Any, ...]]:
            found.extend(WorkPart(name, part.nbytes) for name, part in _name_parts(parts))
            raise _Ended

        self._run(list_parts, new.arguments, None)
        parent, name = split(url)
        folder = f"{parent.rstrip('/')}/.{name}.tasks-{new.id}"
        sources = digest_paths(list_paths(new.arguments))
        return replace(new, folder=folder, sources=sources, tasks=share_parts(found, count)), ()

    def run(self, plan: TaskPlan, parts: Sequence[WorkPart], on_progress: OnProgress | None) -> None:
        """Compute some parts. Raises UsageError if the source has changed."""
        _require_same_sources(plan)
        left, results = {part.name: part for part in parts}, PartResults(plan)

        def compute_some(parts: Iterable[ComputedPart], _record: type) -> Iterator[tuple[Any, ...]]:
            for name, part in _name_parts(parts):
                if name in left:
                    values = self._compute(plan, left[name], part, results)
                    written = left.pop(name)
                    results.write(written, _encode_values(values))
                    if self._undo is not None and not results.is_started():
                        self._undo.remove(plan.arguments, values)
                        results.remove_late(written)
                        results.require_started()
            raise _Ended

        self._run(compute_some, plan.arguments, on_progress)
        if left:
            raise changed_source_error(", ".join(list_paths(plan.arguments)))

    def _compute(self, plan: TaskPlan, part: WorkPart, computed: ComputedPart, results: PartResults) -> Records:
        """Return a part's records, also what a task published that was killed before it stored them."""
        if self._undo is None:
            with compute_by(None):
                return computed.compute()
        before = [*_decode_values(results.read_started(part), part.name, self._undo.record)]

        def announce(record: object) -> None:
            before.append(record)
            results.write_started(part, _encode_values(before))

        with compute_by(None, announce):
            values = computed.compute()
        done = self._undo.find(plan.arguments, tuple(before))
        return (*values, *(record for record in done if record not in values))

    def is_done(self, plan: TaskPlan, part: WorkPart, result: Mapping[str, Any]) -> bool:  # noqa: ARG002
        """Return True if a part has its values."""
        return isinstance(result.get("values"), list)

    def commit(self, plan: TaskPlan, results: Results, on_progress: OnProgress | None) -> Any:
        """Make the call with the stored values, and return its result."""
        _require_same_sources(plan)

        def take_stored(parts: Iterable[ComputedPart], record: type) -> Iterator[tuple[Any, ...]]:
            for name, part in _name_parts(parts):
                if name not in results:
                    raise changed_source_error(", ".join(list_paths(plan.arguments)))
                yield _decode_values(results[name], name, record, part.counts)

        return self._run(take_stored, plan.arguments, on_progress)

    def discard(self, plan: TaskPlan, *, has_commit: bool) -> None:  # noqa: ARG002
        """Undo what tasks wrote outside the plan's folder."""
        if self._undo is None:
            return
        results = PartResults(plan)
        for part in {*results.list_started(), *results.list_done()}:
            stored = results.read(part) or results.read_started(part)
            self._undo.remove(plan.arguments, _decode_values(stored, part.name, self._undo.record))

    def _run(self, compute: Compute, arguments: Mapping[str, Any], on_progress: OnProgress | None) -> Any:
        takes_progress = "on_progress" in inspect.signature(self._call).parameters
        try:
            with compute_by(compute):
                return self._call(**arguments, **({"on_progress": on_progress} if takes_progress else {}))
        except _Ended:
            return None


def _encode_values(values: Iterable[Any]) -> dict[str, Any]:
    return {"values": [typed_json.encode(value) for value in values]}


def _decode_values(result: Mapping[str, Any], name: str, record: type, counts: range | None = None) -> tuple[Any, ...]:
    """Return a part's records. Raises FormatError for another number of them, or another form."""
    stored = result.get("values") or ()
    if counts is not None and len(stored) not in counts:
        expected = "1 record" if counts == range(1, 2) else f"{counts.start} to {counts.stop - 1} records"
        raise FormatError(
            "a result must have the records of its part", where=name, found=len(stored), expected=expected
        )
    return tuple(typed_json.decode(record, value, where=name) for value in stored)


def _name_parts(parts: Iterable[ComputedPart]) -> Iterator[tuple[str, ComputedPart]]:
    """Yield parts with unique names."""
    seen: Counter[str] = Counter()
    for part in parts:
        seen[part.name] += 1
        yield part.name if seen[part.name] == 1 else f"{part.name} #{seen[part.name]}", part


def _require_same_sources(plan: TaskPlan) -> None:
    if digest_paths(list_paths(plan.arguments)) != plan.sources:
        raise changed_source_error(", ".join(list_paths(plan.arguments)))
