"""Who holds a model's tensors: a unit's bucket, one DTensor, or a plain tensor; each turns shards into the three forms.

Whatever is laid out as the parameters are (they themselves, a moment of the optimizer) passes through the same
functions: *laid* is this rank's part of all of them together, a bucket's 1-D shard or a tensor's local part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from shardckpt.core.bucket import Bucket
from shardckpt.core.dtensor_exposure import DTensorExposure
from shardckpt.core.exposure import Exposure
from shardckpt.core.flat_exposure import FlatExposure
from shardckpt.core.full import Staging, copies, cut, gather, join, scatter
from shardckpt.core.original_exposure import OriginalExposure
from shardckpt.core.packing import apart
from shardckpt.layout import DimLayout, FlatLayout, ParamSpec
from shardckpt.state import dtensor_rows
from shardckpt.state.dtensor_rows import chunks
from shardckpt.state.exchange import first_owners, from_rows, row_dim, strides, to_rows
from shardckpt.state.ranks import Ranks


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


class Holder(ABC):
    """Tensors that are sharded together.

    Args:
        entries: What they are, in order.
        everyone: The ranks that the model is on.
    """

    def __init__(self, entries: Sequence[Entry], everyone: Ranks) -> None:
        self.entries = tuple(entries)
        self.everyone = everyone

    @property
    @abstractmethod
    def exposed(self) -> list[nn.Parameter]:
        """The parameters that an optimizer holds: one for all entries, or one for each."""

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Tell whether ranks hold different parts."""

    @property
    def is_everywhere(self) -> bool:
        """Tell whether each rank of the model has a part or a copy: not so of an expert that some ranks share."""
        return True

    @property
    @abstractmethod
    def laid(self) -> torch.Tensor:
        """The parameters' own values, laid out."""

    @abstractmethod
    def put(self, laid: torch.Tensor) -> None:
        """Replace the parameters' values by others that are laid out."""

    @abstractmethod
    def full(self, laid: torch.Tensor, staging: Staging, *, first_only: bool) -> Iterable[torch.Tensor] | None:
        """Return the whole of each entry. Collective.

        Args:
            laid: What to gather.
            staging: Memory that it passes through, in use until all entries were taken.
            first_only: Only the first rank gets them.

        Returns:
            Tensors of their own, but for what is not sharded and may be what is held; None on the ranks that get none.
        """

    @abstractmethod
    def from_full(self, values: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's part of whole values that every rank has."""

    @abstractmethod
    def from_first(self, values: Sequence[torch.Tensor] | None, dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's part of whole values that the first rank has. Collective."""

    @abstractmethod
    def sharded(self, laid: torch.Tensor, staging: Staging) -> list[torch.Tensor]:
        """Return each entry as a DTensor, or plain where nothing is sharded. Collective for flat layouts.

        Args:
            laid: What to cut; where nothing has to travel for it, the result shares its memory.
            staging: Memory that it passes through.
        """

    def takes(self, values: Sequence[torch.Tensor]) -> bool:
        """Tell whether these are cut as `sharded` cuts, so that nothing has to be gathered."""
        return all(_alike(value, own) for value, own in zip(values, self.cuts(), strict=True))

    @abstractmethod
    def cuts(self) -> list[tuple[DeviceMesh, tuple[Placement, ...]] | None]:
        """Return how `sharded` cuts each entry: over which mesh and where; None for what is whole."""

    @abstractmethod
    def from_sharded(self, values: Sequence[torch.Tensor], dtype: torch.dtype, staging: Staging) -> torch.Tensor:
        """Return this rank's part of what `sharded` returned, on the same ranks. Collective for flat layouts."""

    @abstractmethod
    def parts(self, laid: torch.Tensor) -> list[torch.Tensor]:
        """Return what is laid out as tensors of the exposed parameters' shapes, views where they can be."""

    def lying(self, laid: torch.Tensor) -> list[torch.Tensor]:
        """Return `parts` as this rank has them: of a DTensor the local part."""
        return self.parts(laid)

    @abstractmethod
    def own_parts(self, laid: torch.Tensor) -> list[torch.Tensor]:
        """Return `parts` in memory of their own.

        Args:
            laid: What one of the functions that begin with `from` returned; nobody uses it after this.
        """

    @abstractmethod
    def join(
        self, parts: Sequence[torch.Tensor | None], dtype: torch.dtype, staging: Staging | None = None
    ) -> torch.Tensor:
        """Lay out tensors of the exposed parameters' shapes; zeros for those that are None.

        Args:
            parts: The tensors; what is laid out may share memory with one that is all there is.
            dtype: The type they are to have.
            staging: That through which `full` gathers it then; None for new memory.
        """

    @abstractmethod
    def overlay(self, laid: torch.Tensor, before: torch.Tensor, kept: Set[int]) -> None:
        """Copy into what is laid out those entries of something else that is laid out.

        Args:
            laid: Changed in place.
            before: The other.
            kept: Which entries, by index.
        """

    def layout_note(self) -> dict[str, Any]:
        """Return the layout as plain JSON values; nothing where every rank has the whole."""
        return {}

    @property
    def lies_as_sharded(self) -> bool:
        """Tell whether what an optimizer keeps is what `sharded` makes of it, so that nothing has to travel."""
        return True

    @property
    def ranks(self) -> dist.ProcessGroup | None:
        """The ranks that have different parts; None where it is not one group of them."""
        return None

    def extents(self, position: int) -> tuple[int, ...] | None:
        """Return how long each rank's part of a parameter is along the dimension it is cut; None if not along one.

        Args:
            position: Which of the exposed parameters.
        """
        del position
        return None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where parts of it travel from and to."""

    @property
    def all_have(self) -> bool:
        """Tell whether an optimizer keeps something of each parameter on every rank, if it does on one."""
        return True

    def _told(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, value: torch.Tensor | None
    ) -> torch.Tensor:
        """Return a tensor that the first rank has; the others give None. Collective."""
        return from_first(self.everyone, shape, dtype, device, value)

    def tells(self, position: int) -> bool:
        """Tell whether this rank is the one that tells the others what its optimizer keeps of a parameter.

        Args:
            position: Which of the exposed parameters.
        """
        del position
        return self.everyone.is_first


class BucketHolder(Holder):
    """A bucket of the engine; the ways in which its parameters are exposed are classes of their own.

    Args:
        exposure: The bucket as the user sees it.
        names: The names of each member in the model, the first before its aliases.
        everyone: The ranks that the model is on.
    """

    def __init__(self, exposure: Exposure, names: Sequence[Sequence[str]], everyone: Ranks) -> None:
        bucket = exposure.bucket
        rows = zip(names, bucket.leaves, strict=True)
        super().__init__(
            [
                Entry(first, tuple(others), tuple(leaf.shape), bucket.dtype, leaf.requires_grad)
                for (first, *others), leaf in rows
            ],
            everyone,
        )
        self._exposure = exposure

    @property
    def bucket(self) -> Bucket:
        """The bucket."""
        return self._exposure.bucket

    @property
    def device(self) -> torch.device:
        """Where the unit computes."""
        return self.bucket.compute_device

    @property
    def exposed(self) -> list[nn.Parameter]:
        """The parameters that an optimizer holds."""
        return self._exposure.parameters

    @property
    def is_everywhere(self) -> bool:
        """Tell whether each rank of the model has a part or a copy."""
        return self.bucket.group.world == self.everyone.size

    @property
    def is_sharded(self) -> bool:
        """Tell whether ranks hold different parts."""
        return not self.bucket.keeps_full and self.bucket.group.size > 1

    @property
    def laid(self) -> torch.Tensor:
        """The shard."""
        self._exposure.adopt()
        return self.bucket.shard.detach()

    def put(self, laid: torch.Tensor) -> None:
        """Replace the shard's content; full parameters that are there are stale, and go."""
        self.bucket.free()
        self._exposure.show_sharded()
        with torch.no_grad():
            self.bucket.shard.copy_(laid)

    def full(self, laid: torch.Tensor, staging: Staging, *, first_only: bool) -> Iterable[torch.Tensor] | None:
        """Gather the whole bucket; what tensor parallelism has cut is gathered once more, everywhere."""
        found = copies(self.bucket, laid, staging, first_only=first_only)
        if found is None or not self.is_parallel:
            return found if not first_only or self.everyone.is_first else None
        values = [self._whole(index, value) for index, value in enumerate(found)]
        return values if not first_only or self.everyone.is_first else None

    @property
    def _has_one_first(self) -> bool:
        """Tell whether the first of the ranks that share the bucket is the first of all: not so in parts of a mesh."""
        return not self.is_parallel and self.bucket.group.world == self.everyone.size

    @property
    def ranks(self) -> dist.ProcessGroup | None:
        """The ranks that share the bucket."""
        return self.bucket.group.shard

    @property
    def is_parallel(self) -> bool:
        """Tell whether tensor parallelism has cut parameters before the engine did."""
        return any(isinstance(leaf, DTensor) for leaf in self.bucket.leaves)

    def _whole(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Return a parameter of which this is all that the bucket has."""
        seen = self.bucket.computed(index, value)
        return seen.full_tensor() if isinstance(seen, DTensor) else value

    def _own_of(self, index: int, value: torch.Tensor) -> torch.Tensor:
        """Return what the bucket has of a whole parameter."""
        leaf = self.bucket.leaves[index]
        if not isinstance(leaf, DTensor):
            return value
        value = value.to(self.bucket.compute_device)
        return distribute_tensor(value, leaf.device_mesh, leaf.placements, src_data_rank=None).to_local()

    def from_full(self, values: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Cut this rank's part."""
        own = self._empty(dtype)
        cut(self.bucket, [self._own_of(index, value) for index, value in enumerate(values)], own)
        return own

    def from_first(self, values: Sequence[torch.Tensor] | None, dtype: torch.dtype) -> torch.Tensor:
        """Scatter the rows of the first rank; where parts of a mesh have firsts of their own, tell everyone."""
        own = self._empty(dtype)
        if not self._has_one_first:
            told = [
                self._told(entry.shape, dtype, own.device, None if values is None else values[index])
                for index, entry in enumerate(self.entries)
            ]
            return self.from_full(told, dtype)
        scatter(self.bucket, values if self.bucket.group.is_first else None, own)
        return own

    def overlay(self, laid: torch.Tensor, before: torch.Tensor, kept: Set[int]) -> None:
        """Copy the parts of some entries."""
        pairs = zip(self.bucket.of_shard(laid), self.bucket.of_shard(before), strict=True)
        for index, (place, part) in enumerate(pairs):
            if index in kept:
                place.copy_(part)

    def layout_note(self) -> dict[str, Any]:
        """Return the layout, and which of its ranks this one is."""
        return {"layout": self.bucket.layout.to_json(), "place": self.bucket.rank}

    def _empty(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(self.bucket.layout.chunk, dtype=dtype, device=self.bucket.compute_device)

    def parts(self, laid: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's part as a view."""
        return self.bucket.of_shard(laid)

    def own_parts(self, laid: torch.Tensor) -> list[torch.Tensor]:
        """Return copies, so that one outlives the others."""
        return [part.clone() for part in self.parts(laid)]

    def join(
        self, parts: Sequence[torch.Tensor | None], dtype: torch.dtype, staging: Staging | None = None
    ) -> torch.Tensor:
        """Lay parts out."""
        return join(self.bucket, [None if part is None else local(part) for part in parts], dtype, staging)


class FlatHolder(BucketHolder):
    """A bucket laid out flat: one flat parameter, or original ones as 1-D views.

    Args:
        exposure: The bucket as the user sees it.
        names: The names of each member in the model, the first before its aliases.
        everyone: The ranks that the model is on.
        mesh: The ranks that share the bucket, with its shards along the last dimension; None where nothing is sharded.
        flat_name: Name of the flat parameter in the model; None where the original parameters are registered.
    """

    def __init__(
        self,
        exposure: FlatExposure | OriginalExposure,
        names: Sequence[Sequence[str]],
        everyone: Ranks,
        mesh: DeviceMesh | None,
        flat_name: str | None,
    ) -> None:
        super().__init__(exposure, names, everyone)
        self._mesh = mesh
        self._flat_name = flat_name

    @property
    def layout(self) -> FlatLayout:
        """Where each entry lies in every rank's shard."""
        found = self.bucket.layout
        assert isinstance(found, FlatLayout), "the wrapper lays out flat"
        return found

    def show(self, values: Sequence[torch.Tensor], *, lying: bool) -> None:
        """Register tensors for torch's own recursion to find; `hide` undoes it.

        Args:
            values: One for each entry, registered where it belongs; or one for the flat parameter.
            lying: It is the flat parameter's.
        """
        home = self._exposure.home if isinstance(self._exposure, FlatExposure) else None
        if home is not None:
            home.module._parameters[home.attribute] = values[0] if lying else None  # type: ignore[assignment]
        if not lying:
            for member, value in zip(self.bucket.members, values, strict=True):
                for place in member.places:
                    place.module.__dict__.pop(place.attribute, None)  # what stands there while the unit is sharded
                    place.module._parameters[place.attribute] = value  # type: ignore[assignment]

    def registered(self, *, lying: bool) -> list[torch.Tensor]:
        """Return what is registered in the places that `show` filled: what was shown, or what was put there since."""
        if lying:
            assert isinstance(self._exposure, FlatExposure), "only a flat parameter lies by itself"
            places = [self._exposure.home]
        else:
            places = [member.places[0] for member in self.bucket.members]
        found = [place.module._parameters[place.attribute] for place in places]
        return [each for each in found if each is not None]

    def hide(self) -> None:
        """Register what is registered while the bucket is sharded."""
        if isinstance(self._exposure, FlatExposure):
            self._exposure.hide_whole()
        else:
            self._exposure.show_sharded()

    @property
    def flat_name(self) -> str | None:
        """Name of the flat parameter in the model; None where the original parameters are registered."""
        return self._flat_name

    @property
    def owned(self) -> int:
        """Elements of this rank's shard without the padding at its end."""
        return self.layout.owned(self.bucket.rank)

    @property
    def all_have(self) -> bool:
        """Tell whether no rank is without a part of a parameter: of the flat one all have some."""
        return self._flat_name is not None or self.bucket.keeps_full

    def extents(self, position: int) -> tuple[int, ...] | None:
        """Count elements: of the flat parameter with padding, as it is exposed."""
        if self.is_parallel:
            return None
        if self._flat_name is not None:
            return (self.layout.chunk,) * self.layout.world
        ranks = range(self.layout.world)
        return tuple(sum(run.stop - run.start for run in self.layout.runs(r) if run.index == position) for r in ranks)

    def tells(self, position: int) -> bool:
        """Let the first rank that has a part of a parameter tell."""
        group = self.bucket.group
        if group.replicate is not None and group.replicate.rank() != 0:
            return False
        return first_owners(self.layout).get(position, 0) == group.rank

    @property
    def lies_as_sharded(self) -> bool:
        """Tell that rows have to be exchanged for it."""
        return False

    def layout_note(self) -> dict[str, Any]:
        """Return the layout, which of its ranks this one is, and the name of the flat parameter."""
        return {**super().layout_note(), "flat": self._flat_name}

    def sharded(self, laid: torch.Tensor, staging: Staging) -> list[torch.Tensor]:
        """Exchange flat shards for rows: one all-to-all."""
        if self.bucket.keeps_full or self._mesh is None:
            return [self.bucket.computed(i, view.clone()) for i, view in enumerate(self.bucket.of_shard(laid))]
        if self.is_parallel:
            return self._parallel(laid)
        rows = to_rows(laid.to(self.bucket.compute_device), self.layout, self.bucket.group.shard, staging)
        return [self._dtensor(part, index) for index, part in enumerate(rows)]

    def _parallel(self, laid: torch.Tensor) -> list[torch.Tensor]:
        """Return what tensor parallelism cut as it cut it; a flat shard has no place within that."""
        values = gather(self.bucket, laid).values
        return [self.bucket.computed(index, value.clone()) for index, value in enumerate(values)]

    def _dtensor(self, part: torch.Tensor, index: int) -> torch.Tensor:
        assert self._mesh is not None
        spec = self.layout.specs[index]
        if not spec.shape:  # a 0-dim tensor has no dimension to be cut along
            return self._scalar(part)
        stride = strides(spec.shape, spec.order)
        return DTensor.from_local(
            apart(part),
            self._mesh,
            self._placements(spec),
            run_check=False,
            shape=torch.Size(spec.shape),
            stride=stride,
        )

    def _placements(self, spec: ParamSpec) -> tuple[Placement, ...]:
        copies = 0 if self._mesh is None else self._mesh.ndim - 1
        return (*[Replicate()] * copies, Shard(row_dim(spec)))

    def cuts(self) -> list[tuple[DeviceMesh, tuple[Placement, ...]] | None]:
        """Rows along the dimension that is slowest in memory; what tensor parallelism cut as it cut it."""
        if self.is_parallel:
            return [_cut_of(leaf) for leaf in self.bucket.leaves]
        mesh = None if self.bucket.keeps_full else self._mesh
        return [
            (mesh, self._placements(spec)) if mesh is not None and spec.shape else None for spec in self.layout.specs
        ]

    def _scalar(self, part: torch.Tensor) -> torch.Tensor:
        """Return a 0-dim value on every rank; the first of those that share has it."""
        value = part.clone() if part.dim() == 0 else part.new_zeros(())
        dist.broadcast(value.view(1).view(torch.uint8), group=self.bucket.group.shard, group_src=0)
        return value

    def from_sharded(self, values: Sequence[torch.Tensor], dtype: torch.dtype, staging: Staging) -> torch.Tensor:
        """Exchange rows for flat shards: one all-to-all."""
        if self.bucket.keeps_full or self._mesh is None or self.is_parallel:
            own = self._empty(dtype)
            cut(self.bucket, [local(value) for value in values], own)
            return own
        parts = []
        for value, spec in zip(values, self.layout.specs, strict=True):
            part = local(value).to(dtype)
            parts.append(part if spec.shape or self.bucket.rank == 0 else part.new_empty(0))
        return from_rows(parts, self.layout, self.bucket.group.shard, staging)

    def parts(self, laid: torch.Tensor) -> list[torch.Tensor]:
        """Return the flat tensor itself, or each original's part."""
        return [laid] if self._flat_name is not None else super().parts(laid)

    def own_parts(self, laid: torch.Tensor) -> list[torch.Tensor]:
        """Return the flat tensor itself, or a copy of each original's part."""
        return [laid] if self._flat_name is not None else super().own_parts(laid)

    def join(
        self, parts: Sequence[torch.Tensor | None], dtype: torch.dtype, staging: Staging | None = None
    ) -> torch.Tensor:
        """Lay parts out."""
        if self._flat_name is None:
            return super().join(parts, dtype, staging)
        return self._empty(dtype) if parts[0] is None else local(parts[0]).to(dtype)


class RowsHolder(BucketHolder):
    """A bucket of `fully_shard`: its parameters are DTensors already.

    Args:
        exposure: The bucket as the user sees it.
        names: The names of each member in the model, the first before its aliases.
        everyone: The ranks that the model is on.
    """

    def __init__(self, exposure: DTensorExposure, names: Sequence[Sequence[str]], everyone: Ranks) -> None:
        super().__init__(exposure, names, everyone)
        self._placed = exposure.placed

    @property
    def all_have(self) -> bool:
        """Tell whether no rank is without rows of a parameter."""
        rows = [
            spec.shape[placed.dim]
            for spec, placed in zip(self.bucket.layout.specs, self._placed, strict=True)
            if placed.dim is not None
        ]
        return all(has_rows_everywhere(each, self.bucket.group.size) for each in rows)

    def extents(self, position: int) -> tuple[int, ...] | None:
        """Count rows."""
        dim = self._placed[position].dim
        return None if dim is None else chunks(self.bucket.layout.specs[position].shape[dim], self.bucket.group.size)

    def sharded(self, laid: torch.Tensor, staging: Staging) -> list[torch.Tensor]:  # noqa: ARG002
        """Return DTensors around what is there: nothing travels, nothing is copied."""
        if laid.numel() and laid.data_ptr() == self.bucket.shard.data_ptr():
            return [parameter.detach() for parameter in self.exposed]
        return self.parts(laid)

    def cuts(self) -> list[tuple[DeviceMesh, tuple[Placement, ...]] | None]:
        """As the parameters are."""
        return [_cut_of(parameter) for parameter in self.exposed]

    def from_sharded(
        self,
        values: Sequence[torch.Tensor],
        dtype: torch.dtype,
        staging: Staging,  # noqa: ARG002
    ) -> torch.Tensor:
        """Take the local parts: nothing travels."""
        return self.join(values, dtype)

    def parts(self, laid: torch.Tensor) -> list[torch.Tensor]:
        """Return DTensors around each parameter's part."""
        return [placed.sharded(part) for placed, part in zip(self._placed, self.lying(laid), strict=True)]

    def lying(self, laid: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's part."""
        return super().parts(laid)

    def own_parts(self, laid: torch.Tensor) -> list[torch.Tensor]:
        """Return DTensors around copies."""
        return [placed.sharded(part.clone()) for placed, part in zip(self._placed, self.lying(laid), strict=True)]


class TensorHolder(Holder):
    """One parameter or buffer that no unit of the engine has: plain, or a DTensor of any placement.

    Args:
        entry: What it is.
        tensor: The tensor.
        everyone: The ranks that the model is on.
    """

    def __init__(self, entry: Entry, tensor: torch.Tensor, everyone: Ranks) -> None:
        super().__init__([entry], everyone)
        self._tensor = tensor

    @property
    def exposed(self) -> list[nn.Parameter]:
        """The parameter; nothing for a buffer."""
        return [self._tensor] if isinstance(self._tensor, nn.Parameter) else []

    @property
    def is_everywhere(self) -> bool:
        """Tell whether the mesh of a DTensor has all ranks of the model."""
        return not isinstance(self._tensor, DTensor) or self._tensor.device_mesh.size() == self.everyone.size

    @property
    def is_sharded(self) -> bool:
        """Tell whether it is a DTensor that is cut."""
        return isinstance(self._tensor, DTensor) and not all(p.is_replicate() for p in self._tensor.placements)

    @property
    def all_have(self) -> bool:
        """Tell whether no rank is without rows; of a mesh of several dimensions, whether that is certain."""
        if not isinstance(self._tensor, DTensor):
            return True
        dims = [each.dim for each in self._tensor.placements if isinstance(each, Shard)]
        return all(has_rows_everywhere(self._tensor.shape[dim], self._tensor.device_mesh.size()) for dim in dims)

    @property
    def ranks(self) -> dist.ProcessGroup | None:
        """The ranks of a mesh of one dimension."""
        mesh = self._tensor.device_mesh if isinstance(self._tensor, DTensor) else None
        return mesh.get_group() if mesh is not None and mesh.ndim == 1 else None

    def extents(self, position: int) -> tuple[int, ...] | None:
        """Count rows, on a mesh of one dimension."""
        del position
        tensor = self._tensor
        if not isinstance(tensor, DTensor) or tensor.device_mesh.ndim != 1 or type(tensor.placements[0]) is not Shard:
            return None
        return chunks(tensor.shape[tensor.placements[0].dim], tensor.device_mesh.size())

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.laid.device

    @property
    def laid(self) -> torch.Tensor:
        """The local part."""
        return local(self._tensor.detach())

    def put(self, laid: torch.Tensor) -> None:
        """Copy into the local part."""
        with torch.no_grad():
            local(self._tensor).copy_(laid)

    def full(
        self,
        laid: torch.Tensor,
        staging: Staging,  # noqa: ARG002
        *,
        first_only: bool,
    ) -> Iterable[torch.Tensor] | None:
        """Gather to the ranks that get something, where it is cut along one direction of its mesh; else to all."""
        kept = self._tensor
        if not isinstance(kept, DTensor):
            return None if first_only and not self.everyone.is_first else [laid]
        at = dtensor_rows.direction(kept) if first_only else None
        whole = self._like(laid).full_tensor() if at is None else dtensor_rows.collected(kept, at, laid)
        return None if whole is None or (first_only and not self.everyone.is_first) else [whole]

    def _like(self, laid: torch.Tensor) -> DTensor:
        kept = self._tensor
        assert isinstance(kept, DTensor)
        return DTensor.from_local(
            laid, kept.device_mesh, kept.placements, run_check=False, shape=kept.shape, stride=kept.stride()
        )

    def from_full(self, values: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Cut this rank's part."""
        value = values[0].to(dtype=dtype, device=self.laid.device)
        if not isinstance(self._tensor, DTensor):
            return value
        return distribute_tensor(
            value, self._tensor.device_mesh, self._tensor.placements, src_data_rank=None
        ).to_local()

    def from_first(self, values: Sequence[torch.Tensor] | None, dtype: torch.dtype) -> torch.Tensor:
        """Take the rows that the first rank deals out; where it has no place for that, broadcast from it and cut."""
        at = dtensor_rows.direction(self._tensor) if isinstance(self._tensor, DTensor) else None
        if isinstance(self._tensor, DTensor) and at is not None and self._is_everywhere(self._tensor.device_mesh):
            return dtensor_rows.dealt(self._tensor, at, None if values is None else values[0], dtype, self.laid.device)
        value = self._told(self.entries[0].shape, dtype, self.laid.device, None if values is None else values[0])
        return self.from_full([value], dtype)

    def _is_everywhere(self, mesh: DeviceMesh) -> bool:
        """Tell whether a mesh has all ranks of the model, and begins with their first; the same on all of them."""
        ranks = mesh.mesh.flatten()
        return len(ranks) == self.everyone.size and int(ranks[0]) == int(ranks.min())

    def sharded(self, laid: torch.Tensor, staging: Staging) -> list[torch.Tensor]:  # noqa: ARG002
        """Return it as it is."""
        return self.parts(laid)

    def cuts(self) -> list[tuple[DeviceMesh, tuple[Placement, ...]] | None]:
        """As the tensor is."""
        return [_cut_of(self._tensor)]

    def from_sharded(
        self,
        values: Sequence[torch.Tensor],
        dtype: torch.dtype,
        staging: Staging,  # noqa: ARG002
    ) -> torch.Tensor:
        """Take the local part."""
        return self.join(values, dtype)

    def parts(self, laid: torch.Tensor) -> list[torch.Tensor]:
        """Return it in the form of the parameter."""
        return [self._like(laid) if isinstance(self._tensor, DTensor) else laid]

    def lying(self, laid: torch.Tensor) -> list[torch.Tensor]:
        """Return the local part."""
        return [laid]

    def own_parts(self, laid: torch.Tensor) -> list[torch.Tensor]:
        """Return a copy: it may be what was given."""
        return self.parts(laid.clone())

    def layout_note(self) -> dict[str, Any]:
        """Return the rows that a DTensor's ranks have, where it is cut along one dimension of one mesh's."""
        tensor, entry = self._tensor, self.entries[0]
        if not isinstance(tensor, DTensor) or tensor.device_mesh.get_coordinate() is None:
            return {}
        cuts = [(at, p) for at, p in enumerate(tensor.placements) if not p.is_replicate()]
        if len(cuts) != 1 or type(cuts[0][1]) is not Shard:
            return {}
        at, placement = cuts[0]
        assert isinstance(placement, Shard)
        spec = ParamSpec(entry.name, entry.shape, str(entry.dtype).removeprefix("torch."))
        layout = DimLayout((spec,), tensor.device_mesh.size(at), (placement.dim % len(entry.shape),))
        return {"layout": layout.to_json(), "place": tensor.device_mesh.get_local_rank(at)}

    def overlay(self, laid: torch.Tensor, before: torch.Tensor, kept: Set[int]) -> None:
        """Copy it all, or nothing."""
        if kept:
            laid.copy_(before)

    def join(
        self,
        parts: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        staging: Staging | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """Return the local part."""
        return self.laid.new_zeros(self.laid.shape, dtype=dtype) if parts[0] is None else local(parts[0]).to(dtype)


def has_rows_everywhere(rows: int, ranks: int) -> bool:
    """Tell whether every rank gets some of a parameter's rows; the last ones may get none.

    Args:
        rows: How many there are.
        ranks: Among how many ranks.
    """
    return -(-rows // ranks) * (ranks - 1) < rows


def from_first(
    everyone: Ranks, shape: Sequence[int], dtype: torch.dtype, device: torch.device, value: torch.Tensor | None
) -> torch.Tensor:
    """Return a tensor that the first rank has. Collective.

    Args:
        everyone: The ranks.
        shape: Its shape.
        dtype: The type it is to have.
        device: Where it is to be.
        value: The tensor on the first rank; None elsewhere.
    """
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    if value is not None:
        made.copy_(value)
    everyone.tell(made)
    return made


def _cut_of(tensor: torch.Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    return (tensor.device_mesh, tuple(tensor.placements)) if isinstance(tensor, DTensor) else None


def _alike(value: torch.Tensor, cut: tuple[DeviceMesh, tuple[Placement, ...]] | None) -> bool:
    if not isinstance(value, DTensor) or cut is None:
        return not isinstance(value, DTensor) and cut is None
    return value.device_mesh == cut[0] and tuple(value.placements) == cut[1]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, a plain tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor
