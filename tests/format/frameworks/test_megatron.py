"""Megatron's distributed folders: DCP with a name, and words on what is stacked or of another backend."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dcp_writers import save
from materialise import assert_same
from samples import MODEL, SAMPLES

from shardckpt.errors import UnknownFormatError, UnsupportedError
from shardckpt.format.frameworks import megatron
from shardckpt.format.registry import detect, open_checkpoint, open_source


def test_it_is_dcp_with_what_all_ranks_share_beside(tmp_path: Path) -> None:
    source = open_source(str(SAMPLES["megatron"]["torch_dist"](tmp_path / "iter_0000003")))
    assert detect(source) is megatron.FORMAT
    reader = megatron.open_source(source)
    for name, value in MODEL.items():
        assert_same(reader, ("model", name), value)
    assert reader.load_object(reader.manifest.objects["common.pt",]) == {"iteration": 3}
    assert reader.manifest.warnings == ()


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
