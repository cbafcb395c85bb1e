"""A drill proves a state that is complete, and names the values that one lacks."""

from __future__ import annotations

import functools
import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import shardckpt
from shardckpt.errors import UsageError
from shardckpt.witness.prove_resume import drill_folder, require_proven, run_drill
from shardckpt.witness.reachable import digest_reachable
from tests.kit.ranks.harness import run
from tests.kit.runs.faults import Generator


class Position:
    """Position in the data, as a sampler has it."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Training:
    """Training with everything that a resume needs."""

    def __init__(self, wrap: Any = lambda net: net) -> None:
        torch.manual_seed(1)
        self.model = wrap(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optim, lambda epoch: 0.5**epoch)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
        self.data, self.position = torch.rand(64, 4), Position()
        self.ema = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.noise = torch.Generator().manual_seed(3)
        self.log: list[float] = []
        self.state = {
            "model": self.model,
            "optim": self.optim,
            "schedule": self.schedule,
            "scaler": self.scaler,
            "position": self.position,
            "ema": self.ema,
            "rng": shardckpt.RNGState(),
            "noise": Generator(self.noise),
        }

    def step(self) -> dict[str, Any]:
        batch = self.data[self.position.at : self.position.at + 4]
        self.position.at += 4
        noisy = batch + torch.rand(batch.shape, generator=self.noise) + random.random() + np.random.rand()
        loss = functional.dropout(self.model(noisy), 0.2).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optim)
        self.scaler.update()
        self.optim.zero_grad()
        self.schedule.step()
        for name, value in self.model.state_dict().items():
            self.ema[name].lerp_(value, 0.1) if value.is_floating_point() else self.ema[name].copy_(value)
        self.log.append(loss.item())
        return {"loss": loss + next(iter(self.ema.values())).sum(), "batch": batch}


def test_a_complete_state_is_proven_and_training_may_go_on(tmp_path: Path) -> None:
    training = Training()
    report = shardckpt.prove_resume(training.step, training.state, tmp_path / "drill", steps=3)
    assert report.ok, report
    assert "3 steps" in str(report)
    assert training.position.at == 12


@pytest.mark.parametrize(
    ("left_out", "cause", "name"),
    [
        ("schedule", "schedule", "self.schedule (LambdaLR)"),
        ("position", "batch", "self.position (Position)"),
        ("ema", "loss", "self.ema (dict)"),
        ("noise", "loss", "self.noise (Generator)"),
        ("scaler", "", "self.scaler (GradScaler)"),
        ("rng", "random state", "random state of torch"),
        ("optim", "", "self.optim (AdamW)"),
        ("model", "", "self.model (Sequential)"),
    ],
)
def test_what_the_state_lacks_is_named(left_out: str, cause: str, name: str, tmp_path: Path) -> None:
    training = Training()
    del training.state[left_out]
    report = shardckpt.prove_resume(training.step, training.state, tmp_path / "drill")
    assert name in report.missing
    if cause:
        assert report.divergence is not None
        assert report.divergence.cause == cause
        assert name in str(report)


def test_a_closure_shows_what_its_step_uses(tmp_path: Path) -> None:
    model, count = nn.Linear(4, 1), torch.zeros(())

    def forward() -> torch.Tensor:
        count.add_(1)
        return model(torch.full((2, 4), float(count))).sum()

    def step() -> dict[str, torch.Tensor]:
        return {"loss": forward()}

    report = shardckpt.prove_resume(step, {"model": model}, tmp_path / "drill")
    assert report.divergence is not None
    assert report.missing == ("count (Tensor)",)
    assert shardckpt.prove_resume(step, {"model": model, "count": count}, tmp_path / "all").ok


class Average:
    """Average of a model, which has no `state_dict`."""

    def __init__(self, model: nn.Module) -> None:
        self.values = [parameter.detach().clone() for parameter in model.parameters()]
        self.freed, self.sparse, self.above = torch.zeros(4), torch.eye(2).to_sparse(), self
        self.freed.untyped_storage().resize_(0)

    def update(self, model: nn.Module) -> None:
        for mean, parameter in zip(self.values, model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)


def test_objects_in_containers_are_looked_at_too(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    averages, recent, chain = {"slow": Average(model)}, deque[float](maxlen=2), [SimpleNamespace(above=None)]
    for _ in range(1000):
        chain = [SimpleNamespace(above=chain[0])]

    def step() -> torch.Tensor:
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        optim.step()
        optim.zero_grad()
        averages["slow"].update(model)
        recent.append(loss.item())
        assert chain
        return loss

    report = shardckpt.prove_resume(step, {"model": model, "optim": optim}, tmp_path / "drill")
    assert report.ok
    assert report.missing == ("averages (dict)", "recent (deque)")


def test_a_step_that_is_not_repeatable_is_told_from_a_state_that_lacks_values(tmp_path: Path) -> None:
    model, calls = nn.Linear(4, 1), iter(range(100))
    step = lambda: model(torch.ones(1, 4)).sum() * (1 + 1e-3 * next(calls))  # noqa: E731
    report = shardckpt.prove_resume(step, {"model": model}, tmp_path / "drill")
    assert report.divergence is not None
    assert report.divergence.cause == "loss"
    assert report.is_repeatable is False
    assert "not deterministic" in str(report)


def test_all_ranks_get_one_report(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> list[str]:
        random.seed(1)
        np.random.seed(1)
        training = Training(DistributedDataParallel)
        whole = shardckpt.prove_resume(training.step, training.state, tmp_path / "whole")
        del training.state["rng"]
        part = shardckpt.prove_resume(training.step, training.state, tmp_path / "part")
        return [str(whole), str(part)]

    first, second = run(2, body)
    assert first == second
    assert "proven" in first[0]
    assert "random state" in first[1]


@pytest.mark.parametrize("arguments", [{"steps": 0}, {"overwrite": 1}, {"train_step": 3}])
def test_wrong_arguments_are_refused(arguments: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        shardckpt.prove_resume(**{"train_step": lambda: None, "state": {}, "path": tmp_path / "a", **arguments})


NOTHING = "the drill proves nothing: the training steps return nothing and change nothing that it compares"


@pytest.mark.parametrize("state", [{"w": torch.ones(1)}, {"model": nn.Linear(2, 1), "epoch": 3}], ids=repr)
def test_steps_that_return_and_change_nothing_prove_nothing(state: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{NOTHING}. Return the loss"):
        shardckpt.prove_resume(lambda: None, state, tmp_path / "drill")


def test_steps_that_change_other_values_alone_prove_nothing(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)

    def step() -> None:
        model.weight.data += 1

    with pytest.raises(UsageError, match=rf"{NOTHING}.*it changes model \(Linear\)"):
        shardckpt.prove_resume(step, {"w": torch.ones(1)}, tmp_path / "drill")


def test_a_result_or_a_change_of_the_state_is_enough(tmp_path: Path) -> None:
    counts = {"step": torch.zeros(()), "epoch": 0}

    def count(name: str) -> None:
        counts[name] += 1

    for number, step in enumerate([lambda: 0.5, lambda: {"batch": torch.ones(2)}, lambda: count("step")]):
        assert shardckpt.prove_resume(step, counts, tmp_path / str(number)).ok


def test_ranks_raise_together_that_nothing_is_proven(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> str:
        with pytest.raises(UsageError) as caught:
            shardckpt.prove_resume(lambda: None, {"w": torch.ones(1)}, tmp_path / "drill")
        return str(caught.value)

    assert all(NOTHING in message for message in run(2, body))


def test_a_step_that_returns_unknown_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="accuracy"):
        shardckpt.prove_resume(lambda: {"accuracy": 1}, {"w": torch.ones(1)}, tmp_path / "a")


def test_a_step_that_raises_leaves_no_hook_on_the_optimizer(tmp_path: Path) -> None:
    training, steps = Training(), iter(range(3))

    def train_step() -> dict[str, Any]:
        if next(steps) == 2:
            raise ValueError("no more data")
        return training.step()

    with pytest.raises(ValueError, match="no more data"):
        shardckpt.prove_resume(train_step, training.state, tmp_path / "drill")
    assert not training.optim._optimizer_step_pre_hooks


def test_a_cached_function_and_a_built_in_one_are_looked_at_too() -> None:
    counts = {"at": 1}
    assert "counts (dict)" in digest_reachable(functools.lru_cache(lambda: counts))
    assert digest_reachable(dict)


def test_a_compiled_step_is_proven(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def train_step() -> None:
        model(torch.ones(2)).sum().backward()
        optim.step()
        optim.zero_grad()

    compiled = torch.compile(train_step, backend="eager")
    assert shardckpt.prove_resume(compiled, {"model": model, "optim": optim}, tmp_path / "drill").ok


def build_state() -> dict[str, Any]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {"model": model, "optim": optim, "rng": shardckpt.RNGState()}


def train(state: dict[str, Any]) -> float:
    loss = state["model"](torch.ones(4, 2)).square().sum()
    loss.backward()
    state["optim"].step()
    state["optim"].zero_grad()
    return loss.item()


def test_training_after_a_drill_has_the_bits_of_training_without_it(tmp_path: Path) -> None:
    state = build_state()
    expected = [train(state) for _ in range(3)]
    state = build_state()
    report = run_drill(lambda: train(state), state, drill_folder(str(tmp_path)))
    require_proven(report)
    assert report.missing == ()
    assert [train(state) for _ in range(3)] == expected
    assert list(tmp_path.iterdir()) == []


def test_a_run_can_begin_after_a_drill_that_failed(tmp_path: Path) -> None:
    state = build_state()
    with pytest.raises(ZeroDivisionError):
        run_drill(lambda: 1 // 0, state, drill_folder(str(tmp_path)))
    assert shardckpt.Checkpointer(tmp_path).restore(state) is None
    assert run_drill(lambda: train(state), state, drill_folder(str(tmp_path))).ok


def test_a_divergence_and_a_warning_name_the_values_that_the_state_lacks(tmp_path: Path) -> None:
    state, seen = build_state(), {"loss": 0.0}

    def note() -> float:
        seen["loss"] += train(state)
        return 0.0

    report = run_drill(note, state, drill_folder(str(tmp_path)))
    with pytest.warns(UserWarning, match=r"does not restore: seen \(dict\)"):
        require_proven(report)
    report = run_drill(lambda: note() + seen["loss"], state, drill_folder(str(tmp_path)))
    with pytest.raises(shardckpt.errors.ResumeDivergence, match=r"not restored: .*seen \(dict\)"):
        require_proven(report)
