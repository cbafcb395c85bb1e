"""Versions that slime, miles, ModelExpress and `export_versions` write are checkpoints for every offline verb."""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash
import zstandard
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_tensors

import shardckpt
from shardckpt.errors import (
    CheckpointError,
    ChecksumError,
    FormatError,
    IncompleteError,
    TruncatedError,
    UnsupportedError,
)
from shardckpt.readers.registry import open_checkpoint
from shardckpt.storage.store import read_bytes
from shardckpt.stream.versions import hf_delta_checksums, made_file
from shardckpt.stream.versions.hf_delta_changes import ChangedFolder
from tests.kit.ranks.harness import run
from tests.kit.writers.stream_writer import ANCHORS, NUMBERS, Weights, assert_same, flip

INDEX = "model.safetensors.index.json"
HASHES: Mapping[str, Callable[[bytes], str]] = {
    "xxh3-128": xxhash.xxh3_128_hexdigest,
    "adler32": lambda data: f"{zlib.adler32(data):08x}",
}


def name_folder(number: int) -> str:
    return f"weight_v{number:06d}"


@pytest.fixture
def folders(stream: Path, tmp_path: Path) -> Path:
    """Return exported versions: 10 and 13 are full."""
    shardckpt.export_versions(stream, tmp_path / "folders")
    return tmp_path / "folders"


def as_bytes(value: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return value.contiguous().reshape(-1).view(torch.uint8).numpy()


def encode(encoding: str, old: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> bytes:
    if encoding == "xor":
        return (old ^ new).tobytes()
    at = np.flatnonzero(old != new).astype("<u4")
    return np.uint32(len(at)).tobytes() + at.tobytes() + new[at].tobytes()


def write_like_slime(
    folder: Path, number: int, before: Weights, after: Weights, *, encoding: str = "xor", checksum: str = "xxh3-128"
) -> None:
    """Write a version's changes as slime does: one file for each writing rank, here two."""
    changed = [name for name in after if not torch.equal(before[name], after[name])]
    weight_map: dict[str, str] = {}
    target = folder / name_folder(number)
    target.mkdir(parents=True)
    for rank, names in enumerate(filter(None, (changed[::2], changed[1::2]))):
        file = f"model-{rank:05d}-of-00002.safetensors"
        frames, hashes = {}, {}
        for name in names:
            old, new = as_bytes(before[name]), as_bytes(after[name])
            frame = zstandard.ZstdCompressor(level=1).compress(encode(encoding, old, new))
            frames[name], hashes[name] = np.frombuffer(frame, np.uint8), HASHES[checksum](new.tobytes())
        save_file(frames, target / file, hashes)
        weight_map |= dict.fromkeys(names, file)
    metadata = {"version": f"{number:06d}", "base_version": f"{number - 1:06d}", "delta_encoding": encoding}
    metadata |= {"compression_format": "zstd", "checksum_format": checksum}
    (target / INDEX).write_text(json.dumps({"metadata": metadata, "weight_map": weight_map}))


@pytest.fixture
def weights(versions: dict[int, Weights]) -> Callable[[int], Weights]:
    return lambda number: {name: value for name, value in versions[number].items() if value.numel()}


@pytest.mark.parametrize("number", NUMBERS)
def test_each_exported_version_has_the_streams_weights(
    folders: Path, versions: dict[int, Weights], number: int, tmp_path: Path
) -> None:
    source = folders / name_folder(number)
    shardckpt.consolidate(source, tmp_path / "out")
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), versions[number])
    assert shardckpt.inspect(source).format == ("safetensors" if number in ANCHORS else "hf-delta")
    assert shardckpt.verify(source).ok


def test_versions_can_be_inspected_compared_and_measured(folders: Path, versions: dict[int, Weights]) -> None:
    found = shardckpt.inspect(folders / name_folder(12))
    assert (found.metadata["version"], found.metadata["base_version"]) == ("000012", "000011")
    assert {each.name: each.shape for each in found.tensors} == {n: tuple(v.shape) for n, v in versions[12].items()}
    changed = shardckpt.diff(folders / name_folder(11), folders / name_folder(12)).differences
    assert {each.name for each in changed} == {"layers.0.weight", "scalar", "mask"}
    stats = {each.name: each for each in shardckpt.stats(folders / name_folder(12)).tensors}
    assert stats["scalar"].max == versions[12]["scalar"].item()


