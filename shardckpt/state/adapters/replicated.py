"""Plain tensors with all elements on every rank, replicated by `DistributedDataParallel` or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from shardckpt.core.params.full_params import Staging
from shardckpt.state.adapters.base import Entry, MeshPlacements, ShardingAdapter, broadcast_from_rank0
from shardckpt.state.redistribute.rank_grid import Ranks


class ReplicatedAdapter(ShardingAdapter):
    """One parameter."""

    def __init__(self, entry: Entry, parameter: nn.Parameter, ranks: Ranks) -> None:
        super().__init__([entry], ranks)
        self._parameter = parameter

    @property
    def exposed(self) -> list[nn.Parameter]:
        """The parameter."""
        return [self._parameter]

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

    def mark_written(self) -> None:
        """Nothing was made of it."""

    def part_views(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return it as it is."""
        return [packed]

    def parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """Return it as it is."""
        return [packed]

    def pack(
        self,
        parts: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        staging: Staging | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """Return it as it is."""
        return torch.zeros_like(self.packed, dtype=dtype) if parts[0] is None else parts[0].to(dtype)

    def empty_like(self, position: int, dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002
        """Return memory in the parameter's form."""
        return torch.empty_like(self.packed, dtype=dtype)

    def to_full(
        self,
        packed: torch.Tensor,
        staging: Staging,  # noqa: ARG002
        *,
        first_only: bool,
    ) -> Iterable[torch.Tensor] | None:
        """Return it as it is: nothing travels."""
        return None if first_only and not self.ranks.is_first else [packed]

    def to_sharded(self, packed: torch.Tensor, staging: Staging) -> list[torch.Tensor]:  # noqa: ARG002
        """Return it as it is."""
        return [packed]

    def from_full(self, values: Sequence[torch.Tensor | None], into: Sequence[torch.Tensor | None]) -> None:
        """Copy it."""
        if values[0] is not None and into[0] is not None:
            into[0].copy_(values[0])

    def from_rank0(
        self,
        values: Sequence[torch.Tensor | None] | None,
        into: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        staging: Staging,  # noqa: ARG002
    ) -> None:
        """Broadcast it."""
        if into[0] is not None:
            value = None if values is None else values[0]
            into[0].copy_(broadcast_from_rank0(self.ranks, self.entries[0].shape, dtype, self.device, value))

    def from_sharded(
        self,
        values: Sequence[torch.Tensor | None],
        into: Sequence[torch.Tensor | None],
        staging: Staging,  # noqa: ARG002
    ) -> None:
        """Copy it: nothing is sharded."""
        self.from_full(values, into)
