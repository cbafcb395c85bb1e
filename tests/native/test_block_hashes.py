"""Hashes of blocks are stored by all that write steps, bounded, and never believed before they are checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import shardckpt
from shardckpt.boxes import full_box
from shardckpt.errors import FormatError
from shardckpt.native import records
from shardckpt.native.commit import COMMIT
from shardckpt.native.manifest_json import (
    ManifestContents,
    WrittenPayload,
    build_partial,
    decode_manifest,
    decode_partial,
    encode_manifest,
    encode_partial,
)
from shardckpt.native.payload import (
    BLOCK_BYTES,
    GROUP_BYTES,
    BlockHasher,
    PayloadChunk,
    group_hashes,
    plan_payloads,
)
from shardckpt.native.reader import NativeReader
from shardckpt.readers.registry import open_checkpoint
from tests.kit.writers.native_writer import with_grouped_hashes, write_step

STATE = {"w": torch.arange(BLOCK_BYTES, dtype=torch.int32).reshape(4, -1), "b": torch.ones(3)}


def contents_of(step: Path) -> ManifestContents:
    reader = open_checkpoint(str(step))
    assert isinstance(reader, NativeReader)
    return reader.contents


def hash_blocks(data: bytes) -> bytes:
    return b"".join(xxhash.xxh3_64_digest(data[at : at + BLOCK_BYTES]) for at in range(0, len(data), BLOCK_BYTES))


def check_step(step: Path) -> None:
    """Every file has the hashes of its blocks, and there is one of several blocks."""
    files = contents_of(step).files
    assert all(file.hashes == hash_blocks((step / file.name).read_bytes()) for file in files)
    assert any(len(file.hashes or b"") > 8 for file in files)
    assert shardckpt.verify(str(step)).ok


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    step = tmp_path_factory.mktemp("hashes") / "saved"
    shardckpt.save(STATE, step)
    return step


def test_a_save_stores_them(saved: Path) -> None:
    check_step(saved)


def test_a_step_for_other_ranks_has_its_own(saved: Path, tmp_path: Path) -> None:
    shardckpt.reshard(str(saved), str(tmp_path / "two"), world_size=2)
    check_step(tmp_path / "two")


def test_a_step_with_hashes_of_groups_is_converted_to_one_with_hashes_of_blocks(tmp_path: Path) -> None:
    large = write_step(tmp_path / "large", STATE, change=with_grouped_hashes)
    assert [len(file.hashes or b"") for file in contents_of(large).files] == [8]
    shardckpt.reshard(str(large), str(tmp_path / "new"), world_size=1)
    check_step(tmp_path / "new")
    assert torch.equal(shardckpt.load(large)["w"], STATE["w"])


def test_repair_makes_them_anew(saved: Path, tmp_path: Path) -> None:
    step = tmp_path / "step"
    step.mkdir()
    for file in saved.glob("*.safetensors"):
        (step / file.name).write_bytes(file.read_bytes())
    shardckpt.repair(str(step))
    check_step(step)


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("is_right", [False, True])
def test_repair_compares_them_with_those_of_the_old_manifest(tmp_path: Path, is_grouped: bool, is_right: bool) -> None:
    def change(contents: ManifestContents) -> ManifestContents:
        contents = with_grouped_hashes(contents) if is_grouped else contents
        return contents if is_right else with_wrong_hashes(contents)

    step = write_step(tmp_path / "step", STATE, change=change)
    (step / COMMIT).unlink()
    if is_right:
        assert shardckpt.repair(str(step)).problems == ()
    else:
        with pytest.raises(shardckpt.errors.ChecksumError, match="bytes differ from the step's manifest"):
            shardckpt.repair(str(step))


def with_wrong_hashes(contents: ManifestContents) -> ManifestContents:
    [file] = contents.files
    return replace(contents, files=(file._replace(hashes=b"\0" * len(file.hashes or b"")),))


def test_a_part_of_a_manifest_brings_them_to_the_rank_that_commits() -> None:
    shape = (3 * BLOCK_BYTES,)
    [payload] = plan_payloads("s", 0, [PayloadChunk(("w",), shape, "uint8", full_box(shape))])
    hasher = BlockHasher()
    hasher.update(bytes(payload.nbytes))
    written = [WrittenPayload(payload, hasher.digests())]
    part = decode_partial(encode_partial(written))
    assert part == build_partial(written)
    assert len(part.files[0].hashes or b"") == 4 * 8


def test_beyond_its_limit_a_manifest_has_hashes_of_groups(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = contents_of(saved)
    total = sum(len(file.hashes or b"") for file in contents.files)
    monkeypatch.setattr(records, "MAX_HASH_BYTES", total)
    assert decode_manifest(encode_manifest(contents)) == contents
    monkeypatch.setattr(records, "MAX_HASH_BYTES", total - 1)
    grouped = decode_manifest(encode_manifest(contents))
    assert grouped == with_grouped_hashes(contents) != contents
    assert decode_manifest(encode_manifest(grouped)) == grouped


def test_a_very_large_step_and_one_that_refers_to_it_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_HASH_BYTES", 0)
    shardckpt.save(STATE, tmp_path / "large", store_digests=True)
    assert [file.is_grouped for file in contents_of(tmp_path / "large").files] == [True]
    monkeypatch.undo()
    state = {**STATE, "b": torch.zeros(BLOCK_BYTES)}
    shardckpt.save(state, tmp_path / "next", base=tmp_path / "large")
    assert sorted(file.is_grouped for file in contents_of(tmp_path / "next").files) == [False, True]
    assert shardckpt.verify(tmp_path / "next").ok
    assert torch.equal(shardckpt.load(tmp_path / "next")["w"], STATE["w"])


@pytest.mark.parametrize("nbytes", [0, 1, BLOCK_BYTES, BLOCK_BYTES + 1, GROUP_BYTES, GROUP_BYTES + 1, 1 << 40])
def test_the_number_of_hashes_says_what_each_covers(nbytes: int) -> None:
    blocks, groups = bytes(8 * -(-nbytes // BLOCK_BYTES)), bytes(8 * -(-nbytes // GROUP_BYTES))
    assert not records.FileRecord("a", nbytes, blocks).is_grouped
    assert records.FileRecord("a", nbytes, groups).is_grouped == (nbytes > BLOCK_BYTES)
    assert len(group_hashes(blocks)) == len(groups)


def lie(raw: dict[str, Any], name: str) -> None:
    """Change the hashes of the last file."""
    entry = raw["files"][-1]
    good = entry[2]
    assert len(good) > 48
    texts = {
        "one too few": good[:-16],
        "one too many": good + good[:16],
        "half a hash": good[:-8],
        "none": "",
        "no digits": "g" * len(good),
        "white space": " " * 16 + good[16:],
        "capital letters beyond": "G" + good[1:],
        "a number": 7,
        "a list": [good],
    }
    if name in texts:
        entry[2] = texts[name]
    else:
        assert name == "of a file of two exabytes"
        entry[1] = 1 << 61


LIES = ["one too few", "one too many", "half a hash", "none", "no digits", "white space", "capital letters beyond"]
LIES += ["a number", "a list", "of a file of two exabytes"]


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_an_error_of_the_format(saved: Path, name: str) -> None:
    raw = json.loads(encode_manifest(contents_of(saved)))
    assert decode_manifest(json.dumps(raw).encode())
    lie(raw, name)
    with pytest.raises(FormatError, match="hash"):
        decode_manifest(json.dumps(raw).encode())


@pytest.mark.parametrize(
    ("is_grouped", "place"), [(False, "block 0, bytes 0 to 131072 "), (True, "blocks 0 to 4, bytes 0 to ")]
)
def test_wrong_ones_are_found_by_a_load(tmp_path: Path, is_grouped: bool, place: str) -> None:
    def change(contents: ManifestContents) -> ManifestContents:
        return with_wrong_hashes(with_grouped_hashes(contents) if is_grouped else contents)

    step = write_step(tmp_path / "step", STATE, change=change)
    with pytest.raises(shardckpt.errors.ChecksumError, match=f"{place}.*do not match their checksum"):
        shardckpt.load(step)
    assert place in shardckpt.verify(step).problems[0].message
