"""Base of the adapters, and the one for plain tensors, with or without `DistributedDataParallel`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardckpt.core.modules.dtensors import MeshPlacements, detach, get_mesh_placements, local
from shardckpt.core.params.full_params import Staging
from shardckpt.state.redistribute.rank_grid import Ranks

Tensors = Sequence[torch.Tensor | None]  # one tensor per entry, or per exposed parameter; None to skip it


@dataclass(frozen=True)
class Entry:
    """A parameter's properties in the unsharded model."""

    name: str  # FQN without wrapper segments
    aliases: tuple[str, ...]  # a shared parameter's other FQNs
    shape: tuple[int, ...]
    dtype: torch.dtype  # stored dtype
    trains: bool  # whether the parameter requires gradients


class ShardingAdapter(ABC):
    """Adapter that gets and sets state for tensors that are sharded together.

    Args:
        entries: The tensors' properties, in order.
        ranks: All ranks of the model.
    """

    def __init__(self, entries: Sequence[Entry], ranks: Ranks) -> None:
        self.entries = tuple(entries)
        self.ranks = ranks

    # -------------------------------------------------------------------------------------------------- facts

    @property
    @abstractmethod
    def exposed(self) -> list[nn.Parameter]:
        """Parameters that an optimizer updates: one for all entries, or one per entry."""

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Return True if ranks have different parts."""

    @property
    def is_everywhere(self) -> bool:
        """Return True if every rank has a part or a copy.

        It is False for an expert that only some ranks have.
        """
        return True

    @property
    def has_parts_everywhere(self) -> bool:
        """Return True if optimizers on all ranks have state for the same parameters."""
        return True

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """Process group in which ranks have different parts; None if they are not one group."""
        return None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device on which ranks exchange tensors."""

    @property
    def is_stored_as_sharded(self) -> bool:
        """Return True if an optimizer's tensors are sharded as `to_sharded` returns them.

        No communication is necessary then.
        """
        return True

    @abstractmethod
    def placements(self) -> list[MeshPlacements | None]:
        """Return mesh and placements for each entry after `to_sharded`; None if unsharded."""

    def shard_lengths(self, position: int) -> tuple[int, ...] | None:
        """Return each rank's length in the sharded dimension; None unless exactly one is sharded."""
        del position
        return None

    def is_reporting_rank(self, position: int) -> bool:
        """Return True if this rank reports a parameter's optimizer state to the others."""
        del position
        return self.ranks.is_first

    def layout_metadata(self) -> dict[str, Any]:
        """Return the layout as plain JSON values; empty if every rank has all elements."""
        return {}

    # --------------------------------------------------------------------------------------- tensors of this rank

    @property
    @abstractmethod
    def packed(self) -> torch.Tensor:
        """Packed parameters, aliasing them; call `mark_written` after a write."""

    @abstractmethod
    def mark_written(self) -> None:
        """Drop copies of the parameters, which are stale after a write into `packed`."""

    @abstractmethod
    def part_views(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's part of each entry as a view into `packed`.

        The views are 1-D if the layout is flat.
        """

    @abstractmethod
    def parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return `packed` as tensors with the exposed parameters' shapes.

        They are views if possible.
        """

    def local_parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return `parts`, with local tensors instead of DTensors."""
        return self.parts(packed)

    @abstractmethod
    def pack(self, parts: Tensors, dtype: torch.dtype, staging: Staging | None = None) -> torch.Tensor:
        """Pack tensors with the exposed parameters' shapes; zeros for None.

        Args:
            parts: Tensors to pack; the result may share a single tensor's memory.
            dtype: Dtype of the result.
            staging: Buffers that the following `to_full` uses too; None to allocate memory.
        """

    @abstractmethod
    def empty_like(self, position: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor for an optimizer slot, with zeros as padding."""

    # ----------------------------------------------------------------------------------- from packed parameters

    @abstractmethod
    def to_full(self, packed: torch.Tensor, staging: Staging, *, first_only: bool) -> Iterable[torch.Tensor] | None:
        """Return each entry's full tensor. Collective.

        Args:
            packed: Packed values to gather.
            staging: Communication buffers, in use until the caller has iterated over all entries.
            first_only: Only rank 0 gets the tensors.

        Returns:
            New tensors, except that unsharded entries may share memory with `packed`; None on ranks that do not get
            tensors.
        """

    @abstractmethod
    def to_sharded(self, packed: torch.Tensor, staging: Staging) -> list[torch.Tensor]:
        """Return each entry as a DTensor, or as a plain tensor if it is not sharded.

        Collective for flat layouts.

        Args:
            packed: Packed values; the result shares their memory if ranks do not exchange data.
            staging: Communication buffers.
        """

    def start_to_sharded(self, packed: torch.Tensor, staging: Staging) -> Callable[[], list[torch.Tensor]]:
        """Start an asynchronous `to_sharded`. Collective.

        Args:
            packed: As for `to_sharded`.
            staging: Communication buffers, in use until the returned function has run.

        Returns:
            Function that waits and returns the entries; all ranks call these functions in the order of the starts.
        """
        entries = self.to_sharded(packed, staging)
        return lambda: entries

    # ----------------------------------------------------------------------------------- into packed parameters

    @abstractmethod
    def from_full(self, values: Tensors, into: Tensors) -> None:
        """Copy this rank's parts from full values, which every rank has.

        Args:
            values: Full value for each entry, in any dtype; None to skip it.
            into: Destinations, such as `part_views` of packed values; skipped entries' destinations are ignored.
        """

    @abstractmethod
    def from_rank0(self, values: Tensors | None, into: Tensors, dtype: torch.dtype, staging: Staging) -> None:
        """Copy this rank's parts from full values on rank 0. Collective.

        Args:
            values: As for `from_full` on rank 0; None on other ranks.
            into: As for `from_full`; None, on all ranks, for entries to skip.
            dtype: The destinations' dtype, in which ranks communicate.
            staging: Communication buffers.
        """

    def from_sharded(self, values: Tensors, into: Tensors, staging: Staging) -> None:
        """Copy values that are sharded as `to_sharded` returns them. Collective if flat.

        Args:
            values: Tensors, one per entry, that pass `are_sharded_as`; None for entries to skip.
            into: As for `from_full`.
            staging: Communication buffers.
        """
        del staging  # only flat layouts exchange data
        copy_parts([None if value is None else local(value) for value in values], into)


class ParameterAdapter(ShardingAdapter):
    """Adapter for one parameter that the engine does not manage."""

    def __init__(self, entry: Entry, parameter: nn.Parameter, ranks: Ranks) -> None:
        super().__init__([entry], ranks)
        self._parameter = parameter

    @property
    def exposed(self) -> list[nn.Parameter]:
        """The parameter alone."""
        return [self._parameter]

    def mark_written(self) -> None:
        """Do nothing: the parameter does not have copies."""

    def part_views(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return `packed` itself."""
        return [packed]

    def parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return `packed` itself."""
        return [packed]

    def to_sharded(self, packed: torch.Tensor, staging: Staging) -> list[torch.Tensor]:  # noqa: ARG002
        """Return the parts themselves, without communication or copies."""
        return self.parts(packed)

    def broadcast_full(self, values: Tensors | None, dtype: torch.dtype) -> torch.Tensor:
        """Broadcast rank 0's full value. Collective."""
        value = None if values is None else values[0]
        return broadcast_from_rank0(self.ranks, self.entries[0].shape, dtype, self.device, value)


def copy_parts(parts: Tensors, into: Tensors) -> None:
    """Copy parts to their destinations; pairs with a None are skipped."""
    for part, place in zip(parts, into, strict=True):
        if part is not None and place is not None:
            place.copy_(part)


def are_sharded_as(adapter: ShardingAdapter, values: Tensors) -> bool:
    """Return True if values are sharded as an adapter's `to_sharded` returns them: they load without an all-gather."""
    pairs = zip(values, adapter.placements(), strict=True)
    return all(value is None or get_mesh_placements(value) == placed for value, placed in pairs)


def broadcast_from_rank0(
    ranks: Ranks, shape: Sequence[int], dtype: torch.dtype, device: torch.device, value: torch.Tensor | None
) -> torch.Tensor:
    """Broadcast a tensor from rank 0. Collective."""
    received = torch.empty(tuple(shape), dtype=dtype, device=device)
    if value is not None:
        received.copy_(value)
    ranks.broadcast_from_rank0(received)
    return received


class ReplicatedAdapter(ParameterAdapter):
    """Adapter for one parameter with all elements on every rank."""

    @property
    def is_sharded(self) -> bool:
        """Return False: every rank has all elements."""
        return False

    @property
    def device(self) -> torch.device:
        """The parameter's device."""
        return self._parameter.device

    def placements(self) -> list[MeshPlacements | None]:
        """Return None for the parameter, which is not sharded."""
        return [None]

    @property
    def packed(self) -> torch.Tensor:
        """The parameter itself."""
        return detach(self._parameter)

    def pack(self, parts: Tensors, dtype: torch.dtype, staging: Staging | None = None) -> torch.Tensor:  # noqa: ARG002
        """Return the only part."""
        return torch.zeros_like(self.packed, dtype=dtype) if parts[0] is None else parts[0].to(dtype)

    def empty_like(self, position: int, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002
        """Return an uninitialized tensor with the parameter's shape."""
        return torch.empty_like(self.packed, dtype=dtype)

    def to_full(self, packed: torch.Tensor, staging: Staging, *, first_only: bool) -> Iterable[torch.Tensor] | None:  # noqa: ARG002
        """Return `packed` itself, without communication."""
        return None if first_only and not self.ranks.is_first else [packed]

    def from_full(self, values: Tensors, into: Tensors) -> None:
        """Copy the value."""
        copy_parts(values, into)

    def from_rank0(self, values: Tensors | None, into: Tensors, dtype: torch.dtype, staging: Staging) -> None:  # noqa: ARG002
        """Broadcast the value from rank 0."""
        if into[0] is not None:
            into[0].copy_(self.broadcast_full(values, dtype))
