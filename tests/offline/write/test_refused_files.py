"""A file that the safetensors library refuses is not published, whoever wrote it, and the old content stays."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardckpt
from shardckpt.native import payload
from shardckpt.offline.targets import safetensors_files
from tests.kit.stores.bucket import Bucket

STATE = {f"t{i}": torch.arange(4.0) + i for i in range(3)}


def edit(header: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Change the tensors in a header, which are ordered as their data."""
    content = json.loads(header[8:])
    tensors = {name: entry for name, entry in content.items() if name != "__metadata__"}
    change(tensors)
    body = json.dumps({"__metadata__": content.get("__metadata__", {}), **tensors}).encode()
    return struct.pack("<Q", len(body)) + body


def first(tensors: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(tensors.values()))
    return found


HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "a type of another width": lambda header: edit(header, lambda tensors: first(tensors).update(dtype="I8")),
    "the last tensor is lost": lambda header: edit(header, lambda tensors: tensors.popitem()),
    "a hole": lambda header: edit(header, lambda tensors: first(tensors)["data_offsets"].__setitem__(0, 1)),
    "no JSON": lambda header: header[:-2] + b"]]",
}


@pytest.fixture(params=HEADERS)
def change(request: pytest.FixtureRequest) -> Callable[[bytes], bytes]:
    """A fault of a writer, in the header of each file."""
    return HEADERS[request.param]


def break_writers(monkeypatch: pytest.MonkeyPatch, change: Callable[[bytes], bytes], which: int = 0) -> None:
    """Make the writers of safetensors files write other headers, from a number of files on."""
    made = 0

    def broken(write: Callable[..., bytes]) -> Callable[..., bytes]:
        def run(*args: Any, **options: Any) -> bytes:
            nonlocal made
            made += 1
            header = write(*args, **options)
            return header if made <= which else change(header)

        return run

    monkeypatch.setattr(safetensors_files, "encode_header", broken(safetensors_files.encode_header))
    monkeypatch.setattr(payload, "join_header", broken(payload.join_header))


@pytest.fixture
def src(tmp_path: Path) -> Path:
    save_file(STATE, tmp_path / "src.safetensors")
    return tmp_path / "src.safetensors"


WRITERS: dict[str, Callable[[Path, str], object]] = {
    "consolidate": lambda src, out: shardckpt.consolidate(src, out, overwrite=True),
    "one file": lambda src, out: shardckpt.consolidate(src, f"{out}.safetensors", overwrite=True),
    "shards": lambda src, out: shardckpt.consolidate(src, out, max_shard_size="32B", overwrite=True),
    "jobs": lambda src, out: shardckpt.consolidate(src, out, max_shard_size="32B", jobs=2, overwrite=True),
    "convert": lambda src, out: shardckpt.convert(src, out, dtype="bf16", overwrite=True),
    "native": lambda src, out: shardckpt.convert(src, out, to="native", overwrite=True),
    "reshard": lambda src, out: shardckpt.reshard(src, out, world_size=2, overwrite=True),
    "save": lambda _, out: shardckpt.save(STATE, out, overwrite=True),
    "async_save": lambda _, out: shardckpt.async_save(STATE, out, overwrite=True).result(),
}


def read_all(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("writer", WRITERS)
def test_nothing_is_published_and_the_old_content_stays(
    writer: str, change: Callable[[bytes], bytes], src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    for _ in ("new", "old"):
        before = read_all(folder)
        with monkeypatch.context() as patch:
            break_writers(patch, change)
            with pytest.raises(shardckpt.errors.CheckpointError, match="written file"):
                WRITERS[writer](src, str(folder / "out"))
        assert read_all(folder) == before
        WRITERS[writer](src, str(folder / "out"))
    assert before


@pytest.mark.parametrize("writer", ["shards", "jobs", "reshard"])
def test_one_refused_file_of_several_is_enough(
    writer: str, src: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    break_writers(monkeypatch, HEADERS["no JSON"], which=1)
    with pytest.raises(shardckpt.errors.FormatError, match="written file"):
        WRITERS[writer](src, str(tmp_path / "here" / "out"))
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("writer", WRITERS)
def test_a_store_without_rename_keeps_what_it_has(
    writer: str, change: Callable[[bytes], bytes], src: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Bucket.reset()
    for _ in ("new", "old"):
        before = dict(Bucket.objects)
        with monkeypatch.context() as patch:
            break_writers(patch, change)
            with pytest.raises(shardckpt.errors.CheckpointError, match="written file"):
                WRITERS[writer](src, "bucket://b/out")
        assert Bucket.objects == before
        WRITERS[writer](src, "bucket://b/out")
    assert before
