"""A link between some ranks of another link, in an order of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from shardckpt.ranks.linked_group import LinkedGroup, RankLink, Transfer

if TYPE_CHECKING:
    import torch

__all__ = ["OrderedLink", "keep_first", "put_first", "sort_by_number"]

_T = TypeVar("_T")


class OrderedLink(RankLink):
    """Some ranks of a link, or all, in another order: the first one is rank 0. It shares the other link's messages."""

    def __init__(self, link: RankLink, ranks: Sequence[int]) -> None:
        super().__init__(ranks.index(link.rank), len(ranks), link.timeout)
        self._link, self._ranks = link, tuple(ranks)

    @property
    def named_size(self) -> int:
        """Number of ranks of the other link."""
        return self._link.named_size

    def name_rank(self, rank: int) -> int:
        """Return the other link's number for a rank."""
        return self._link.name_rank(self._ranks[rank])

    def send_message(self, data: bytes, dst: int) -> None:
        """Send over the other link."""
        self._link.send_message(data, self._ranks[dst])

    def recv_message(self, src: int, deadline: float) -> bytes:
        """Receive over the other link."""
        return self._link.recv_message(self._ranks[src], deadline)

    def expect_message(self, src: int) -> None:
        """Accept the next message over the other link."""
        self._link.expect_message(self._ranks[src])

    def start_send(self, tensor: torch.Tensor, dst: int) -> Transfer:
        """Send a tensor over the other link."""
        return self._link.start_send(tensor, self._ranks[dst])

    def start_recv(self, tensor: torch.Tensor, src: int) -> Transfer:
        """Receive a tensor over the other link."""
        return self._link.start_recv(tensor, self._ranks[src])

    def leave_note(self, key: str, text: str) -> None:
        """Leave a note for all ranks of the other link."""
        self._link.leave_note(key, text)

    def find_note(self, key: str, *, wait_s: float = 0.0) -> str:
        """Return a note of the other link."""
        return self._link.find_note(key, wait_s=wait_s)

    def find_host(self, rank: int) -> str:
        """Return the name of a rank's machine."""
        return self._link.find_host(self._ranks[rank])

    def renew(self, *, has_low_priority: bool = False) -> RankLink:
        """Return a new link between all ranks of the other link, in this order."""
        return OrderedLink(self._link.renew(has_low_priority=has_low_priority), self._ranks)


def put_first(group: LinkedGroup, ranks: Sequence[int]) -> LinkedGroup:
    """Return a group's ranks with some of them first. The others may leave once they have sent their last message."""
    order = [*ranks, *(rank for rank in range(group.size) if rank not in ranks)]
    return group.derive(f"first {[*ranks]}", lambda link: OrderedLink(link, order), needed=len(ranks))


def sort_by_number(group: LinkedGroup, values: Sequence[_T]) -> list[_T]:
    """Return the ranks' values in the order of the ranks' numbers in messages."""
    return [values[rank] for rank in sorted(range(group.size), key=group.global_rank)]


def keep_first(group: LinkedGroup, count: int) -> LinkedGroup:
    """Return a group's first ranks. On these ranks."""
    return group.derive(f"only {count}", lambda link: OrderedLink(link, range(count)), needed=count)
