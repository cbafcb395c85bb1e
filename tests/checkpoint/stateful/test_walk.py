"""One module knows the kinds of objects in a state: saves, loads, streams and witnesses treat each as it says."""

from __future__ import annotations

import ast
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardckpt
from shardckpt.checkpoint.save.planner import SaveOptions
from shardckpt.checkpoint.save.session import Saver
from shardckpt.checkpoint.stateful import walk as walking
from shardckpt.checkpoint.stateful.state_stream import build_stream
from shardckpt.checkpoint.stateful.walk import Leaf, LeafKind, find_kind, map_leaves, walk
from shardckpt.errors import UnsupportedError
from shardckpt.ranks.linked_group import ALONE
from shardckpt.state.local.tensor_shards import get_tensor_shards
from shardckpt.witness.state_digests import StateReader
from shardckpt.witness.trained_objects import find_trained_objects

PACKAGE = Path(shardckpt.__file__).parent
# Names by which source text tests for a kind of object.
TESTED = {"Module", "Optimizer", "Variant", "PerRank", "Stateful", "ndarray", "Tensor"}


class Clock:
    """An object with a state."""

    def __init__(self, time: int = 0) -> None:
        self.time = time

    def state_dict(self) -> dict[str, Any]:
        return {"time": self.time, "ticks": torch.full((2,), float(self.time))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["ticks"], torch.full((2,), float(state["time"])))
        self.time = state["time"]


MODEL = nn.Linear(2, 3)


def build_optimizer(number: int) -> torch.optim.Optimizer:
    optim = torch.optim.SGD(MODEL.parameters(), lr=0.1 + number, momentum=0.9)
    for parameter in MODEL.parameters():
        optim.state[parameter]["momentum_buffer"] = torch.full_like(parameter, number)
    return optim


def build_module(number: int) -> nn.Module:
    return nn.Linear(2, 3).requires_grad_(False).apply(lambda each: nn.init.constant_(each.weight, number))


# For each kind an object with a number in it, and how to read the number.
OBJECTS: dict[LeafKind, tuple[Callable[[int], Any], Callable[[Any], float]]] = {
    LeafKind.VALUE: (lambda number: number, float),
    LeafKind.TENSOR: (lambda number: torch.full((3,), float(number)), lambda value: float(value[0])),
    LeafKind.MODULE: (build_module, lambda value: float(value.weight[0, 0])),
    LeafKind.VARIANT: (
        lambda number: shardckpt.Variant({n: torch.full_like(p, number) for n, p in MODEL.named_parameters()}, MODEL),
        lambda value: float(value.weights["bias"][0]),
    ),
    LeafKind.OPTIMIZER: (build_optimizer, lambda value: float(value.state[MODEL.bias]["momentum_buffer"][0])),
    LeafKind.PER_RANK: (shardckpt.PerRank, lambda value: float(value.held)),
    LeafKind.STATEFUL: (Clock, lambda value: float(value.time)),
    LeafKind.ARRAY: (lambda number: np.full(3, float(number)), lambda value: float(value[0])),
    LeafKind.SHARDS: (
        lambda number: get_tensor_shards(torch.full((3,), float(number))),
        lambda value: float(value.shards[0].tensor[0]),
    ),
    LeafKind.CONTAINER: (lambda number: [number, torch.ones(1)], lambda value: float(value[0])),
}


def test_every_kind_has_an_object_here() -> None:
    assert OBJECTS.keys() == set(LeafKind)
    assert {kind: find_kind(build(1)) for kind, (build, _) in OBJECTS.items()} == {kind: kind for kind in LeafKind}


@pytest.mark.parametrize("kind", LeafKind, ids=lambda kind: kind.name.lower())
def test_an_object_of_each_kind_is_saved_repeatedly_and_loaded(kind: LeafKind, tmp_path: Path) -> None:
    build, read = OBJECTS[kind]
    saver = Saver(ALONE)
    for number in (1, 2, 3):
        target = tmp_path / f"{number}"
        state = {"model": MODEL, "object": build(number)}
        saver.save(state, SaveOptions(str(target), overwrite=False, checksums=True, custom_metadata={}))
        loaded = shardckpt.load({"model": MODEL, "object": build(0)}, target)
        assert read(loaded["object"]) == number


