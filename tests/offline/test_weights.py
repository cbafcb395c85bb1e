"""`--weights`: an optimizer's copies or an average instead of the model's own, bit for bit what frameworks make."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardckpt
from shardckpt.errors import NameCollisionError, UsageError
from tests.kit.runs.cases import assert_same, load_folder

CASES = ("deepspeed_zero1_bf16_gpt2_w2", "deepspeed_zero2_bf16_nasty_w2", "deepspeed_zero3_bf16_llama_w2")
LIVE = {"w": torch.arange(6.0).bfloat16(), "b": torch.ones(2)}
EMA = {"w": torch.arange(6.0) / 3}


@pytest.mark.parametrize("name", CASES)
def test_masters_are_those_of_the_training_run_and_the_rest_is_the_models(
    name: str, fixtures: Path, tmp_path: Path
) -> None:
    report = shardckpt.consolidate(fixtures / name / "ckpt", tmp_path / "out", weights="master")
    live = load_file(fixtures / name / "truth_model.safetensors")
    masters = load_file(fixtures / name / "truth_master.safetensors")
    expected = {**live, **masters}
    assert_same(load_folder(tmp_path / "out"), {k: v for k, v in expected.items() if k not in report.ties})
    assert not report.cast


@pytest.mark.parametrize("name", CASES)
def test_masters_are_what_deepspeeds_own_converter_makes_but_for_widened_buffers(
    name: str, fixtures: Path, tmp_path: Path
) -> None:
    shardckpt.consolidate(fixtures / name / "ckpt", tmp_path / "out", weights="master")
    theirs = load_file(fixtures / name / "truth_zero_to_fp32.safetensors")
    ours = load_folder(tmp_path / "out")
    widened = {key for key in ours if ours[key].dtype != theirs[key].dtype}
    assert widened <= {"half_table"}
    assert_same({k: v.float() if k in widened else v for k, v in ours.items()}, {k: theirs[k] for k in ours})


def test_an_average_beside_the_model_is_one_too(tmp_path: Path) -> None:
    torch.save({"model": LIVE, "ema": EMA}, tmp_path / "a.pt")
    shardckpt.consolidate(tmp_path / "a.pt", tmp_path / "ema", weights="ema")
    assert_same(load_folder(tmp_path / "ema"), {"w": EMA["w"], "b": LIVE["b"]})
    report = shardckpt.consolidate(tmp_path / "a.pt", tmp_path / "live")
    assert_same(load_folder(tmp_path / "live"), LIVE)
    assert report.left_out == ("ema",)


def test_an_average_with_two_tensors_of_one_name_is_refused(tmp_path: Path) -> None:
    torch.save({"model": LIVE, "ema": {**EMA, "module.w": EMA["w"] + 1}}, tmp_path / "a.pt")
    with pytest.raises(NameCollisionError, match=r"'ema\.w' and 'ema\.module\.w' would both be named 'w'"):
        shardckpt.consolidate(tmp_path / "a.pt", tmp_path / "ema", weights="ema")


def test_weights_that_are_not_there_and_words_that_mean_none(tmp_path: Path) -> None:
    torch.save({"model": LIVE}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="--weights master: the checkpoint holds no such weights; found live"):
        shardckpt.consolidate(tmp_path / "a.pt", tmp_path / "out", weights="master")
    with pytest.raises(UsageError, match="--weights best: the checkpoint holds no such weights; found live"):
        shardckpt.consolidate(tmp_path / "a.pt", tmp_path / "out", weights="best")
    assert not (tmp_path / "out").exists()
