"""Damaged, foreign and hostile streams: one typed error, the server unchanged, and the next good version applies."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.encodings.safetensors import HeaderTensor, encode_header
from shardckpt.encodings.typed_json import dump
from shardckpt.errors import (
    CheckpointError,
    ChecksumError,
    FormatError,
    IncompleteError,
    MismatchError,
    MissingFileError,
    NoSpaceError,
    RankError,
    ShardckptError,
    StorageError,
    TruncatedError,
)
from shardckpt.storage.resolve_url import open_place
from shardckpt.stream.format.codec import BoxChange, encode_change
from shardckpt.stream.format.delta_file import read_index
from shardckpt.stream.format.stream_records import (
    KEY,
    DeltaFile,
    DeltaIndex,
    StoredChange,
    StreamTensor,
    Version,
)
from shardckpt.stream.receive.subscriber import SubscriberState
from tests.kit.ranks.harness import outcomes

V1, V2, V3 = "e00001-v0000000001", "e00001-v0000000002", "e00001-v0000000003"
SHAPES = {"a": (64, 64), "b": (5,)}  # a chain of changes is much shorter than all weights
STRIDE = 5
"""Of the bytes that are flipped, `make test` flips every fifth."""


def build(number: int) -> dict[str, torch.Tensor]:
    """Return version `number`, as a stream has it: one element more than before, and a norm."""
    a = torch.zeros(SHAPES["a"], dtype=torch.bfloat16)
    a[:number, 1] = torch.arange(1.0, number + 1)
    return {"a": a, "b": torch.full(SHAPES["b"], float(number), dtype=torch.bfloat16)}


def publisher(url: Path, max_chain: int = 100) -> shardckpt.Publisher:
    return shardckpt.Publisher(url, anchors=shardckpt.Anchors(max_chain=max_chain, max_bytes=1e9))


def publish(url: Path, *numbers: int, max_chain: int = 100) -> None:
    with publisher(url, max_chain) as each:
        for number in numbers:
            each.publish(number, build(number)).result()


def is_version(into: dict[str, torch.Tensor], number: int) -> bool:
    return all(torch.equal(value, build(number)[name]) for name, value in into.items())


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << at % 8
    path.write_bytes(data)


def find_delta(url: Path, folder: str = V2) -> Path:
    return next((url / folder).glob("delta-*"))


def edit_commit(url: Path, **fields: Any) -> None:
    path = url / V2 / "COMMIT.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def take_commit_of_another_stream(url: Path) -> None:
    other = url.parent / "other"
    publish(other, 1, 2)
    shutil.copy(other / V2 / "COMMIT.json", url / V2 / "COMMIT.json")


def take_delta_of_another_stream(url: Path) -> None:
    """The commit of this stream has the hash of its own file."""
    other = url.parent / "other"
    publish(other, 1, 2)
    shutil.copy(find_delta(other), find_delta(url))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: dict[str, tuple[Callable[[Path], object], type[ShardckptError]]] = {
    "a flipped byte of a change": (lambda url: flip(find_delta(url), -1), ChecksumError),
    "a flipped byte of a header": (lambda url: flip(find_delta(url), 30), ChecksumError),
    "a truncated file of changes": (lambda url: truncate(find_delta(url)), TruncatedError),
    "a missing file of changes": (lambda url: find_delta(url).unlink(), MissingFileError),
    "a file of changes of another stream": (take_delta_of_another_stream, CheckpointError),
    "a commit that is no JSON": (lambda url: (url / V2 / "COMMIT.json").write_text("{"), FormatError),
    "a commit without a field": (lambda url: (url / V2 / "COMMIT.json").write_text("{}"), FormatError),
    "a commit of another stream": (take_commit_of_another_stream, CheckpointError),
    "a commit of another epoch": (lambda url: edit_commit(url, version=[2, 2]), CheckpointError),
    "a commit of another version": (lambda url: edit_commit(url, version=[1, 7]), CheckpointError),
    "a base that is not there": (lambda url: edit_commit(url, base=[1, 0]), IncompleteError),
    "a base with another digest": (lambda url: edit_commit(url, base_digest="0" * 32), IncompleteError),
    "a base that is later": (lambda url: edit_commit(url, base=[1, 9]), CheckpointError),
    "another digest of a tensor": (lambda url: edit_commit(url, digests={"a": "0" * 32, "b": "0" * 32}), ChecksumError),
    "a tensor that the stream lacks": (lambda url: edit_commit(url, digests={"c": "0" * 32}), CheckpointError),
    "a file outside of the folder": (
        lambda url: edit_commit(url, files=[["../x.safetensors", 9, 9, "0" * 64]]),
        CheckpointError,
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_server_stays_on_its_version_and_the_next_good_one_applies(damage: str, tmp_path: Path) -> None:
    url, into = tmp_path / "stream", build(0)
    act, kind = DAMAGES[damage]
    with publisher(url, 1) as trainer:
        trainer.publish(1, build(1)).result()
        subscriber = shardckpt.Subscriber(url)
        subscriber.stage().commit(into)
        trainer.publish(2, build(2)).result()
        shutil.rmtree(url / V2 / "anchor", ignore_errors=True)
        act(url)
        for _ in range(2):
            with pytest.raises(kind):
                subscriber.stage()
            assert is_version(into, 1)
            assert (subscriber.label, subscriber.state) == ("1", SubscriberState.READY)
        trainer.publish(3, build(3)).result()  # with an anchor: the chain is as long as it may be
        trainer.close()
    assert (url / V3 / "anchor").exists()
    assert subscriber.stage().commit(into) == (1, 3)
    assert is_version(into, 3)


def test_a_hole_in_a_chain_is_told_until_an_anchor_comes(tmp_path: Path) -> None:
    into = build(0)
    with publisher(tmp_path, 3) as trainer:
        trainer.publish(1, build(1)).result()
        subscriber = shardckpt.Subscriber(tmp_path)
        subscriber.stage().commit(into)
        for number in (2, 3):
            trainer.publish(number, build(number)).result()
        (tmp_path / V2 / "COMMIT.json").unlink()
        with pytest.raises(IncompleteError, match=r"version 3 .* needs version 2"):
            subscriber.stage()
        assert is_version(into, 1) and subscriber.label == "1"
        trainer.publish(4, build(4)).result()
        with pytest.raises(IncompleteError):
            subscriber.stage()
        trainer.publish(5, build(5)).result()
    assert subscriber.stage().commit(into).number == 5
    assert is_version(into, 5)


def outcome(url: Path) -> str:
    """Receive the newest version as a new server: what it gets is bit for bit what it says, or a typed error."""
    into, subscriber = build(0), shardckpt.Subscriber(url)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            subscriber.stage().commit(into)
    except ShardckptError as error:
        assert is_version(into, 0), "the target is unchanged"
        return type(error).__name__
    assert is_version(into, int(subscriber.label)), "a flipped byte got through"
    if subscriber.label == "2":
        return ""
    assert "its commit is damaged" in str(caught[0].message)
    return "the version before"


def flip_each(url: Path, path: Path, places: Iterable[int]) -> dict[str, int]:
    """Flip bytes of a file, one after the other; return how often each outcome came."""
    found: dict[str, int] = {}
    kept = path.read_bytes()
    for at in places:
        flip(path, at)
        name = outcome(url)
        found[name] = found.get(name, 0) + 1
        path.write_bytes(kept)
    assert outcome(url) == ""
    return found


PARTS = [pytest.param(each, marks=[pytest.mark.full] if each else []) for each in range(STRIDE)]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["STREAM.json", f"{V2}/COMMIT.json", "delta"])
def test_any_flipped_byte_of_a_small_file_is_found_or_has_no_effect(name: str, part: int, tmp_path: Path) -> None:
    publish(tmp_path, 1, 2)
    path = find_delta(tmp_path) if name == "delta" else tmp_path / name
    found = flip_each(tmp_path, path, range(part, path.stat().st_size, STRIDE))
    assert sum(found.values()) > found.get("", 0), found
    if name == "delta":
        assert "" not in found


def test_flipped_bytes_of_an_anchor_are_found(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2)
    files = [path for path in (tmp_path / V1 / "anchor").rglob("*") if path.is_file()]
    assert len(files) >= 3
    for path in files:
        size = path.stat().st_size
        found = flip_each(tmp_path, path, range(0, size, max(size // 12, 1)))
        if path.suffix == ".safetensors":
            assert found.get("", 0) <= 8, "its header's padding alone is not compared"


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_missing_or_truncated_file_of_an_anchor_is_told(damage: str, tmp_path: Path) -> None:
    publish(tmp_path, 1)
    path = next((tmp_path / V1 / "anchor").glob("*.safetensors"))
    if damage == "missing":
        path.unlink()
    else:
        truncate(path)
    into = build(0)
    with pytest.raises((CheckpointError, StorageError)):
        shardckpt.Subscriber(tmp_path).stage()
    publish(tmp_path, 2)
    assert shardckpt.Subscriber(tmp_path).stage().commit(into) == (2, 2)
    assert is_version(into, 2)


def test_a_server_that_comes_after_a_damaged_anchor_takes_the_one_before(tmp_path: Path) -> None:
    into, late = build(0), build(0)
    with publisher(tmp_path, 1) as trainer:
        trainer.publish(1, build(1)).result()
        subscriber = shardckpt.Subscriber(tmp_path)
        subscriber.stage().commit(into)
        for number in (2, 3):
            trainer.publish(number, build(number)).result()
        truncate(next((tmp_path / V3 / "anchor").glob("*.safetensors")))
        with pytest.warns(UserWarning, match=r"anchor of version 3 \(epoch 1\) is damaged, and an earlier one is used"):
            shardckpt.Subscriber(tmp_path).stage().commit(late)
        assert is_version(late, 3)
        subscriber.stage().commit(into)
        assert is_version(into, 3)


def test_if_all_anchors_are_damaged_the_newest_ones_fault_is_raised(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2, 3, max_chain=1)
    for folder in (V1, V3):
        truncate(next((tmp_path / folder / "anchor").glob("*.safetensors")))
    with pytest.raises(CheckpointError, match=f"{V1}/anchor"), pytest.warns(UserWarning, match="version 3"):
        shardckpt.Subscriber(tmp_path).stage()


def test_a_server_that_comes_after_a_damaged_commit_takes_the_version_before(tmp_path: Path) -> None:
    publish(tmp_path, 1, 2)
    into, subscriber = build(0), shardckpt.Subscriber(tmp_path)
    (tmp_path / V2 / "COMMIT.json").write_text("{}")
    with pytest.warns(UserWarning, match=r"version 2 \(epoch 1\) is not used, because its commit is damaged"):
        subscriber.stage().commit(into)
    assert is_version(into, 1) and subscriber.label == "1"
    with pytest.raises(FormatError):
        shardckpt.Subscriber(tmp_path).stage(2)


# What is published


CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "name": lambda model: model.__setitem__("c", model.pop("b")),
    "more": lambda model: model.__setitem__("c", torch.ones(2)),
    "less": lambda model: model.pop("b"),
    "shape": lambda model: model.__setitem__("b", torch.ones(6)),
    "dtype": lambda model: model.__setitem__("b", torch.ones(5, dtype=torch.int32)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_is_not_published_and_the_next_good_one_is(change: str, tmp_path: Path) -> None:
    into = build(0)
    with publisher(tmp_path) as trainer:
        trainer.publish(1, build(1)).result()
        other = build(2)
        CHANGES[change](other)
        with pytest.raises(MismatchError, match=r"[bc]"):
            trainer.publish(2, other)
        assert shardckpt.Subscriber(tmp_path).stage().version.number == 1
        trainer.publish(2, build(2)).result()
    shardckpt.Subscriber(tmp_path).stage().commit(into)
    assert is_version(into, 2)


@pytest.mark.parametrize(
    "target",
    [
        {"a": torch.zeros(64, 64), "b": torch.zeros(5, dtype=torch.int64)},
        {"a": torch.zeros(64, 64, dtype=torch.float16), "b": torch.zeros(5)},
    ],
    ids=["integers", "a narrower float"],
)
def test_a_target_that_would_round_is_refused(target: dict[str, torch.Tensor], tmp_path: Path) -> None:
    publish(tmp_path, 1)
    staged = shardckpt.Subscriber(tmp_path).stage()
    with pytest.raises(MismatchError, match="dtype"):
        staged.commit(target)
    assert not any(value.any() for value in target.values())
    wider = {"a": torch.zeros(64, 64), "b": torch.zeros(5)}
    staged.commit(wider)
    assert is_version({name: value.bfloat16() for name, value in wider.items()}, 1)


# A full mirror


def list_weights(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("weights-*")]


def test_a_full_mirror_is_told_and_the_next_version_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, mirror, into = tmp_path / "stream", tmp_path / "mirror", build(0)
    publish(url, 1, 2, 3)
    subscriber = shardckpt.Subscriber(url, mirror=mirror)
    subscriber.stage(1).commit(into)
    reserve = os.posix_fallocate

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fail)
    other = shardckpt.Subscriber(url, mirror=tmp_path / "full")
    with pytest.raises(NoSpaceError, match="full"):
        other.stage()
    assert list_weights(tmp_path / "full") == []
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    assert other.stage(2).commit(build(0)) == (1, 2)
    subscriber.stage(2).commit(into)
    assert is_version(into, 2)


@pytest.mark.parametrize("is_full", [True, False])
def test_a_mirror_that_cannot_say_what_it_holds_is_given_up_without_a_leak(
    is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, mirror, into = tmp_path / "stream", tmp_path / "mirror", build(0)
    publish(url, 1, 2, 3, max_chain=1)
    subscriber = shardckpt.Subscriber(url, mirror=mirror)
    subscriber.stage(1).commit(into)
    replace = os.replace

    def fail(source: str, target: str) -> None:
        if str(target).endswith("HELD.json"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    if is_full:
        subscriber.close()
        subscriber, into = shardckpt.Subscriber(url, mirror=mirror), build(0)
    monkeypatch.setattr(os, "replace", fail)
    staged = subscriber.stage(2)
    with pytest.warns(UserWarning, match="applied, but the mirror failed"):
        assert staged.commit(into) == (1, 2)
    assert is_version(into, 2) and subscriber.label == "2"
    assert list_weights(mirror) == []
    monkeypatch.setattr(os, "replace", replace)
    subscriber.stage().commit(into)
    assert is_version(into, 3)
    assert len(list_weights(mirror)) == 1


# A publisher that loses a rank


def publish_and_lose(rank: int, world: int, url: str) -> str:
    """Publish a version; then rank 1 ends before the next one. Return what the others are told."""
    trainer = shardckpt.Publisher(url)
    trainer.publish(1, build(1)).result()
    if rank == 1:
        os._exit(7)
    began = time.monotonic()
    try:
        trainer.publish(2, build(2)).result()
    except RankError as error:
        assert time.monotonic() - began < 30
        return f"{error.rank} {error}"
    return "published"


def test_a_publisher_that_loses_a_rank_names_it_and_another_one_continues(tmp_path: Path) -> None:
    url, into = str(tmp_path / "stream"), build(0)
    found = outcomes(3, publish_and_lose, url)
    told = [str(each.value) for rank, each in enumerate(found) if rank != 1]
    assert all(text.startswith("1 ") and "rank 1" in text for text in told), told
    subscriber = shardckpt.Subscriber(url)
    subscriber.stage().commit(into)
    assert is_version(into, 1)
    with publisher(Path(url)) as trainer:
        assert trainer.resume(build(1)) == 1
        trainer.publish(2, build(2)).result()
    staged = subscriber.stage()
    assert not staged.is_full
    staged.commit(into)
    assert is_version(into, 2)


# A damaged history


def test_a_damaged_commit_does_not_stop_a_publisher_that_resumes(tmp_path: Path) -> None:
    into = build(0)
    publish(tmp_path, 1, 2, 3)
    (tmp_path / V3 / "COMMIT.json").write_text("{")
    with publisher(tmp_path) as trainer, pytest.warns(UserWarning, match="commit is damaged"):
        assert trainer.resume(build(2)) == 2
        trainer.publish(4, build(4)).result()
    assert shardckpt.Subscriber(tmp_path).stage().commit(into).number == 4
    assert is_version(into, 4)


def test_a_chain_that_is_interrupted_gets_an_anchor(tmp_path: Path) -> None:
    into = build(0)
    publish(tmp_path, 1, 2, 3)
    (tmp_path / V2 / "COMMIT.json").unlink()
    with publisher(tmp_path) as trainer:
        assert trainer.resume(build(3)) == 3
        trainer.publish(4, build(4)).result()
    assert shardckpt.Subscriber(tmp_path).stage().commit(into).number == 4
    assert is_version(into, 4)


# Hostile files


@pytest.mark.parametrize(
    "text",
    ["[" * 1_000_000, '{"a":' * 300_000, "9" * 1_000_000, '{"stream": "' + "x" * 1_000_000 + '"}', "[1]" * 400_000],
    ids=["lists", "objects", "digits", "a text", "more"],
)
@pytest.mark.parametrize("name", ["STREAM.json", f"{V2}/COMMIT.json"])
def test_hostile_records_are_refused_in_linear_time(name: str, text: str, tmp_path: Path) -> None:
    publish(tmp_path, 1, 2)
    (tmp_path / name).write_text(text)
    began = time.process_time()
    if name == "STREAM.json":
        with pytest.raises(CheckpointError) as caught:
            shardckpt.Subscriber(tmp_path).stage()
        said = str(caught.value)
    else:  # a server that starts takes the version before
        with pytest.warns(UserWarning, match=V2) as warned:
            assert shardckpt.Subscriber(tmp_path).stage().version.number == 1
        said = str(warned[0].message)
    assert time.process_time() - began < 10
    assert len(said) < 10_000


def write_changes(store: Any, version: Version, boxes: int, numel: int) -> DeltaFile:
    """Write a file in which many short changes each have all elements of a large tensor."""
    data = encode_change(BoxChange(numel, None, torch.zeros(numel, dtype=torch.int16).numpy().view("u2")))
    index = DeltaIndex("0" * 32, version, tuple(StoredChange("a", (0,), (numel,), "0" * 64) for _ in range(boxes)))
    tensors = [HeaderTensor(str(at), "uint8", (len(data),)) for at in range(boxes)]
    header = encode_header(tensors, {KEY: dump(index).decode()})
    name = "delta-00000-00000000.safetensors"
    with store.create(f"{version.folder}/{name}") as writer:
        writer.write(header + data * boxes)
    return DeltaFile(name, len(header) + len(data) * boxes, len(header), hashlib.sha256(header).hexdigest())


def test_many_short_changes_of_one_large_box_are_refused(tmp_path: Path) -> None:
    """Each takes the memory of the box, so a file of a megabyte could take terabytes."""
    store, version = open_place(str(tmp_path)), Version(1, 2)
    tensors = {"a": StreamTensor("bfloat16", (1 << 20,))}
    file = write_changes(store, version, 1000, 1 << 20)
    assert file.nbytes < 1 << 20
    tracemalloc.start()
    with pytest.raises(FormatError, match="overlap"):
        read_index(store, version, [file], "0" * 32, tensors)
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()
