"""Rules on names and shapes alone: what they make, what they refuse, and that parts are found where they lie."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from shardckpt.boxes import Box, full_box, strides
from shardckpt.errors import NameCollisionError, UsageError
from shardckpt.manifest import Encoded, Piece, Span, Strided, TensorEntry
from shardckpt.plan.rules.rule_files import KINDS, parse_rename, parse_rules, shipped
from shardckpt.plan.rules.rules import Rule, apply_recipe, plan_remap

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "rules.schema.json").read_text())
CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2}


class File:
    """Bytes of one file, filled with arrays that lie in pieces of several kinds."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.random = random.Random(0)

    def put(self, name: str, array: np.ndarray) -> TensorEntry:
        pieces = [self._piece(box, array) for box in self._boxes(array.shape)]
        return TensorEntry((name,), array.shape, "int32", tuple(pieces))

    def _boxes(self, shape: tuple[int, ...]) -> list[Box]:
        if not shape or 0 in shape:
            return [full_box(shape)]
        dim = self.random.randrange(len(shape))
        at = self.random.randrange(shape[dim] + 1)
        low = Box((0,) * len(shape), (*shape[:dim], at, *shape[dim + 1 :]))
        offset = tuple(at if d == dim else 0 for d in range(len(shape)))
        high = Box(offset, (*shape[:dim], shape[dim] - at, *shape[dim + 1 :]))
        return [box for box in (low, high) if box.volume]

    def _piece(self, box: Box, array: np.ndarray) -> Piece:
        part = array[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))]
        start = len(self.data)
        kind = self.random.choice(("span", "strided", "encoded"))
        if kind == "span" or part.ndim < 2:
            self.data += part.tobytes()
            return Piece(box, "f", Span(start, part.nbytes))
        turned = np.ascontiguousarray(part.T)
        self.data += b"\0" * 8 + turned.tobytes()
        layout = Strided(start, 8 + part.nbytes, 2, tuple(reversed(strides(turned.shape))))
        if kind == "strided":
            return Piece(box, "f", layout)
        return Piece(box, "f", Encoded("zstd", 0, 0, layout))  # as if the decoded stream were the file

    def read(self, entry: TensorEntry) -> np.ndarray:
        found = np.full(entry.shape, -1, np.int32)
        for box, _, layout in entry.pieces:
            inner = layout.inner if isinstance(layout, Encoded) else layout
            if isinstance(inner, Span):
                part = np.frombuffer(self.data, np.int32, box.volume, inner.offset).reshape(box.size)
            else:
                assert isinstance(inner, Strided)
                steps = [4 * s for s in inner.strides]
                part = np.ndarray(box.size, np.int32, bytes(self.data), inner.offset + 4 * inner.start, steps)
            at = tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))
            assert (found[at] == -1).all(), "no element comes from two pieces"
            found[at] = part
        assert (found != -1).all(), "and every one comes from one"
        return found


