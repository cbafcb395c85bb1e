"""Earlier names of public parameters still work: each warns at the caller's line; both names at once are refused."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.checkpoint.load.load import EARLIER_PARAMS
from shardckpt.checkpoint.manager import Checkpointer
from shardckpt.deprecation import renamed_params
from shardckpt.errors import UsageError

STATE = {"a": torch.arange(4.0)}
SAVE = {
    "group": ("process_group", None),
    "about": ("custom_metadata", {"by": "me"}),
    "digests": ("store_digests", True),
    "base_rules": ("base_key_map", {}),
}
ASYNC = {**SAVE, "budget": ("max_staging_bytes", "1MiB")}
RESTORE = {"fan_out": ("broadcast_reads", False), "partial": ("ignore_extra", True), "rules": ("key_map", {"^b$": "a"})}
LOAD = {"group": ("process_group", None), **RESTORE}


def save_step(folder: Path, **given: Any) -> None:
    Checkpointer(folder).save(1, STATE, **given)


def async_save_step(folder: Path, **given: Any) -> None:
    Checkpointer(folder).async_save(1, STATE, **given).result()


def restore(folder: Path, **given: Any) -> None:
    Checkpointer(folder).save(1, STATE)
    assert Checkpointer(folder).restore({"a": torch.zeros(4)}, **given) == 1


def load(folder: Path, **given: Any) -> None:
    shardckpt.save(STATE, folder / "c")
    shardckpt.load({"a": torch.zeros(4)}, folder / "c", **given)


VERBS: list[tuple[Callable[..., Any], Callable[..., None], dict[str, tuple[str, Any]]]] = [
    (shardckpt.save, lambda folder, **given: shardckpt.save(STATE, folder / "c", **given), SAVE),
    (shardckpt.async_save, lambda folder, **given: shardckpt.async_save(STATE, folder / "c", **given).result(), ASYNC),
    (shardckpt.load, load, LOAD),
    (Checkpointer, Checkpointer, {"group": SAVE["group"]}),
    (Checkpointer.save, save_step, SAVE),
    (Checkpointer.async_save, async_save_step, ASYNC),
    (Checkpointer.restore, restore, RESTORE),
]
CASES = [
    pytest.param(verb, call, old, new, value, id=f"{verb.__qualname__}-{old}")
    for verb, call, names in VERBS
    for old, (new, value) in names.items()
]


@pytest.mark.parametrize(("verb", "call", "old", "new", "value"), CASES)
class TestEarlierNames:
    def test_the_earlier_name_works_and_warns_at_the_callers_line(self, verb, call, old, new, value, tmp_path) -> None:
        with pytest.warns(DeprecationWarning, match=f"`{old}`.*use `{new}`") as found:
            call(tmp_path, **{old: value})
        assert [each.filename for each in found] == [__file__]

    def test_the_new_name_does_not_warn(self, verb, call, old, new, value, tmp_path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            call(tmp_path, **{new: value})

    def test_both_at_once_are_refused(self, verb, call, old, new, value, tmp_path) -> None:
        with pytest.raises(UsageError, match=f"`{new}` and its earlier name `{old}`"):
            call(tmp_path, **{old: value, new: value})

    def test_the_signature_has_the_new_name_alone(self, verb, call, old, new, value) -> None:
        names = inspect.signature(verb).parameters
        assert old == "rules" or old not in names, "`rules` is a file of rules now"
        assert new in names or "options" in names


GLOBS = ["a", "b.*"]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"partial": GLOBS}, {"include": GLOBS}),
        ({"partial": "a"}, {"include": "a"}),
        ({"partial": False}, {"ignore_extra": False}),
        ({"rules": {"^b$": "a"}}, {"key_map": {"^b$": "a"}}),
    ],
)
def test_values_of_earlier_parameters_are_passed_on(old: dict[str, Any], new: dict[str, Any]) -> None:
    @renamed_params(**EARLIER_PARAMS)
    def call(**given: Any) -> dict[str, Any]:
        return given

    with pytest.warns(DeprecationWarning):
        assert call(**old) == new
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(rules="rules.toml") == {"rules": "rules.toml"}


def test_the_value_arrives(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning):
        shardckpt.save(STATE, tmp_path / "c", about={"by": "me"})
    (manifest,) = tmp_path.glob("c/*manifest*.json")
    assert json.loads(manifest.read_text())["about"]["by"] == "me"


def test_the_kind_of_a_state_is_parsed_under_its_earlier_name_too() -> None:
    with pytest.warns(DeprecationWarning, match="`StateKind.of` is deprecated .* use `StateKind.parse`") as seen:
        assert shardckpt.StateKind.of("full") is shardckpt.StateKind.parse("full") is shardckpt.StateKind.FULL
    assert seen[0].filename == __file__
