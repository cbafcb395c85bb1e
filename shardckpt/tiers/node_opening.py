"""`NodeOpening`: make a tier ready on all nodes before a step, with an extra message only if something changes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from shardckpt.errors import ShardckptError, StorageError
from shardckpt.ranks.process_group import get_ranks


class NodeShare(NamedTuple):
    """A rank's part in a capture."""

    nodes: int
    is_first: bool  # this rank acts for its node
    leaving: Sequence[str] = ()  # ids of nodes with a notice; empty unless other nodes have none


class NodeOpening:
    """Makes a tier ready on all ranks' nodes."""

    def __init__(
        self,
        root: str,
        open_node: Callable[[], object],
        refuse: Callable[[int, Exception], object],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._root, self._open_node, self._refuse, self._group = root, open_node, refuse, group
        self.is_ready = False  # for the last step of this tier, on all nodes; equal on every rank

    def find_fault(self) -> str:
        """Make the tier ready on this rank's node; return why it is not, or empty text."""
        try:
            self._open_node()
        except ShardckptError as error:
            return str(error)
        return ""

    def open_nodes(self, number: int, share: NodeShare, *, is_open: bool) -> bool:
        """Make the tier ready on all nodes; return whether it can take a step. Collective."""
        self.is_ready = is_open or self._agree(number, share)
        return self.is_ready

    def _agree(self, number: int, share: NodeShare) -> bool:
        coordinator = get_ranks(self._group)
        message: bytes | Exception = b""
        try:
            message = self.find_fault().encode() if share.is_first and coordinator.rank else b""
        except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
            message = error

        def decide(messages: list[bytes]) -> list[bytes]:
            is_refused = self.refuse_on(number, enumerate(message.decode() for message in messages))
            return [b"" if is_refused else b"1"] * len(messages)

        return bool(coordinator.ask_rank0(f"opening {self._root} on all nodes", message, decide))

    def refuse_on(self, number: int, faults: Iterable[tuple[int, str]]) -> bool:
        """Refuse a step if a rank has a fault; return True if so. On rank 0."""
        rank, fault = next(((rank, fault) for rank, fault in faults if fault), (0, ""))
        if fault:
            self._refuse(number, StorageError(f"rank {rank}: {fault}"))
        return bool(fault)
