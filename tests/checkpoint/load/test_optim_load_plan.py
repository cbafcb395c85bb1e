"""Optimizers that are loaded without their models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import raised_everywhere, run
from states import FRONT_ENDS, Net, step

import shardckpt

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