def test_all_bytes_of_changed_tensors_are_compared_and_the_others_are_named(folders: Path) -> None:
    found = shardckpt.verify(folders / name_folder(12))
    assert "checksums" in found.checks
    assert found.checked_bytes == 40 * 30 * 2 + 30 * 2 + 4 + 2
    assert found.warnings == ("2 tensors have no checksum: no version since the full one has changed them",)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", HASHES)
def test_both_encodings_and_several_files_are_read(
    weights: Callable[[int], Weights], tmp_path: Path, encoding: str, checksum: str
) -> None:
    """slime's version 0 is the model that the server started with, under that name."""
    save_tensors(weights(10), tmp_path / "model.safetensors")
    (tmp_path / "stream" / name_folder(0)).mkdir(parents=True)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "stream" / name_folder(0))
    for number in (1, 2, 3):
        before, after = weights(9 + number), weights(10 + number)
        write_like_slime(tmp_path / "stream", number, before, after, encoding=encoding, checksum=checksum)
        source = tmp_path / "stream" / name_folder(number)
        assert_same(shardckpt.load(source), after)
        assert shardckpt.verify(source).ok


def test_the_base_may_be_a_link_to_the_model(weights: Callable[[int], Weights], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save_tensors(weights(10), tmp_path / "model" / "model.safetensors")
    write_like_slime(tmp_path, 1, weights(10), weights(11))
    with pytest.raises(IncompleteError, match=r"version 000001 needs version 000000, .*copy or link its folder"):
        shardckpt.inspect(tmp_path / name_folder(1))
    (tmp_path / name_folder(0)).symlink_to(tmp_path / "model")
    assert_same(shardckpt.load(tmp_path / name_folder(1)), weights(11))


def test_a_version_without_changes_has_its_bases_weights(weights: Callable[[int], Weights], tmp_path: Path) -> None:
    (tmp_path / name_folder(0)).mkdir()
    save_tensors(weights(10), tmp_path / name_folder(0) / "model.safetensors")
    write_like_slime(tmp_path, 1, weights(10), weights(10))
    assert_same(shardckpt.load(tmp_path / name_folder(1)), weights(10))


def test_one_tensor_is_read_without_the_others(
    folders: Path, versions: dict[int, Weights], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_file, "_GROUP_BYTES", 1)
    asked: list[str] = []
    original = ChangedFolder.read

    def record(self: ChangedFolder, boxes: Any, buffer: Any) -> None:
        asked.extend(box.name for box in boxes)
        original(self, boxes, buffer)

    monkeypatch.setattr(ChangedFolder, "read", record)
    reader = open_checkpoint(str(folders / name_folder(12)))
    [(_, file, span)] = reader.manifest.tensors["norm",].pieces
    found = read_bytes(reader.store, file, span.offset, span.nbytes)  # type: ignore[union-attr]
    assert found == as_bytes(versions[12]["norm"]).tobytes()
    assert set(asked) == {"norm"}


# ModelExpress's own sender


class FakeService:
    """Its orchestrator, as far as the sender asks it; `refit_pb2` has the messages."""

    def __init__(self, pb: Any) -> None:
        self._pb = pb

    def GetWeightVersion(self, request: Any, **_: Any) -> Any:  # noqa: N802  (their name)
        pb, number = self._pb, int(request.uid)
        is_full = number % 3 == 0
        kind = pb.WEIGHT_PAYLOAD_FORMAT_FULL_HF_CHECKPOINT if is_full else pb.WEIGHT_PAYLOAD_FORMAT_XOR_DELTA
        uri = f"s3://bucket/{name_folder(number)}/{INDEX}"
        storage = pb.ObjectStorageSource(storage_type=pb.OBJECT_STORAGE_TYPE_S3, uri=uri)
        version = pb.WeightVersion(model_name="model", payload_format=kind, object_storage=storage)
        if not is_full:
            version.base_version_id = f"{number - 1:06d}"
        return pb.GetWeightVersionResponse(version=version)


def send_with_modelexpress(rank: int, world: int, folder: Path, versions: dict[int, Weights]) -> None:
    from modelexpress_rl import refit_pb2
    from modelexpress_rl.train.methods.canonical_delta import CanonicalDeltaPublicationMethod
    from modelexpress_rl.version import WeightVersionRef

    def put(*, uri: str, data: bytes) -> None:
        target = folder / uri.removeprefix("s3://bucket/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(bytes(data))

    sender = CanonicalDeltaPublicationMethod(
        config=SimpleNamespace(initial_base_version_id="none", uri_prefix="s3://bucket"),
        model_name="model",
        service=lambda: FakeService(refit_pb2),
        rpc_timeout_seconds=1.0,
        process_group=dist.group.WORLD,
        read_seed_tensor=lambda name: None,
        s3=SimpleNamespace(put=put, close=lambda: None),
    )
    for number, weights in versions.items():
        own = [[(name, value)] for at, (name, value) in enumerate(weights.items()) if at % world == rank]
        version = WeightVersionRef(f"{number:06d}")
        sender.publish(version=version, staged=sender.stage(version=version, hf_tensor_iter=own))


def test_what_modelexpress_sends_is_read(weights: Callable[[int], Weights], tmp_path: Path) -> None:
    pytest.importorskip("modelexpress_rl.train.methods.canonical_delta")
    sent = {number: weights(number) for number in range(12, 15)}
    run(2, send_with_modelexpress, tmp_path, sent)
    for number, expected in sent.items():
        source = tmp_path / name_folder(number)
        assert_same(shardckpt.load(source), expected)
        found = shardckpt.verify(source)
        assert found.ok and not found.warnings
        assert found.checked_bytes == sum(value.nbytes for value in expected.values()), "the full version has checksums"
    [file, _] = sorted((tmp_path / name_folder(12)).glob("*.safetensors"))
    flip(file, -1)
    assert [problem.kind for problem in shardckpt.verify(tmp_path / name_folder(12)).problems] == ["checksum"]
    assert not shardckpt.verify(tmp_path / name_folder(14)).ok


# Damage


def edit(folder: Path, **fields: object) -> None:
    """Change an index's metadata."""
    index = json.loads((folder / INDEX).read_text())
    index["metadata"] |= fields
    (folder / INDEX).write_text(json.dumps(index))


def replace_frames(folder: Path, change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> None:
    """Write all changes of a version again, changed, with the checksums that they had."""
    from safetensors import safe_open

    [file] = folder.glob("*.safetensors")
    with safe_open(file, "numpy") as opened:
        hashes = opened.metadata()
        frames = {name: change(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118
    save_file(frames, file, hashes)


def compress(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.frombuffer(zstandard.ZstdCompressor(level=1).compress(data), np.uint8)


def change_hash(folder: Path) -> None:
    [file] = folder.glob("*.safetensors")
    data = file.read_bytes()
    at = data.index(b'"scalar":"') + 10
    file.write_bytes(data[:at] + b"0123456789" + data[at + 10 :])


@pytest.mark.parametrize(
    ("damage", "error", "problem"),
    [
        (lambda to: flip(next(to(12).glob("*.safetensors")), -1), CheckpointError, "checksum|decompressed"),
        (lambda to: change_hash(to(12)), ChecksumError, "scalar"),
        (lambda to: replace_frames(to(12), lambda f: f[:-3]), FormatError, "another size|decompressed"),
        (lambda to: replace_frames(to(12), lambda _: compress(b"\0" * (1 << 22))), FormatError, "another size"),
        (lambda to: replace_frames(to(12), lambda _: compress(b"\0")), FormatError, "another size"),
        (lambda to: replace_frames(to(12), lambda f: np.resize(f, 9000)), FormatError, "longer than its tensor"),
        (lambda to: replace_frames(to(12), lambda _: np.zeros(9, np.uint8)), FormatError, "decompressed"),
        (lambda to: replace_frames(to(12), lambda f: f.astype("i4")), FormatError, "must be a row of bytes"),
        (lambda to: next(to(12).glob("*.safetensors")).unlink(), IncompleteError, "changes is gone"),
        (lambda to: next(to(10).glob("*.safetensors")).unlink(), IncompleteError, "full version are gone"),
        (lambda to: shutil.rmtree(to(11)), IncompleteError, "needs version 000011, which is not here"),
        (lambda to: shutil.rmtree(to(10)), IncompleteError, "needs version 000010, which is not here"),
        (lambda to: edit(to(12), version="000011"), CheckpointError, "another version than its name says"),
        (lambda to: edit(to(11), version="000001"), CheckpointError, "another version"),
        (lambda to: edit(to(10), version="000009"), CheckpointError, "the base is another version"),
        (lambda to: edit(to(11), base_version="000012"), FormatError, "a cycle"),
        (lambda to: edit(to(12), base_version="../x"), FormatError, "`base_version` that can name a folder"),
        (lambda to: edit(to(12), base_version=11), FormatError, "must be text"),
        (lambda to: edit(to(12), delta_encoding="add"), UnsupportedError, "unknown encoding"),
        (lambda to: edit(to(12), compression_format="lz4"), UnsupportedError, "unknown encoding"),
        (lambda to: edit(to(12), delta_encoding="overwrite"), CheckpointError, "number of bytes|another size|longer"),
        (lambda to: (to(12) / INDEX).write_bytes(b'{"delta_encoding"'), FormatError, "not valid JSON"),
        (lambda to: next(to(11).glob("*.safetensors")).write_bytes(b""), TruncatedError, "no room"),
    ],
)
def test_damage_is_a_typed_error_and_is_verified(
    folders: Path, tmp_path: Path, damage: Callable[[Any], object], error: type[CheckpointError], problem: str
) -> None:
    source = folders / name_folder(12)
    assert shardckpt.verify(source).ok
    damage(lambda number: folders / name_folder(number))
    with pytest.raises(error, match=problem):
        shardckpt.consolidate(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    if error is not UnsupportedError:
        assert not shardckpt.verify(source).ok


def test_a_change_of_an_unknown_tensor_is_refused(weights: Callable[[int], Weights], tmp_path: Path) -> None:
    (tmp_path / name_folder(0)).mkdir()
    save_tensors({"norm": weights(10)["norm"]}, tmp_path / name_folder(0) / "model.safetensors")
    write_like_slime(tmp_path, 1, weights(10), weights(11))
    with pytest.raises(CheckpointError, match="the full version lacks"):
        shardckpt.inspect(tmp_path / name_folder(1))


def test_a_position_after_the_end_is_refused(weights: Callable[[int], Weights], tmp_path: Path) -> None:
    (tmp_path / name_folder(0)).mkdir()
    save_tensors({"norm": torch.zeros(4)}, tmp_path / name_folder(0) / "model.safetensors")
    write_like_slime(tmp_path, 1, {"norm": torch.zeros(5)}, {"norm": torch.ones(5)}, encoding="overwrite")
    with pytest.raises(FormatError, match="after the end"):
        shardckpt.load(tmp_path / name_folder(1))


def test_checksums_that_cannot_be_computed_are_named(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> object:
        raise ImportError(name)

    monkeypatch.setattr(hf_delta_checksums, "import_module", refuse)
    edit(folders / name_folder(12), checksum_format="blake3")
    found = shardckpt.verify(folders / name_folder(12))
    assert found.ok
    assert re.search("blake3.*are not compared; install the package blake3", str(found.warnings))
    edit(folders / name_folder(12), checksum_format="md5")
    assert "'md5' are not compared" in str(shardckpt.verify(folders / name_folder(12)).warnings)


def test_an_ordinary_model_folder_is_not_taken_for_a_version(folders: Path) -> None:
    assert shardckpt.inspect(folders / name_folder(10)).format == "safetensors"
