"""Patterns of modules fit what `re` says, and take time in proportion to the name and no more."""

from __future__ import annotations

import random
import re

import pytest

from shardckpt.errors import CheckpointError, FormatError, UnsupportedError
from shardckpt.plan.module_patterns import ModulePattern

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
    ".",
    "a.",
]


@pytest.mark.parametrize(
    "text",
    [
        "q_proj",
        "proj",
        "model.layers.0.self_attn.q_proj",
        r"layers\.\d+\.self_attn\.(q_proj|v_proj)",
        r".*\.q_proj",
        "^model.*q_proj$",
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
    ],
)
def test_a_pattern_fits_what_peft_finds_with_it(text: str) -> None:
    pattern = ModulePattern(text, "x")
    for name in NAMES:
        assert pattern.fits(name) == bool(re.match(rf"(.*\.)?({text})$", name)), name


def test_patterns_at_random_fit_what_re_says() -> None:
    dice = random.Random(0)
    compared = 0
    for _ in range(3000):
        text = "".join(dice.choice(["a", "b", ".", r"\.", "*", "+", "?", "(", "|", ")", "[ab]"]) for _ in range(6))
        try:
            expected = re.compile(rf"(.*\.)?({text})$")
            pattern = ModulePattern(text, "x")
        except (re.error, CheckpointError):
            continue
        for _ in range(5):
            name = "".join(dice.choice("ab.") for _ in range(dice.randrange(8)))
            assert pattern.fits(name) == bool(expected.match(name)), (text, name)
            compared += 1
    assert compared > 1000


@pytest.mark.parametrize("text", ["(a+)+b", "(a|b)*", "a{1,9}", "(?=a)", r"(a)\1", "a**", "(?P<x>a)", "a$b", "a+?"])
def test_other_forms_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedError, match="for ever"):
        ModulePattern(text, "x")


@pytest.mark.parametrize("text", ["(", ")", "[", "*a", "a\\", "[b-a]", 7, None, ["a"]])
def test_what_is_no_expression_is_refused(text: object) -> None:
    with pytest.raises(FormatError):
        ModulePattern(text, "x")


def test_many_alternatives_are_refused() -> None:
    with pytest.raises(UnsupportedError):
        ModulePattern("(a|a)" * 30, "x")


def test_each_character_of_a_name_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = ModulePattern("a*a*a*a*a*a*a*a*b", "x")
    looked = []
    [matcher] = pattern._sequences
    mask = matcher._mask
    monkeypatch.setattr(matcher, "_mask", lambda character: looked.append(character) or mask(character))
    assert not pattern.fits("a" * 5000)
    assert len(looked) == 5000
