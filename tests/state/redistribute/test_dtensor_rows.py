"""Rows of DTensors that torch places are gathered and loaded in their order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardckpt.core.comm.streams import FULL_BYTES
from shardckpt.core.params.full_params import Staging
from shardckpt.state import load_model_state_dict, model_state_dict
from shardckpt.state.redistribute.dtensor_rows import has_rows_everywhere, scatter_from_rank0
from shardckpt.state.redistribute.rank_grid import Ranks
from tests.kit.models.states import differing
from tests.kit.ranks.harness import run


def test_full_states_of_torchs_own_wrapping_hold_every_row_in_its_place() -> None:
    def body(rank: int, world: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

        def make(seed: int) -> nn.Module:
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 4))
            expected.append({name: value.clone() for name, value in model.state_dict().items()})
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            return fully_shard(model, mesh=mesh["dp"])

        expected: list[dict[str, torch.Tensor]] = []
        model, other = make(0), make(1)
        wrong = differing(model_state_dict(model, "FULL"), expected[0])
        load_model_state_dict(other, expected[0])
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        wrong += ["loaded" for one, two in pairs if not torch.equal(one.to_local(), two.to_local())]
        return wrong

    assert run(4, body) == [[]] * 4


@pytest.mark.parametrize(
    ("rows", "ranks", "expected"), [(2, 3, False), (5, 4, False), (3, 3, True), (6, 4, False), (7, 4, True)]
)
def test_the_last_rank_decides_whether_every_rank_has_rows(rows: int, ranks: int, expected: bool) -> None:
    """Rows are split as by `torch.chunk`: of five rows four ranks have two, two, one and none."""
    assert has_rows_everywhere(rows, ranks) is expected


SIZES = ((6, 4), (6, 1), (0, 4))
"""Elements of each of two parameters that each of three ranks has."""


def places(rank: int, how: str) -> list[torch.Tensor | None]:
    """This rank's room for two parameters, between them one that is left alone."""
    first, second = SIZES[rank]
    if how == "side by side":
        room = torch.full((first + second,), -1.0)
        return [room[:first], None, room[first:]]
    kind = torch.float64 if how == "of another type" else torch.float32
    return [torch.full((2, first // 2), -1.0, dtype=kind).t(), None, torch.full((second,), -1.0, dtype=kind)]


def part(rank: int, number: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank is to have of a parameter."""
    return (torch.arange(SIZES[rank][number]) + 10 * rank + 100 * number).to(dtype)


def test_each_rank_is_given_its_own_parts_wherever_they_are_kept():
    def body(rank, world, how):
        into = places(rank, how)
        given = torch.int64 if how == "of another type" else torch.float32
        rows = [[part(r, 0, given).view(2, -1).t(), None, part(r, 1, given)] for r in range(world)]
        if how == "side by side":
            rows = [[part(r, 0, given), None, part(r, 1, given)] for r in range(world)]
        expected = [None if value is None else value.to(into[2].dtype) for value in rows[rank]]
        staging, before = Staging(), FULL_BYTES.held
        FULL_BYTES.reset_peak()
        how_to_travel = {"dtype": into[2].dtype, "device": torch.device("cpu"), "staging": staging}
        scatter_from_rank0(rows if rank == 0 else None, into, dist.group.WORLD, Ranks(), **how_to_travel)
        passed = (FULL_BYTES.peak - before) // into[2].element_size()
        return [torch.equal(into[at], expected[at]) for at in (0, 2)], passed

    others = sum(map(sum, SIZES[1:]))
    assert run(3, body, "side by side") == [([True, True], others), ([True, True], 0), ([True, True], 0)]
    for how in ("apart", "of another type"):  # the last rank has a single tensor, which is in one piece
        assert run(3, body, how) == [([True, True], others), ([True, True], sum(SIZES[1])), ([True, True], 0)]


def test_adjacent_tensors_of_another_type_than_the_communication_are_converted():
    def body(rank, world):
        room = torch.full((sum(SIZES[rank]),), -1.0, dtype=torch.float64)
        into = [room[: SIZES[rank][0]], room[SIZES[rank][0] :]]
        rows = [[part(r, number, torch.float32) for number in range(2)] for r in range(world)] if rank == 0 else None
        scatter_from_rank0(
            rows,
            into,
            dist.group.WORLD,
            Ranks(),
            dtype=torch.float32,
            device=torch.device("cpu"),
            staging=Staging(),
        )
        return room.tolist() == [float(each) for number in range(2) for each in part(rank, number, torch.float32)]

    assert run(3, body) == [True] * 3


def test_ranks_that_have_copies_are_told():
    def body(rank, world):
        cut, copies = torch.arange(4.0), [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
        across = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        rows = [[cut[:2]], [cut[2:]]] if rank == 0 else None
        into = torch.empty(2)
        scatter_from_rank0(
            rows, [into], across, Ranks((copies,)), dtype=into.dtype, device=into.device, staging=Staging()
        )
        return into.tolist()

    assert run(4, body) == [[0.0, 1.0], [2.0, 3.0]] * 2
