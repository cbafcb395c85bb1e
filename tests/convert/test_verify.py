"""`verify` lists every fault it can find without a truth to compare with."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from cases import NAMES, read_case
from safetensors.torch import save_file

import shardckpt
from shardckpt.errors import SourceNotFoundError, UnknownFormatError


@pytest.mark.parametrize("name", NAMES)
def test_what_frameworks_wrote_is_whole(name: str, fixtures: Path, tmp_path: Path) -> None:
    case = read_case(fixtures, name, tmp_path)
    found = shardckpt.verify(str(case.source))
    assert found.ok, found.problems
    assert found.tensors == len(shardckpt.inspect(str(case.source)).tensors)


def test_the_checksums_of_torch_archives_are_compared(tmp_path: Path) -> None:
    """torch.load ignores them; a flipped bit in the payload is named with its file."""
    file = tmp_path / "a.pt"
    torch.save({"w": torch.arange(1000.0)}, file)
    found = shardckpt.verify(str(file))
    assert found.ok
    assert found.checked_bytes >= 4000
    raw = bytearray(file.read_bytes())
    at = raw.index(torch.arange(1000.0).numpy().tobytes()) + 1234
    raw[at] ^= 1
    file.write_bytes(raw)
    [problem] = shardckpt.verify(str(file)).problems
    assert "checksum" in problem
    assert "a.pt" in problem


def test_every_missing_piece_is_listed(fixtures: Path, tmp_path: Path) -> None:
    source = tmp_path / "src"
    shutil.copytree(fixtures / "dcp_fsdp2_llama_w2" / "ckpt", source)
    (source / "__1_0.distcp").unlink()
    found = shardckpt.verify(str(source))
    assert not found.ok
    assert len(found.problems) > 10
    assert all(p.isprintable() for p in found.problems)
    assert any("model.layers.0.mlp.up_proj.weight [" in p and "__1_0.distcp" in p for p in found.problems)


def test_a_header_that_cannot_be_read_is_a_problem_and_no_exception(tmp_path: Path) -> None:
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    raw = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(raw.replace(b'"F32"', b'"F99"'))
    found = shardckpt.verify(str(tmp_path))
    assert not found.ok
    assert "F99" in found.problems[0]


def test_nothing_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError):
        shardckpt.verify(str(tmp_path / "none"))
    with pytest.raises(UnknownFormatError):
        shardckpt.verify(str(tmp_path))
