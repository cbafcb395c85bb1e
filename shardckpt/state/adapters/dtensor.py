"""Adapter for DTensors with any placements that do not come from the engine.

Torch's `fully_shard`, tensor parallelism or a user may have made them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardckpt.core.modules.dtensors import (
    MeshPlacements,
    detach,
    gather_full_tensor,
    get_mesh_placements,
    local,
    shard_full_tensor,
    split_rows,
    wrap_local,
)
from shardckpt.core.params.full_params import Staging
from shardckpt.layout import DimLayout, ParamSpec
from shardckpt.state.adapters.base import ParameterAdapter, Tensors
from shardckpt.state.redistribute import dtensor_rows
from shardckpt.state.redistribute.dtensor_rows import has_rows_everywhere


class DTensorAdapter(ParameterAdapter):
    """Adapter for one parameter that is a DTensor."""

    @property
    def _kept(self) -> DTensor:
        kept = self._parameter
        assert isinstance(kept, DTensor), "other adapters have plain parameters"
        return kept

    @property
    def is_everywhere(self) -> bool:
        """Return True if the mesh contains all ranks."""
        return self._kept.device_mesh.size() == self.ranks.size

    @property
    def is_sharded(self) -> bool:
        """Return True if a placement is not `Replicate`."""
        return not all(placement.is_replicate() for placement in self._kept.placements)

    @property
    def has_parts_everywhere(self) -> bool:
        """Return True if every rank certainly has rows, also on a mesh with several dims."""
        dims = [placement.dim for placement in self._kept.placements if isinstance(placement, Shard)]
        return all(has_rows_everywhere(self._kept.shape[dim], self._kept.device_mesh.size()) for dim in dims)

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """A 1-D mesh's process group; None for other meshes."""
        mesh = self._kept.device_mesh
        return mesh.get_group() if mesh.ndim == 1 else None

    @property
    def device(self) -> torch.device:
        """Device on which the mesh's ranks exchange data."""
        return dtensor_rows.get_mesh_device(self._kept)

    def placements(self) -> list[MeshPlacements | None]:
        """Return the parameter's own mesh and placements."""
        return [get_mesh_placements(self._kept)]

    def shard_lengths(self, position: int) -> tuple[int, ...] | None:
        """Return each rank's number of rows; None unless a 1-D mesh shards one dim."""
        del position
        mesh, placement = self._kept.device_mesh, self._kept.placements[0]
        if mesh.ndim != 1 or type(placement) is not Shard:
            return None
        return split_rows(self._kept.shape[placement.dim], mesh.size())

    def layout_metadata(self) -> dict[str, Any]:
        """Return each rank's number of rows, if one mesh dimension shards rows."""
        mesh, entry = self._kept.device_mesh, self.entries[0]
        if mesh.get_coordinate() is None:
            return {}
        shards = [(at, p) for at, p in enumerate(self._kept.placements) if not p.is_replicate()]
        if len(shards) != 1 or type(shards[0][1]) is not Shard:
            return {}
        at, placement = shards[0]
        assert isinstance(placement, Shard)
        spec = ParamSpec(entry.name, entry.shape, str(entry.dtype).removeprefix("torch."))
        layout = DimLayout((spec,), mesh.size(at), (placement.dim % len(entry.shape),))
        return {"layout": layout.to_json(), "place": mesh.get_local_rank(at)}

    @property
    def packed(self) -> torch.Tensor:
        """The parameter's local tensor."""
        return local(detach(self._parameter))

    def parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return a DTensor with the parameter's mesh and placements."""
        return [self._around(packed)]

    def local_parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return the local tensor."""
        return [packed]

    def _around(self, packed: torch.Tensor) -> DTensor:
        kept = self._kept
        return wrap_local(packed, kept.device_mesh, kept.placements, kept.shape, kept.stride())

    def pack(self, parts: Tensors, dtype: torch.dtype, staging: Staging | None = None) -> torch.Tensor:  # noqa: ARG002
        """Return the local tensor."""
        return self.packed.new_zeros(self.packed.shape, dtype=dtype) if parts[0] is None else local(parts[0]).to(dtype)

    def empty_like(self, position: int, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002
        """Return a DTensor around new memory."""
        return self._around(torch.empty_like(self.packed, dtype=dtype))

    def to_full(self, packed: torch.Tensor, staging: Staging, *, first_only: bool) -> Iterable[torch.Tensor] | None:  # noqa: ARG002
        """Gather to the ranks that need it, if one mesh dim shards it; otherwise to all."""
        kept = self._kept
        at = dtensor_rows.direction(kept) if first_only else None
        own = packed.to(self.device)
        full = gather_full_tensor(self._around(own)) if at is None else dtensor_rows.gather_rows(kept, at, own)
        return None if full is None or (first_only and not self.ranks.is_first) else [full]

    def from_full(self, values: Tensors, into: Tensors) -> None:
        """Copy this rank's shard from the full value."""
        (value,), (place,) = values, into
        if value is None or place is None:
            return
        place.copy_(shard_full_tensor(value.to(self.device), self._kept))

    def from_rank0(self, values: Tensors | None, into: Tensors, dtype: torch.dtype, staging: Staging) -> None:
        """Scatter rows from rank 0; if the mesh does not allow it, broadcast and shard."""
        (place,), value = into, None if values is None else values[0]
        if place is None:
            return
        at = dtensor_rows.direction(self._kept)
        if at is not None and self._is_everywhere(self._kept.device_mesh):
            dtensor_rows.scatter_rows(self._kept, at, value, place, dtype=dtype, staging=staging)
            return
        self.from_full([self.broadcast_full(values, dtype)], into)

    def _is_everywhere(self, mesh: DeviceMesh) -> bool:
        """Return True if a mesh contains all ranks and starts with rank 0; the answer is equal on all ranks."""
        ranks = mesh.mesh.flatten()
        return len(ranks) == self.ranks.size and int(ranks[0]) == int(ranks.min())
