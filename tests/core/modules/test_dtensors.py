"""Rows that two mesh dimensions share are cut and joined as `fully_shard` over tensor parallelism splits them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardckpt.core.modules.dtensors import gather_full_tensor, shard_full_tensor, sort_by_split_order, wrap_local
from tests.kit.ranks.harness import run

ROWS_OF_SIX = {(0, 0): [0, 1], (0, 1): [3, 4], (1, 0): [2], (1, 1): [5]}
"""By rank of data and of tensor parallelism: the latter splits first, into 0 to 2 and 3 to 5."""


def strided(value: torch.Tensor, dim: int) -> DTensor:
    """A DTensor of a value's shape on a mesh of 2 x 2, with memory of its own for this rank's part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    place = _StridedShard(dim, split_factor=2), Shard(dim)
    empty = wrap_local(value.new_empty(0), mesh, place, value.shape, value.stride())
    return wrap_local(shard_full_tensor(value, empty).clone(), mesh, place, value.shape, value.stride())


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_that_the_ranks_do_not_divide_lie_where_two_splits_put_them(dim: int) -> None:
    def body(rank: int, world: int) -> list[int]:
        value = torch.arange(6).view(6, 1) if dim == 0 else torch.arange(6).view(1, 6)
        return strided(value, dim).to_local().flatten().tolist()

    assert run(4, body) == list(ROWS_OF_SIX.values())


def test_strided_rows_are_joined_in_their_order_however_many_there_are() -> None:
    def body(rank: int, world: int) -> list[object]:
        wrong: list[object] = []
        for rows in range(12):
            for dim, dtype in ((0, torch.float32), (1, torch.float8_e4m3fn)):
                shape = [3, 3]
                shape[dim] = rows
                value = torch.arange(rows * 3).reshape(shape).float().to(dtype)
                joined = gather_full_tensor(strided(value, dim))
                if joined.dtype != dtype or not torch.equal(joined.float(), value.float()):
                    wrong.append((rows, dim, joined))
        return wrong

    assert run(4, body) == [[]] * 4


def test_strided_rows_are_not_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(rank: int, world: int) -> bool:
        value = strided(torch.arange(6.0), 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DTensor, "full_tensor", None)  # wrong for these rows with torch 2.9
            joined = gather_full_tensor(value)
        dist.barrier()
        return joined.tolist() == [0, 1, 2, 3, 4, 5]

    assert run(4, body) == [True] * 4


def test_a_strided_shard_that_follows_no_split_of_the_mesh_is_left_to_torch() -> None:
    def body(rank: int, world: int) -> bool:
        mesh, value = init_device_mesh("cpu", (2,)), torch.arange(24.0)
        place = (_StridedShard(0, split_factor=4),)  # as of `view(24)` of 4 x 6 that is sharded by columns
        own = value.view(4, 2, 3)[:, rank].reshape(-1)
        spread = wrap_local(own, mesh, place, (24,), (1,))
        return torch.equal(gather_full_tensor(spread), value) and torch.equal(shard_full_tensor(value, spread), own)

    assert run(2, body) == [True] * 2


def test_strided_shards_split_after_those_whose_parts_are_their_factor() -> None:
    inner, outer, plain = _StridedShard(0, split_factor=2), _StridedShard(0, split_factor=4), Shard(0)
    assert sort_by_split_order((plain, plain), (2, 2)) == [(0, plain), (1, plain)]
    assert sort_by_split_order((inner, Shard(1), plain), (2, 3, 2)) == [(1, Shard(1)), (2, plain), (0, inner)]
    assert sort_by_split_order((outer, inner, plain), (2, 2, 2)) == [(2, plain), (1, inner), (0, outer)]
    assert sort_by_split_order((inner,), (2,)) is None
    assert sort_by_split_order((inner, plain), (2, 4)) is None
