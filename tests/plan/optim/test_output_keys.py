"""Tensors of an optimizer lie end to end as their flat parameters have them; what cannot lie so is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from shardckpt.boxes import full_box
from shardckpt.errors import UsageError
from shardckpt.layout import FlatLayout, ParamSpec
from shardckpt.manifest import Encoded, Piece, Span, Strided, TensorEntry
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.optim.output_keys import rekey_state, to_state_paths

SHAPES = {"a": (2, 3), "b": (3,), "other": (4,)}


def tensor(name: str, slot: str = "m", shape: tuple[int, ...] | None = None, dtype: str = "float32") -> OutputTensor:
    size = SHAPES[name] if shape is None else shape
    piece = Piece(full_box(size), "f" if slot == "step" else name, Span(0, 4))
    return OutputTensor(f"{name}/{slot}", TensorEntry((name,), size, dtype, (piece,)), dtype)


def units(alignment: int = 1, order: tuple[int, ...] = ()) -> dict[str, FlatLayout]:
    specs = (ParamSpec("a", (2, 3), "float32", order), ParamSpec("b", (3,), "float32"))
    return {"flat": FlatLayout(specs, 2, alignment)}


def content(*groups: dict[str, Any], **values: Any) -> dict[str, Any]:
    return {"param_groups": groups or ({"lr": 1, "params": ["other", "b", "a"]},), "non_tensor_state": values}


def test_members_are_written_back_to_back_in_the_order_of_the_layout() -> None:
    given = [tensor("other"), tensor("b"), tensor("a"), *(tensor(n, "step", ()) for n in ("a", "b"))]
    made, said = rekey_state(given, content(a={"k": 1}, b={"k": 1}, other={"k": 2}), "flat-parameters", units=units())
    assert [(t.name, t.shape, [m.name for m in t.members]) for t in made] == [
        ("other/m", (4,), []),
        ("flat/m", (9,), ["a/m", "b/m"]),
        ("flat/step", (), []),
    ]
    assert made[1].nbytes == 36
    assert said["param_groups"] == [{"lr": 1, "params": ["other", "flat"]}]
    assert said["originals"] == [["other", "b", "a"]]
    assert said["non_tensor_state"] == {"other": {"k": 2}, "flat": {"k": 1}}


def test_a_flat_parameter_is_in_the_first_group_of_its_members() -> None:
    groups = ({"lr": 1, "params": ["b"]}, {"lr": 1, "params": []}, {"lr": 1, "params": ["a", "other"]})
    _, said = rekey_state([tensor("a"), tensor("b")], content(*groups), "flat-parameters", units=units())
    assert [group["params"] for group in said["param_groups"]] == [["flat"], [], ["other"]]


@pytest.mark.parametrize("kind", ["span", "strided", "encoded"])
def test_a_parameter_in_another_order_is_read_in_that_order(kind: str) -> None:
    inner = Span(8, 24) if kind == "span" else Strided(8, 24, 0, (3, 1))
    layout = Encoded("zstd", 5, 9, inner) if kind == "encoded" else inner
    entry = TensorEntry(("a",), (2, 3), "float32", (Piece(full_box((2, 3)), "f", layout),))
    tensors = [OutputTensor("a/m", entry, "float32"), tensor("b")]
    made, _ = rekey_state(tensors, content(), "flat-parameters", units=units(order=(1, 0)))
    [piece] = made[0].members[0].entry.pieces
    assert made[0].members[0].shape == piece.box.size == (3, 2)
    found = piece.layout.inner if isinstance(piece.layout, Encoded) else piece.layout
    assert found == Strided(8, 24, 0, (1, 3))


@pytest.mark.parametrize(
    ("given", "said", "laid", "text"),
    [
        ([tensor("a")], content(), units(), "flat/m: a flat parameter would have holes; found nothing of b"),
        (
            [tensor("a"), tensor("b")],
            content(),
            units(4),
            "flat/m: a flat parameter would have holes; found alignment 4",
        ),
        (
            [tensor("a"), tensor("b", shape=(2,))],
            content(),
            units(),
            "b/m: a value must have its parameter's shape",
        ),
        ([tensor("a"), tensor("b", dtype="bfloat16")], content(), units(), "members of one flat parameter differ"),
        ([tensor("a", "step", ()), tensor("b", "s", ())], content(), units(), "flat/step: a flat parameter would"),
        (
            [tensor("a"), tensor("b")],
            content({"lr": 1, "params": ["a"]}, {"lr": 2, "params": ["b"]}),
            units(),
            "parameters of one group were saved with different settings; found lr=1 of a; lr=2 of b",
        ),
        ([tensor("a"), tensor("b")], content(a={"k": 1}), units(), "flat/k: members of one flat parameter differ"),
    ],
)
def test_what_cannot_lie_so_is_refused_by_name(
    given: list[OutputTensor], said: dict[str, Any], laid: dict[str, FlatLayout], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        rekey_state(given, said, "flat-parameters", units=laid)


def test_steps_that_are_not_one_and_the_same_are_refused() -> None:
    other = tensor("b", "step", ())
    moved = OutputTensor(
        "b/step", other.entry._replace(pieces=(Piece(full_box(()), "elsewhere", Span(0, 4)),)), "float32"
    )
    with pytest.raises(UsageError, match="flat/step: members of one flat parameter differ; found a/step and b/step"):
        rekey_state([tensor("a", "step", ()), moved], content(), "flat-parameters", units=units())


@pytest.mark.parametrize("keys", ["names", "ids", "flat"])
def test_tensors_keep_their_order_though_slots_of_parameters_are_mixed(keys: Any) -> None:
    """Files of torch.save number their storages in this order."""
    given = [tensor("b"), tensor("a"), tensor("b", "v"), tensor("a", "v")]
    rekeyed, settings = rekey_state(given, content({"lr": 1, "params": ["a", "b"]}), keys)
    by_path, _ = to_state_paths(rekeyed, settings)
    assert list(by_path.values()) == list(rekeyed)
    assert [output.entry for output in rekeyed] == [output.entry for output in given]
