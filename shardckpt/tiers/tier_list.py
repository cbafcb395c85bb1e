"""Implement `list_tiers` and `stop_tiers`: this user's capture holders on this node."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from shardckpt.errors import CheckpointError, StorageError
from shardckpt.native.run_directory import read_run
from shardckpt.storage.resolve_url import open_store
from shardckpt.tiers.holder.holders import find_holders, stop_holders


@dataclass(frozen=True, slots=True)
class HolderInfo:
    """A holder: a process that keeps one run's captures.

    Attributes:
        run: Run id.
        url: Captures' URL, for every function and command.
        steps: Step numbers of complete captures, oldest first.
        parts: Step numbers of captures with only some files on this machine, oldest first.
        nbytes: Memory for its files in bytes, including files in progress.
        max_bytes: Maximum for `nbytes`.
        clients: How many processes are connected.
        pid: Process id.
        started_at: Start time, in seconds since the epoch.
    """

    run: str
    url: str
    steps: tuple[int, ...]
    parts: tuple[int, ...]
    nbytes: int
    max_bytes: int
    clients: int
    pid: int
    started_at: float


@dataclass(frozen=True, slots=True)
class HungHolderInfo:
    """A holder that does not answer because it is stopped or hangs.

    Attributes:
        run: Run id.
        url: Captures' URL, for every function and command.
        pid: Process id; 0 if unknown.
    """

    run: str
    url: str
    pid: int


@dataclass(frozen=True, slots=True)
class TierList:
    """Result of `list_tiers`.

    Attributes:
        holders: This user's holders on this node, by run.
        hung: Holders that do not answer, by run.
        stopped: Runs whose holders `shardckpt tiers stop` ended before it listed the others.
    """

    holders: tuple[HolderInfo, ...]
    hung: tuple[HungHolderInfo, ...] = ()
    stopped: tuple[str, ...] = ()


def list_tiers() -> TierList:
    """List this user's capture holders on this node; a holder is hung if it does not answer within 10 s.

    Returns:
        The holders, with the steps that they have.

    Raises:
        StorageError: The folder with sockets cannot be opened.
        UnsafeError: Other users may use that folder.
    """
    found = find_holders()
    holders = (
        HolderInfo(
            each.run,
            each.url,
            *_list_steps(each.url),
            each.nbytes,
            each.max_bytes,
            each.clients,
            each.pid,
            each.started_at,
        )
        for each in found.running
    )
    return TierList(tuple(holders), tuple(HungHolderInfo(each.run, each.url, each.pid) for each in found.hung))


def stop_tiers(run: str | None = None) -> tuple[str, ...]:
    """End this user's capture holders on this node; their captures are lost.

    A holder that does not answer within 10 s gets SIGTERM, and SIGKILL 2 s later.

    Args:
        run: Run id; None for all.

    Returns:
        Ids of the runs whose holders were ended.

    Raises:
        UsageError: No holder has this run.
        StorageError: The folder with sockets cannot be opened, or a hung holder cannot be ended.
        UnsafeError: Other users may use that folder.
    """
    return tuple(stop_holders(run))


def _list_steps(url: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the step numbers of complete captures, and of captures that are partly on other machines."""
    with suppress(CheckpointError, StorageError):  # it has ended meanwhile
        run = read_run(open_store(url))
        return tuple(step.number for step in run.complete), tuple(step.number for step in run.steps if step.is_part)
    return (), ()
