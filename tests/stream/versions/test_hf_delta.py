"""Versions are exported as folders that slime, miles and ModelExpress read."""

from __future__ import annotations

import json
import shutil
import threading
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
from shardckpt.errors import ChecksumError, SourceNotFoundError, TargetExistsError, UsageError
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.versions import hf_delta, stream_follower
from shardckpt.stream.versions.version_content import VersionContent
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


# Versions that come later


def publish_in_thread(url: Path, numbers: range, wait: threading.Event) -> threading.Thread:
    """Publish versions; each but the first after the export has written the one before."""

    def publish() -> None:
        with shardckpt.Publisher(url, anchors=shardckpt.Anchors(max_chain=2)) as publisher:
            for number in numbers:
                publisher.publish(number, make_weights(number)).result()
                wait.wait(60)
                wait.clear()

    thread = threading.Thread(target=publish)
    thread.start()
    return thread


def make_weights(number: int) -> Weights:
    weights = {"w": torch.zeros(300), "b": torch.ones(5)}
    weights["w"][: number * 3] = float(number)
    return weights


def test_an_export_that_follows_writes_each_version_once_it_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The publisher waits for each folder, so none is written by a later export of all."""
    written, is_due = [], threading.Event()
    write_index = hf_delta._Export._write_index

    def record(self: Any, commit: Any, metadata: Any, names: Any) -> None:
        write_index(self, commit, metadata, names)
        written.append(commit.version.number)
        is_due.set()

    monkeypatch.setattr(hf_delta._Export, "_write_index", record)
    monkeypatch.setattr(stream_follower, "_POLL_S", 0.01)
    thread = publish_in_thread(tmp_path / "stream", range(1, 6), is_due)
    found = shardckpt.export_versions(tmp_path / "stream", tmp_path / "out", follow_s=5.0)
    thread.join()
    assert written == [1, 2, 3, 4, 5] == [each.number for each in found.versions]
    for number in written:
        expected = {name: value.bfloat16() for name, value in make_weights(number).items()}
        assert_same(shardckpt.load(tmp_path / "out" / name_folder(number)), expected)
    assert not list((tmp_path / "stream" / "leases").iterdir()), "the lease is dropped at the end"


def test_an_export_that_follows_continues_in_the_folder_of_an_earlier_one(stream: Path, tmp_path: Path) -> None:
    shardckpt.export_versions(f"{stream}@12", out := tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.safetensors")}
    found = shardckpt.export_versions(stream, out, follow_s=0.01)
    assert [each.number for each in found.versions] == list(NUMBERS)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_an_export_that_follows_keeps_what_it_still_needs(stream: Path) -> None:
    """Versions 13 and 14 lead to 15, which the next change needs."""
    folder = StreamFolder(str(stream))
    follower = stream_follower.StreamFollower(str(stream), 1.0)
    follower.keep([*folder.iter_commits()][:1])
    assert shardckpt.compact_versions(stream, keep_anchors=1).removed == (10, 11, 12)
    assert [each.number for each in shardckpt.list_versions(stream).versions] == [13, 14, 15]
    follower.release()
    assert shardckpt.compact_versions(stream, keep_anchors=1).removed == (13, 14)


def test_an_export_that_follows_waits_for_the_first_version(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError, match="no version is published here"):
        shardckpt.export_versions(tmp_path / "nothing", tmp_path / "out", follow_s=0.01)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("follow_s", [-1.0, float("inf"), float("nan"), "1"])
def test_impossible_times_are_refused(stream: Path, tmp_path: Path, follow_s: float) -> None:
    with pytest.raises(UsageError, match="`follow_s` must be"):
        shardckpt.export_versions(stream, tmp_path / "out", follow_s=follow_s)


def test_one_version_cannot_be_followed(stream: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a stream"):
        shardckpt.export_versions(f"{stream}@12", tmp_path / "out", follow_s=1.0)


def test_changes_are_made_from_the_version_before_and_its_own_changes(
    stream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No version but full ones, and those before changes, is made from its anchor."""
    made: list[int] = []
    read = VersionContent.read

    def record(self: VersionContent, boxes: Any) -> Any:
        made.append(self.commit.version.number)
        return read(self, boxes)

    monkeypatch.setattr(VersionContent, "read", record)
    shardckpt.export_versions(stream, tmp_path / "out")
    assert made == [10, 10, 11, 13, 13, 14]
