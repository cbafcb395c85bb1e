"""Whatever sharded or wrapped a model, its state has one vocabulary, and goes from any of them to any other."""

from __future__ import annotations

import pytest
from harness import run
from states import FACES, HYBRID, PARALLEL, everything


@pytest.mark.parametrize("face", list(FACES))
def test_every_face_gives_and_takes_the_plain_state(face):
    assert run(2, lambda rank, world: everything({face: FACES[face]})) == [[], []]


@pytest.mark.parametrize("face", list(HYBRID))
def test_ranks_that_hold_copies_give_and_take_the_plain_state(face):
    assert (
        run(4, lambda rank, world: everything({face: HYBRID[face]}, (2, 2), ("copies", "cut")), timeout=60) == [[]] * 4
    )


@pytest.mark.parametrize("face", list(PARALLEL))
def test_tensor_parallel_models_give_and_take_the_plain_state(face):
    assert run(4, lambda rank, world: everything({face: PARALLEL[face]}, (2, 2), ("dp", "tp")), timeout=60) == [[]] * 4
