"""Seconds of fuzzing for every parser and every reader; `python -m tests.fuzz` does it for as long as one likes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import ShardckptError
from shardckpt.readers.registry import BUILT_IN

from .mutations import Edit, apply, damages
from .targets import TARGETS

READERS = {name.split()[0] for name in TARGETS}


def test_every_registered_reader_is_a_target() -> None:
    assert {form.load().name for form in BUILT_IN} <= READERS


@pytest.mark.parametrize("name", TARGETS)
def test_good_input_is_accepted(name: str) -> None:
    """The control: a target that refuses everything would find nothing."""
    for which, seed in enumerate(TARGETS[name].seeds()):
        TARGETS[name].run(which, seed)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=60)
@given(which=st.integers(0, 99), damage=damages)
def test_damage_ends_in_a_result_or_a_typed_error(name: str, which: int, damage: list[Edit]) -> None:
    target = TARGETS[name]
    seeds = target.seeds()
    try:
        target.run(which % len(seeds), apply(seeds[which % len(seeds)], damage))
    except ShardckptError as error:
        assert str(error).isprintable()
        assert error.exit_code in {1, 2}, "the checkpoint or the call, never the storage"
