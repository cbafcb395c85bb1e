"""`save_total_limit` removes the steps whose folders the Trainer itself removes."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st


@given(
    is_best=st.lists(st.booleans(), max_size=9),
    is_saved=st.lists(st.booleans(), min_size=9, max_size=9),
    limit=st.sampled_from([None, 0, 1, 2, 3, 4]),
)
def test_the_same_steps_stay_as_of_the_trainer(is_best: list[bool], is_saved: list[bool], limit: int | None) -> None:
    from transformers.trainer_utils import rotate_checkpoints

    from shardckpt.integrations.transformers.trainer_folder import choose_removed

    numbers: list[int] = []
    best = None
    with tempfile.TemporaryDirectory() as folder:
        for number, (becomes_best, saves) in enumerate(zip(is_best, is_saved, strict=False), 8):
            if not saves:
                continue
            best = number if becomes_best else best
            Path(folder, f"checkpoint-{number}").mkdir()
            rotate_checkpoints(folder, limit, None if best is None else f"{folder}/checkpoint-{best}")
            numbers.append(number)
            numbers = [each for each in numbers if each not in choose_removed(numbers, limit, best)]
            assert {path.name for path in Path(folder).iterdir()} == {f"checkpoint-{each}" for each in numbers}
