"""Adapter for `fully_shard` units: DTensors that are sharded along one dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardckpt.core.modules.dtensors import MeshPlacements, get_mesh_placements, local, split_rows
from shardckpt.core.params.full_params import Staging
from shardckpt.core.registration.dtensor_params import DTensorRegistration
from shardckpt.state.adapters.engine_bucket import EngineBucketAdapter
from shardckpt.state.redistribute.dtensor_rows import has_rows_everywhere
from shardckpt.state.redistribute.rank_grid import Ranks


class EngineDTensorAdapter(EngineBucketAdapter):
    """Adapter for a `fully_shard` bucket; for arguments see `EngineBucketAdapter`."""

    def __init__(self, registration: DTensorRegistration, names: Sequence[Sequence[str]], ranks: Ranks) -> None:
        super().__init__(registration, names, ranks)
        self._placed = registration.placements

    @property
    def has_parts_everywhere(self) -> bool:
        """Return True if every rank has rows from every parameter."""
        rows = [
            spec.shape[placed.dim]
            for spec, placed in zip(self.bucket.layout.specs, self._placed, strict=True)
            if placed.dim is not None
        ]
        return all(has_rows_everywhere(count, self.bucket.group.size) for count in rows)

    def shard_lengths(self, position: int) -> tuple[int, ...] | None:
        """Return each rank's number of rows."""
        dim = self._placed[position].dim
        shape, ranks = self.bucket.layout.specs[position].shape, self.bucket.group.size
        return None if dim is None else split_rows(shape[dim], ranks)

    def placements(self) -> list[MeshPlacements | None]:
        """Return the parameters' meshes and placements."""
        return [get_mesh_placements(parameter) for parameter in self.exposed]

    def to_sharded(self, packed: torch.Tensor, staging: Staging) -> list[torch.Tensor]:  # noqa: ARG002
        """Return DTensors that alias `packed`, without communication or copies."""
        if packed.numel() and packed.data_ptr() == self.bucket.shard.data_ptr():
            return [parameter.detach() for parameter in self.exposed]
        return self.parts(packed)

    def parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return DTensors around each parameter's part."""
        return [placed.sharded(part) for placed, part in zip(self._placed, self.local_parts(packed), strict=True)]

    def local_parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's part."""
        return super().parts(packed)

    def empty_like(self, position: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a DTensor around new memory."""
        return self._placed[position].sharded(torch.empty_like(local(self.exposed[position].detach()), dtype=dtype))
