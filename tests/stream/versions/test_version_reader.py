"""A version of a stream is a checkpoint: every offline verb reads it, from an anchor and the changes after it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed import fsdp as theirs

import shardckpt
from shardckpt.errors import (
    CheckpointError,
    ChecksumError,
    IncompleteError,
    ShardckptError,
    SourceNotFoundError,
    TruncatedError,
    UnknownFormatError,
    UsageError,
)
from shardckpt.readers.registry import open_checkpoint, resolve_step
from shardckpt.storage.store import read_bytes
from shardckpt.stream.versions import made_file, version_content
from tests.kit.ranks.harness import run
from tests.kit.writers.stream_writer import ANCHORS, NUMBERS, Weights, assert_same, delta_of, flip, folder_of


def read(source: object, target: Path) -> Weights:
    shardckpt.consolidate(str(source), target)
    assert [file.name for file in target.iterdir()] == ["model.safetensors"]
    return load_file(target / "model.safetensors")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_consolidated_version_is_what_was_published(
    stream: Path, versions: dict[int, Weights], number: int, tmp_path: Path
) -> None:
    assert_same(read(f"{stream}@{number}", tmp_path / "out"), versions[number])


def test_the_test_stream_has_anchors_and_chains(stream: Path) -> None:
    assert tuple(n for n in NUMBERS if (folder_of(stream, n) / "anchor").exists()) == ANCHORS


@pytest.mark.parametrize("name", ["@latest", "#15", "/e00001-v0000000015"])
def test_a_version_is_named_like_a_step_or_by_its_folder(
    stream: Path, versions: dict[int, Weights], name: str, tmp_path: Path
) -> None:
    assert_same(read(f"{stream}{name}", tmp_path / "out"), versions[15])


def test_small_groups_of_tensors_give_the_same_bytes(
    stream: Path, versions: dict[int, Weights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_file, "_GROUP_BYTES", 1)
    assert_same(read(f"{stream}@12", tmp_path / "out"), versions[12])
    assert shardckpt.verify(f"{stream}@12").ok


def test_at_most_one_group_of_tensors_is_read_at_a_time(
    stream: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(made_file, "_GROUP_BYTES", 1)
    sizes: list[int] = []
    original = version_content.VersionContent.read

    def record(self: version_content.VersionContent, boxes: object) -> object:
        made = original(self, boxes)  # type: ignore[arg-type]
        sizes.append(made.nbytes)
        return made

    monkeypatch.setattr(version_content.VersionContent, "read", record)
    read(f"{stream}@12", tmp_path / "out")
    assert max(sizes) == 40 * 30 * 2
    assert len(sizes) == 5, "each tensor with bytes is made once"


def test_any_range_of_bytes_can_be_read(stream: Path, versions: dict[int, Weights]) -> None:
    reader = open_checkpoint(resolve_step(f"{stream}@12"))
    [(file, size)] = reader.manifest.files.items()
    everything = b"".join(bytes(value.reshape(-1).view(torch.uint8).tolist()) for value in versions[12].values())
    assert len(everything) == size
    for offset, nbytes in ((0, size), (1, size - 1), (7, 100), (2399, 70), (2450, 50), (size - 1, 1), (5, 0)):
        assert read_bytes(reader.store, file, offset, nbytes) == everything[offset : offset + nbytes]
    with pytest.raises(TruncatedError):
        read_bytes(reader.store, file, size - 1, 2)


def test_a_digest_does_not_depend_on_the_blocks_that_are_read(stream: Path, versions: dict[int, Weights]) -> None:
    reader = open_checkpoint(resolve_step(f"{stream}@12"))
    first = next(reader.checksums())
    data = memoryview(read_bytes(reader.store, first.file, first.offset, first.nbytes))
    digest = reader.algorithms[first.algorithm]
    assert digest([data]) == digest([data[:800], data[800:802], data[802:]]) == first.value
    assert digest([data[802:], data[:802]]) != first.value


def test_versions_can_be_inspected_compared_and_measured(stream: Path, versions: dict[int, Weights]) -> None:
    found = shardckpt.inspect(f"{stream}@12")
    assert (found.format, found.metadata["version"], found.metadata["epoch"]) == ("stream", "12", "1")
    assert {each.name: each.shape for each in found.tensors} == {n: tuple(v.shape) for n, v in versions[12].items()}
    changed = {each.name for each in shardckpt.diff(f"{stream}@11", f"{stream}@12").differences}
    assert changed == {"layers.0.weight", "scalar", "mask"}
    stats = {each.name: each for each in shardckpt.stats(f"{stream}@12").tensors}
    assert stats["scalar"].max == versions[12]["scalar"].item()


def test_a_module_loads_a_version(stream: Path, versions: dict[int, Weights]) -> None:
    model = nn.Module()
    for name in ("norm", "counts", "scalar", "mask"):
        model.register_buffer(name, torch.zeros_like(versions[14][name]))
    shardckpt.load(model, f"{stream}@14", strict=False)
    assert all(torch.equal(value, versions[14][name]) for name, value in model.state_dict().items())


def test_tied_names_are_in_the_version(tmp_path: Path) -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False)})
    model["head"].weight = model["embed"].weight
    with shardckpt.Publisher(tmp_path / "stream", dtype=None) as publisher:
        publisher.publish(1, model)
    assert shardckpt.inspect(f"{tmp_path}/stream@1").ties == {"head.weight": "embed.weight"}
    shardckpt.consolidate(f"{tmp_path}/stream@1", tmp_path / "model.pt")
    assert_same(torch.load(tmp_path / "model.pt"), model.state_dict())


def publish_shards(rank: int, world: int, url: str) -> Weights:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    theirs.fully_shard(model)
    with shardckpt.Publisher(url) as publisher:
        for number in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.5)
            publisher.publish(number, model)
    return {name: value.bfloat16() for name, value in shardckpt.model_state_dict(model).items()}


def test_boxes_of_several_ranks_are_joined(tmp_path: Path) -> None:
    made = run(2, publish_shards, str(tmp_path / "stream"))
    assert_same(read(f"{tmp_path}/stream@2", tmp_path / "out"), made[0])
    assert shardckpt.verify(f"{tmp_path}/stream@2").ok


# Names that mean no version


def test_a_stream_without_a_version_is_explained(stream: Path) -> None:
    with pytest.raises(UnknownFormatError, match=r"is a stream of weights.*newest version is 15 .*stream@15") as caught:
        shardckpt.inspect(stream)
    assert caught.value.nearby == f"{stream}@15"
    for folder in stream.glob("e*"):
        shutil.rmtree(folder)
    with pytest.raises(UnknownFormatError, match="without a version"):
        shardckpt.inspect(stream)


@pytest.mark.parametrize(
    ("suffix", "error", "message"),
    [
        ("@99", SourceNotFoundError, "version 99 is not published here; found versions 10 to 15"),
        ("@best", UsageError, "a stream has no best version"),
        ("@10..12", UsageError, "takes one step"),
    ],
)
def test_names_of_no_version_are_refused(stream: Path, suffix: str, error: type[ShardckptError], message: str) -> None:
    with pytest.raises(error, match=message):
        shardckpt.inspect(f"{stream}{suffix}")


def test_a_version_without_a_commit_is_not_published(stream: Path) -> None:
    (folder_of(stream, 15) / "COMMIT.json").unlink()
    assert shardckpt.inspect(f"{stream}@latest").metadata["version"] == "14"
    with pytest.raises(SourceNotFoundError, match="not published"):
        shardckpt.inspect(folder_of(stream, 15))


# Damage


def swap_anchor(stream: Path) -> None:
    """Give version 10 an undamaged anchor with other weights."""
    shutil.rmtree(folder_of(stream, 10) / "anchor")
    shutil.copytree(folder_of(stream, 13) / "anchor", folder_of(stream, 10) / "anchor")


def edit_commit(stream: Path, number: int, edit: Callable[[dict[str, object]], object]) -> None:
    file = folder_of(stream, number) / "COMMIT.json"
    commit = json.loads(file.read_text())
    edit(commit)
    file.write_text(json.dumps(commit))


@pytest.mark.parametrize(
    ("damage", "error", "problem"),
    [
        (lambda stream: flip(delta_of(stream, 12), -1), ChecksumError, "a change differs from its hash"),
        (lambda stream: flip(delta_of(stream, 12), 20), ChecksumError, "the header differs from the commit's hash"),
        (lambda stream: delta_of(stream, 11).unlink(), IncompleteError, "delta-00000"),
        (lambda stream: delta_of(stream, 11).write_bytes(b""), CheckpointError, "another size than its commit says"),
        (lambda stream: shutil.rmtree(folder_of(stream, 11)), IncompleteError, "needs version 11 .*, which is gone"),
        (lambda stream: shutil.rmtree(folder_of(stream, 10) / "anchor"), IncompleteError, "has an anchor"),
        (swap_anchor, ChecksumError, "layers.0.weight"),
        (
            lambda stream: edit_commit(stream, 12, lambda commit: commit["digests"].popitem()),  # type: ignore[attr-defined]
            CheckpointError,
            "digests in the commit do not fit together",
        ),
        (
            lambda stream: edit_commit(stream, 12, lambda commit: commit.update(stream="0" * 32)),
            CheckpointError,
            "the commit is for another stream",
        ),
    ],
    ids=["change", "header", "gone", "empty", "hole", "no anchor", "swapped", "digest", "stream"],
)
def test_damage_is_a_typed_error_and_is_verified(
    stream: Path,
    tmp_path: Path,
    damage: Callable[[Path], object],
    error: type[CheckpointError],
    problem: str,
) -> None:
    source = str(folder_of(stream, 12))
    assert shardckpt.verify(source).ok
    damage(stream)
    with pytest.raises(error):
        shardckpt.consolidate(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    found = shardckpt.verify(source)
    assert not found.ok
    assert re.search(problem, str(found.problems)), found.problems
