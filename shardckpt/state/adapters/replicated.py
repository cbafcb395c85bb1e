"""Adapter for plain tensors, with or without `DistributedDataParallel`."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardckpt.core.modules.dtensors import MeshPlacements
from shardckpt.core.params.full_params import Staging
from shardckpt.state.adapters.base import ParameterAdapter, Tensors, copy_parts


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
        return self._parameter.detach()

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
