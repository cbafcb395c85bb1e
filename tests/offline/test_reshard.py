"""`reshard` writes all that a checkpoint holds for another number of ranks, and changes no bit of it."""

from __future__ import annotations

import argparse
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.encodings.tagged_json import ArrayRef, NamedValue
from shardckpt.errors import IncompleteError, TargetExistsError, UsageError
from shardckpt.native.reader import NativeReader
from shardckpt.readers.registry import open_checkpoint
from tests.kit.writers.golden_state import BOXES, full
from tests.kit.writers.materialise import materialise
from tests.kit.writers.native_writer import opened, write_step
from tests.kit.writers.samples import SAMPLES

ALL = [(name, variant) for name, variants in SAMPLES.items() for variant in variants]


def nest(reader: NativeReader) -> Any:
    paths = [record.path for record in reader.contents.arrays]
    return reader.decode_state(lambda each: paths[each.number] if isinstance(each, ArrayRef) else each)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_a_step_is_the_same_for_any_number_of_ranks(tmp_path: Path, world: int) -> None:
    source = opened(write_step(tmp_path / "src", full(), BOXES))
    report = shardckpt.reshard(str(tmp_path / "src"), str(tmp_path / "out"), world_size=world)
    result = opened(tmp_path / "out")
    assert repr(nest(result)) == repr(nest(source))
    assert list(result.manifest.tensors) == list(source.manifest.tensors)
    assert result.manifest.aliases == source.manifest.aliases
    for path in source.manifest.tensors:
        assert materialise(result, path).tobytes() == materialise(source, path).tobytes(), path
        assert result.manifest.tensors[path].stored == source.manifest.tensors[path].stored
    assert shardckpt.verify(str(tmp_path / "out")).ok
    assert result.contents.topology["world_size"] == world
    writers = {file.name.split("-")[1] for file in report.files}
    assert writers == {f"{rank:05d}" for rank in range(world)}


def test_every_rank_gets_its_rows(tmp_path: Path) -> None:
    write_step(tmp_path / "src", {"w": torch.arange(14.0).reshape(7, 2)})
    shardckpt.reshard(str(tmp_path / "src"), str(tmp_path / "out"), world_size=3)
    entry = opened(tmp_path / "out").manifest.tensors["w",]
    found = {piece.file.split("-")[1]: (piece.box.offset[0], piece.box.size[0]) for piece in entry.pieces}
    assert found == {"00000": (0, 3), "00001": (3, 3), "00002": (6, 1)}


@pytest.mark.parametrize(("name", "variant"), ALL, ids=["-".join(each) for each in ALL])
def test_every_readable_format_becomes_a_step(name: str, variant: str, tmp_path: Path) -> None:
    source = str(SAMPLES[name][variant](tmp_path / "src"))
    shardckpt.reshard(source, str(tmp_path / "out"), world_size=2)
    assert shardckpt.verify(str(tmp_path / "out")).ok
    found = shardckpt.diff(source, str(tmp_path / "out"))
    assert found.same, found
    assert found.compared >= 5
    assert set(opened(tmp_path / "out").manifest.tensors) == set(open_checkpoint(source).manifest.tensors)


def test_values_come_along(tmp_path: Path) -> None:
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0]}]
    state = {
        "model": OrderedDict(w=torch.ones(4, 2)),
        "optimizer": {"state": {0: {"step": 3}}, "param_groups": groups},
        "dtype": torch.bfloat16,
        "plain": [1, OrderedDict(a=None)],
        "mixed": [torch.ones(2), 1],
    }
    torch.save(state, tmp_path / "a.pt")
    shardckpt.reshard(str(tmp_path / "a.pt"), str(tmp_path / "out"), world_size=2)
    assert nest(opened(tmp_path / "out")) == {
        "model": {"w": ("model", "w")},
        "optimizer": {"state": {0: {"step": 3}}, "param_groups": groups},
        "dtype": NamedValue("dtype", "bfloat16"),
        "plain": [1, OrderedDict(a=None)],
        "mixed": {0: ("mixed", 0), 1: 1},  # other formats do not tell a list of tensors from a dict
    }


