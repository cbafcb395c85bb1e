"""Weights that simulated publishers stream: tensors computed from one number, whole or a rank's rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import numpy as np
import torch

from shardckpt.boxes import Box, Shape, chunk_box, full_box, narrow_to_box
from shardckpt.stream.format.digest import combine_digests, digest_box
from shardckpt.stream.receive.targets import TensorChange
from tests.simulation.scheduler import Scheduler
from tests.simulation.trained_state import make_row_shard

_SHARDED = ("rows", "frozen rows")
_SMALL = 200  # bfloat16 has all integers up to 256
_MAX_BUILT = 256
BROKEN = "broken"  # what an engine's fault shows


def build_weights(content: int, rank: int, size: int, *, is_sharded: bool) -> dict[str, torch.Tensor]:
    """Return a rank's part of the weights of an attempt to publish."""
    return {
        name: make_row_shard(full, rank, size) if is_sharded and name in _SHARDED else full.clone()
        for name, full in _build(content).items()
    }


@lru_cache(_MAX_BUILT)
def _build(content: int) -> dict[str, torch.Tensor]:
    """Return all weights of an attempt: some change by an element, some entirely, some never."""
    small = content % _SMALL
    rows, sparse = torch.arange(21.0).reshape(7, 3), torch.arange(70.0)
    rows[content % 7] += small
    sparse[content % 70] = small
    return {
        "rows": rows,
        "sparse": sparse,
        "norm": torch.full((3,), float(small)),
        "slow": torch.full((5,), float(small // 4)),
        "frozen rows": torch.arange(14.0).reshape(7, 2),
        "scale": torch.tensor(float(small)),
        "content": torch.tensor([content]),
    }


@lru_cache(_MAX_BUILT)
def publish_alone(content: int) -> Mapping[str, torch.Tensor]:
    """Return what a stream must have of an attempt, computed without it."""
    return {
        name: full.to(torch.bfloat16) if full.is_floating_point() else full for name, full in _build(content).items()
    }


@lru_cache(_MAX_BUILT)
def digest_alone(content: int) -> str:
    """Return the digest of all weights of an attempt."""
    digests = {}
    for name, value in publish_alone(content).items():
        width = np.dtype(f"u{value.element_size()}")
        bits = value.reshape(-1).view(torch.uint8).numpy().view(width)
        digests[name] = digest_box(bits, tuple(value.shape), full_box(tuple(value.shape)))
    return combine_digests(digests).hex()


def slice_rows(name: str, shape: Shape, rank: int, size: int) -> Box:
    """Return the box of a tensor that a worker holds: some rows, or everything."""
    return chunk_box(shape, 0, size, rank) if name in _SHARDED else full_box(shape)


class BrokenEngineError(Exception):
    """An engine's write failed."""


class Engine:
    """A server's worker, with weights of its own; each write is a scheduling point."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.tensors: dict[str, tuple[Box, torch.Tensor]] = {}

    def apply(self, changes: Iterable[TensorChange]) -> None:
        """Write changes."""
        for change in changes:
            if self._scheduler.step("apply", change.name) == BROKEN:
                raise BrokenEngineError(change.name)
            empty = (change.box, torch.zeros(change.box.size, dtype=change.values.dtype))
            box, tensor = self.tensors.setdefault(change.name, empty)
            assert box == change.box
            if change.indices is None:
                tensor.copy_(change.values.view(change.box.size))
            else:
                tensor.view(-1)[change.indices] = change.values

    def copy(self) -> dict[str, tuple[Box, torch.Tensor]]:
        """Return a copy of the weights."""
        return {name: (box, tensor.clone()) for name, (box, tensor) in self.tensors.items()}

    def differs_from(self, other: Mapping[str, tuple[Box, torch.Tensor]]) -> bool:
        """Return True unless the weights are a copy, bit for bit."""
        return self.tensors.keys() != other.keys() or any(
            not _is_equal(tensor, other[name][1]) for name, (_, tensor) in self.tensors.items()
        )

    def find_difference(self, content: int, rank: int, size: int) -> str:
        """Return the first tensor that differs from a worker's part of an attempt; empty without one."""
        for name, full in publish_alone(content).items():
            box = slice_rows(name, tuple(full.shape), rank, size)
            held = self.tensors.get(name)
            if (held is None and box.volume) or (held is not None and not _is_equal(held[1], narrow_to_box(full, box))):
                return name
        return ""


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if all bits are equal, also those of zeros."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))
