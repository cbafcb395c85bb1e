"""`tiers` and `stop_tiers`: the holders of captures of this user on this node."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from shardckpt.errors import CheckpointError, StorageError
from shardckpt.format.native.run_directory import read_run
from shardckpt.storage.holder.holders import find_holders, stop_holders
from shardckpt.storage.resolve_url import open_store


@dataclass(frozen=True, slots=True)
class HolderInfo:
    """A holder: a process that keeps the captures of one run.

    Attributes:
        run: Id of the run.
        url: URL of its captures, for every function and command.
        steps: Numbers of the complete captures, the oldest first.
        parts: Numbers of the captures of which this machine has only some files, the oldest first.
        nbytes: Bytes of memory for its files, including those being written.
        max_bytes: Maximum of these bytes.
        clients: Number of connected processes.
        pid: Process id.
        started_at: Time of its start, in seconds since the epoch.
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
    """A holder that does not answer: it is stopped, or hangs.

    Attributes:
        run: Id of the run.
        url: URL of its captures, for every function and command.
        pid: Process id; 0 if it is unknown.
    """

    run: str
    url: str
    pid: int


@dataclass(frozen=True, slots=True)
class TierList:
    """Result of `tiers`.

    Attributes:
        holders: Holders of this user on this node, in the order of their runs.
        hung: Holders that do not answer, in the order of their runs.
        stopped: Runs whose holders `shardckpt tiers stop` has ended, before the others were listed.
    """

    holders: tuple[HolderInfo, ...]
    hung: tuple[HungHolderInfo, ...] = ()
    stopped: tuple[str, ...] = ()


def tiers() -> TierList:
    """List the holders of captures of this user on this node; one that does not answer within 10 s is listed as hung.

    Returns:
        The holders, with the steps that they have.

    Raises:
        StorageError: The folder of sockets cannot be opened.
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
    """End holders of captures of this user on this node; their captures are lost.

    One that does not answer within 10 s gets SIGTERM, and SIGKILL 2 s later.

    Args:
        run: Id of the run; None for all.

    Returns:
        The ids of the runs whose holders were ended.

    Raises:
        UsageError: No holder has this run.
        StorageError: The folder of sockets cannot be opened, or a holder that does not answer cannot be ended.
        UnsafeError: Other users may use that folder.
    """
    return tuple(stop_holders(run))


def _list_steps(url: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of the complete captures, and of those of which other machines have the rest."""
    with suppress(CheckpointError, StorageError):  # it has ended meanwhile
        run = read_run(open_store(url))
        return tuple(step.number for step in run.complete), tuple(step.number for step in run.steps if step.is_part)
    return (), ()
