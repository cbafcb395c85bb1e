"""Random states of all kinds: what is loaded on other ranks has the saved bits, or a typed error comes before."""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import shardckpt
from shardckpt import core
from shardckpt.errors import ShardckptError
from tests.checkpoint import test_state_table as table
from tests.kit.ranks.harness import run

CASES = 12  # of one save, each a state of its own

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.bool, torch.uint8)
SHAPES = ((), (1,), (5,), (7, 3), (4, 6), (2, 3, 5), (0, 4), (64, 8))
FSDP = {"torch": fully_shard, "engine": core.fully_shard}


class Color(enum.Enum):
    """No plain value."""

    RED = 1


def draw(choose: random.Random, seed: int) -> torch.Tensor:
    shape, dtype = choose.choice(SHAPES), choose.choice(DTYPES)
    made = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 50).to(dtype)
    return choose.choice([lambda t: t, lambda t: t.t() if t.dim() == 2 else t, lambda t: t.expand(2, *t.shape)[1]])(
        made
    )


def draw_sharded(choose: random.Random, seed: int, mesh: DeviceMesh) -> DTensor:
    full = draw(choose, seed).contiguous()
    at = choose.randrange(full.dim() + 1)
    return distribute_tensor(full, mesh, [Shard(at) if at < full.dim() else Replicate()])


def draw_value(choose: random.Random, seed: int) -> Any:
    values: list[Any] = [seed, 0.1 * seed, float("nan"), f"text {seed}", b"\x00\xff", None, (seed, "a"), {seed}, True]
    values += [np.arange(seed + 3), np.float32(seed), torch.float16, torch.Size([seed, 2]), 1j * seed, 2**70 + seed]
    values += [{"": seed, 3: [seed, {"deep.name": (torch.full((2,), float(seed)),)}]}, [], {}]
    return choose.choice(values)


def draw_odd(choose: random.Random, seed: int) -> Any:
    """Return what may be refused."""
    odd: list[Callable[[], Any]] = [lambda: Color.RED, object, lambda: print, lambda: torch.eye(3).to_sparse()]
    odd += [lambda: torch.zeros(2, device="meta"), lambda: (item for item in [])]
    return choose.choice(odd)()


def draw_wrapper(choose: random.Random, seed: int) -> torch.Tensor:
    return table.TENSORS[choose.choice([kind for kind in table.TENSORS if kind.startswith("torchao")])](seed)


def draw_module(choose: random.Random, seed: int) -> nn.Module:
    return table.MODULES[choose.choice([*table.MODULES])](seed)


def draw_training(choose: random.Random, seed: int, mesh: DeviceMesh) -> dict[str, Any]:
    from torchao.optim import AdamW4bit, AdamW8bit

    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.BatchNorm1d(96), nn.Linear(96, 5, bias=False))
    FSDP[choose.choice([*FSDP])](model, mesh=mesh)
    kinds: list[Callable[..., torch.optim.Optimizer]] = [torch.optim.AdamW, torch.optim.Adagrad, AdamW8bit, AdamW4bit]
    optimizer = choose.choice(kinds)(model.parameters(), lr=1e-2)
    model(torch.randn(4, 64)).square().sum().backward()
    if not seed or choose.random() < 0.5:
        optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optim": optimizer}


def build(case: int, seed: int, mesh: DeviceMesh) -> dict[str, Any]:
    """Return a random state: a case has the same form for all seeds and worlds."""
    choose, state = random.Random(case), {}
    for number in range(choose.randint(1, 5)):
        kind = choose.choices(
            [draw, draw_sharded, draw_value, draw_wrapper, draw_module, draw_training, draw_odd],
            [4, 4, 4, 3, 2, 2, 0.5],
        )[0]
        own = random.Random(1000 * case + number)
        made = kind(own, seed, mesh) if kind in (draw_sharded, draw_training) else kind(own, seed)
        if isinstance(made, dict) and "model" in made:
            state |= {f"{number}.{name}": part for name, part in made.items()}
        else:
            state[f"{number}"] = made
    return state


def gather(value: Any) -> Any:
    """Return a state as what a load without targets returns; collective."""
    if isinstance(value, DTensor):
        return value if table.list_parts(value.to_local())[0] is not value.to_local() else value.full_tensor()
    if isinstance(value, nn.Module):
        return {name: gather(part) for name, part in value.state_dict().items()}
    if isinstance(value, dict):
        return {key: gather(part) for key, part in value.items()}
    return value


def find_difference(one: Any, other: Any, where: str = "") -> str | None:
    """Return where two states differ."""
    if isinstance(one, (DTensor, torch.optim.Optimizer)):
        return None  # shards of wrappers and moments are compared between both steps
    if isinstance(one, torch.Tensor):
        return None if isinstance(other, torch.Tensor) and table.is_same(one, other) else where
    if isinstance(one, np.ndarray):
        return None if one.dtype == other.dtype and np.array_equal(one, other) else where
    if isinstance(one, dict) or type(one) in (list, tuple):
        pairs = one.items() if isinstance(one, dict) else enumerate(one)
        if type(one) is not type(other) or len(one) != len(other) or (isinstance(one, dict) and [*one] != [*other]):
            return where
        found = (find_difference(part, other[key], f"{where}/{key}") for key, part in pairs)
        return next((each for each in found if each is not None), None)
    return None if type(one) is type(other) and (one == other or one != one) else where


@pytest.fixture(autouse=True)
def _without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")  # torchao compiles its steps


Told = tuple[str | None, str | None]
"""The error that refused a case, and where the saved step differs from the state."""


def save_cases(rank: int, world: int, cases: range, folder: Path) -> list[Told]:
    mesh, told = init_device_mesh("cpu", (world,)), []
    for case in cases:
        state, step = build(case, 0, mesh), folder / f"{case}"
        try:
            shardckpt.save(state, step)
        except ShardckptError as error:
            told.append((str(error), None))
        else:
            told.append((None, find_difference(gather(state), shardckpt.load(step))))
    return told


def move_cases(rank: int, world: int, cases: list[int], folder: Path) -> list[Told]:
    """Load each case into a state with other values, and save it again."""
    mesh, told = init_device_mesh("cpu", (world,)), []
    for case in cases:
        state, step = build(case, 1, mesh), folder / f"{case}"
        again = folder / f"{case}-again"
        try:
            shardckpt.load(state, step)
            shardckpt.save(state, again)
        except ShardckptError as error:
            told.append((str(error), None))
        else:
            told.append((None, find_difference(shardckpt.load(step), shardckpt.load(again))))
    return told


@pytest.mark.parametrize("first", [0, *(pytest.param(at, marks=pytest.mark.full) for at in range(CASES, 48, CASES))])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 1)])
def test_a_random_state_is_moved_bit_for_bit_or_refused(first: int, before: int, after: int, tmp_path: Path) -> None:
    cases = range(first, first + CASES)
    saved = dict(zip(cases, run(before, save_cases, cases, tmp_path)[0], strict=True))
    complete = [case for case in cases if saved[case][0] is None]
    assert not [case for case in cases if case not in complete and list((tmp_path / f"{case}").rglob("COMMIT"))]
    moved = dict(zip(complete, run(after, move_cases, complete, tmp_path)[0], strict=True))
    assert {case: told for case, told in saved.items() if told[1]} == {}
    assert {case: told for case, told in moved.items() if told != (None, None)} == {}
