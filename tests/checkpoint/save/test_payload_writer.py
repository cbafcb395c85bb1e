"""Files are hashed block by block on the thread that writes, and by threads beside it where a block waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

import shardckpt
from shardckpt.boxes import full_box
from shardckpt.checkpoint.save import payload_writer, session
from shardckpt.checkpoint.save.payload_writer import write_payloads
from shardckpt.native.manifest_json import WrittenPayload
from shardckpt.native.payload import (
    GROUP_BYTES,
    FileHasher,
    PayloadChunk,
    PayloadFile,
    arrange_files,
    build_payloads,
)
from shardckpt.storage.publication import Publication
from shardckpt.storage.store import ClosingWriter, Store

MIB = 1 << 20
SLICE_BYTES = 16 * MIB
BYTES = SLICE_BYTES + 6 * MIB


@dataclass
class Recorded(ClosingWriter, Publication):
    """Publication of one file, and its writer: notes what is hashed and written, and on which thread.

    Attributes:
        notes: ("hash", bytes of the first request) and ("write", bytes), in order.
        content: Hash of everything that was written.
        hashing: Names of the threads that hashed.
        tasks: Number of tasks that hashed.
    """

    notes: list[tuple[str, int]] = field(default_factory=list)
    content: Any = field(default_factory=xxhash.xxh3_64)
    hashing: set[str] = field(default_factory=set)
    tasks: int = 0

    def create(self, name: str) -> Recorded:
        return self

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.notes.append(("write", len(data)))
        self.content.update(data)

    def copy_from(self, source: Store, name: str, offset: int, nbytes: int) -> None:
        raise NotImplementedError

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def commit(self) -> None: ...

    def rollback(self) -> None: ...

    @property
    def written(self) -> list[int]:
        """Bytes of each write, without the header."""
        return [nbytes for kind, nbytes in self.notes if kind == "write"][1:]


@dataclass
class Clock:
    """Clock whose hashes take as long as it is told.

    Attributes:
        step: Seconds from one look at the clock to the next.
    """

    step: float = 0.0
    now: float = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(payload_writer, "SLICE_BYTES", SLICE_BYTES)
    monkeypatch.setattr(payload_writer, "perf_counter", clock := Clock())
    return clock


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    recorded, split = Recorded(), FileHasher.split

    def note(task: Any) -> None:
        recorded.hashing.add(threading.current_thread().name.rpartition("_")[0])
        task()

    def noted(hasher: FileHasher, data: memoryview, most: int) -> list[Any]:
        tasks = split(hasher, data, most)
        recorded.notes.append(("hash", len(data)))
        recorded.tasks += len(tasks)
        return [lambda task=task: note(task) for task in tasks]

    monkeypatch.setattr(FileHasher, "split", noted)
    return recorded


def write(to: Publication, parts: Iterator[memoryview] | None = None, **options: bool) -> WrittenPayload:
    chunk = PayloadChunk(("t",), (BYTES // 4,), "float32", full_box((BYTES // 4,)))
    (payload,) = build_payloads("0" * 15, 0, arrange_files((chunk,)))

    def source(_: PayloadFile) -> Iterator[memoryview]:
        return iter([memoryview(bytes(range(256)) * (BYTES // 256))]) if parts is None else parts

    return write_payloads(to, [payload], source, checksums=True, **options)[0]


def test_the_writing_thread_hashes_each_block_right_before_it_writes_it(recorded: Recorded, clock: Clock) -> None:
    payload = write(recorded).payload
    assert recorded.hashing == {""}  # the main thread has no number
    assert recorded.notes[::2] == [("hash", nbytes) for _, nbytes in recorded.notes[1::2]]
    assert {kind for kind, _ in recorded.notes[1::2]} == {"write"}
    first = GROUP_BYTES - len(payload.header)  # writes end where blocks end
    assert recorded.written == [first, *[GROUP_BYTES] * 4, BYTES - first - 4 * GROUP_BYTES]


def test_beside_python_code_one_call_writes_a_slice_and_few_tasks_hash_it(recorded: Recorded, clock: Clock) -> None:
    """There each call that releases the interpreter's lock waits for it."""
    clock.step = 1.0
    payload = write(recorded).payload
    assert recorded.written == [SLICE_BYTES, BYTES - SLICE_BYTES]
    assert recorded.hashing == {"", "shardckpt-hash"}  # the header alone is hashed by the writing thread
    assert recorded.tasks <= 1 + 2 * 5  # of the header, and of two slices
    assert payload.nbytes == len(payload.header) + BYTES


def test_threads_hash_only_as_long_as_blocks_wait(recorded: Recorded, clock: Clock) -> None:
    def parts() -> Iterator[memoryview]:
        clock.step = 1.0
        yield memoryview(bytes(MIB))
        yield memoryview(bytes(SLICE_BYTES))
        clock.step = 0.0
        yield memoryview(bytes(MIB))
        yield memoryview(bytes(4 * MIB))

    write(recorded, parts())
    assert recorded.written[:3] == [MIB, SLICE_BYTES, MIB]  # the last one by threads too, but in time
    assert sum(recorded.written[3:]) == 4 * MIB and len(recorded.written) == 5  # two blocks


@pytest.mark.parametrize("has_core", [True, False])
@pytest.mark.parametrize("verb", ["save", "async_save"])
def test_only_a_save_that_the_training_waits_for_hashes_on_another_core(
    tmp_path: Path, recorded: Recorded, clock: Clock, monkeypatch: pytest.MonkeyPatch, verb: str, has_core: bool
) -> None:
    assert clock.step == 0.0
    monkeypatch.setattr(session, "has_second_core", lambda _ranks: has_core)
    state = {"t": torch.ones(BYTES // 4)}
    if verb == "save":
        shardckpt.save(state, tmp_path / "step")
    else:
        shardckpt.async_save(state, tmp_path / "step").result()
    assert ("shardckpt-hash" in recorded.hashing) == (verb == "save" and has_core)


def test_statistics_are_always_computed_beside_the_writes(recorded: Recorded, clock: Clock) -> None:
    write(recorded, stats=True)
    assert recorded.written == [SLICE_BYTES, BYTES - SLICE_BYTES]
    assert recorded.hashing == {"shardckpt-hash"}


@pytest.mark.parametrize("options", [{}, {"digests": True}, {"digests": True, "stats": True}])
def test_hashes_and_bytes_do_not_depend_on_the_thread(
    recorded: Recorded, clock: Clock, options: dict[str, bool]
) -> None:
    here = write(recorded, **options)
    clock.step = 1.0
    beside = write(again := Recorded(), **options)
    assert (here.hashes, here.digests, here.stats) == (beside.hashes, beside.digests, beside.stats)
    assert recorded.content.digest() == again.content.digest()
