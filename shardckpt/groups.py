"""Process groups behind one interface: a torch group, or a single process.

Values are sent as bytes in tensor collectives, never as pickled objects: peers send data, not code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from shardckpt.devices import is_device_error, is_out_of_memory
from shardckpt.errors import RankError, ShardckptError, describe_with_class

# Bytes for an error message in the all-gather that ends a collective: one small all-gather if no rank failed.
_MESSAGE_BYTES = 512


_PIGGYBACK_BYTES = _MESSAGE_BYTES - 1
_CPU = torch.device("cpu")


class Piggyback:
    """One message per rank, sent with the all-gather for errors."""

    def __init__(self) -> None:
        self.local = b""  # this rank's message, at most 511 bytes; set inside the block
        # Each rank's message, in rank order, padded with zero bytes; set at the end of the block.
        self.gathered: list[bytes] = []


class Group(ABC):
    """The ranks that take part in one operation."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Rank of this process in the group, from 0."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of ranks."""

    def global_rank(self, rank: int) -> int:
        """Return the global rank of a rank of this group; messages name global ranks.

        Args:
            rank: Rank in this group.
        """
        return rank

    @abstractmethod
    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in rank order. Collective; lengths may differ.

        Raises:
            RankError: A rank did not take part in time.
        """

    @abstractmethod
    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """Return the bytes of rank `source`; the other ranks may pass None. Collective.

        Raises:
            RankError: A rank did not take part in time.
        """

    def all_gather_equal(self, data: bytes) -> list[bytes]:
        """Return the bytes of all ranks, in rank order. Collective.

        Lengths must be equal, which saves an all-gather.

        Args:
            data: This rank's bytes.
        """
        return self.all_gather(data)

    @contextmanager
    def collective(self, what: str) -> Iterator[Piggyback]:
        """Run a block on every rank; raise one rank's error on all.

        One all-gather at the end; errors name the rank.

        Args:
            what: Operation name, for the message.

        Yields:
            This rank's message and, after the block, the messages from all ranks.

        Raises:
            RankError: Another rank failed. This rank's own exception is raised unchanged.
        """
        failure: Exception | None = None
        piggyback = Piggyback()
        try:
            yield piggyback
        except Exception as error:  # noqa: BLE001  (sent to every rank, then raised)
            failure = error
        outcomes = self.all_gather_equal(_pack_outcome(failure, piggyback.local))
        if failure is not None:
            raise failure
        self._raise_first(what, outcomes)
        piggyback.gathered = [each[1:] for each in outcomes]

    def _raise_first(self, what: str, outcomes: Sequence[bytes]) -> None:
        texts = {at: data.rstrip(b"\0").decode("utf-8", "replace") for at, data in enumerate(outcomes) if data[0]}
        if texts:
            failed = [self.global_rank(at) for at in texts]
            more = f"; ranks {', '.join(map(str, failed))} failed" if len(failed) > 1 else ""
            text = next(iter(texts.values()))
            raise RankError(f"{what} failed on rank {failed[0]}: {text}{more}", rank=failed[0])


def _pack_outcome(failure: Exception | None, message: bytes) -> bytes:
    if failure is None:
        return b"\0" + message[:_PIGGYBACK_BYTES].ljust(_PIGGYBACK_BYTES, b"\0")
    text = str(failure) if isinstance(failure, ShardckptError) else describe_with_class(failure)
    return (
        (text or type(failure).__name__).encode("utf-8", "replace")[: _MESSAGE_BYTES - 1].ljust(_MESSAGE_BYTES, b"\0")
    )


class LocalGroup(Group):
    """A group with one process: every collective returns its input."""

    @property
    def rank(self) -> int:
        """Always 0."""
        return 0

    @property
    def size(self) -> int:
        """Always 1."""
        return 1

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return the bytes given."""
        return [data]

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """Return the bytes given."""
        if data is None or source != 0:
            raise RankError(f"rank {source} has nothing to broadcast in a world of one", rank=source)
        return data


class TorchGroup(Group):
    """A torch process group, which sends messages as tensors on its backend's device; for NCCL an accelerator."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group

    @property
    def rank(self) -> int:
        """Rank in the group."""
        return dist.get_rank(self._group)

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return dist.get_world_size(self._group)

    def global_rank(self, rank: int) -> int:
        """Return the global rank for a rank in the group."""
        return rank if self._group is None else dist.get_global_rank(self._group, rank)

    def all_gather(self, data: bytes) -> list[bytes]:
        """Gather the lengths, then the bytes, padded to the longest."""
        with self._named("all-gather"):
            lengths = self._gather_rows(torch.tensor([len(data)]))[:, 0].tolist()
            if not any(lengths):
                return [b""] * self.size
            rows = self._gather_rows(_pad_to_tensor(data, max(lengths)))
        return [row[:n].numpy().tobytes() for row, n in zip(rows, lengths, strict=True)]

    def all_gather_equal(self, data: bytes) -> list[bytes]:
        """Gather the bytes, whose length is known."""
        with self._named("all-gather"):
            rows = self._gather_rows(_pad_to_tensor(data, len(data)))
        return [row.numpy().tobytes() for row in rows]

    def _gather_rows(self, row: torch.Tensor) -> torch.Tensor:
        """Return the rows from all ranks, `(rank, element)`, on the CPU."""
        rows = torch.empty(self.size, row.numel(), dtype=row.dtype, device=get_group_device(self._group))
        dist.all_gather(list(rows.unbind()), row.to(rows.device), group=self._group)
        return rows.cpu()

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """Broadcast the length, then the bytes."""
        device = get_group_device(self._group)
        with self._named("broadcast"):
            length = torch.tensor([len(data or b"")], device=device)
            dist.broadcast(length, group=self._group, group_src=source)
            if int(length) == 0:
                return b""
            row = _pad_to_tensor(data if data is not None and self.rank == source else b"", int(length)).to(device)
            dist.broadcast(row, group=self._group, group_src=source)
        return row.cpu().numpy().tobytes()

    @contextmanager
    def _named(self, what: str) -> Iterator[None]:
        """Add this rank to the error of a collective that fails or times out."""
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error) or is_device_error(error):
                raise
            raise RankError(
                f"rank {self.rank} of {self.size} could not complete an {what}: {error}",
                rank=self.rank,
                fix="Another rank died or left; its own log says why.",
            ) from error


def get_group_device(group: dist.ProcessGroup | None = None, preferred: torch.device = _CPU) -> torch.device:
    """Return a device whose tensors a group's backend can send."""
    kinds = [each.partition(":")[0] for each in dist.get_backend_config(group).split(",")]
    return preferred if preferred.type in kinds else current_device(kinds[0])  # NCCL cannot send CPU tensors


def current_device(kind: str) -> torch.device:
    """Return this process's device of a type, such as "cuda"."""
    return torch.empty(0, device=kind).device


def _pad_to_tensor(data: bytes, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(data.ljust(nbytes, b"\0")), dtype=torch.uint8)


def current_group() -> Group:
    """Return this process's group: torch's default process group if initialized, else a group with one rank."""
    return TorchGroup() if dist.is_available() and dist.is_initialized() else LocalGroup()
