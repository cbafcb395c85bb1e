"""From every format that is written to every other and back: nothing changes, not a bit and not a type."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from tests.kit.runs.cases import same_bits

TARGETS = ("safetensors", "torch", "dcp", "native")


def _moments(value: torch.Tensor, step: float) -> dict[str, Any]:
    return {"step": torch.tensor(step), "exp_avg": torch.full_like(value, step), "exp_avg_sq": value * value}


WEIGHT = torch.arange(12.0).reshape(4, 3) / 7
STATES: dict[str, dict[str, Any]] = {
    "types": {
        "model": {
            "w": WEIGHT,
            **{
                f"f.{n}": torch.tensor([1.5, -0.0, float("nan")]).to(getattr(torch, n)) for n in ("bfloat16", "float16")
            },
            "f8": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
            "c": torch.tensor([1 + 2j]),
            "i": torch.tensor([[1 << 40], [-3]]),
            "u": torch.tensor([7, 65535], dtype=torch.uint16),
            "mask": torch.tensor([True, False, True]),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "empty": torch.empty(0, 3),
        }
    },
    "ties": {
        "model": {"embed.weight": WEIGHT, "mid": torch.ones(2), "head.weight": WEIGHT},
        "optimizer": {
            "state": {"embed.weight": _moments(WEIGHT, 3.0)},
            "param_groups": [{"params": ["embed.weight", "mid"], "lr": 0.1}],
        },
    },
    "groups": {
        "model": {"a.b": WEIGHT, "a.c": torch.ones(3), "frozen": torch.zeros(2)},
        "optimizer": {
            "state": {"a.b": {**_moments(WEIGHT, 1.0), "count": 7, "mode": "x"}, "a.c": {"count": 1 << 70}},
            "param_groups": [
                {
                    "params": ["a.b"],
                    "lr": 1e-3,
                    "betas": (0.9, 0.999),
                    "eps": float("inf"),
                    "nested": [1, (2, [3, None]), {"k": (4,)}],
                    "fused": None,
                    "amsgrad": False,
                    "raw": b"\x00\xff",
                    "dtype": torch.bfloat16,
                },
                {"params": [], "lr": 0.5, "betas": [0.1]},
                {"params": ["a.c"], "lr": 1, "betas": (0.9, 0.999)},
            ],
        },
    },
}


def same(a: Any, b: Any) -> bool:
    """Tell whether two nests are one: types, order and bits; a group's settings may be in another order."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and same_bits(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(value, b[key]) for key, value in a.items())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def ties(model: dict[str, torch.Tensor]) -> set[frozenset[str]]:
    """Return which names share memory."""
    by_place: dict[int, set[str]] = {}
    for name, tensor in model.items():
        if tensor.numel():
            by_place.setdefault(tensor.data_ptr(), set()).add(name)
    return {frozenset(names) for names in by_place.values() if len(names) > 1}


def part_of(state: str) -> str:
    return "all" if "optimizer" in STATES[state] else "model"


def read_back(source: Path, folder: Path, state: str) -> Any:
    """Return a checkpoint as one file of torch.save gives it."""
    shardckpt.consolidate(str(source), str(folder / "last.pt"), part=part_of(state))
    found = torch.load(folder / "last.pt", weights_only=True)
    return found if part_of(state) == "all" else {"model": found}


@pytest.mark.parametrize("state", sorted(STATES))
@pytest.mark.parametrize("through", TARGETS)
@pytest.mark.parametrize("first", TARGETS)
def test_there_and_back_is_bit_exact(first: str, through: str, state: str, tmp_path: Path) -> None:
    torch.save(STATES[state], tmp_path / "src.pt")
    source = tmp_path / "src.pt"
    for number, to in enumerate((first, through, first)):
        report = shardckpt.consolidate(str(source), str(tmp_path / str(number)), to=to, part=part_of(state))
        assert [w for w in report.warnings if "--config-from" not in w] == []
        source = tmp_path / str(number)
    found = read_back(source, tmp_path, state)
    assert list(found["model"]) == list(STATES[state]["model"]) or "safetensors" in (first, through)
    assert ties(found["model"]) == ties(STATES[state]["model"])
    for part in STATES[state]:
        assert same(found[part], STATES[state][part]), part


@pytest.mark.parametrize("to", TARGETS)
def test_an_ordered_dict_comes_back_as_one_or_needs_the_flag(to: str, tmp_path: Path) -> None:
    groups = [{"params": ["w"], "order": OrderedDict(z=1, a=(2,))}]
    torch.save({"model": {"w": WEIGHT}, "optimizer": {"state": {}, "param_groups": groups}}, tmp_path / "src.pt")
    if to == "dcp":  # torch opens it, and gives a dict back
        with pytest.raises(shardckpt.errors.UsageError, match="--allow-loss"):
            shardckpt.consolidate(str(tmp_path / "src.pt"), str(tmp_path / "out"), to=to, part="all")
        return
    shardckpt.consolidate(str(tmp_path / "src.pt"), str(tmp_path / "out"), to=to, part="all")
    assert same(read_back(tmp_path / "out", tmp_path, "groups")["optimizer"]["param_groups"], groups)


def test_the_comparison_sees_a_type_and_a_bit() -> None:
    assert not same({"a": (1,)}, {"a": [1]})
    assert not same({"a": 1}, {"a": 1.0})
    assert not same({"a": torch.tensor(0.0)}, {"a": torch.tensor(-0.0)})
    assert not same([torch.ones(1)], [torch.ones(1, dtype=torch.float64)])


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("keys", ["ids", "flat"])
def test_other_keys_of_the_optimizer_come_back_as_names(to: str, keys: str, tmp_path: Path) -> None:
    named = {
        "state": {"a.b": _moments(WEIGHT, 1.0)},
        "param_groups": [{"params": ["a.b"], "lr": 0.1, "betas": (0.9, 0.99)}, {"params": ["a.c"], "lr": 0.2}],
    }
    torch.save({"model": STATES["groups"]["model"], "optimizer": named}, tmp_path / "src.pt")
    shardckpt.consolidate(str(tmp_path / "src.pt"), str(tmp_path / "keyed"), to=to, part="all", optim_keys=keys)
    found = read_back(tmp_path / "keyed", tmp_path, "groups")
    assert same(found["optimizer"]["state"], named["state"])
    if keys == "ids" or to == "safetensors":  # flattened settings do not tell what a parameter without state shares
        assert same(found["optimizer"]["param_groups"], named["param_groups"])
