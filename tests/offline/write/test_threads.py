"""One file by several threads: the bytes that one thread writes, the first error, or nothing."""

from __future__ import annotations

import errno
import os
import re
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

import shardckpt
from shardckpt.errors import NoSpaceError, PrecisionError, StorageError, UsageError
from shardckpt.offline.write import stream
from shardckpt.storage.local import LocalStore, LocalWriter

ROWS, COLUMNS = 96, 64


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor takes many batches, and every copy many blocks."""
    monkeypatch.setattr(stream, "_MIN_BATCH_BYTES", 512)
    monkeypatch.setattr(stream, "_LOCAL_BATCH_BYTES", 512)
    monkeypatch.setattr(stream, "_WIDE_BATCH_BYTES", 2048)
    monkeypatch.setattr(stream, "_COPY_BYTES", 2048)


def by_rows_and_columns(folder: Path) -> Path:
    """Two ranks: `rows` is copied run by run, `columns` is put together, and many are small."""
    folder.mkdir()
    random = np.random.default_rng(7)
    for rank in range(2):
        arrays, offsets = {}, {}
        for number in range(3):
            arrays[f"rows.{number}"] = random.standard_normal((ROWS // 2, COLUMNS)).astype(np.float32)
            offsets[f"rows.{number}"] = [rank * ROWS // 2, 0]
            arrays[f"columns.{number}"] = random.standard_normal((ROWS, COLUMNS // 2)).astype(np.float32)
            offsets[f"columns.{number}"] = [0, rank * COLUMNS // 2]
        if rank == 0:
            small = {f"small.{number}": random.standard_normal(5).astype(np.float32) for number in range(40)}
            arrays |= small
            offsets |= {name: [0] for name in small}
        info = {name: {"saved_offsets": offset} for name, offset in offsets.items()}
        header = {"DCP_SHARDING_INFO": str(info).replace("'", '"')}
        save_file(arrays, folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors", header)
    return folder


def transposed(folder: Path) -> Path:
    folder.mkdir()
    torch.save({"t": torch.randn(COLUMNS, ROWS).T, "w": torch.randn(ROWS, COLUMNS)}, folder / "a.pt")
    return folder


def deflated(folder: Path) -> Path:
    """Streams that are decoded forward only, beside one that is not encoded."""
    folder.mkdir()
    torch.save({f"w{n}": torch.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) + n for n in range(4)}, folder / "a.pt")
    deflate(folder / "a.pt")
    return folder


def deflate(path: Path) -> None:
    """Compress two of three records of a file of torch."""
    plain = path.rename(path.with_name("plain"))
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(path, "w") as target:
        for number, info in enumerate(source.infolist()):
            kind = zipfile.ZIP_DEFLATED if number % 3 else zipfile.ZIP_STORED
            target.writestr(info.filename, source.read(info), kind)
    plain.unlink()


def content(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder; a save's id is the only thing that differs."""
    files = sorted(folder.iterdir()) if folder.is_dir() else [folder]
    return {re.sub(r"^[0-9a-z]{15}-", "", file.name): file.read_bytes() for file in files}


@pytest.mark.parametrize("make", [by_rows_and_columns, transposed, deflated])
@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("one.safetensors", {}),
        ("many", {"max_shard_size": 30_000}),
        ("half", {"dtype": "bf16"}),
        ("torch", {"to": "torch"}),
        ("dcp", {"to": "dcp"}),
    ],
)
def test_any_number_of_threads_writes_the_same_bytes(
    make: Callable[[Path], Path], target: str, options: dict[str, object], tmp_path: Path
) -> None:
    source = make(tmp_path / "src")
    written = []
    for jobs in (1, 2, 4, 7):
        out = tmp_path / str(jobs) / target
        shardckpt.consolidate(source, out, jobs=jobs, **options)
        written.append(content(out))
    assert sum(map(len, written[0].values())) > 15_000
    assert all(each == written[0] for each in written[1:])


@pytest.mark.parametrize("jobs", [2, 4])
def test_a_step_written_by_threads_is_verified(jobs: int, tmp_path: Path) -> None:
    source = by_rows_and_columns(tmp_path / "src")
    shardckpt.convert(source, tmp_path / "step", to="native", jobs=jobs)
    assert shardckpt.verify(tmp_path / "step").problems == ()
    assert shardckpt.diff(source, tmp_path / "step").same
    shardckpt.consolidate(tmp_path / "step", tmp_path / "back", jobs=jobs)
    assert shardckpt.diff(source, tmp_path / "back").same


def test_other_threads_read_a_file_that_the_calling_one_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readers, writers, tellers, sizes = Counter(), set(), set(), []
    read, write = LocalStore.read, LocalWriter.write

    def read_here(self: LocalStore, reads: list) -> None:
        readers[threading.get_ident()] += sum(each.buffer.nbytes for each in reads)
        read(self, reads)

    def write_here(self: LocalWriter, data: memoryview) -> None:
        writers.add(threading.get_ident())
        sizes.append(len(data))
        write(self, data)

    monkeypatch.setattr(LocalStore, "read", read_here)
    monkeypatch.setattr(LocalWriter, "write", write_here)
    done = []

    def tell(progress: shardckpt.results.Progress) -> None:
        tellers.add(threading.get_ident())
        done.append(progress.done_bytes)

    source = by_rows_and_columns(tmp_path / "src")
    report = shardckpt.consolidate(source, tmp_path / "one.safetensors", jobs=3, on_progress=tell)
    del readers[threading.get_ident()]  # it plans
    assert 1 < len(readers) <= 3
    assert readers.total() == report.nbytes
    assert writers == tellers == {threading.get_ident()}
    assert done == sorted(done) and done[-1] == report.nbytes
    assert max(sizes[1:]) <= 512, "all but the header are batches"


