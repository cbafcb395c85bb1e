"""Values of a state that rank 0 alone has arrive at the other ranks as they are, with their types."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core import fully_shard
from shardckpt.state import load_model_state_dict, load_optim_state_dict, model_state_dict, optim_state_dict
from shardckpt.state.keys import validation
from tests.kit.ranks.harness import run

VALUES = {"betas": (0.9, [1, (2,)]), 3: "int", "none": None, "flags": [True, 1, 1.0], "tuple": {"dict": ()}}


class Noted(nn.Linear):
    """A module with extra state."""

    note: object = None

    def get_extra_state(self) -> object:
        return self.note

    def set_extra_state(self, state: object) -> None:
        self.note = state


def test_values_keep_their_types() -> None:
    again = validation.decode(validation.encode([VALUES, -math.inf, torch.tensor([0.1], dtype=torch.bfloat16)]))
    assert repr(again[:2]) == repr([VALUES, -math.inf])
    assert again[2].dtype == torch.bfloat16 and torch.equal(again[2], torch.tensor([0.1], dtype=torch.bfloat16))


def test_other_values_are_refused() -> None:
    with pytest.raises(TypeError, match="an object with class set is not"):
        validation.encode({"a": [{1}]})


def test_extra_state_and_settings_of_rank_0_arrive_as_they_are() -> None:
    def body(rank: int, world: int) -> str:
        model = Noted(2, 2)
        model.note = VALUES
        optim = torch.optim.Adam(fully_shard(model).parameters(), betas=(0.5, 0.6))
        optim.param_groups[0]["schedule"] = VALUES
        states = model_state_dict(model, rank0_only=True), optim_state_dict(model, optim, rank0_only=True)
        model.note, optim.param_groups[0]["schedule"] = None, None
        load_model_state_dict(model, states[0])
        load_optim_state_dict(model, optim, states[1])
        return repr([model.note, optim.param_groups[0]["schedule"], optim.param_groups[0]["betas"]])

    assert run(2, body) == [repr([VALUES, VALUES, (0.5, 0.6)])] * 2


def test_a_number_of_which_ranks_have_parts_is_gathered() -> None:
    def body(rank: int, world: int) -> bool:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(2, 2, bias=False))
        optim = torch.optim.SGD(model.parameters(), momentum=0.9)
        optim.state[model.weight]["norm"] = norm = model.weight.detach().norm()
        assert isinstance(norm, DTensor) and norm.placements[0].is_partial()
        full = norm.full_tensor()
        return torch.equal(optim_state_dict(model, optim)["state"]["weight"]["norm"], full)

    assert run(2, body) == [True] * 2
