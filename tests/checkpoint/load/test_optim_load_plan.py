"""Optimizers that are loaded without their models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardckpt
from tests.kit.models.states import FRONT_ENDS, Net, step
from tests.kit.ranks.harness import raised_everywhere, run

DTENSORS = ["in place", "torch in place"]


def save_full_state(folder: Path, momentum: float = 0.9) -> Path:
    model = Net((1,))
    optim = torch.optim.SGD(model.parameters(), 0.1, momentum)
    step(model, optim)
    torch.save(optim.state_dict(), folder / "optimizer.pt")
    return folder / "optimizer.pt"


@pytest.mark.parametrize("style", DTENSORS)
def test_an_optimizer_of_dtensors_is_refused_without_its_model(style: str, tmp_path: Path) -> None:
    path = save_full_state(tmp_path)

    def body(rank: int, world: int) -> None:
        optim = torch.optim.SGD(FRONT_ENDS[style](Net((1,))).parameters(), 0.2, 0.9)
        try:
            shardckpt.load(optim, path)
        finally:
            assert not optim.state

    for raised in raised_everywhere(2, body):
        assert "sharded parameters" in raised.message and '{"model": model, "optim": optim}' in raised.message


@pytest.mark.parametrize("style", DTENSORS)
def test_settings_without_slots_are_loaded_without_the_model(style: str, tmp_path: Path) -> None:
    path = save_full_state(tmp_path, momentum=0)

    def body(rank: int, world: int) -> float:
        optim = torch.optim.SGD(FRONT_ENDS[style](Net((1,))).parameters(), 0.2)
        shardckpt.load(optim, path)
        return float(optim.param_groups[0]["lr"])

    assert run(2, body) == [0.1, 0.1]


class Two(nn.Module):
    """Two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)


@pytest.mark.parametrize("prefix", ["", "_orig_mod.", "unknown."])
def test_ids_are_matched_by_stored_names_that_the_model_has_else_by_position(prefix: str, tmp_path: Path) -> None:
    model = Two()
    optim = torch.optim.SGD([(prefix + name, each) for name, each in model.named_parameters()], 0.1, 0.9)
    model.b(model.a(torch.ones(1, 2))).sum().backward()
    optim.step()
    torch.save({"model": model.state_dict(), "optim": optim.state_dict()}, tmp_path / "c.pt")
    again = torch.optim.SGD([model.b.weight, model.a.weight], 0.1, 0.9)
    shardckpt.load({"model": model, "optim": again}, tmp_path / "c.pt")
    source = model.b if prefix == "unknown." else model.a
    expected = optim.state[source.weight]["momentum_buffer"]
    assert torch.equal(again.state[model.a.weight]["momentum_buffer"], expected)
