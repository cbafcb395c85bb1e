"""The start of a run that captured last: noted in the root, so that later starts see if they reach its captures."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace

from shardckpt.format.durability.run_record import CapturingStart, read_run_record, write_run_record
from shardckpt.storage.store import Store


class LastStart:
    """The start of a run that captured last. On rank 0.

    Nodes that a start does not use may have captures of an earlier one, which it cannot see: of other steps, or none of
    their marks. What it saves is newer, so it belongs to the next branch.

    Args:
        open_root: Returns the store of the run's root. Raises ShardckptError.
    """

    def __init__(self, open_root: Callable[[], Store]) -> None:
        self._open_root = open_root
        self._id = secrets.token_hex(4)
        self._recorded: int | None = None

    def make_attempt(self) -> str:
        """Return text that no other attempt to save has, and that names this start."""
        return f"{self._id}-{secrets.token_hex(8)}"

    def record(self, branch: int) -> None:
        """Record that this start captures, before its first capture in a branch.

        Args:
            branch: Branch of the run that the capture belongs to.

        Raises:
            ShardckptError: The root cannot be read or written.
        """
        if self._recorded is not None and branch <= self._recorded:
            return
        store = self._open_root()
        write_run_record(store, replace(read_run_record(store), start=CapturingStart(self._id, branch)))
        self._recorded = branch

    def find_least_branch(self, attempts: Iterable[str]) -> int:
        """Return the least branch of the steps that this start may save.

        Args:
            attempts: Results of `make_attempt` in the captures that this start can read.

        Raises:
            ShardckptError: The root cannot be read.
        """
        last = read_run_record(self._open_root()).start
        is_seen = last.id in ("", self._id) or any(each.partition("-")[0] == last.id for each in attempts)
        return 0 if is_seen else last.branch + 1
