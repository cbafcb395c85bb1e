"""Results of parts, one small JSON file each, in a folder that all tasks of a plan see."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from shardckpt.errors import FormatError, MissingFileError, ShardckptError, StorageError, UsageError
from shardckpt.offline.tasks.task_inputs import INPUTS
from shardckpt.offline.tasks.task_plan import TaskPlan, WorkPart
from shardckpt.storage.local import make_folders
from shardckpt.storage.orphans import hold, release
from shardckpt.storage.resolve_url import local_path, open_place, split
from shardckpt.storage.store import Store, convert_os_errors, read_bytes
from shardckpt.storage.thread_pool import ThreadPool

__all__ = ["PartResults"]

_PLAN, _RESULTS, _COMMIT, _DISCARD = "plan.json", "results", "commit-", "discard"
_DISCARDED, _COMMITTED = b'{"discarded": true}\n', b'{"committed": true}\n'  # in place of the plan
_ENDS = {_DISCARDED: "a plan that was discarded", _COMMITTED: "a plan that was committed"}
_THREADS = 16  # requests at the same time; results are small
_MAX_READS = 16  # results that are read without a list of all
_MAX_RESULT_BYTES = 256 << 20
_MAX_REMOVALS = 100  # of a folder that late tasks write into; each writes at most once more


class PartResults:
    """What the tasks of one plan have done so far.

    Args:
        plan: The plan.
        url: Path or URL of its file, for messages.

    Raises:
        FormatError: The plan names folders that no plan has.
    """

    def __init__(self, plan: TaskPlan, url: str = "") -> None:
        _require_own_folders(plan, url)
        self._plan, self._url = plan, url or plan.folder
        self._store: Store = open_place(plan.folder)
        self._encoded = plan.encode()
        self._parts = {
            f"{_RESULTS}/{task:06d}-{at:06d}.json": part
            for task, parts in enumerate(plan.tasks)
            for at, part in enumerate(parts)
        }
        self._names = {part.name: name for name, part in self._parts.items()}

    def start(self, inputs: Sequence[bytes]) -> None:
        """Make the plan's folders, and write inputs and plan, by which tasks know it. Raises StorageError."""
        staging = local_path(self._plan.staging) if self._plan.staging else None
        if staging is not None:
            with convert_os_errors("cannot make the folder of the plan", staging):
                make_folders(staging)
        if inputs:
            with self._store.create(INPUTS) as writer:
                for block in inputs:
                    writer.write(block)
        with self._store.create(_PLAN) as writer:
            writer.write(self._encoded)

    def require_started(self, *, or_discarded: bool = False) -> None:
        """Require that the folder of this plan is here, and that nobody discards the plan. Raises StorageError."""
        found = self._read_plan()
        if found != self._encoded and not (or_discarded and found == _DISCARDED):
            raise self._ended_error(found)

    def _ended_error(self, found: bytes) -> StorageError:
        return StorageError(
            "the folder of this plan is not here",
            where=self._url,
            found=_ENDS.get(found, f"no {self._plan.folder}"),
            fix="Give every machine the same storage. If the plan was committed or discarded, make a new one.",
        )

    def is_started(self) -> bool:
        """Return True unless the plan was committed or discarded. Raises StorageError."""
        return self._read_plan() == self._encoded

    def is_discarded(self) -> bool:
        """Return True while the plan is being discarded. Raises StorageError."""
        return self._read_plan() == _DISCARDED

    @contextmanager
    def end_alone(self, *, or_discarded: bool = False) -> Iterator[None]:
        """Commit or discard the plan in the block, while no other process of this machine does. Raises StorageError."""
        # On a store, and among machines, marks keep a commit and a discard apart; two commits publish the same files.
        lock = self._lock()
        try:
            found = self._read_plan()
            if found == _COMMITTED:
                self.remove()  # the commit was killed amid this
                raise self._ended_error(found)
            with self.explain_end(or_discarded=or_discarded):
                self.require_started(or_discarded=or_discarded)
                yield
        finally:
            release(lock)

    def _lock(self) -> int:
        """Return a descriptor that holds the lock of the plan's folder; -1 if there is none to lock."""
        path, lock = local_path(self._plan.folder), -1
        if path is not None:
            with convert_os_errors("cannot lock the folder of the plan", path), suppress(FileNotFoundError):
                lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        if lock != -1 and not hold(lock):
            release(lock)
            fix = "Wait until it has ended."
            raise StorageError("another process is committing or discarding this plan", where=self._url, fix=fix)
        return lock

    @contextmanager
    def explain_end(self, *, or_discarded: bool = False) -> Iterator[None]:
        """Raise an error in the block as one about the plan if another process has committed or discarded it."""
        try:
            yield
        except ShardckptError:
            self.require_started(or_discarded=or_discarded)
            raise

    def _read_plan(self) -> bytes:
        try:
            store = open_place(self._plan.folder)  # stores keep what they have read
            return read_bytes(store, _PLAN, 0, store.size(_PLAN))
        except MissingFileError:
            return b""

    def mark_discard(self) -> bool:
        """Store that the plan is discarded: from now on, no commit publishes, and a task removes what it has written.

        Returns:
            Whether a commit has published, or tried to, so that the target may refer to files of tasks.

        Raises:
            StorageError: The plan was committed meanwhile, or the store failed.
        """
        # A commit marks itself, looks for this mark, publishes, replaces the plan, then removes all marks.
        with self._store.create(_DISCARD) as writer:
            writer.write(b"")
        has_commit = any(name.startswith(_COMMIT) for name in self._list_marks())
        if (found := self._read_plan()) not in (self._encoded, _DISCARDED):
            self.remove()
            raise self._ended_error(found)
        with self._store.create(_PLAN) as writer:
            writer.write(_DISCARDED)
        return has_commit

    def _list_marks(self) -> list[str]:
        return [entry.name for entry in open_place(self._plan.folder).list() if not entry.is_folder]

    def remove_committed(self) -> None:
        """Store that the plan is committed, then remove its folder. Raises StorageError."""
        with suppress(MissingFileError), self._store.create(_PLAN) as writer:  # a discard may remove the folder now
            writer.write(_COMMITTED)
        self.remove()

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
        name = self._names[part.name]
        with self._store.create(name) as writer:
            writer.write(
                json.dumps({"plan": self._plan.id, "digest": _digest(name, result), "result": result}).encode()
            )

    def remove_late(self, part: WorkPart) -> None:
        """Remove a result that was written after the plan ended. Raises StorageError."""
        self._remove_late(self._names[part.name])

    def _remove_late(self, name: str) -> None:
        if self._read_plan() in (self._encoded, _DISCARDED):  # the discard removes the folder
            self._store.delete(name)
        else:
            self.remove()

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

    def mark_commit(self) -> None:
        """Store that a commit publishes. Raises StorageError, also if the plan ended."""
        name = f"{_COMMIT}{secrets.token_hex(4)}"  # its own: another commit's mark stays
        with self._store.create(name) as writer:
            writer.write(b"")
        is_discarded = _DISCARD in self._list_marks()
        if is_discarded or not self.is_started():
            self._remove_late(name)
            raise self._ended_error(_DISCARDED if is_discarded else self._read_plan())

    def remove(self) -> None:
        """Remove the folder of the plan. Raises StorageError."""
        parent, name = split(self._plan.folder)
        for left in reversed(range(_MAX_REMOVALS)):
            try:
                open_place(parent).delete_folder(name)
                break
            except StorageError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not left:
                    raise


def _digest(name: str, result: Mapping[str, Any]) -> str:
    """Return a digest over a result, by which a damaged one is known."""
    return hashlib.sha256(f"{name}\n{json.dumps(result, sort_keys=True)}".encode()).hexdigest()


def _require_own_folders(plan: TaskPlan, url: str) -> None:
    """Require folders as `plan_tasks` names them: the commit removes one, and tasks write into the other."""
    parent, name = split(plan.folder)
    found = re.fullmatch(r"\.(.+)\.tasks-([0-9a-f]{8})", name, re.DOTALL)
    target = f"{parent.rstrip('/')}/{found[1]}" if found else ""
    staging = target if local_path(plan.folder) is None else f"{plan.folder}/files"
    if not found or found[2] != plan.id or plan.staging.rstrip("/") not in ("", staging):
        raise FormatError(
            "a plan must use folders of its own",
            where=url,
            found=f"{plan.folder!r}, {plan.staging!r}",
            expected=f"a folder .NAME.tasks-{plan.id}",
            fix="Make a new plan.",
        )


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