@pytest.mark.parametrize("to", ["native", "dcp"])
def test_values_that_the_format_cannot_hold_need_the_flag_and_are_reported(tmp_path: Path, to: str) -> None:
    torch.save({"model": {"w": torch.ones(2)}, "args": argparse.Namespace(lr=1)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=r"args.*Namespace.*--allow-loss"):
        shardckpt.reshard(str(tmp_path / "a.pt"), str(tmp_path / "out"), world_size=1, to=to)
    assert not (tmp_path / "out").exists()
    report = shardckpt.reshard(str(tmp_path / "a.pt"), str(tmp_path / "out"), world_size=1, to=to, allow_loss=True)
    assert any(warning.startswith("left out: args") for warning in report.warnings), report.warnings
    assert set(open_checkpoint(str(tmp_path / "out")).manifest.tensors) == {("model", "w")}


def test_large_tensors_go_through_a_small_buffer_and_files_are_cut(tmp_path: Path) -> None:
    big = torch.arange(3 << 20, dtype=torch.int32).reshape(-1, 1024)
    write_step(tmp_path / "src", {"big": big, "small": torch.ones(3)})
    report = shardckpt.reshard(
        str(tmp_path / "src"), str(tmp_path / "out"), world_size=2, max_shard_size="1MB", max_memory="24MiB"
    )
    assert len(report.files) > 2
    assert materialise(opened(tmp_path / "out"), ("big",)).tobytes() == big.numpy().tobytes()


def test_a_damaged_source_leaves_nothing(tmp_path: Path) -> None:
    write_step(tmp_path / "src", full(), BOXES)
    next((tmp_path / "src").glob("*-00001-00.safetensors")).unlink()
    with pytest.raises(IncompleteError):
        shardckpt.reshard(str(tmp_path / "src"), str(tmp_path / "out"), world_size=2)
    assert not (tmp_path / "out").exists()
    write_step(tmp_path / "flipped", full(), BOXES)
    file = next((tmp_path / "flipped").glob("*-00001-00.safetensors"))
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(shardckpt.errors.ChecksumError):
        shardckpt.reshard(str(tmp_path / "flipped"), str(tmp_path / "out"), world_size=2)
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    source = str(write_step(tmp_path / "src", full()))
    for wrong in ({"world_size": 0}, {"world_size": 2, "to": "tar"}, {"world_size": 2, "max_memory": "1MiB"}):
        with pytest.raises(UsageError):
            shardckpt.reshard(source, str(tmp_path / "out"), **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="overlap"):
        shardckpt.reshard(source, f"{source}/out", world_size=2)
    shardckpt.reshard(source, str(tmp_path / "out"), world_size=2)
    with pytest.raises(TargetExistsError):
        shardckpt.reshard(source, str(tmp_path / "out"), world_size=2)
    shardckpt.reshard(source, str(tmp_path / "out"), world_size=3, overwrite=True)
    assert opened(tmp_path / "out").contents.topology["world_size"] == 3


def test_a_dry_run_says_what_it_would_write(tmp_path: Path) -> None:
    source = str(write_step(tmp_path / "src", full()))
    report = shardckpt.reshard(source, str(tmp_path / "out"), world_size=4, dry_run=True)
    assert (len(report.files), report.dry_run) == (4, True)
    assert not (tmp_path / "out").exists()
    assert json.loads(json.dumps(report.seconds))


@pytest.mark.parametrize(("to", "most"), [("native", 16_384), ("dcp", 16_384), ("torch", 4096)])
def test_more_ranks_than_a_job_has_are_refused_at_once(to: str, most: int, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=rf"--world-size.*found {most + 1}; expected .*{most}"):
        shardckpt.reshard(tmp_path / "a.pt", tmp_path / "out", world_size=most + 1, to=to)


@pytest.mark.parametrize("to", ["native", "dcp"])
def test_a_format_without_whole_tensors_refuses_their_names(to: str, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(4)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=f"--keep-whole needs --to torch.*found --to {to}"):
        shardckpt.reshard(tmp_path / "a.pt", tmp_path / "out", world_size=2, to=to, keep_whole=["["])
    assert not (tmp_path / "out").exists()
