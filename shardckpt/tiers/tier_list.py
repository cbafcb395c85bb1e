"""Implement `list_tiers` and `stop_tiers`: this user's captures in memory on this node."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass

from shardckpt.errors import CheckpointError, MissingFileError, StorageError, UsageError
from shardckpt.events.warn_user import warn_user
from shardckpt.native.run_directory import read_run
from shardckpt.notebook import Result
from shardckpt.storage.local import LocalStore
from shardckpt.storage.store import convert_os_errors
from shardckpt.tiers.memory import SCHEME
from shardckpt.tiers.memory.lease import Lease, lock_unused, open_lease, read_lease
from shardckpt.tiers.memory.memory_store import list_sizes
from shardckpt.tiers.memory.run_folders import list_run_folders, remove_run_folder


@dataclass(frozen=True, slots=True, repr=False)
class RunCaptures(Result):
    """One run's captures in memory on this machine.

    Attributes:
        run: Run id.
        url: Captures' URL, for every function and command on this machine.
        path: Their folder, which holds the same steps.
        steps: Step numbers of complete captures, oldest first.
        parts: Step numbers of captures with only some files on this machine, oldest first.
        nbytes: Size of its files in bytes, including files in progress.
        max_bytes: Maximum for `nbytes`; 0 if unknown.
        is_used: Whether a process uses them.
        unused_s: Seconds since a process used them.
        idle_s: Seconds without a process after which they are removed.
    """

    run: str
    url: str
    path: str
    steps: tuple[int, ...]
    parts: tuple[int, ...]
    nbytes: int
    max_bytes: int
    is_used: bool
    unused_s: float
    idle_s: float


@dataclass(frozen=True, slots=True, repr=False)
class TierList(Result):
    """Result of `list_tiers`.

    Attributes:
        runs: This user's captures in memory on this machine, by run.
        stopped: Runs whose captures `shardckpt tiers stop` removed before it listed the others.
    """

    runs: tuple[RunCaptures, ...]
    stopped: tuple[str, ...] = ()


def list_tiers() -> TierList:
    """List this user's captures in memory on this machine.

    Returns:
        The runs, with the steps that they have.

    Raises:
        StorageError: The folder with captures cannot be read.
    """
    found = []
    for run, folder in sorted(list_run_folders().items()):
        with suppress(MissingFileError):  # it has just been removed
            found.append(_describe(run, folder))
    return TierList(tuple(found))


def _describe(run: str, folder: str) -> RunCaptures:
    is_used, lease = _look_at(folder)
    unused_s = 0.0 if is_used else max(time.monotonic() - lease.used_at, 0.0)
    nbytes, (steps, parts) = sum(list_sizes(folder)), _list_steps(folder)
    return RunCaptures(
        run, f"{SCHEME}://{run}", folder, steps, parts, nbytes, lease.max_bytes, is_used, unused_s, lease.idle_s
    )


def _look_at(folder: str) -> tuple[bool, Lease]:
    """Return whether a process uses a folder, and its lease."""
    with convert_os_errors("cannot look at the lease of captures", folder):
        fd = open_lease(folder)
        try:
            return not lock_unused(fd), read_lease(fd)
        finally:
            os.close(fd)


def stop_tiers(run: str | None = None) -> tuple[str, ...]:
    """Remove this user's captures in memory on this machine.

    A process that uses them continues, and its next capture makes another folder.

    Args:
        run: Run id; None for all.

    Returns:
        Ids of the runs whose captures were removed.

    Raises:
        UsageError: No captures of this run are there.
        StorageError: Captures cannot be removed.

    Warns:
        UserWarning: A process uses the removed captures.
    """
    found = {each: folder for each, folder in sorted(list_run_folders().items()) if run in (None, each)}
    if run is not None and not found:
        raise UsageError(
            "no captures of this run are in memory", where=run, fix="`shardckpt tiers` lists the runs with captures."
        )
    used = []
    for each, folder in found.items():
        with suppress(MissingFileError):
            used += [each] if _look_at(folder)[0] else []
        remove_run_folder(folder)
    if used:
        warn_user(f"processes use the captures that were removed, and make new ones: {', '.join(used)}")
    return tuple(found)


def _list_steps(folder: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the step numbers of complete captures, and of captures that are partly on other machines."""
    with suppress(CheckpointError, StorageError):  # it has just been removed
        run = read_run(LocalStore(folder))
        return tuple(step.number for step in run.complete), tuple(step.number for step in run.steps if step.is_part)
    return (), ()