@pytest.mark.parametrize(("jobs", "copies"), [(2, True), (5, False)])
def test_only_as_many_files_as_threads_are_each_copied_by_the_thread_that_writes_it(
    jobs: int, copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Barrier(2)
    share, copy_from = stream.TensorStream._share_copies, LocalWriter.copy_from
    copied = []

    def share_side_by_side(self: stream.TensorStream, plan: Iterator[object]) -> Iterator[object]:
        begun.wait(60)
        yield from share(self, plan)

    def copy_here(self: LocalWriter, source: LocalStore, name: str, offset: int, nbytes: int) -> None:
        copied.append(nbytes)
        copy_from(self, source, name, offset, nbytes)

    monkeypatch.setattr(stream.TensorStream, "_share_copies", share_side_by_side)
    monkeypatch.setattr(LocalWriter, "copy_from", copy_here)
    source = by_rows_and_columns(tmp_path / "src")
    report = shardckpt.consolidate(source, tmp_path / "two", include="rows.[01]", jobs=jobs, max_shard_size=30_000)
    assert len(report.files) == 2
    assert bool(copied) is copies


@pytest.mark.parametrize("target", ["one.safetensors", "many"])
def test_a_disk_that_is_full_stops_all_threads_and_leaves_nothing(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, count = os.write, iter(range(10**6))

    def full(fd: int, data: memoryview) -> int:
        if next(count) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(fd, data)

    source = by_rows_and_columns(tmp_path / "src")
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(NoSpaceError, match=r"\.safetensors"):
        shardckpt.consolidate(source, tmp_path / target, jobs=3, max_shard_size=30_000)
    assert next(count) < 150, "of 290 writes"
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_the_first_batch_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = by_rows_and_columns(tmp_path / "src")
    whole, lock, calls = LocalStore.read, threading.Lock(), [0]

    def broken(self: LocalStore, reads: list) -> None:
        with lock:
            calls[0] += any(read.buffer.nbytes == 512 for read in reads)
        if calls[0] > 10 and any("shard-00002" in read.name for read in reads):
            raise StorageError("cannot read", where=reads[0].name)
        whole(self, reads)

    monkeypatch.setattr(LocalStore, "read", broken)
    with pytest.raises(StorageError, match="cannot read"):
        shardckpt.consolidate(source, tmp_path / "one.safetensors", jobs=4)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_a_value_that_is_lost_in_a_thread_is_named(tmp_path: Path) -> None:
    values = np.ones((ROWS, COLUMNS), np.float32)
    values[50, 3] = 1e38
    (tmp_path / "src").mkdir()
    save_file({"a": np.ones((ROWS, COLUMNS), np.float32), "w": values}, tmp_path / "src" / "model.safetensors")
    with pytest.raises(PrecisionError, match=r"^finite values of 'w'"):
        shardckpt.consolidate(tmp_path / "src", tmp_path / "out", dtype="fp16", jobs=4)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("target", ["one.safetensors", "many"])
@pytest.mark.parametrize("allowed", [0, 1, 4])
def test_too_few_threads_are_an_error_that_says_so(
    target: str, allowed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, count = threading.Thread.start, iter(range(10**6))

    def start(self: threading.Thread) -> None:
        if next(count) >= allowed:
            raise RuntimeError("can't start new thread")
        whole(self)

    source = by_rows_and_columns(tmp_path / "src")
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(UsageError, match=r"no more threads.*--jobs"):
        shardckpt.consolidate(source, tmp_path / target, jobs=8, max_shard_size=30_000)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("target", ["one.safetensors", "many"])
def test_an_interrupt_stops_all_threads_and_leaves_nothing(target: str, tmp_path: Path) -> None:
    source = by_rows_and_columns(tmp_path / "src")
    before = threading.active_count()

    def stop(progress: shardckpt.results.Progress) -> None:
        if progress.done_bytes > 20_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shardckpt.consolidate(source, tmp_path / target, jobs=3, max_shard_size=30_000, on_progress=stop)
    assert threading.active_count() == before
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_threads_share_the_decoders_of_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "adapter").mkdir()
    weights = {f"w{n}.weight": np.ones((ROWS, COLUMNS), np.float32) for n in range(4)}
    save_file(weights, tmp_path / "base" / "model.safetensors")
    factors = {}
    for n in range(4):
        factors[f"base_model.model.w{n}.lora_A.weight"] = torch.randn(8, COLUMNS)
        factors[f"base_model.model.w{n}.lora_B.weight"] = torch.randn(ROWS, 8)
    torch.save(factors, tmp_path / "adapter" / "adapter_model.bin")
    deflate(tmp_path / "adapter" / "adapter_model.bin")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8, "lora_alpha": 8}')
    written = []
    for jobs in (1, 4, 4, 4):
        out = tmp_path / f"out{len(written)}"
        shardckpt.merge_adapter(tmp_path / "base", tmp_path / "adapter", out, jobs=jobs)
        written.append(content(out))
    assert all(each == written[0] for each in written[1:])
