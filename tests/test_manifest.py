"""Descriptions are values: frozen, hashable where they are keys, and free of data."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from shardckpt.boxes import full_box
from shardckpt.errors import FormatError
from shardckpt.manifest import (
    UNREAD,
    Encoded,
    Lazy,
    Manifest,
    ObjectEntry,
    Piece,
    Span,
    Strided,
    TensorEntry,
    dotted,
    unflatten,
)


def entry(**changes: object) -> TensorEntry:
    piece = Piece(full_box((2, 3)), "a.bin", Span(8, 24))
    return TensorEntry(("w",), (2, 3), "float32", (piece,))._replace(**changes)


def test_a_tensor_is_delivered_as_stored_unless_it_says_otherwise() -> None:
    assert (entry().dtype, entry().nbytes) == ("float32", 24)
    assert (entry(delivered="bfloat16").dtype, entry(delivered="bfloat16").nbytes) == ("bfloat16", 12)
    assert entry(shape=()).nbytes == 4
    assert entry(shape=(0, 5)).nbytes == 0


def test_descriptions_cannot_be_changed() -> None:
    manifest = Manifest("x", {}, {("w",): entry()})
    for thing, name in ((entry(), "shape"), (manifest, "tensors"), (ObjectEntry(("a",)), "value")):
        with pytest.raises(AttributeError):
            setattr(thing, name, None)


def test_layouts_are_equal_by_value_and_serve_as_keys() -> None:
    layouts = [
        Span(0, 4),
        Strided(0, 4, 0, (1,)),
        Encoded("zstd", 0, 9, Span(0, 4)),
        Lazy(0, 9, "detail"),
    ]
    assert len(set(layouts)) == 4
    assert {Encoded("zstd", 0, 9, Span(0, 4)): 1}[layouts[2]] == 1  # type: ignore[index]


def test_two_paths_with_one_dotted_name_are_two_things() -> None:
    assert dotted(("a.b",)) == dotted(("a", "b")) == "a.b"
    assert ("a.b",) != ("a", "b")
    assert dotted(("layers", 0, "w")) == "layers.0.w"


def test_an_unread_value_is_no_value_and_survives_copying() -> None:
    unread = ObjectEntry(("epoch",))
    assert unread.value is UNREAD
    assert pickle.loads(pickle.dumps(unread)).value is UNREAD
    assert ObjectEntry(("epoch",), None).value is not UNREAD


def test_leaves_import_neither_numpy_nor_torch() -> None:
    code = (
        "import sys, shardckpt.boxes, shardckpt.manifest, shardckpt.errors, shardckpt.dtypes;"
        "print([m for m in ('numpy', 'torch', 'fsspec') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_values_by_path_become_nested_dicts() -> None:
    """Also replaces the test of `unflatten` in `plan.optim.optimizer_state`, which is this function now."""
    values = {(0, "lr"): 1, (0, "betas", 0): 2, (1,): 3}
    assert unflatten(values, "here") == {0: {"lr": 1, "betas": {0: 2}}, 1: 3}
    assert unflatten({(): 5}) == 5
    assert unflatten({}) == {}


def test_dicts_that_count_from_0_become_lists_but_not_the_state_of_an_optimizer() -> None:
    state = {("state", 0, "step", 0): 7, ("param_groups", 1, "lr"): 2, ("param_groups", 0, "lr"): 1}
    assert unflatten(state, has_lists=True) == {"state": {0: {"step": [7]}}, "param_groups": [{"lr": 1}, {"lr": 2}]}
    assert unflatten({("state", 0): 7, ("x", 1): 8}, has_lists=True) == {"state": [7], "x": {1: 8}}
    assert unflatten({("x",): {0: 7}}, has_lists=True) == {"x": {0: 7}}, "a value is not changed"


@pytest.mark.parametrize("order", [1, -1])
def test_a_value_below_another_is_an_error_or_dropped(order: int) -> None:
    inner = {"x": 1}
    values = dict([(("a",), inner), (("a", "b"), 2)][::order])
    with pytest.raises(FormatError, match="a value is inside another value") as caught:
        unflatten(values, "run/step-1")
    assert "run/step-1" in str(caught.value)
    assert unflatten(values) == {"a": inner if order == 1 else {"b": 2}}
    assert inner == {"x": 1}
    assert unflatten(dict([(("a",), {}), (("a", "b"), 2)][::order]), "run/step-1") == {"a": {"b": 2}}
