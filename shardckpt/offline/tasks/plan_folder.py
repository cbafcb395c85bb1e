"""The folder of a plan, from its start to its commit or discard, which one process does."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from shardckpt.errors import FormatError, MissingFileError, ShardckptError, StorageError
from shardckpt.offline.tasks.task_inputs import INPUTS
from shardckpt.offline.tasks.task_plan import TaskPlan
from shardckpt.storage.local import make_folders
from shardckpt.storage.orphans import hold, release
from shardckpt.storage.resolve_url import local_path, open_place, split
from shardckpt.storage.store import Store, convert_os_errors, read_bytes

__all__ = ["PlanFolder"]

_PLAN, _COMMIT, _DISCARD = "plan.json", "commit-", "discard"
_DISCARDED, _COMMITTED = b'{"discarded": true}\n', b'{"committed": true}\n'  # in place of the plan
_ENDS = {_DISCARDED: "a plan that was discarded", _COMMITTED: "a plan that was committed"}
_RESTS = "rests of a plan that had ended, which are removed now"
_MAX_REMOVALS = 100  # of a folder that late tasks write into; each writes at most once more


class PlanFolder:
    """The folder that all tasks of a plan see, and whether the plan is committed or discarded.

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
        self._is_removed = False  # by this process, at least in part

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
            raise self._ended_error(self._describe_end(found))

    def _describe_end(self, found: bytes) -> str:
        return _ENDS.get(found, f"no {self._plan.folder}/{_PLAN}")

    def _ended_error(self, found: str) -> StorageError:
        return StorageError(
            "the folder of this plan is not here",
            where=self._url,
            found=found,
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
            if found == _COMMITTED or (not found and or_discarded and lock != -1):
                self.remove()  # the commit or the discard failed or was killed amid this
                raise self._ended_error(_ENDS.get(found, _RESTS))
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
            if not self._is_removed:
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
            raise self._ended_error(self._describe_end(found))
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

    def mark_commit(self) -> None:
        """Store that a commit publishes. Raises StorageError, also if the plan ended."""
        name = f"{_COMMIT}{secrets.token_hex(4)}"  # its own: another commit's mark stays
        with self._store.create(name) as writer:
            writer.write(b"")
        is_discarded = _DISCARD in self._list_marks()
        if is_discarded or not self.is_started():
            self.remove_late_file(name)
            raise self._ended_error(self._describe_end(_DISCARDED if is_discarded else self._read_plan()))

    def remove_late_file(self, name: str) -> None:
        """Remove a file that was written after the plan ended, or without it the folder. Raises StorageError."""
        if self._read_plan() in (self._encoded, _DISCARDED):  # the discard removes the folder
            self._store.delete(name)
        else:
            self.remove()

    def remove(self) -> None:
        """Remove the folder of the plan. Raises StorageError."""
        self._is_removed = True
        parent, name = split(self._plan.folder)
        for left in reversed(range(_MAX_REMOVALS)):
            try:
                open_place(parent).delete_folder(name)
                break
            except StorageError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not left:
                    raise


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
