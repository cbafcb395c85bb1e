"""A model's ranks: all, or only the ranks in a pipeline stage or in part of a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from shardckpt.ranks.group import Group
from shardckpt.ranks.linked_group import ALONE
from shardckpt.ranks.torch_group import TorchGroup, get_group_device


@dataclass(frozen=True)
class Ranks:
    """A model's ranks as a grid: one process group, or one per axis."""

    # This rank's process groups, the slowest axis first; empty for a single rank.
    axes: tuple[dist.ProcessGroup, ...] = ()
    # Whether the ranks are a guess: the model does not use a process group, so ranks may have different models.
    guessed: bool = False

    @classmethod
    def from_groups(cls, groups: Iterable[dist.ProcessGroup | None]) -> Ranks:
        """Build the grid from a model's process groups."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        members: dict[frozenset[int], dist.ProcessGroup] = {}
        given = [group for group in dict.fromkeys(groups) if group is not None]
        if given and all(group.size() == 1 for group in given):
            return cls()
        for group in given:
            if group.size() > 1:
                members.setdefault(frozenset(dist.get_process_group_ranks(group)), group)
        axes = {of: group for of, group in members.items() if not any(of < other for other in members)}
        if not axes or prod(map(len, axes)) >= dist.get_world_size():
            world = dist.group.WORLD
            assert world is not None, "there is a job"
            return cls((world,), guessed=not axes)
        return cls(tuple(axes[of] for of in sorted(axes, key=lambda of: sorted(of)[1] - sorted(of)[0], reverse=True)))

    @property
    def group(self) -> Group:
        """Group for messages between these ranks."""
        if not self.axes:
            return ALONE
        return TorchGroup(self.axes[0]) if len(self.axes) == 1 else _Grid([TorchGroup(axis) for axis in self.axes])

    @property
    def is_first(self) -> bool:
        """Return True if this is rank 0 of the grid."""
        return all(axis.rank() == 0 for axis in self.axes)

    @property
    def size(self) -> int:
        """Ranks on all axes together."""
        return prod(axis.size() for axis in self.axes)

    def broadcast_from_rank0(self, tensor: torch.Tensor) -> None:
        """Broadcast a tensor from rank 0. Collective."""
        for at, axis in enumerate(self.axes):
            if axis.size() > 1 and all(later.rank() == 0 for later in self.axes[at + 1 :]):
                moved = tensor.to(get_group_device(axis, tensor.device))
                dist.broadcast(moved.view(-1).view(torch.uint8), group=axis, group_src=0)
                if moved is not tensor:
                    tensor.copy_(moved)


class _Grid(Group):
    """Group for ranks without a common process group; messages go axis by axis."""

    def __init__(self, axes: Sequence[Group]) -> None:
        self._axes = axes
        self.size = prod(axis.size for axis in axes)
        self.rank = 0  # with the fastest axis last
        for axis in axes:
            self.rank = self.rank * axis.size + axis.rank

    def all_gather_equal(self, data: bytes) -> list[bytes]:
        """Gather bytes with equal length along the fastest axis, then along the next axes."""
        rows = data
        for axis in reversed(self._axes):
            rows = b"".join(axis.all_gather_equal(rows))
        return [rows[at * len(data) : (at + 1) * len(data)] for at in range(self.size)]
