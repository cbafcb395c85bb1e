"""Different saved values of parameters that are one in the model are a mismatch before anything changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import shardckpt
from shardckpt.core import FullyShardedDataParallel, fully_shard
from shardckpt.errors import UsageError
from shardckpt.state import StateMismatchError, load_model_state_dict, load_optim_state_dict, optim_state_dict
from tests.kit.ranks.harness import run

PROBLEM = r"m\.a\.weight and m\.b\.weight are one parameter in this model, but their saved values differ"


class Pair(nn.Module):
    def __init__(self, *, tied: bool, rows: int = 4) -> None:
        super().__init__()
        self.a = nn.Linear(3, 4, bias=False)
        self.b = nn.Linear(3, rows, bias=False)
        if tied:
            self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x)


def saved(path: Path, *, are_equal: bool = False, rows: int = 4) -> Pair:
    model = Pair(tied=False, rows=rows)
    if are_equal:
        model.b.weight.data.copy_(model.a.weight.data)
    shardckpt.save({"m": model}, path)
    return model


@pytest.mark.parametrize("options", [{}, {"strict": False}, {"verify": "live"}, {"cast": True}, {"include": ["m"]}])
def test_different_values_are_a_mismatch_that_names_both_and_changes_nothing(tmp_path: Path, options: dict):
    saved(tmp_path / "x")
    model = Pair(tied=True)
    before = model.a.weight.detach().clone()
    with pytest.raises(UsageError, match=PROBLEM):
        shardckpt.load({"m": model}, tmp_path / "x", **options)
    assert torch.equal(model.a.weight, before)


def test_another_shape_under_the_second_name_is_a_mismatch(tmp_path: Path):
    saved(tmp_path / "x", rows=5)
    with pytest.raises(UsageError, match=PROBLEM):
        shardckpt.load({"m": Pair(tied=True)}, tmp_path / "x")


@pytest.mark.parametrize("form", ["ours", "torch.save"])
def test_equal_values_load(tmp_path: Path, form: str):
    source = saved(tmp_path / "x", are_equal=True)
    if form == "torch.save":
        torch.save({"m": source.state_dict()}, tmp_path / "x.pt")
    model = Pair(tied=True)
    shardckpt.load({"m": model}, tmp_path / ("x" if form == "ours" else "x.pt"))
    assert torch.equal(model.a.weight, source.a.weight) and model.a.weight is model.b.weight


def test_a_tensor_that_was_saved_under_both_names_is_not_read_to_compare(tmp_path: Path, monkeypatch):
    source = Pair(tied=True)
    shardckpt.save({"m": source}, tmp_path / "x")
    monkeypatch.setattr("shardckpt.checkpoint.load.load_plan.LoadPlanBuilder._read_shard", None)
    model = Pair(tied=True)
    shardckpt.load({"m": model}, tmp_path / "x")
    assert torch.equal(model.a.weight, source.a.weight)


@pytest.mark.parametrize("kept", ["a", "b"])
def test_one_of_the_two_loads_if_the_other_is_left_out(tmp_path: Path, kept: str):
    source = saved(tmp_path / "x")
    wanted = getattr(source, kept).weight
    (tmp_path / "rules.toml").write_text(f"[[rule]]\ndrop = {{ name = '{'b' if kept == 'a' else 'a'}\\.weight' }}\n")
    for options in ({"include": [f"m.{kept}.weight"]}, {"rules": tmp_path / "rules.toml"}):
        model = Pair(tied=True)
        shardckpt.load({"m": model}, tmp_path / "x", **options)
        assert torch.equal(model.a.weight, wanted)


def test_a_state_dict_with_different_values_is_refused():
    state = Pair(tied=False).state_dict()
    model = Pair(tied=True)
    before = model.a.weight.detach().clone()
    for strict in (True, False):
        with pytest.raises(StateMismatchError, match=r"a\.weight and b\.weight are one parameter"):
            load_model_state_dict(model, state, strict=strict)
    assert torch.equal(model.a.weight, before)
    state["b.weight"] = state["a.weight"].clone()
    load_model_state_dict(model, state)
    assert torch.equal(model.b.weight, state["a.weight"])


def test_every_rank_raises_if_the_values_of_one_differ(tmp_path: Path):
    source = Pair(tied=False)
    source.b.weight.data.copy_(source.a.weight.data)
    source.b.weight.data[3] += 1  # a row of the second rank
    shardckpt.save({"m": source}, tmp_path / "x")
    state = source.state_dict()

    def body(rank, world):
        raised = []
        for shard in (fully_shard, lambda m: FullyShardedDataParallel(m, device_id=torch.device("cpu"))):
            model = shard(Pair(tied=True))
            for action in (
                lambda: shardckpt.load({"m": model}, tmp_path / "x"),  # noqa: B023
                lambda: load_model_state_dict(model, state),  # noqa: B023
                lambda: load_model_state_dict(model, state if rank == 0 else {}),  # noqa: B023
            ):
                try:
                    action()
                except shardckpt.ShardckptError as error:
                    raised.append(str(error))
                else:
                    raised.append("")
        return raised

    for raised in run(2, body, timeout=60):
        assert all("a.weight and " in text and "b.weight are one parameter" in text for text in raised)


def test_a_state_of_the_optimizer_for_each_of_the_two_is_refused(tmp_path: Path):
    def trained(*, tied: bool) -> tuple[Pair, torch.optim.Optimizer]:
        model = Pair(tied=tied)
        optim = torch.optim.Adam(model.parameters())
        (model(torch.ones(3)) * torch.arange(4)).sum().backward()
        optim.step()
        return model, optim

    source, target = trained(tied=False), trained(tied=True)
    state = optim_state_dict(*source)
    before = target[1].state[target[0].a.weight]["exp_avg"].clone()
    with pytest.raises(StateMismatchError, match=r"a\.weight and b\.weight are one parameter in this model"):
        load_optim_state_dict(*target, state)
    shardckpt.save({"m": source[0], "o": source[1]}, tmp_path / "x")
    with pytest.raises(UsageError, match=r"two optimizer entries would both be named 'a\.weight/"):
        shardckpt.load({"m": target[0], "o": target[1]}, tmp_path / "x")
    assert torch.equal(target[1].state[target[0].a.weight]["exp_avg"], before)
