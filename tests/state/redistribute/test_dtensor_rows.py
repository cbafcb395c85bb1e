"""Rows of DTensors that torch places are gathered and loaded in their order."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardckpt.state import load_model_state_dict, model_state_dict
from shardckpt.state.redistribute.dtensor_rows import has_rows_everywhere
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
