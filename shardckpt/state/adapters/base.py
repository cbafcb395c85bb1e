"""The adapter interface: get and set the state of tensors that are sharded together, whatever sharded the model.

One adapter each: `engine_flat` and `engine_dtensor` for units of the engine (their common part is in `engine_bucket`),
`dtensor` for DTensors of any other origin, torch's `fully_shard` among them, `replicated` for plain tensors.
States of models under torch's own wrapper go through its public functions, in `torch_fsdp1`.

Tensors with the layout of the parameters (they themselves, a moment of the optimizer) pass through the same
functions: *packed* is this rank's part of all of them together, a bucket's 1-D shard or a tensor's local part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardckpt.core.params.full_params import Staging
from shardckpt.state.redistribute.rank_grid import Ranks

MeshPlacements = tuple[DeviceMesh, tuple[Placement, ...]]
"""The mesh of a DTensor, and its placements over it."""

Tensors = Sequence[torch.Tensor | None]
"""One tensor for each entry, or for each exposed parameter; None for those that are left alone."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a model, as it is unsharded.

    Attributes:
        name: Clean fully qualified name.
        aliases: Its other names.
        shape: Full shape, in elements.
        dtype: Stored type.
        trains: Whether it takes part in gradients.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trains: bool


class ShardingAdapter(ABC):
    """Gets and sets the state of tensors that are sharded together.

    Args:
        entries: The tensors, in order.
        ranks: The ranks that the model is on.
    """

    def __init__(self, entries: Sequence[Entry], ranks: Ranks) -> None:
        self.entries = tuple(entries)
        self.ranks = ranks

    # -------------------------------------------------------------------------------------------------- facts

    @property
    @abstractmethod
    def exposed(self) -> list[nn.Parameter]:
        """The parameters that an optimizer holds: one for all entries, or one for each."""

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Return True if ranks hold different parts."""

    @property
    def is_everywhere(self) -> bool:
        """Return True if each rank of the model has a part or a copy: not so of an expert that some ranks share."""
        return True

    @property
    def has_parts_everywhere(self) -> bool:
        """Return True if an optimizer keeps something of each parameter on every rank, if it does on one."""
        return True

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that have different parts; None where it is not one group of them."""
        return None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where parts of it travel from and to."""

    @property
    def is_stored_as_sharded(self) -> bool:
        """Return True if what an optimizer keeps is what `to_sharded` makes of it, so that nothing has to travel."""
        return True

    @abstractmethod
    def placements(self) -> list[MeshPlacements | None]:
        """Return how `to_sharded` shards each entry; None for unsharded ones."""

    def shard_lengths(self, position: int) -> tuple[int, ...] | None:
        """Return the length of each rank's part along the sharded dimension; None if there is not one such."""
        del position
        return None

    def is_reporting_rank(self, position: int) -> bool:
        """Return True if this rank reports the optimizer state of a parameter to the others."""
        del position
        return self.ranks.is_first

    def layout_metadata(self) -> dict[str, Any]:
        """Return the layout as plain JSON values; nothing if every rank has all elements."""
        return {}

    # --------------------------------------------------------------------------------------- tensors of this rank

    @property
    @abstractmethod
    def packed(self) -> torch.Tensor:
        """The parameters' own values, packed; call `mark_written` after a write into them."""

    @abstractmethod
    def mark_written(self) -> None:
        """Drop copies of the parameters that are stale after a write into `packed`."""

    @abstractmethod
    def part_views(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return this rank's part of each entry, as views of `packed`: 1-D ones if parts are sharded flat."""

    @abstractmethod
    def parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return `packed` as tensors of the exposed parameters' shapes, views if possible."""

    def local_parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return `parts` as this rank has them: the local part of a DTensor."""
        return self.parts(packed)

    @abstractmethod
    def pack(self, parts: Tensors, dtype: torch.dtype, staging: Staging | None = None) -> torch.Tensor:
        """Pack tensors of the exposed parameters' shapes; zeros for those that are None.

        Args:
            parts: The tensors; the result may share memory with a single one.
            dtype: The type they are to have.
            staging: That through which `to_full` gathers it then; None for new memory.
        """

    @abstractmethod
    def empty_like(self, position: int, dtype: torch.dtype) -> torch.Tensor:
        """Return new memory for what an optimizer keeps of an exposed parameter: any content, zeros in its padding."""

    # --------------------------------------------------------------------------------------------------- out of it

    @abstractmethod
    def to_full(self, packed: torch.Tensor, staging: Staging, *, first_only: bool) -> Iterable[torch.Tensor] | None:
        """Return each entry unsharded. Collective.

        Args:
            packed: What to gather.
            staging: Memory that it passes through, in use until all entries were taken.
            first_only: Only rank 0 gets them.

        Returns:
            Tensors of their own, but for what is not sharded and may be what is held; None on the ranks that get none.
        """

    @abstractmethod
    def to_sharded(self, packed: torch.Tensor, staging: Staging) -> list[torch.Tensor]:
        """Return each entry as a DTensor, or plain where nothing is sharded. Collective for flat layouts.

        Args:
            packed: The values to shard; the result shares their memory if nothing is exchanged.
            staging: Memory that it passes through.
        """

    def start_to_sharded(self, packed: torch.Tensor, staging: Staging) -> Callable[[], list[torch.Tensor]]:
        """Start what `to_sharded` does, while other work goes on. Collective.

        Args:
            packed: As for `to_sharded`.
            staging: Memory that it passes through, in use until the end.

        Returns:
            What ends it and returns the entries, on all ranks in the order of the beginnings.
        """
        entries = self.to_sharded(packed, staging)
        return lambda: entries

    # ----------------------------------------------------------------------------------------------------- into it

    @abstractmethod
    def from_full(self, values: Tensors, into: Tensors) -> None:
        """Copy this rank's parts of full values that every rank has.

        Args:
            values: For each entry its value, of any type; None for those that are left alone.
            into: Where they go: `part_views` of something packed, or tensors as those are. Of those that are left alone
                they are not looked at.
        """

    @abstractmethod
    def from_rank0(self, values: Tensors | None, into: Tensors, dtype: torch.dtype, staging: Staging) -> None:
        """Copy this rank's parts of full values on rank 0. Collective.

        Args:
            values: As for `from_full` on rank 0; None elsewhere.
            into: As for `from_full`; None, on all ranks, for what is left alone.
            dtype: The type in which they travel: that of where they go.
            staging: Memory that they pass through.
        """

    def from_sharded(self, values: Tensors, into: Tensors, staging: Staging) -> None:
        """Copy this rank's parts of what `to_sharded` returned, on the same ranks. Collective for flat layouts.

        Args:
            values: As for `from_full`; see `are_sharded_as`.
            into: As for `from_full`.
            staging: Memory that they pass through.
        """
        del staging  # only flat layouts exchange something
        copy_parts([None if value is None else local(value) for value in values], into)


class ParameterAdapter(ShardingAdapter):
    """One parameter outside the engine.

    Args:
        entry: The parameter, as it is unsharded.
        parameter: The parameter.
        ranks: The ranks that the model is on.
    """

    def __init__(self, entry: Entry, parameter: nn.Parameter, ranks: Ranks) -> None:
        super().__init__([entry], ranks)
        self._parameter = parameter

    @property
    def exposed(self) -> list[nn.Parameter]:
        """The parameter."""
        return [self._parameter]

    def mark_written(self) -> None:
        """Do nothing: nothing is copied from it."""

    def part_views(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return it as it is."""
        return [packed]

    def parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return it as it is."""
        return [packed]

    def to_sharded(self, packed: torch.Tensor, staging: Staging) -> list[torch.Tensor]:  # noqa: ARG002
        """Return what an optimizer keeps: nothing travels, nothing is copied."""
        return self.parts(packed)

    def broadcast_full(self, values: Tensors | None, dtype: torch.dtype) -> torch.Tensor:
        """Return the full value that rank 0 has. Collective."""
        value = None if values is None else values[0]
        return broadcast_from_rank0(self.ranks, self.entries[0].shape, dtype, self.device, value)


def copy_parts(parts: Tensors, into: Tensors) -> None:
    """Copy parts to their places; None on either side is left alone."""
    for part, place in zip(parts, into, strict=True):
        if part is not None and place is not None:
            place.copy_(part)


def are_sharded_as(adapter: ShardingAdapter, values: Tensors) -> bool:
    """Return True if values are sharded as by `to_sharded` of an adapter, so that nothing has to be gathered."""
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


def get_mesh_placements(tensor: torch.Tensor) -> MeshPlacements | None:
    """Return the mesh and placements of a DTensor; None for a plain tensor."""
    return (tensor.device_mesh, tuple(tensor.placements)) if isinstance(tensor, DTensor) else None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, a plain tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()
