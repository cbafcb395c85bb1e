"""Composer's folders and pointers, rebuilt from its documentation: model, optimizer and loop are where they belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import shardckpt
from shardckpt.errors import FormatError, IncompleteError
from shardckpt.manifest import UNREAD
from shardckpt.plan.naming.sections import find_sections
from shardckpt.readers.registry import open_checkpoint
from tests.kit.writers.dcp_writers import save
from tests.kit.writers.materialise import assert_same

W = torch.arange(6.0).reshape(2, 3)
OPTIM: dict[str, Any] = {"state": {"w": {"exp_avg": W + 1}}, "param_groups": [{"params": ["w"], "lr": 0.1}]}
STATE = {"model": {"w": W}, "optimizers": {"DecoupledAdamW": OPTIM}, "timestamp": {"Timestamp": 7}}


@pytest.mark.parametrize("form", ["folders", "files"])
def test_parts_are_one_checkpoint(form: str, tmp_path: Path) -> None:
    source = tmp_path / "src"
    source.mkdir()
    if form == "folders":
        save({"w": W}, source / "model")
        save(OPTIM, source / "optim")
    else:
        torch.save({"w": W}, source / "model.pt")
        torch.save(OPTIM, source / "optim.pt")
    (source / "composer_metadata.json").write_text("{}")
    torch.save({"timestamp": 7}, source / "resumption.pkl")
    reader = open_checkpoint(str(source))
    assert reader.manifest.format == "composer"
    assert_same(reader, ("model", "w"), W)
    assert_same(reader, ("optim", "state", "w", "exp_avg"), W + 1)
    assert reader.manifest.objects["resumption.pkl",].value is UNREAD
    assert find_sections(reader.manifest).optimizers == (("optim",),)


@pytest.mark.parametrize("form", ["dcp", "file"])
def test_everything_below_state_is_found(form: str, tmp_path: Path) -> None:
    """Folders `ep{}-ba{}` and single files keep model and optimizers below one key."""
    source = tmp_path / "ep0-ba4"
    if form == "dcp":
        save({"state": STATE}, source)
    else:
        source = tmp_path / "ep0-ba4-rank0.pt"
        torch.save({"state": STATE, "rng": []}, source)
    shardckpt.consolidate(str(source), str(tmp_path / "out"), part="all")
    assert torch.equal(load_file(tmp_path / "out/model.safetensors")["w"], W)
    assert torch.equal(load_file(tmp_path / "out/optimizer.safetensors")["w/exp_avg"], W + 1)


@pytest.mark.parametrize("target", ["ep0-ba4", "run/checkpoints/ep0-ba4", "ep0-ba4/__0_0.distcp", "./ep0-ba4\n"])
def test_a_pointer_leads_to_what_lies_beside_it(target: str, tmp_path: Path) -> None:
    save({"state": STATE}, tmp_path / "ep0-ba4")
    (tmp_path / "latest-rank0.symlink").write_text(target)
    assert_same(open_checkpoint(str(tmp_path / "latest-rank0.symlink")), ("state", "model", "w"), W)


def test_a_pointer_may_name_a_file(tmp_path: Path) -> None:
    torch.save({"state": STATE}, tmp_path / "ep0-ba4-rank0.pt")
    (tmp_path / "latest.symlink").write_text("checkpoints/ep0-ba4-rank0.pt")
    assert_same(open_checkpoint(str(tmp_path / "latest.symlink")), ("state", "model", "w"), W)


@pytest.mark.parametrize("target", ["", "..", "../..", "/etc/passwd", "latest.symlink", "gone"])
def test_a_pointer_leads_nowhere_else(target: str, tmp_path: Path) -> None:
    (tmp_path / "latest.symlink").write_text(target)
    with pytest.raises(IncompleteError, match="is not next to it"):
        open_checkpoint(str(tmp_path / "latest.symlink"))


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * 5000])
def test_a_pointer_that_is_none_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "latest.symlink").write_bytes(content)
    with pytest.raises(FormatError, match="pointer"):
        open_checkpoint(str(tmp_path / "latest.symlink"))
