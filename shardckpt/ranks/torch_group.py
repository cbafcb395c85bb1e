"""Ranks of a torch process group, which talk by its collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from shardckpt.devices import is_device_error, is_out_of_memory
from shardckpt.errors import RankError
from shardckpt.ranks.bounded_store import BoundedStore
from shardckpt.ranks.group import Group
from shardckpt.ranks.linked_group import ALONE
from shardckpt.ranks.wait_notice import StoreBoard, announce_wait
from shardckpt.torch_features import get_group_store

__all__ = ["TorchGroup", "current_device", "current_group", "get_group_device"]

_CPU = torch.device("cpu")


class TorchGroup(Group):
    """A torch process group, which sends messages as tensors on its backend's device; for NCCL an accelerator."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def global_rank(self, rank: int) -> int:
        """Return the global rank for a rank in the group."""
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def all_gather_equal(self, data: bytes) -> list[bytes]:
        """Gather the bytes as rows of one tensor."""
        with self._named("an all-gather"):
            row = _to_tensor(data)
            rows = torch.empty(self.size, row.numel(), dtype=row.dtype, device=get_group_device(self._group))
            dist.all_gather(list(rows.unbind()), row.to(rows.device), group=self._group)
            return [each.numpy().tobytes() for each in rows.cpu()]

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """Broadcast the length, then the bytes."""
        device = get_group_device(self._group)
        with self._named("a broadcast"):
            length = torch.tensor([len(data or b"")], device=device)
            dist.broadcast(length, group=self._group, group_src=source)
            if int(length) == 0:
                return b""
            sent = data if data is not None and self.rank == source else bytes(int(length))
            row = _to_tensor(sent).to(device)
            dist.broadcast(row, group=self._group, group_src=source)
        return row.cpu().numpy().tobytes()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Add this rank to the error of a collective that fails or times out."""
        given = dist.group.WORLD if self._group is None else self._group
        assert given is not None
        board = StoreBoard(BoundedStore(get_group_store(given)))
        try:
            with announce_wait(board, self.rank, self.size, what):
                yield
        except RuntimeError as error:
            if is_out_of_memory(error) or is_device_error(error):
                raise
            raise RankError(
                f"rank {self.rank} of {self.size} could not complete {what}: {error}",
                rank=self.rank,
                fix="Another rank died or left; its own log says why.",
            ) from error


def get_group_device(group: dist.ProcessGroup | None = None, preferred: torch.device = _CPU) -> torch.device:
    """Return a device whose tensors a group's backend can send."""
    kinds = [each.partition(":")[0] for each in dist.get_backend_config(group).split(",")]
    return preferred if preferred.type in kinds else current_device(kinds[0], group)  # NCCL cannot send CPU tensors


def current_device(kind: str, group: dist.ProcessGroup | None = None) -> torch.device:
    """Return this process's device of a type, such as "cuda": the `device_id` of a group, or the current device."""
    for each in (group, dist.group.WORLD):
        bound: torch.device | None = getattr(each, "bound_device_id", None)
        if bound is not None and bound.type == kind:
            return bound
    return torch.empty(0, device=kind).device


def current_group() -> Group:
    """Return this process's group: torch's default process group if initialized, else a group with one rank."""
    return TorchGroup() if dist.is_available() and dist.is_initialized() else ALONE


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
