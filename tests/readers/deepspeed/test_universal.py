"""Universal checkpoints of DeepSpeed: the same whole tensors as from the folder that they were made of."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

import shardckpt
from shardckpt.errors import FormatError, IncompleteError
from shardckpt.readers.deepspeed import reader as deepspeed
from shardckpt.readers.deepspeed import universal
from shardckpt.readers.registry import detect, open_checkpoint, open_source
from tests.kit.writers.deepspeed_writer import write, write_universal
from tests.readers.deepspeed.test_deepspeed_reader import RUN, assert_is, opened


@pytest.mark.parametrize("world", [1, 2, 5])
@pytest.mark.parametrize("stage", [2, 3])
def test_parameters_come_from_their_folders(stage: int, world: int, tmp_path: Path) -> None:
    folder = write_universal(tmp_path, RUN, stage, world)
    assert_is(opened(folder), RUN)
    assert_is(opened(folder / "global_step3_universal"), RUN)


def test_it_is_told_from_the_folder_that_it_was_made_of(tmp_path: Path) -> None:
    write_universal(tmp_path, RUN, 2, 2)
    assert detect(open_source(str(tmp_path))) is universal.FORMAT
    write(tmp_path, RUN, 2, 2)
    assert detect(open_source(str(tmp_path))) is deepspeed.FORMAT
    assert detect(open_source(str(tmp_path / "global_step3_universal"))) is universal.FORMAT


def test_both_hold_the_same(tmp_path: Path) -> None:
    source, made = write(tmp_path / "zero", RUN, 3, 3), write_universal(tmp_path / "universal", RUN, 2, 1)
    assert shardckpt.diff(source, made, exclude=["dp_world_size"]).same


def test_no_model_file_is_said(tmp_path: Path) -> None:
    folder = write_universal(tmp_path, RUN, 2, 1)
    (folder / "global_step3_universal/mp_rank_00_model_states.pt").unlink()
    with pytest.raises(IncompleteError, match="no model file is next to zero/"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize("gone", ["exp_avg_sq.pt", "."])
def test_a_missing_file_or_folder_of_a_parameter_is_named(gone: str, tmp_path: Path) -> None:
    folder = write_universal(tmp_path, RUN, 2, 1)
    param = folder / "global_step3_universal/zero/k"
    for file in list(param.iterdir()) if gone == "." else [param / gone]:
        file.unlink()
    with contextlib.suppress(OSError):
        param.rmdir()
    with pytest.raises(IncompleteError, match=r"'k' has no (exp_avg_sq|fp32)"):
        open_checkpoint(str(folder))


def test_a_parameter_without_weights_is_named(tmp_path: Path) -> None:
    folder = write_universal(tmp_path, RUN, 2, 1)
    (folder / "global_step3_universal/zero/k/fp32.pt").unlink()
    with pytest.raises(IncompleteError, match=r"'k' has no weights.*expected fp32\.pt"):
        open_checkpoint(str(folder))


def test_flat_weights_of_another_length_are_named(tmp_path: Path) -> None:
    folder = write_universal(tmp_path, RUN, 3, 2)
    torch.save(torch.zeros(99), folder / "global_step3_universal/zero/k/exp_avg.pt")
    with pytest.raises(FormatError, match=r"'k' is not as long.*found 99 elements.*expected 18"):
        open_checkpoint(str(folder))


def test_a_file_without_an_array_is_named(tmp_path: Path) -> None:
    folder = write_universal(tmp_path, RUN, 2, 2)
    torch.save({"other": torch.zeros(3)}, folder / "global_step3_universal/zero/k/fp32.pt")
    with pytest.raises(FormatError, match=r"holds no tensor.*found other"):
        open_checkpoint(str(folder))
