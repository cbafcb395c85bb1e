"""State that simulated trainers save: replicated and sharded tensors, computed from one number."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from shardckpt.boxes import Box, chunk_box
from shardckpt.state.local.tensor_shards import LocalShard, TensorShards, get_tensor_shards
from tests.simulation.scheduler import HistoryError

_ROWS = 7
_SHARDED = ("rows", "frozen rows")
_MAX_BUILT = 64  # attempts whose state is remembered
_STEPS, _OVERWRITE = 1000, 500  # attempts per start; attempts that overwrite are numbered from the second value


# Not a DTensor: that needs a process group, which simulated ranks in one process cannot have.
class RowShard(torch.Tensor):
    """One simulated rank's rows of a full tensor."""

    full: tuple[int, ...]  # shape of the full tensor, in elements
    box: Box
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # results are plain tensors


def make_row_shard(full: torch.Tensor, rank: int, size: int) -> RowShard:
    """Return a rank's rows of a tensor."""
    box = chunk_box(tuple(full.shape), 0, size, rank)
    start, stop = box.offset[0], box.offset[0] + box.size[0]
    rows = full[start:stop].clone().as_subclass(RowShard)
    rows.full, rows.box = tuple(full.shape), box
    return rows


def find_tensor_shards(tensor: torch.Tensor) -> TensorShards:
    """Return this rank's shards of a tensor, instead of `get_tensor_shards`."""
    if not isinstance(tensor, RowShard):
        return get_tensor_shards(tensor)
    own = tensor.detach().as_subclass(torch.Tensor)
    return TensorShards(tensor.full, own.dtype, (LocalShard(tensor.box, own),) if tensor.box.volume else ())


def find_content(start: int, number: int, *, is_overwrite: bool = False) -> int:
    """Return the number that identifies an attempt to save a step."""
    return start * _STEPS + number + is_overwrite * _OVERWRITE


def find_start(content: int) -> int:
    """Return the number of an attempt's start."""
    return content // _STEPS


def build_state(content: int, rank: int = 0, size: int = 1, *, is_sharded: bool = False) -> dict[str, Any]:
    """Return the state that a rank saves."""
    tensors = {
        name: make_row_shard(full, rank, size) if is_sharded and name in _SHARDED else full.clone()
        for name, full in _build_tensors(content).items()
    }
    return {**tensors, "content": content}


def read_content(state: Mapping[str, Any]) -> int:
    """Return the attempt that a state comes from. Raises HistoryError for a mix."""
    content = int(state["content"])
    expected = _build_tensors(content)
    if state.keys() != {*expected, "content"}:
        raise HistoryError(f"a reader got the names {sorted(state)}")
    for name, full in expected.items():
        if not _is_part(full, state[name]):
            raise HistoryError(f"a reader got a mix: {name} is {state[name]}, but the attempt is {content}")
    return content


@lru_cache(_MAX_BUILT)
def _build_tensors(content: int) -> dict[str, torch.Tensor]:
    """Return an attempt's full tensors. They are copied and compared repeatedly: do not change them."""
    rows = torch.arange(2.0 * _ROWS).reshape(_ROWS, 2)
    return {
        "w": torch.full((6,), float(content)),
        "slow": torch.full((3,), float(content // 4)),
        "frozen": torch.arange(5.0) if content else torch.zeros(5),
        "rows": rows + content,
        "frozen rows": rows if content else torch.zeros(_ROWS, 2),
    }


def _is_part(full: torch.Tensor, found: torch.Tensor) -> bool:
    """Return True if a tensor equals the expected one, or the rank's rows of it."""
    if not isinstance(found, RowShard):
        return torch.equal(full, found)
    start, count = found.box.offset[0], found.box.size[0]
    return torch.equal(full[start : start + count], found.as_subclass(torch.Tensor))
