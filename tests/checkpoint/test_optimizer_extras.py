"""What an optimizer has besides slots and groups is saved with an unsharded model, and refused with a sharded one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardckpt
from shardckpt.state import load_optim_state_dict, optim_state_dict
from tests.kit.models.states import FRONT_ENDS, Net, refused, step
from tests.kit.ranks.harness import run

Build = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def compiler_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile no step: the optimizers of the library ask for it."""
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")


def lookahead(model: nn.Module) -> torch.optim.Optimizer:
    from pytorch_optimizer import Lookahead

    return Lookahead(torch.optim.AdamW(model.parameters()), k=3)


def ranger(model: nn.Module) -> torch.optim.Optimizer:
    from pytorch_optimizer import Ranger21

    return Ranger21(model.parameters(), num_iterations=20)


class Counting(torch.optim.SGD):
    """Counts its steps beside the state of its parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, momentum=0.9)
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state.pop("count")
        super().load_state_dict(state)


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: range) -> None:
    for seed in steps:
        model(torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        optim.step()
        optim.zero_grad()


@pytest.mark.parametrize("build", [lookahead, ranger, lambda model: Counting(model.parameters())])
def test_a_resume_of_an_unsharded_model_has_all_of_it(build: Build, tmp_path: Path) -> None:
    warnings.simplefilter("error")
    model, other = nn.Linear(4, 4), nn.Linear(4, 4)
    optim, again = build(model), build(other)
    train(model, optim, range(5))
    shardckpt.save({"m": model, "o": optim}, tmp_path / "step")
    shardckpt.load({"m": other, "o": again}, tmp_path / "step", verify="live")
    for each, with_it in ((model, optim), (other, again)):
        train(each, with_it, range(5, 9))
    assert torch.equal(other.weight, model.weight)
    assert getattr(again, "count", None) == getattr(optim, "count", None)


def test_a_sharded_model_refuses_it_by_name_unless_the_state_leaves_it_out(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> tuple[str, str, bool]:
        model = FRONT_ENDS["in place"](Net((1,)))
        optim = Counting(model.parameters())
        step(model, optim)
        told = refused(shardckpt.save, {"m": model, "o": optim}, tmp_path / "refused")
        shardckpt.save({"m": model, "o": optim_state_dict(model, optim)}, tmp_path / "step")
        again = Counting(model.parameters())
        lost = refused(shardckpt.load, {"m": model, "o": again}, tmp_path / "step")
        shardckpt.load({"m": model, "o": again}, tmp_path / "step", strict=False)
        load_optim_state_dict(model, again, shardckpt.load(tmp_path / "step")["o"])
        return told, lost, bool(again.state)

    for told, lost, has_slots in run(2, body):
        assert "o.count" in told and "optim_state_dict" in told
        assert "o.count" in lost and "strict=False" in lost
        assert has_slots
    assert [each.name for each in tmp_path.iterdir()] == ["step"]


@pytest.mark.parametrize(
    ("wrap", "inner"),
    [(lambda it: it, "o.base_optimizer"), (shardckpt.PerRank, "o.0.base_optimizer")],
    ids=["alone", "PerRank"],
)
def test_offline_commands_write_nothing_of_it_as_a_weight(
    wrap: Callable[[Any], Any], inner: str, tmp_path: Path
) -> None:
    model = nn.Linear(4, 4)
    optim = lookahead(model)
    train(model, optim, range(5))
    shardckpt.save({"m": model, "o": wrap(optim)}, tmp_path / "step")
    report = shardckpt.convert(tmp_path / "step", tmp_path / "w.safetensors", to="safetensors")
    assert report.tensor_count == 2
    left_out = inner.replace("base_optimizer", "lookahead_state")
    assert set(report.left_out) == {inner, left_out}
    report = shardckpt.consolidate(tmp_path / "step", tmp_path / "all", part="all")
    assert report.left_out == (left_out,)
    shardckpt.reshard(tmp_path / "step", tmp_path / "copy", world_size=2)
    report = shardckpt.convert(tmp_path / "copy", tmp_path / "again.safetensors", to="safetensors")
    assert report.tensor_count == 2, "a copy of the step lists its optimizers too"
