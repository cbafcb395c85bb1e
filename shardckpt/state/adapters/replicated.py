"""Plain tensors with all elements on every rank, replicated by `DistributedDataParallel` or not at all."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardckpt.core.params.full_params import Staging
from shardckpt.state.adapters.base import MeshPlacements, ParameterAdapter, Tensors, copy_parts


class ReplicatedAdapter(ParameterAdapter):
    """One parameter."""

    @property
    def is_sharded(self) -> bool:
        """Every rank has all of it."""
        return False

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self._parameter.device

    def placements(self) -> list[MeshPlacements | None]:
        """It is not sharded."""
        return [None]

    @property
    def packed(self) -> torch.Tensor:
        """The parameter itself."""
        return self._parameter.detach()

    def pack(self, parts: Tensors, dtype: torch.dtype, staging: Staging | None = None) -> torch.Tensor:  # noqa: ARG002
        """Return it as it is."""
        return torch.zeros_like(self.packed, dtype=dtype) if parts[0] is None else parts[0].to(dtype)

    def empty_like(self, position: int, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002
        """Return memory in the parameter's form."""
        return torch.empty_like(self.packed, dtype=dtype)

    def to_full(self, packed: torch.Tensor, staging: Staging, *, first_only: bool) -> Iterable[torch.Tensor] | None:  # noqa: ARG002
        """Return it as it is: nothing travels."""
        return None if first_only and not self.ranks.is_first else [packed]

    def from_full(self, values: Tensors, into: Tensors) -> None:
        """Copy it."""
        copy_parts(values, into)

    def from_rank0(self, values: Tensors | None, into: Tensors, dtype: torch.dtype, staging: Staging) -> None:  # noqa: ARG002
        """Broadcast it."""
        if into[0] is not None:
            into[0].copy_(self.broadcast_full(values, dtype))
