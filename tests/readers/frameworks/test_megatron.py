"""Megatron's distributed folders: DCP with a name, and words on what is stacked or of another backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import shardckpt
from shardckpt.errors import UnknownFormatError, UnsupportedError
from shardckpt.manifest import dotted
from shardckpt.readers.frameworks import megatron
from shardckpt.readers.registry import detect, open_checkpoint, open_source
from tests.kit.writers import megatron_writer
from tests.kit.writers.dcp_writers import save
from tests.kit.writers.materialise import assert_same
from tests.kit.writers.samples import MODEL, SAMPLES


def test_it_is_dcp_with_what_all_ranks_share_beside(tmp_path: Path) -> None:
    source = open_source(str(SAMPLES["megatron"]["torch_dist"](tmp_path / "iter_0000003")))
    assert detect(source) is megatron.FORMAT
    reader = megatron.open_source(source)
    for name, value in MODEL.items():
        assert_same(reader, ("model", name), value)
    assert reader.load_object(reader.manifest.objects["common.pt",]) == {"iteration": 3}
    assert reader.manifest.warnings == ()


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.full), 2])
def test_folders_of_megatron_core_are_read_bit_for_bit(tmp_path: Path, world: int) -> None:
    folder = tmp_path / "iter_0000010"
    folder.mkdir()
    command = [sys.executable, megatron_writer.__file__, str(folder)]
    ranks = [subprocess.Popen([*command, str(rank), str(world)], stderr=subprocess.PIPE) for rank in range(world)]
    assert [rank.communicate()[1][-2000:] for rank in ranks if rank.wait()] == []
    truth = megatron_writer.truth()
    reader = open_checkpoint(str(folder))
    assert len(reader.manifest.tensors) == len(truth)
    for path, entry in reader.manifest.tensors.items():
        assert_same(reader, path, truth[dotted(entry.path)])
    assert shardckpt.verify(folder).problems == ()

    report = shardckpt.consolidate(folder, tmp_path / "out")
    merged = load_file(tmp_path / "out/model.safetensors")
    assert {f"model.{name}" for name in merged} == {name for name in truth if name.startswith("model.")}
    assert all(torch.equal(value, truth[f"model.{name}"]) for name, value in merged.items())
    extra = [f"model.layers._extra_state/shard_{rank}_{world}" for rank in range(world)]
    assert sorted(report.left_out) == sorted([*extra, "optimizer", "optimizer.step/shard_0_1", "common.pt"])

    with pytest.warns(
        UserWarning,
        match=r"only the library that wrote them can read them: .*common\.pt\.args, common\.pt\.scheduler\.mode",
    ):
        loaded = shardckpt.load(folder)
    assert loaded["common.pt"]["iteration"] == 10
    assert loaded["common.pt"]["scheduler"] == {"max_lr": 0.1}
    assert loaded["optimizer.step/shard_0_1"] == [{"step": 3}]


def test_stacked_layers_are_said(tmp_path: Path) -> None:
    weights = {"decoder.layers.mlp.weight": torch.zeros(2, 3), "decoder.layers.0.norm": torch.zeros(3)}
    save({"model": weights}, tmp_path / "src")
    (tmp_path / "src/metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    [warning] = open_checkpoint(str(tmp_path / "src")).manifest.warnings
    assert "1 tensors hold all layers" in warning
    assert "model.decoder.layers.mlp.weight" in warning


def test_another_backend_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "zarr", "sharded_backend_version": 1}')
    with pytest.raises(UnsupportedError, match=r"found zarr; expected torch_dist.*--ckpt-format"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("latest_checkpointed_iteration.txt", "several iterations", r"Point at one iter_\*"),
        ("mp_rank_00/x", "older format", "convert.py"),
        ("manifest.ocdbt", "Orbax", "safetensors.flax"),
        ("_sharding", "Orbax", "safetensors.flax"),
        ("zero_to_fp32.py", "DeepSpeed", "Copy that folder"),
    ],
)
def test_what_cannot_be_read_is_explained(name: str, what: str, fix: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("x")
    with pytest.raises(UnknownFormatError, match=f"looks like .*{what}.*{fix}"):
        open_checkpoint(str(tmp_path))
