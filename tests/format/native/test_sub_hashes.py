"""Hashes of sub-blocks are stored by all that write steps, bounded, and never believed before they are checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from native_writer import without_sub_hashes, write_step

import shardckpt
from shardckpt.boxes import full_box
from shardckpt.errors import FormatError
from shardckpt.format.native import records
from shardckpt.format.native.commit import COMMIT
from shardckpt.format.native.manifest_json import (
    ManifestContents,
    WrittenPayload,
    build_partial,
    decode_manifest,
    decode_partial,
    encode_manifest,
    encode_partial,
)
from shardckpt.format.native.payload import SUB_BLOCK_BYTES, BlockHasher, PayloadChunk, plan_payloads
from shardckpt.format.native.reader import NativeReader
from shardckpt.format.registry import open_checkpoint

STATE = {"w": torch.arange(SUB_BLOCK_BYTES, dtype=torch.int32).reshape(4, -1), "b": torch.ones(3)}


def contents_of(step: Path) -> ManifestContents:
    reader = open_checkpoint(str(step))
    assert isinstance(reader, NativeReader)
    return reader.contents


def check_step(step: Path) -> None:
    """Every file of several sub-blocks has the hashes of its bytes, and there is one."""
    hashed = 0
    for file in contents_of(step).files:
        data = (step / file.name).read_bytes()
        parts = [data[at : at + SUB_BLOCK_BYTES] for at in range(0, len(data), SUB_BLOCK_BYTES)]
        assert file.sub_hashes == (b"".join(map(xxhash.xxh3_64_digest, parts)) if len(parts) > 1 else b"")
        hashed += bool(file.sub_hashes)
    assert hashed
    assert shardckpt.verify(str(step)).ok


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    step = tmp_path_factory.mktemp("sub-hashes") / "saved"
    shardckpt.save(STATE, step)
    return step


def test_a_save_stores_them(saved: Path) -> None:
    check_step(saved)


def test_a_step_for_other_ranks_has_its_own(saved: Path, tmp_path: Path) -> None:
    shardckpt.reshard(str(saved), str(tmp_path / "two"), world_size=2)
    check_step(tmp_path / "two")


def test_a_step_of_version_1_0_is_converted_to_one_that_has_them(tmp_path: Path) -> None:
    old = write_step(tmp_path / "old", STATE, change=without_sub_hashes)
    assert json.loads((old / COMMIT).read_bytes().splitlines()[0])["version"] == [1, 0]
    shardckpt.reshard(str(old), str(tmp_path / "new"), world_size=1)
    check_step(tmp_path / "new")
    assert torch.equal(shardckpt.load(tmp_path / "old")["w"], STATE["w"])


def test_repair_makes_them_anew(saved: Path, tmp_path: Path) -> None:
    step = tmp_path / "step"
    step.mkdir()
    for file in saved.glob("*.safetensors"):
        (step / file.name).write_bytes(file.read_bytes())
    shardckpt.repair(str(step))
    check_step(step)


def test_repair_compares_them_with_those_of_the_old_manifest(tmp_path: Path) -> None:
    def change(contents: ManifestContents) -> ManifestContents:
        [file] = contents.files
        return replace(contents, files=(file._replace(sub_hashes=b"\0" * len(file.sub_hashes)),))

    step = write_step(tmp_path / "step", STATE, change=change)
    (step / COMMIT).unlink()
    with pytest.raises(shardckpt.ChecksumError, match="bytes are not those"):
        shardckpt.repair(str(step))


def test_a_part_of_a_manifest_brings_them_to_the_rank_that_commits() -> None:
    shape = (3 * SUB_BLOCK_BYTES,)
    [payload] = plan_payloads("s", 0, [PayloadChunk(("w",), shape, "uint8", full_box(shape))])
    hasher = BlockHasher()
    hasher.update(bytes(payload.nbytes))
    written = [WrittenPayload(payload, hasher.digests())]
    part = decode_partial(encode_partial(written))
    assert part == build_partial(written)
    assert len(part.files[0].sub_hashes) == 4 * 8


def test_a_manifest_has_no_more_of_them_than_its_limit(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = contents_of(saved)
    total = sum(len(file.sub_hashes) for file in contents.files)
    monkeypatch.setattr(records, "MAX_SUB_HASH_BYTES", total)
    assert decode_manifest(encode_manifest(contents)) == contents
    monkeypatch.setattr(records, "MAX_SUB_HASH_BYTES", total - 1)
    without = encode_manifest(contents)
    assert json.loads(without)["version"] == [1, 0]
    assert decode_manifest(without) == without_sub_hashes(contents)


def lie(raw: dict[str, Any], name: str) -> None:
    """Change the field; the last file has the hashes."""
    good = raw["sub_hashes"][-1]
    texts = {
        "one too few": good[:-16],
        "one too many": good + good[:16],
        "no digits": "g" * len(good),
        "white space": " " * 16 + good[16:],
        "capital letters beyond": "G" + good[1:],
        "no text": None,
        "a number": 7,
        "a list": [good],
    }
    if name in texts:
        raw["sub_hashes"][-1] = texts[name]
    elif name == "a file too many":
        raw["sub_hashes"].append("")
    elif name == "a file too few":
        raw["sub_hashes"].pop()
    elif name == "no list":
        raw["sub_hashes"] = good
    elif name == "of a file without hashes":
        raw["files"][-1][2] = None
    elif name == "of a file of two exabytes":
        raw["files"][-1][1:] = [1 << 61, None]


LIES = ["one too few", "one too many", "no digits", "white space", "capital letters beyond", "no text", "a number"]
LIES += ["a list", "a file too many", "a file too few", "no list", "of a file without hashes"]


@pytest.mark.parametrize("name", [*LIES, "of a file of two exabytes"])
def test_a_lie_is_an_error_of_the_format(saved: Path, name: str) -> None:
    raw = json.loads(encode_manifest(contents_of(saved)))
    assert decode_manifest(json.dumps(raw).encode())
    lie(raw, name)
    with pytest.raises(FormatError, match=r"sub_hashes|sub-blocks|sub-block"):
        decode_manifest(json.dumps(raw).encode())


def test_wrong_ones_are_found_by_a_load(tmp_path: Path) -> None:
    def change(contents: ManifestContents) -> ManifestContents:
        [file] = contents.files
        return replace(contents, files=(file._replace(sub_hashes=b"\0" * len(file.sub_hashes)),))

    step = write_step(tmp_path / "step", STATE, change=change)
    with pytest.raises(shardckpt.ChecksumError, match="bytes 0 to 131072, does not match its checksum"):
        shardckpt.load(step)
