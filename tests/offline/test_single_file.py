"""A target that ends in .safetensors is one file, whatever the sizes."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

import shardckpt


def test_one_file_holds_everything_even_beyond_the_shard_size(fixtures, tmp_path):
    source = str(fixtures / "dcp_fsdp2_llama_w2" / "ckpt")
    report = shardckpt.consolidate(source, str(tmp_path / "all.safetensors"), max_shard_size=1000)
    assert [f.name for f in report.files] == ["all.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["all.safetensors"]
    assert len(load_file(tmp_path / "all.safetensors")) == report.tensor_count == 30


def test_one_file_cannot_hold_model_and_optimizer(fixtures, tmp_path):
    source = str(fixtures / "dcp_fsdp2_llama_w2" / "ckpt")
    with pytest.raises(shardckpt.errors.UsageError, match="cannot hold a model and an optimizer"):
        shardckpt.consolidate(source, str(tmp_path / "all.safetensors"), part="all")
    assert not list(tmp_path.iterdir())
    shardckpt.consolidate(source, str(tmp_path / "optim.safetensors"), part="optim")
    assert "model.norm.weight/exp_avg" in load_file(tmp_path / "optim.safetensors")
