"""Patterns of modules fit what `re` says, and take time in proportion to the name and no more."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable

import pytest

from shardckpt.errors import CheckpointError, FormatError, UnsafeError, UnsupportedError
from shardckpt.plan.module_patterns import MatchBudget, ModulePattern

NAMES = [
    "",
    "q_proj",
    "a.q_proj",
    "model.layers.0.self_attn.q_proj",
    "model.layers.11.self_attn.v_proj",
    "model.layers.1.mlp.down_proj",
    "modelXlayers.1",
    "m.aaa",
    "ab",
    "aab.b",
    "a\nb",
    "aab\nb",
    ".",
    "a.",
]


def made(text: object) -> ModulePattern:
    return ModulePattern(text, "x", MatchBudget(1000, "x"))


@pytest.mark.parametrize(
    "text",
    [
        "q_proj",
        "proj",
        "model.layers.0.self_attn.q_proj",
        r"layers\.\d+\.self_attn\.(q_proj|v_proj)",
        r".*\.q_proj",
        "^model.*q_proj$",
        "^q_proj",
        "^layers.*q_proj",
        "^a.q_proj",
        "^(a|b)",
        "^b",
        "a+b?",
        "a*",
        "[ab]*b",
        "[^.]+",
        r"(?:layers|blocks)\.[01]\.mlp\.down_proj",
        r"layers\.1[0-9]?\..*",
        "((a|b)|aab)",
        "(a|)b",
        "",
        r"\w+\.b",
        r"layers\.0\.self_attn\.q_proj",
        "m.aa?a|ab",
        r"a.\w",
        r".*\w",
        r"aab\.b",
        "model.layers.(0|1|1[0-9]).mlp.(up|down)_proj",
    ],
)
def test_a_pattern_fits_what_peft_finds_with_it(text: str) -> None:
    pattern = made(text)
    for name in NAMES:
        assert pattern.fits(name) == bool(re.match(rf"(.*\.)?({text})$", name)), name


def test_patterns_at_random_fit_what_re_says() -> None:
    dice = random.Random(0)
    compared = 0
    for _ in range(3000):
        text = "".join(dice.choice(["a", "b", ".", r"\.", "*", "+", "?", "(", "|", ")", "[ab]"]) for _ in range(6))
        try:
            expected = re.compile(rf"(.*\.)?({text})$")
            pattern = made(text)
        except (re.error, CheckpointError):
            continue
        for _ in range(5):
            name = "".join(dice.choice("ab.") for _ in range(dice.randrange(8)))
            assert pattern.fits(name) == bool(expected.match(name)), (text, name)
            compared += 1
    assert compared > 1000


@pytest.mark.parametrize("text", ["(a+)+b", "(a|b)*", "a{1,9}", "(?=a)", r"(a)\1", "a**", "(?P<x>a)", "a$b", "a+?"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match="forever"):
        made(text)


@pytest.mark.parametrize("text", ["(", ")", "[", "*a", "a\\", "[b-a]", 7, None, ["a"]])
def test_what_is_no_expression_is_refused(text: object) -> None:
    with pytest.raises(FormatError):
        made(text)


def test_many_alternatives_are_told_apart() -> None:
    pattern = made("(a|b)" * 30 + "c")
    assert pattern.fits("x." + "ab" * 15 + "c")
    assert not pattern.fits("x." + "ab" * 15)


def test_patterns_that_would_take_minutes_are_refused_in_time() -> None:
    names = [f"model.layers.{i}.self_attn.{kind}_proj" for i in range(8) for kind in "qkvo"]
    texts = [f"{'(.|x)' * 6}.*z{i}" for i in range(1000)]
    steps = MatchBudget(sum(map(len, names + texts)), "adapter")
    started = time.process_time()
    with pytest.raises(UnsafeError, match=r"adapter: .*patterns take too long"):
        assert not any(
            pattern.fits(name) for pattern in [ModulePattern(t, "x", steps) for t in texts] for name in names
        )
    assert time.process_time() - started < 2


def test_a_pattern_that_has_very_many_states_is_refused_in_time() -> None:
    dice = random.Random(0)
    steps = MatchBudget(200_000, "adapter")
    pattern = ModulePattern("[ab]*a" + "(a|b)" * 19, "x", steps)
    started = time.process_time()
    with pytest.raises(UnsafeError):
        while not pattern.fits("".join(dice.choice("ab") for _ in range(5000)) + "c"):
            pass
    assert time.process_time() - started < 3


@pytest.mark.parametrize("escape", [str, re.escape])
def test_an_adapter_with_a_pattern_for_each_of_its_modules_is_matched(escape: Callable[[str], str]) -> None:
    kinds = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj"]
    names = [f"model.layers.{i}.{kind}" for i in range(64) for kind in kinds]
    steps = MatchBudget(2 * sum(map(len, names)), "adapter")
    patterns = [ModulePattern(escape(name), "x", steps) for name in names]
    found = [next(i for i, pattern in enumerate(patterns) if pattern.fits(name)) for name in names]
    assert found == list(range(len(names)))


def test_dozens_of_expressions_are_matched_with_thousands_of_modules() -> None:
    names = [f"model.layers.{i}.mlp.experts.{j}.{k}_proj" for i in range(16) for j in range(32) for k in ("up", "down")]
    texts = [rf"layers\.{i}\.mlp\..*(down|up)_proj" for i in range(16)] + [
        r".*\.\d+\.q_proj",
        r"experts\.[0-9]+\.o_proj",
    ]
    steps = MatchBudget(sum(map(len, names + texts)), "adapter")
    patterns = [ModulePattern(text, "x", steps) for text in reversed(texts)]
    assert all(any(pattern.fits(name) for pattern in patterns) for name in names)