def made(text: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return what rules make of arrays, read through the pieces."""
    file = File()
    entries = {name: file.put(name, array) for name, array in arrays.items()}
    rules = parse_rules(text, "rules.toml", CONFIG)
    result = plan_remap(rules, {name: (array.shape, "int32") for name, array in arrays.items()})
    found = {name: file.read(apply_recipe(m.recipe, name, entries)) for name, m in result.made.items()}
    for name, m in result.made.items():
        assert found[name].shape == m.recipe.shape
    return found


def numbers(*shape: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + int(np.prod(shape)), dtype=np.int32).reshape(shape)


def rule(kind: str, **given: object) -> str:
    return f"[[rule]]\n{kind} = {{ {', '.join(f'{k} = {json.dumps(v)}' for k, v in given.items())} }}\n"


EXPERTS = {
    f"layers.{layer}.experts.{expert}.w1.weight": numbers(2, 3, start=100 * layer + 10 * expert)
    for layer in (0, 1)
    for expert in (1, 0, 2)
}


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_experts_are_stacked_by_their_numbers_and_unstacked_again(dim: int) -> None:
    names = {"from": "layers.{l}.experts.{e}.w1.weight", "to": "layers.{l}.experts.w1"}
    stack = rule("stack", **{"from": names["from"], "over": "e", "to": names["to"], "dim": dim})
    found = made(stack, EXPERTS)
    assert list(found) == ["layers.0.experts.w1", "layers.1.experts.w1"]
    expected = np.stack([EXPERTS[f"layers.1.experts.{e}.w1.weight"] for e in range(3)], dim)
    assert (found["layers.1.experts.w1"] == expected).all()
    undo = rule("unstack", **{"from": names["to"], "over": "e", "to": names["from"], "dim": dim})
    back = made(stack + undo, EXPERTS)
    assert sorted(back) == sorted(EXPERTS)
    assert all((back[name] == EXPERTS[name]).all() for name in EXPERTS)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("groups", [1, 2, "each"])
def test_fused_tensors_are_end_to_end_or_in_groups_and_split_again(dim: int, groups: int | str) -> None:
    q, k = numbers(4, 6), numbers(4, 6, start=100)
    sizes = {} if groups == "each" else {"sizes": [q.shape[dim], k.shape[dim]]}
    fuse = rule("fuse", **{"from": ["a.{l}.q", "a.{l}.k"], "to": "a.{l}.qk", "dim": dim, "groups": groups})
    split = rule("split", **{"from": "a.{l}.qk", "to": ["a.{l}.q", "a.{l}.k"], "dim": dim, "groups": groups, **sizes})
    found = made(fuse, {"a.0.q": q, "a.0.k": k})["a.0.qk"]
    n = {"each": q.shape[dim]}.get(str(groups), groups)
    runs = [part for pair in zip(np.split(q, n, dim), np.split(k, n, dim), strict=True) for part in pair]
    assert (found == np.concatenate(runs, dim)).all()
    back = made(fuse + split, {"a.0.q": q, "a.0.k": k})
    assert (back["a.0.q"] == q).all()
    assert (back["a.0.k"] == k).all()


def test_sizes_may_be_shares_that_the_config_says() -> None:
    qkv = numbers(16, 3)
    told = ["num_attention_heads", "num_key_value_heads", "num_key_value_heads"]
    text = rule("split", **{"from": "qkv", "to": ["q", "k", "v"], "sizes": told, "groups": "num_key_value_heads"})
    found = made(text, {"qkv": qkv})
    by_group = qkv.reshape(2, 8, 3)
    assert (found["q"] == by_group[:, :4].reshape(8, 3)).all()
    assert (found["v"] == by_group[:, 6:].reshape(4, 3)).all()
    with pytest.raises(UsageError, match=r"num_key_value_heads.*config\.json.*--config-from"):
        parse_rules(text, "x", {})


def test_rules_follow_one_another() -> None:
    text = (
        rule("transpose", name="{l}.w", dims=[2, 0, 1])
        + rule("rename", **{"from": r"(\d)\.w", "to": r"x.\1"})
        + rule("split", **{"from": "x.{n}", "to": ["{n}.a", "{n}.b"], "sizes": [1, 3]})
        + rule("drop", name=r".*\.a")
    )
    w = numbers(2, 3, 4)
    found = made(text, {"0.w": w, "1.w": w + 1000})
    assert list(found) == ["0.b", "1.b"]
    assert (found["1.b"] == (w + 1000).transpose(2, 0, 1)[1:]).all()


def test_braces_stand_for_one_component_and_everything_else_for_itself() -> None:
    shapes = {"layers.norm.weight": ((1,), "float32"), "layersX3Xweight": ((1,), "float32")}
    with pytest.raises(UsageError, match="matches no tensor"):
        plan_remap(parse_rules(rule("rename", **{"from": "layers.{l}.{n}.weight", "to": "x"}), "x"), shapes)
    found = plan_remap(parse_rules(rule("rename", **{"from": "layers.{l}.weight", "to": "w.{l}"}), "x"), shapes)
    assert list(found.made) == ["w.norm", "layersX3Xweight"]


def test_casts_and_what_was_dropped_are_told() -> None:
    rules = parse_rules(rule("cast", name="a", dtype="bf16") + rule("drop", name="b"), "x")
    found = plan_remap(rules, {"a": ((2,), "float32"), "b": ((1,), "int64")})
    assert (found.made["a"].cast, found.made["a"].dtype) == ("bfloat16", "float32")
    assert found.dropped == ("b",)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"model\.(.*)=\1", {"model.a": "a", "b": "b"}),
        (r"(?!model)(.*)=x.\1", {"model.a": "model.a", "b": "x.b"}),
        (r"(?=b)b=c", {"model.a": "model.a", "b": "c"}),
        ("model.{x}={x}.y", {"model.a": "a.y", "b": "b"}),
    ],
)
def test_renames_of_the_command_line(text: str, found: dict[str, str]) -> None:
    result = plan_remap([parse_rename(text)], dict.fromkeys(found, ((1,), "float32")))
    assert list(result.made) == list(found.values())


SHAPES = {
    **{f"e.{i}.w": ((2, 3), "float32") for i in range(3)},
    "odd.0.w": ((2, 3), "float32"),
    "odd.1.w": ((2, 4), "float32"),
    "half.0.w": ((2,), "float32"),
    "half.1.w": ((2,), "float16"),
    "gap.0.w": ((2,), "float32"),
    "gap.2.w": ((2,), "float32"),
    "ints": ((4,), "int64"),
}


def _stack(source: str, to: str = "x", over: str = "e", **more: object) -> str:
    return rule("stack", **{"from": source, "over": over, "to": to, **more})


REFUSED: list[tuple[str, str]] = [
    (rule("rename", **{"from": "nothing", "to": "x"}), "rule 1 .rename.*matches no tensor"),
    (rule("rename", **{"from": "e.{i}.w", "to": "x"}), "both be named 'x'"),
    (rule("rename", **{"from": "ints", "to": "e.0.w"}), r"both be named 'e\.0\.w'"),
    (_stack("gap.{e}.w"), "hole.*= 1 is missing"),
    (_stack("odd.{e}.w"), r"odd\.1\.w does not fit odd\.0\.w"),
    (_stack("half.{e}.w"), "float16"),
    (_stack("{e}"), "must be a number in ints"),
    (_stack("e.{e}.w", dim=3), "no such dimension"),
    (_stack("{a}.{e}.w"), "one place in a stack"),
    (rule("split", **{"from": "e.0.w", "to": ["a", "b"], "sizes": [1, 2]}), "sum of 2"),
    (rule("split", **{"from": "e.0.w", "to": ["a", "a"]}), "one name"),
    (rule("split", **{"from": "e.0.w", "to": ["a", "b"], "dim": 1}), "sizes do not fit"),
    (rule("fuse", **{"from": ["e.{i}.w", "gone.{i}"], "to": "f.{i}"}), "nothing matches 'gone"),
    (rule("fuse", **{"from": ["odd.0.w", "odd.1.w"], "to": "f"}), "does not fit"),
    (rule("fuse", **{"from": ["e.0.w", "e.1.w"], "to": "f", "dim": 1, "groups": 2}), "2 groups"),
    (rule("transpose", name="e.0.w", dims=[0, 0]), "dims do not fit"),
    (rule("cast", name="ints", dtype="bf16"), "must have a float type"),
    (rule("unstack", **{"from": "e.0.w", "over": "k", "to": "e.{k}.w"}), "both be named"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[str(i) for i in range(len(REFUSED))])
def test_a_rule_that_does_not_fit_is_refused_by_number_and_tensor(text: str, message: str) -> None:
    with pytest.raises((UsageError, NameCollisionError), match=message):
        plan_remap(parse_rules(text, "x"), SHAPES)


MALFORMED: list[tuple[str, str]] = [
    ("[[rule]", "invalid TOML"),
    ("", "must be a list of rules"),
    ("rule = 3", "must be a list of rules"),
    ("[[rules]]\ndrop = {name = 'a'}", "must be a list of rules"),
    ("[[rule]]\ndrop = {name = 'a'}\nrename = {from = 'a', to = 'b'}", "must have one known kind"),
    ("[[rule]]\nmelt = {name = 'a'}", "must have one known kind"),
    ("[[rule]]\ndrop = {nam = 'a'}", "do not fit its kind"),
    ("[[rule]]\ndrop = {name = 3}", "must be text"),
    ("[[rule]]\ndrop = {name = '('}", "invalid regular expression"),
    ("[[rule]]\ndrop = {name = 'a'}\noptional = 1", "must be true or false"),
    (rule("rename", **{"from": "a", "to": "{x}"}), "names {x}"),
    (rule("rename", **{"from": "(a)", "to": r"\2"}), "names "),
    (_stack("a.{e}", to="a.{e}"), "not in `to`"),
    (rule("unstack", **{"from": "a", "over": "e", "to": "b"}), "must stand in `to`"),
    (rule("split", **{"from": "a", "to": ["b"], "sizes": [1, 2]}), "differ in number"),
    (rule("split", **{"from": "a", "to": ["b"], "sizes": [0]}), "a number from 1"),
    (rule("split", **{"from": "a", "to": []}), "must be a list"),
    (rule("fuse", **{"from": "a", "to": "b"}), "must be a list"),
    (rule("transpose", name="a", dims=["x"]), "must be an integer"),
    (rule("cast", name="a", dtype="int8"), "must be a float type"),
]


@pytest.mark.parametrize(("text", "message"), MALFORMED, ids=[str(i) for i in range(len(MALFORMED))])
def test_a_file_that_holds_no_rules_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_rules(text, "rules.toml")


def test_a_rule_may_be_optional() -> None:
    text = rule("drop", name="gone") + "optional = true\n"
    assert list(plan_remap(parse_rules(text, "x"), {"a": ((), "float32")}).made) == ["a"]


@pytest.mark.parametrize("name", sorted(shipped()))
def test_what_comes_along_is_read_and_follows_the_schema(name: str) -> None:
    text = shipped()[name]
    rules: tuple[Rule, ...] = parse_rules(text, name, CONFIG)
    assert rules
    jsonschema.validate(tomllib.loads(text), SCHEMA)


def test_the_schema_knows_the_kinds_that_are_read_and_no_others() -> None:
    assert set(SCHEMA["$defs"]) >= set(KINDS)
    assert set(SCHEMA["properties"]["rule"]["items"]["properties"]) == {*KINDS, "optional"}
    for text, _ in REFUSED:
        jsonschema.validate(tomllib.loads(text), SCHEMA)
    for text, message in MALFORMED[2:10]:
        if "regular expression" in message:
            continue  # which no schema tells
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(tomllib.loads(text), SCHEMA)
