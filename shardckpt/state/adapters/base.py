"""Interface of adapters, which get and set the state of sharded tensors.

The adapters are `engine_flat` and `engine_dtensor` for units of the engine (with a common base in `engine_bucket`),
`dtensor` for all other DTensors, such as those of torch's `fully_shard`, and `replicated` for plain tensors.
`torch_fsdp1` handles models under torch's own wrapper through torch's public functions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from shardckpt.core.modules.dtensors import MeshPlacements, get_mesh_placements, local
from shardckpt.state.redistribute.rank_grid import Ranks

if TYPE_CHECKING:
    from shardckpt.core.params.full_params import Staging

Tensors = Sequence[torch.Tensor | None]  # one tensor per entry, or per exposed parameter; None for those to skip


@dataclass(frozen=True)
class Entry:
    """Properties of one parameter of the unsharded model."""

    name: str  # FQN without the segments of wrappers
    aliases: tuple[str, ...]  # other FQNs of a shared parameter
    shape: tuple[int, ...]
    dtype: torch.dtype  # stored dtype
    trains: bool  # whether the parameter requires gradients


class ShardingAdapter(ABC):
    """Adapter that gets and sets the state of tensors that are sharded together.

    Args:
        entries: Properties of the tensors, in order.
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
        """Return True if every rank of the model has a part or a copy.

        It is False for an expert that only some ranks have.
        """
        return True

    @property
    def has_parts_everywhere(self) -> bool:
        """Return True if optimizers of all ranks have state of the same parameters."""
        return True

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """Process group of the ranks with different parts; None if they are not one group."""
        return None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the tensors that ranks exchange."""

    @property
    def is_stored_as_sharded(self) -> bool:
        """Return True if an optimizer's tensors are sharded as `to_sharded` returns them.

        No communication is necessary then.
        """
        return True

    @abstractmethod
    def placements(self) -> list[MeshPlacements | None]:
        """Return mesh and placements of each entry after `to_sharded`; None if unsharded."""

    def shard_lengths(self, position: int) -> tuple[int, ...] | None:
        """Return each rank's length of the sharded dimension; None if not exactly one is."""
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
        """Return this rank's part of each entry as a view of `packed`.

        The views are 1-D if the layout is flat.
        """

    @abstractmethod
    def parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return `packed` as tensors with the shapes of the exposed parameters.

        They are views if possible.
        """

    def local_parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return `parts`, with the local tensors of DTensors."""
        return self.parts(packed)

    @abstractmethod
    def pack(self, parts: Tensors, dtype: torch.dtype, staging: Staging | None = None) -> torch.Tensor:
        """Pack tensors with the shapes of the exposed parameters; zeros for None.

        Args:
            parts: Tensors to pack; the result may share the memory of a single tensor.
            dtype: Dtype of the result.
            staging: Buffers that the following `to_full` uses too; None to allocate memory.
        """

    @abstractmethod
    def empty_like(self, position: int, dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor for an optimizer slot, with zeros as padding."""

    # --------------------------------------------------------------------------------------------------- out of it

    @abstractmethod
    def to_full(self, packed: torch.Tensor, staging: Staging, *, first_only: bool) -> Iterable[torch.Tensor] | None:
        """Return the full tensor of each entry. Collective.

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

    # ----------------------------------------------------------------------------------------------------- into it

    @abstractmethod
    def from_full(self, values: Tensors, into: Tensors) -> None:
        """Copy this rank's parts of full values, which every rank has.

        Args:
            values: Full value of each entry, of any dtype; None for entries to skip.
            into: Destinations, such as `part_views` of packed values; those of skipped entries are ignored.
        """

    @abstractmethod
    def from_rank0(self, values: Tensors | None, into: Tensors, dtype: torch.dtype, staging: Staging) -> None:
        """Copy this rank's parts of full values on rank 0. Collective.

        Args:
            values: As for `from_full` on rank 0; None on other ranks.
            into: As for `from_full`; None, on all ranks, for entries to skip.
            dtype: Dtype of the destinations, which is the dtype of the communication.
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
    """Adapter of one parameter that the engine does not manage."""

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
        """Broadcast the full value of rank 0. Collective."""
        value = None if values is None else values[0]
        return broadcast_from_rank0(self.ranks, self.entries[0].shape, dtype, self.device, value)


def copy_parts(parts: Tensors, into: Tensors) -> None:
    """Copy parts to their destinations; pairs with a None are skipped."""
    for part, place in zip(parts, into, strict=True):
        if part is not None and place is not None:
            place.copy_(part)


def are_sharded_as(adapter: ShardingAdapter, values: Tensors) -> bool:
    """Return True if values are sharded as `to_sharded` of an adapter returns them."""
    # They can be loaded without an all-gather then.
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
