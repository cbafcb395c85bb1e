"""Versions are exported as folders that slime, miles and ModelExpress read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from safetensors import safe_open
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file

import shardckpt
from shardckpt.errors import ChecksumError, TargetExistsError, UsageError
from tests.kit.writers.stream_writer import ANCHORS, NUMBERS, Weights, assert_same, delta_of, flip, folder_of

INDEX = "model.safetensors.index.json"


def name_folder(number: int) -> str:
    return f"weight_v{number:06d}"


def read_index(folder: Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return index


def as_bytes(value: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy()


def test_versions_with_anchors_are_full_and_others_are_changes(stream: Path, tmp_path: Path) -> None:
    found = shardckpt.export_versions(stream, out := tmp_path / "out")
    assert [each.number for each in found.versions] == list(NUMBERS)
    assert sorted(each.name for each in out.iterdir()) == [name_folder(number) for number in NUMBERS]
    for number in NUMBERS:
        metadata = read_index(out / name_folder(number))["metadata"]
        assert metadata["version"] == f"{number:06d}"
        assert ("delta_encoding" in metadata) == (number not in ANCHORS)
        assert metadata.get("base_version") == (None if number in ANCHORS else f"{number - 1:06d}")


@pytest.mark.parametrize("number", ANCHORS)
def test_a_full_version_is_a_model_folder(
    stream: Path, versions: dict[int, Weights], number: int, tmp_path: Path
) -> None:
    shardckpt.export_versions(stream, tmp_path / "out")
    folder = tmp_path / "out" / name_folder(number)
    [file] = set(read_index(folder)["weight_map"].values())
    assert_same(load_file(folder / file), versions[number])
    assert_same(shardckpt.load(folder), versions[number])


def test_changes_are_frames_of_the_xor_with_hashes_of_the_new_bytes(
    stream: Path, versions: dict[int, Weights], tmp_path: Path
) -> None:
    """Replays the chain as slime's receiver does, with the packages' own readers."""
    shardckpt.export_versions(stream, tmp_path / "out")
    for number in set(NUMBERS) - {*ANCHORS}:
        folder = tmp_path / "out" / name_folder(number)
        index = read_index(folder)
        before, after = versions[number - 1], versions[number]
        assert {*index["weight_map"]} == {name for name in after if not torch.equal(before[name], after[name])}
        [file] = set(index["weight_map"].values())
        with safe_open(folder / file, "numpy") as opened:
            hashes = opened.metadata()
        for name, frame in load_arrays(folder / file).items():
            xor = np.frombuffer(zstandard.ZstdDecompressor().decompress(frame.tobytes()), np.uint8)
            new = as_bytes(before[name]) ^ xor
            assert np.array_equal(new, as_bytes(after[name]))
            assert hashes[name] == xxhash.xxh3_128_hexdigest(new.tobytes())


def test_modelexpress_applies_the_changes(stream: Path, versions: dict[int, Weights], tmp_path: Path) -> None:
    receiver = pytest.importorskip("modelexpress_rl.inference.receiver")
    utils = pytest.importorskip("modelexpress_rl.utils")
    shardckpt.export_versions(stream, tmp_path / "out", checksum="adler32")
    local = tmp_path / "local"
    shutil.copytree(tmp_path / "out" / name_folder(10), local)
    [target] = local.glob("*.safetensors")
    header, start = utils.read_safetensors_header(target.read_bytes(), "local")
    places = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    theirs = SimpleNamespace(
        locations={name: (target, start + first, end - first) for name, (first, end) in places.items()}
    )
    for number in (11, 12):
        folder = tmp_path / "out" / name_folder(number)
        version = receiver._S3Version(f"{number:06d}", f"{number - 1:06d}", None, "")
        metadata, names = receiver._parse_index_manifest((folder / INDEX).read_bytes(), is_delta=True, version=version)
        shards = {
            file: ((folder / file).read_bytes(), found)
            for file, found in receiver._group_tensors_by_shard(names).items()
        }
        cls = next(each for each in vars(receiver).values() if hasattr(each, "_apply_shards"))
        cls._apply_shards(theirs, shards, index_metadata=metadata)
        assert_same(load_file(target), versions[number])


def test_one_version_is_exported_with_what_leads_to_it(
    stream: Path, versions: dict[int, Weights], tmp_path: Path
) -> None:
    shardckpt.export_versions(f"{stream}@15", tmp_path / "out")
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == [name_folder(n) for n in (13, 14, 15)]


def test_a_later_export_adds_the_new_versions(stream: Path, tmp_path: Path) -> None:
    shardckpt.export_versions(f"{stream}@12", out := tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    shardckpt.export_versions(stream, out)
    assert len([*out.iterdir()]) == len(NUMBERS)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_version_without_its_index_is_written_again(
    stream: Path, versions: dict[int, Weights], tmp_path: Path
) -> None:
    """The index comes last: without it an export was interrupted."""
    shardckpt.export_versions(stream, out := tmp_path / "out")
    folder = out / name_folder(10)
    (folder / INDEX).unlink()
    next(folder.glob("*.safetensors")).write_bytes(b"cut")
    shardckpt.export_versions(stream, out)
    assert_same(shardckpt.load(folder), versions[10])


def test_a_version_of_another_stream_stays(stream: Path, tmp_path: Path) -> None:
    with shardckpt.Publisher(tmp_path / "other") as publisher:
        publisher.publish(10, {"w": torch.ones(3)})
    shardckpt.export_versions(tmp_path / "other", tmp_path / "out")
    before = (tmp_path / "out" / name_folder(10) / INDEX).read_bytes()
    with pytest.raises(TargetExistsError, match="a version of another stream"):
        shardckpt.export_versions(stream, tmp_path / "out")
    assert (tmp_path / "out" / name_folder(10) / INDEX).read_bytes() == before


def test_a_damaged_version_has_no_index(stream: Path, tmp_path: Path) -> None:
    flip(delta_of(stream, 12), -1)
    with pytest.raises(ChecksumError):
        shardckpt.export_versions(stream, tmp_path / "out")
    assert not (tmp_path / "out" / name_folder(12)).exists()
    assert (tmp_path / "out" / name_folder(11) / INDEX).exists()


def test_a_swapped_anchor_is_not_exported(stream: Path, tmp_path: Path) -> None:
    shutil.rmtree(folder_of(stream, 10) / "anchor")
    shutil.copytree(folder_of(stream, 13) / "anchor", folder_of(stream, 10) / "anchor")
    with pytest.raises(ChecksumError, match="another tensor than its commit says"):
        shardckpt.export_versions(stream, tmp_path / "out")
    assert not (tmp_path / "out" / name_folder(10) / INDEX).exists()


def test_numbers_that_do_not_ascend_are_refused(tmp_path: Path) -> None:
    weights = {"w": torch.ones(3)}
    for number in (5, 2):
        with shardckpt.Publisher(tmp_path / "stream") as publisher:
            publisher.resume(weights)
            publisher.publish(number, weights)
    with pytest.raises(UsageError, match="must ascend"):
        shardckpt.export_versions(tmp_path / "stream", tmp_path / "out")


def test_an_unknown_checksum_is_refused(stream: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected xxh3-128 or adler32"):
        shardckpt.export_versions(stream, tmp_path / "out", checksum="md5")
