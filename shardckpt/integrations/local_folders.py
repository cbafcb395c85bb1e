"""Folders and steps that a framework names by path: their names, errors about them, and removal."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial

from shardckpt import Checkpointer, ShardckptError, ls, prune
from shardckpt.errors import (
    ChecksumError,
    FormatError,
    IncompleteError,
    MissingFileError,
    NoCompleteCheckpoint,
    StorageError,
)
from shardckpt.events import OperationEvent, SaveEvent
from shardckpt.events.warn_user import warn_user
from shardckpt.ranks.process_group import get_ranks

__all__ = [
    "StepRemoval",
    "list_names",
    "list_steps",
    "name_earlier",
    "name_earlier_step",
    "raise_storage_errors",
    "require_access",
]

_DAMAGE = (ChecksumError, FormatError, IncompleteError, MissingFileError, NoCompleteCheckpoint)


def list_steps(checkpointer: Checkpointer) -> tuple[int, ...]:
    """Return the complete steps that rank 0 lists, the oldest first. Collective."""

    def decide(messages: list[bytes]) -> list[bytes]:
        return [json.dumps(checkpointer.steps()).encode()] * len(messages)

    answer = get_ranks(None).ask_rank0(f"listing steps of {checkpointer.root}", b"", decide)
    return tuple(json.loads(answer))


def list_names(folder: str) -> list[str]:
    """Return the names in a folder; none if it does not exist. Raises StorageError."""
    with raise_storage_errors("cannot list", folder):
        return os.listdir(folder) if os.path.isdir(folder) else []


def require_access(path: str) -> None:
    """Raise StorageError if permissions hide whether a path exists."""
    with raise_storage_errors("cannot look at it", path):
        try:
            os.stat(path)
        except PermissionError:
            raise
        except OSError:  # it does not exist
            return


@contextmanager
def raise_storage_errors(what: str, path: str) -> Iterator[None]:
    """Raise permission errors in the block as `StorageError`; `what` is the action, such as "cannot list"."""
    try:
        yield
    except PermissionError as error:
        if isinstance(error, ShardckptError):
            raise
        raise StorageError(what, where=path, found=error.strerror, fix="Check the permissions.") from error


@contextmanager
def name_earlier(find_earlier: Callable[[], str], fix: str) -> Iterator[None]:
    """Add the complete checkpoint before a damaged one to its error.

    A framework cannot take that one by itself: it has read the step's number, and more, before it finds damaged bytes.

    Args:
        find_earlier: Returns the earlier checkpoint's path; empty without one.
        fix: How a job resumes from it, with `{}` for the path.
    """
    try:
        yield
    except _DAMAGE as error:
        with suppress(ShardckptError):
            earlier = find_earlier()
            known = f"To continue from the one before it, {fix.format(earlier)}."
            hint = known if earlier else "None was found before it."
            error.args = (f"{str(error).rstrip('.')}. {hint}", *error.args[1:])
        raise


def name_earlier_step(path: str | os.PathLike[str], argument: str) -> AbstractContextManager[None]:
    """Add the complete step before a damaged one to its error.

    Args:
        path: Path or URL of the step to load.
        argument: The framework's argument for a step's path.
    """
    return name_earlier(partial(_find_earlier_step, os.fspath(path)), f'pass {argument}="{{}}", or remove this one')


def _find_earlier_step(path: str) -> str:
    """Return the path of the newest complete step before a step; empty without one."""
    root, _, name = path.rstrip("/").rpartition("/")
    paths = [step.path for step in ls(root or ".").complete]
    names = [each.rpartition("/")[2] for each in paths]
    before = paths[: names.index(name)] if name in names else paths
    return before[-1] if before else ""


class StepRemoval:
    """Steps to remove on this rank; each stays until the next saved step is complete."""

    def __init__(self, run: str | os.PathLike[str]) -> None:
        self._run = run
        self._numbers: deque[int] = deque()
        self._is_saved = False

    @property
    def numbers(self) -> list[int]:
        """Steps that are not removed yet."""
        return [*self._numbers]

    def start_save(self, number: int) -> None:
        """Keep all steps until this save is complete; its own step is not removed."""
        self._is_saved = False
        if number in self._numbers:
            self._numbers.remove(number)

    def take_event(self, event: OperationEvent) -> None:
        """Remove steps when the save is complete; background saves call this on their thread."""
        if isinstance(event, SaveEvent) and event.error is None:
            self._is_saved = True
            self._remove_all()

    def add(self, number: int) -> None:
        """Remove a step, now or once the current save is complete."""
        self._numbers.append(number)
        if self._is_saved:
            self._remove_all()

    def _remove_all(self) -> None:
        numbers = set()
        while self._numbers:
            numbers.add(self._numbers.popleft())
        try:
            if numbers:
                prune(self._run, steps=numbers)
        except ShardckptError as error:
            warn_user(f"steps {', '.join(map(str, sorted(numbers)))} could not be removed: {error}")
