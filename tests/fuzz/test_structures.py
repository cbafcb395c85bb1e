"""Headers that parse and mean nonsense end in a typed error or in a result, for every reader; the dice are fixed."""

from __future__ import annotations

import random

import pytest

from shardckpt.errors import ShardckptError

from .structures import restructure
from .targets import TARGETS

_RUNS = 12


@pytest.mark.parametrize("name", TARGETS)
def test_a_header_of_other_fields_ends_in_a_result_or_a_typed_error(name: str) -> None:
    target, dice = TARGETS[name], random.Random(name)
    seeds = target.seeds()
    for _ in range(_RUNS):
        which = dice.randrange(len(seeds))
        data = restructure(seeds[which], dice)
        if data is None:
            continue
        try:
            target.run(which, data)
        except ShardckptError as error:
            assert str(error).isprintable()
            assert error.exit_code in {1, 2}, "the checkpoint or the call, never the storage"


def test_most_kinds_of_files_have_a_structure() -> None:
    dice = random.Random(0)
    known = [name for name, target in TARGETS.items() if any(restructure(seed, dice) for seed in target.seeds())]
    assert len(known) > len(TARGETS) * 0.8