@pytest.mark.parametrize("kind", LeafKind, ids=lambda kind: kind.name.lower())
def test_an_object_of_each_kind_is_sent_or_refused(kind: LeafKind) -> None:
    state = {"object": OBJECTS[kind][0](1)}
    if kind in (LeafKind.VALUE, LeafKind.TENSOR, LeafKind.ARRAY, LeafKind.CONTAINER):
        assert b"".join(map(bytes, build_stream(state)))
    else:
        with pytest.raises(UnsupportedError, match="object"):
            build_stream(state)


@pytest.mark.parametrize("kind", LeafKind, ids=lambda kind: kind.name.lower())
def test_a_witness_reads_a_state_with_an_object_of_each_kind(kind: LeafKind) -> None:
    objects = find_trained_objects({"model": MODEL, "object": OBJECTS[kind][0](1)})
    digests = StateReader(objects, 0, 1).digest(is_deep=True).digests
    assert {"model.weight", "model.bias"} <= digests.tensors.keys()
    is_trained = kind in (LeafKind.MODULE, LeafKind.OPTIMIZER)
    assert any(name.startswith("object.") for name in (*digests.tensors, *digests.settings)) == is_trained


def test_a_row_is_all_that_a_class_needs_to_be_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_kind(Clock()) is LeafKind.STATEFUL
    shardckpt.save({"clock": Clock(3)}, tmp_path / "object")
    assert shardckpt.load(tmp_path / "object")["clock"]["time"] == 3
    monkeypatch.setattr(walking, "_CLASSES", ((Clock, LeafKind.PER_RANK), *walking._CLASSES))
    shardckpt.save({"clock": Clock(5)}, tmp_path / "per rank")
    assert [each["time"] for each in shardckpt.load(tmp_path / "per rank")["clock"]] == [5], "one value for each rank"
    assert shardckpt.load({"clock": Clock()}, tmp_path / "per rank")["clock"].time == 5


def test_no_function_but_one_tells_kinds_apart() -> None:
    files = [path for folder in ("checkpoint", "witness") for path in (PACKAGE / folder).rglob("*.py")]
    found = {
        f"{path.relative_to(PACKAGE)}: {function.name}"
        for path in files
        for function in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(function, ast.FunctionDef) and len(find_tested(function)) > 2
    }
    assert found == set(), "ask `find_kind`"


def find_tested(function: ast.FunctionDef) -> set[str]:
    """Return the kinds of objects that a function tests for itself."""
    tests = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance"
    ]
    return {
        name
        for test in tests
        for node in ast.walk(test.args[1])
        if (name := getattr(node, "attr", getattr(node, "id", ""))) in TESTED
    }


def test_leaves_are_in_the_order_of_the_state() -> None:
    state = {"b": [1, {"x": torch.ones(1)}], "a": (), 5: OrderedDict(c=None, d=(2,)), 1.5: "e"}
    found = [(leaf.path, leaf.kind) for leaf in walk(state)]
    assert found == [
        (("b", 0), LeafKind.VALUE),
        (("b", 1, "x"), LeafKind.TENSOR),
        ((5, "c"), LeafKind.VALUE),
        ((5, "d", 0), LeafKind.VALUE),
        (("1.5",), LeafKind.VALUE),
    ]
    same: list[Leaf] = []
    assert map_leaves(state, lambda leaf: same.append(leaf) or leaf.value) == state  # type: ignore[func-returns-value]
    assert same == list(walk(state))


def test_a_container_may_be_taken_whole() -> None:
    state = {"kept": {"x": 1}, "opened": [{"x": 2}]}

    def enter(container: Any, path: tuple[str | int, ...]) -> bool:
        return path != ("kept",)

    assert list(walk(state, (), enter)) == [
        Leaf(("kept",), LeafKind.CONTAINER, {"x": 1}),
        Leaf(("opened", 0, "x"), LeafKind.VALUE, 2),
    ]


def test_a_state_that_holds_itself_twice_is_refused_at_once(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    state["one"] = state["other"] = [state]
    for act in (shardckpt.save, shardckpt.load):
        with pytest.raises(UnsupportedError, match="holds itself"):
            act(state, tmp_path / "c")
    with pytest.raises(UnsupportedError, match="holds itself"):
        find_trained_objects(state)
