"""A drill of a framework restores the state that it began with, and one that fails does not block the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.witness.framework_drill import drill_folder, require_proven, run_drill


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
