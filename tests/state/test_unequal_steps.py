"""Steps that differ among parameters: kept where each has its own, else an error with an option."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import shardckpt
from shardckpt.errors import UsageError
from shardckpt.state import load_optim_state_dict, optim_state_dict
from shardckpt.state.keys.slots import Form, Slot, with_largest
from tests.kit.models.states import FRONT_ENDS, Net, over, quiet, refused, step, whole


def made(front_end: str):
    torch.manual_seed(0)
    model = quiet(FRONT_ENDS[front_end], Net((1,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def trained_unevenly(front_end: str):
    """One bias has no gradient in the first of two steps."""
    model, optim = made(front_end)
    late = next(p for name, p in model.named_parameters() if name.endswith("last.bias"))
    late.requires_grad_(False)
    step(model, optim)
    late.requires_grad_(True)
    step(model, optim, 1)
    return model, optim


def steps_of(model, optim) -> dict[str, float]:
    state = optim_state_dict(model, optim, "FULL")["state"]
    return {name: float(whole(slots["step"])) for name, slots in state.items()}


def test_they_are_kept_or_the_largest_counts_where_the_caller_says_so(tmp_path: Path) -> None:
    def body(rank: int, world: int, source: str) -> list[str]:
        warnings.simplefilter("ignore")
        model, optim = trained_unevenly(source)
        expected = steps_of(model, optim)
        wrong = [] if set(expected.values()) == {1.0, 2.0} else [f"steps {expected}"]
        shardckpt.save({"model": model, "optim": optim}, tmp_path / source)
        sharded = optim_state_dict(model, optim, "SHARDED")
        numbers = {**sharded, "state": {n: {**s, "step": int(whole(s["step"]))} for n, s in sharded["state"].items()}}

        def native(model, optim, **how) -> None:
            shardckpt.load({"model": model, "optim": optim}, tmp_path / source, **how)

        ways = {
            "native": native,
            "sharded": lambda model, optim, **how: load_optim_state_dict(model, optim, sharded, **how),
            "plain numbers": lambda model, optim, **how: load_optim_state_dict(model, optim, numbers, **how),
        }
        for name, load in ways.items():
            other = made("orig")
            load(*other)
            wrong += [] if steps_of(*other) == expected else [f"{name}: orig has {steps_of(*other)}"]
            other = made("flat")
            told = refused(load, *other)
            if not all(each in told for each in ("last.bias", "unequal_steps='largest'")):
                wrong.append(f"{name}: {told}")
            if other[1].state:
                wrong.append(f"{name}: something was changed")
            load(*other, unequal_steps="largest")
            wrong += [] if set(steps_of(*other).values()) == {2.0} else [f"{name}: flat has {steps_of(*other)}"]
            step(*other) if name != "plain numbers" else None
        return wrong

    over(["in place", "torch in place"], body)


def test_another_word_is_refused(tmp_path: Path) -> None:
    model, optim = made("plain")
    for action in (
        lambda: load_optim_state_dict(model, optim, {"state": {}}, unequal_steps="newest"),
        lambda: shardckpt.load({"optim": optim}, tmp_path, unequal_steps="newest"),
    ):
        with pytest.raises(UsageError, match="must be 'error' or 'largest'"):
            action()


def test_numbers_alone_are_compared_by_size() -> None:
    rows = [
        {
            "step": Slot(Form.SCALAR, "float32", 1.0),
            "mode": Slot(Form.SCALAR, "", "a"),
            "on": Slot(Form.SCALAR, "", True),
        },
        {
            "step": Slot(Form.SCALAR, "float32", 3.0),
            "mode": Slot(Form.SCALAR, "", "b"),
            "on": Slot(Form.SCALAR, "", False),
        },
        {},
    ]
    found = with_largest(rows)
    assert [row["step"].value for row in found[:2]] == [3.0, 3.0] and found[2] == {}
    assert [row["mode"].value for row in found[:2]] == ["a", "b"]
    assert [row["on"].value for row in found[:2]] == [True, False]
