"""Results of parts, one small JSON file each, in a folder that all tasks of a plan see."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardckpt.errors import MissingFileError, UsageError
from shardckpt.offline.tasks.plan_folder import PlanFolder
from shardckpt.offline.tasks.task_plan import TaskPlan, WorkPart
from shardckpt.storage.store import read_bytes
from shardckpt.storage.thread_pool import ThreadPool

__all__ = ["PartResults"]

_RESULTS, _STARTED = "results", "started"
_THREADS = 16  # requests at the same time; results are small
_MAX_READS = 16  # results that are read without a list of all
_MAX_RESULT_BYTES = 256 << 20


class PartResults(PlanFolder):
    """What the tasks of one plan have done so far, in its folder."""

    def __init__(self, plan: TaskPlan, url: str = "") -> None:
        super().__init__(plan, url)
        self._parts = {
            f"{_RESULTS}/{task:06d}-{at:06d}.json": part
            for task, parts in enumerate(plan.tasks)
            for at, part in enumerate(parts)
        }
        self._names = {part.name: name for name, part in self._parts.items()}

    def write_started(self, part: WorkPart, result: Mapping[str, Any]) -> None:
        """Store what a task publishes next for a part without a result. Raises StorageError."""
        self._write(self._names[part.name].replace(_RESULTS, _STARTED), result)

    def read_started(self, part: WorkPart) -> Mapping[str, Any]:
        """Return what tasks published for a part, or tried to; empty if they did not. Raises StorageError."""
        return self._read(self._names[part.name].replace(_RESULTS, _STARTED))

    def list_started(self) -> list[WorkPart]:
        """Return the parts for which tasks published something, or tried to. Raises StorageError."""
        there = {entry.name.replace(_STARTED, _RESULTS) for entry in self._store.list(_STARTED)}
        return [part for name, part in self._parts.items() if name in there]

    def list_done(self) -> list[WorkPart]:
        """Return the parts that have results. Raises StorageError."""
        there = {entry.name for entry in self._store.list(_RESULTS)}
        return [part for name, part in self._parts.items() if name in there]

    def choose_done(self, parts: Sequence[WorkPart]) -> list[WorkPart]:
        """Return those of some parts that may have results. Raises StorageError."""
        if len(parts) <= _MAX_READS:
            return [*parts]  # a request for each is less than a list of the results of thousands of tasks
        done = {part.name for part in self.list_done()}
        return [part for part in parts if part.name in done]

    def read(self, part: WorkPart) -> Mapping[str, Any]:
        """Return a part's result; empty if it is missing or another plan's. Raises StorageError."""
        return self._read(self._names[part.name])

    def _read(self, name: str) -> Mapping[str, Any]:
        try:
            size = self._store.size(name)
            content = json.loads(read_bytes(self._store, name, 0, min(size, _MAX_RESULT_BYTES)))
        except (MissingFileError, ValueError, RecursionError):  # a damaged result is made again
            return {}
        if not isinstance(content, dict) or content.get("plan") != self._plan.id:
            return {}
        result = content.get("result")
        return result if isinstance(result, dict) and content.get("digest") == _digest(name, result) else {}

    def write(self, part: WorkPart, result: Mapping[str, Any]) -> None:
        """Store a part's result. Raises StorageError."""
        self._write(self._names[part.name], result)

    def _write(self, name: str, result: Mapping[str, Any]) -> None:
        with self._store.create(name) as writer:
            writer.write(
                json.dumps({"plan": self._plan.id, "digest": _digest(name, result), "result": result}).encode()
            )

    def remove_late(self, part: WorkPart) -> None:
        """Remove a result that was written after the plan ended. Raises StorageError."""
        self.remove_late_file(self._names[part.name])

    def read_all(self, is_done: Callable[[WorkPart, Mapping[str, Any]], bool]) -> dict[str, Mapping[str, Any]]:
        """Return all results by the part's name.

        Args:
            is_done: Returns True for a part with a result that can be used.

        Raises:
            UsageError: Tasks have not ended; the message has their numbers.
            StorageError: The store failed, or the plan ended meanwhile.
        """
        done = {part.name for part in self.list_done()}
        self._require_all(done)
        with ThreadPool(_THREADS) as pool:
            results = dict(zip(self._names, pool.map(self._read, self._names.values()), strict=True))
            parts = self._parts.values()
            usable = pool.map(is_done, parts, (results[part.name] for part in parts))
            self._require_all({part.name for part, is_usable in zip(parts, usable, strict=True) if is_usable})
        return results

    def _require_all(self, done: set[str]) -> None:
        missing = find_missing_tasks(self._plan, done)
        if missing:
            self.require_started()  # another commit may have moved what was there
            count, have = len(self._plan.tasks), "has" if len(missing) == 1 else "have"
            raise UsageError(
                f"{len(missing)} of {count} task{'s' * (count != 1)} {have} not ended",
                where=self._url,
                found=f"no complete results from {format_numbers(missing)}",
                fix=f"Run {'this task' if len(missing) == 1 else 'these tasks'}, then commit again.",
            )


def _digest(name: str, result: Mapping[str, Any]) -> str:
    """Return a digest over a result, by which a damaged one is known."""
    return hashlib.sha256(f"{name}\n{json.dumps(result, sort_keys=True)}".encode()).hexdigest()


def changed_source_error(source: str) -> UsageError:
    """Return the error for a source that is not the one that was planned."""
    return UsageError(
        "the source, or another file that the plan reads, has changed since the plan was made",
        where=source,
        fix="Discard the plan and make a new one; if another machine made it, check that both see the same storage.",
    )


def find_missing_tasks(plan: TaskPlan, done: set[str]) -> list[int]:
    """Return the numbers of tasks with parts that are not done."""
    return [number for number, parts in enumerate(plan.tasks) if any(part.name not in done for part in parts)]


def format_numbers(numbers: Sequence[int]) -> str:
    """Return numbers as SLURM takes them: `3,7-9`; at most 20 ranges."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in ranges[:20]]
    left = len(ranges) - len(shown)
    return ",".join(shown) + (f" and {left} more range{'s' * (left != 1)}" if left else "")
