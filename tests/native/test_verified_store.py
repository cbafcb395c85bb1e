"""What is read of a hashed file is checked, block by block, however it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash

from shardckpt.errors import ChecksumError, TruncatedError
from shardckpt.native.payload import BLOCK_BYTES, GROUP_BLOCKS, GROUP_BYTES
from shardckpt.readers.registry import open_checkpoint
from shardckpt.storage.store import Read
from tests.kit.stores.counting import open_counted
from tests.kit.writers.native_writer import SAVE, with_grouped_hashes, write_step

SIZE = 3 * GROUP_BYTES + 1000


@pytest.fixture(scope="module", params=[GROUP_BYTES, BLOCK_BYTES], ids=["groups", "blocks"])
def grain(request: pytest.FixtureRequest) -> int:
    """Bytes that one hash covers."""
    return int(request.param)


@pytest.fixture(scope="module")
def step(grain: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensor = torch.randint(256, (SIZE - 4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    more = {} if grain == BLOCK_BYTES else {"change": with_grouped_hashes}
    return write_step(tmp_path_factory.mktemp("step") / "s", {"w": tensor}, **more)


def payload(folder: Path) -> Path:
    return folder / f"{SAVE}-00000-00.safetensors"


def read(folder: Path, ranges: Sequence[tuple[int, int]], times: int = 1) -> list[bytes]:
    store = open_checkpoint(str(folder)).store
    for _ in range(times):
        buffers = [bytearray(n) for _, n in ranges]
        store.read([Read(payload(folder).name, at, memoryview(b)) for (at, _), b in zip(ranges, buffers, strict=True)])
    return [bytes(buffer) for buffer in buffers]


RANGES: dict[str, list[tuple[int, int]]] = {
    "nothing": [(5, 0)],
    "a byte": [(GROUP_BYTES + 7, 1)],
    "a whole block": [(GROUP_BYTES, GROUP_BYTES)],
    "across a border": [(GROUP_BYTES - 3, 6)],
    "everything": [(0, SIZE)],
    "the short last block": [(3 * GROUP_BYTES, 1000)],
    "parts of every block": [(i * GROUP_BYTES + 10, 100) for i in range(4)]
    + [(i * GROUP_BYTES + 50, 900) for i in range(4)],
    "backwards": [(2 * GROUP_BYTES, 20), (GROUP_BYTES, 20), (0, 20)],
    "halves of a block": [(GROUP_BYTES, GROUP_BYTES // 2), (GROUP_BYTES + GROUP_BYTES // 2, GROUP_BYTES // 2)],
    "a block but for a byte": [(GROUP_BYTES, 7), (GROUP_BYTES + 8, GROUP_BYTES - 8)],
    "halves that overlap": [(0, GROUP_BYTES // 2 + 1), (GROUP_BYTES // 2 - 1, GROUP_BYTES // 2 + 1)],
    "large parts": [(10, GROUP_BYTES // 2), (GROUP_BYTES // 2 + 100, GROUP_BYTES // 4)],
    "a large part among small ones": [(3, 4), (GROUP_BYTES // 4, GROUP_BYTES // 2), (GROUP_BYTES - 5, 5), (7, 900)],
    "one part of three blocks": [(GROUP_BYTES // 2, 2 * GROUP_BYTES)],
    "from the middle to the end": [(GROUP_BYTES // 2, SIZE - GROUP_BYTES // 2)],
    "pieces with gaps": [(i * BLOCK_BYTES * 5 // 2, BLOCK_BYTES * 2) for i in range(20)],
}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("name", RANGES)
def test_ranges_are_what_the_file_holds(step: Path, name: str, times: int) -> None:
    data = payload(step).read_bytes()
    assert read(step, RANGES[name], times) == [data[at : at + n] for at, n in RANGES[name]]


def flip(file: Path, at: int) -> Callable[[], None]:
    def change() -> None:
        with file.open("r+b") as opened:
            opened.seek(at)
            [byte] = opened.read(1)
            opened.seek(at)
            opened.write(bytes([byte ^ 1]))

    change()
    return change


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("name", RANGES)
def test_a_flipped_bit_is_found_where_its_hash_is_needed_and_only_there(
    step: Path, grain: int, name: str, block: int
) -> None:
    at = block * GROUP_BYTES + (999 if block == 3 else GROUP_BYTES // 2 + 999)
    is_touched = any(n and low // grain <= at // grain <= (low + n - 1) // grain for low, n in RANGES[name])
    undo = flip(payload(step), at)
    try:
        if is_touched:
            start, end = at // grain * grain, min(at // grain * grain + grain, SIZE)
            first, last = start // BLOCK_BYTES, (end - 1) // BLOCK_BYTES
            place = f"{f'block {first}' if first == last else f'blocks {first} to {last}'}, bytes {start} to {end} do"
            with pytest.raises(ChecksumError, match=f"{payload(step).name}: {place}"):
                read(step, RANGES[name])
        else:
            read(step, RANGES[name])
    finally:
        undo()


def find_unequal(folder: Path, ranges: Sequence[tuple[int, int]], change: int | None = None) -> list[int]:
    """Return the ranges that differ, of buffers that have the file's bytes; of one of them a byte is changed."""
    data = payload(folder).read_bytes()
    buffers = [bytearray(data[at : at + n]) for at, n in ranges]
    if change is not None:
        buffers[change][-1] ^= 1
    store = open_checkpoint(str(folder)).store
    return store.find_unequal(
        [Read(payload(folder).name, at, memoryview(b)) for (at, _), b in zip(ranges, buffers, strict=True)]
    )


def touch_one_block(grain: int, one: tuple[int, int], other: tuple[int, int]) -> bool:
    """Return True if a range touches a block that the last byte of another is in."""
    last = sum(other) - 1
    return bool(one[1]) and one[0] // grain <= last // grain <= (sum(one) - 1) // grain


@pytest.mark.parametrize("name", [name for name in RANGES if "overlap" not in name and name != "parts of every block"])
def test_filled_buffers_that_differ_from_the_file_are_found_with_their_blocks_alone(
    step: Path, grain: int, name: str
) -> None:
    ranges = RANGES[name]
    assert find_unequal(step, ranges) == []
    for changed in (number for number, (_, nbytes) in enumerate(ranges) if nbytes):
        found = find_unequal(step, ranges, changed)
        assert changed in found
        assert all(touch_one_block(grain, ranges[each], ranges[changed]) for each in found)


def test_filled_buffers_that_overlap_or_have_no_hashes_are_not_known_to_be_equal(step: Path) -> None:
    assert find_unequal(step, [(0, 100), (50, 100), (GROUP_BYTES, 9)]) == [0, 1]
    store = open_checkpoint(str(step)).store
    assert store.find_unequal([Read("COMMIT", 0, memoryview(bytearray(4)))]) == [0]
    assert store.find_unequal([Read(payload(step).name, SIZE - 1, memoryview(bytearray(2)))]) == [0]


@pytest.mark.parametrize("start", [0, GROUP_BYTES, SIZE - 9])
def test_a_buffer_that_goes_beyond_the_end_of_its_file_is_not_equal_to_it(step: Path, start: int) -> None:
    store, right = open_checkpoint(str(step)).store, payload(step).read_bytes()[start:]
    assert store.find_unequal([Read(payload(step).name, start, memoryview(bytearray(right)))]) == []
    assert store.find_unequal([Read(payload(step).name, start, memoryview(bytearray(right + b"x")))]) == [0]


def test_of_a_file_only_bytes_that_no_buffer_has_are_read(step: Path, grain: int) -> None:
    data = payload(step).read_bytes()
    source, counted = open_counted(str(step))
    counted.ranges.clear()
    parts = [(7, grain - 7), (grain, grain + 5)]
    source.store.find_unequal(
        [Read(payload(step).name, at, memoryview(bytearray(data[at : at + n]))) for at, n in parts]
    )
    assert [(at, n) for _, at, n in counted.ranges] == [(0, 7), (2 * grain + 5, grain - 5)]


def test_a_file_that_was_damaged_after_its_buffers_were_filled_differs(step: Path) -> None:
    data = payload(step).read_bytes()
    buffer = memoryview(bytearray(data[9:99]))
    undo = flip(payload(step), 3)
    try:
        assert open_checkpoint(str(step)).store.find_unequal([Read(payload(step).name, 9, buffer)]) == [0]
    finally:
        undo()


def test_small_reads_that_follow_one_another_read_each_block_once(step: Path) -> None:
    source, counted = open_counted(str(step))
    counted.ranges.clear()
    for at in range(0, 2 * GROUP_BYTES, 1 << 18):
        buffer = bytearray(1 << 18)
        source.store.read([Read(payload(step).name, at, memoryview(buffer))])
    assert counted.nbytes == 2 * GROUP_BYTES


def test_memory_that_is_used_again_never_changes_what_was_read(step: Path) -> None:
    data = payload(step).read_bytes()
    store = open_checkpoint(str(step)).store
    for blocks in ((0,), (0, 1), (1, 2), (2,), (2, 3), (0, 3)):
        reads = [(block * GROUP_BYTES + 10, 900) for block in blocks]
        buffers = [bytearray(n) for _, n in reads]
        store.read([Read(payload(step).name, at, memoryview(b)) for (at, _), b in zip(reads, buffers, strict=True)])
        assert buffers == [data[at : at + n] for at, n in reads]


def test_parts_that_make_up_a_block_are_read_where_they_belong(step: Path, grain: int) -> None:
    source, counted = open_counted(str(step))
    counted.ranges.clear()
    half = grain // 2
    reads = [Read(payload(step).name, at * half, memoryview(bytearray(half))) for at in (3, 0, 2, 1)]
    source.store.read(reads)
    assert {(at, n) for _, at, n in counted.ranges} == {(at * half, half) for at in range(4)}


def test_a_large_part_of_a_block_is_read_where_it_belongs_and_the_rest_once(step: Path, grain: int) -> None:
    source, counted = open_counted(str(step))
    counted.ranges.clear()
    third = grain // 3
    source.store.read([Read(payload(step).name, third, memoryview(bytearray(third)))])
    assert sorted((at, n) for _, at, n in counted.ranges) == [
        (0, third),
        (third, third),
        (2 * third, grain - 2 * third),
    ]


def test_a_piece_needs_its_own_bytes_and_less_than_two_hashed_ranges_more(step: Path, grain: int) -> None:
    source, counted = open_counted(str(step))
    counted.ranges.clear()
    start, nbytes = GROUP_BYTES + 100, 1 << 20
    source.store.read([Read(payload(step).name, start, memoryview(bytearray(nbytes)))])
    first, last = start // grain, -(-(start + nbytes) // grain)
    assert counted.nbytes == (last - first) * grain


def test_neighbours_in_a_file_are_read_in_one_call(step: Path) -> None:
    source, counted = open_counted(str(step))
    counted.batches = 0
    source.store.read([Read(payload(step).name, 100, memoryview(bytearray(3 * BLOCK_BYTES)))])
    assert counted.batches == 1


def test_each_step_of_a_local_file_is_hashed_once_before_the_next_is_read(
    step: Path, grain: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, counted = open_counted(str(step))
    counted.batches = 0
    seen: list[tuple[int, int]] = []
    digest = xxhash.xxh3_64_digest

    def hash_and_note(data: memoryview) -> bytes:
        seen.append((counted.batches, len(data)))
        return digest(data)

    monkeypatch.setattr(xxhash, "xxh3_64_digest", hash_and_note)
    source.store.read([Read(payload(step).name, 0, memoryview(bytearray(2 * GROUP_BYTES)))])
    nbytes = max(grain, 1 << 18)
    steps = range(1, 2 * GROUP_BYTES // nbytes + 1)
    hashed = [BLOCK_BYTES] * (nbytes // BLOCK_BYTES) + [8 * GROUP_BLOCKS] * (grain == GROUP_BYTES)
    assert seen == [(number, each) for number in steps for each in hashed]
    assert counted.batches == steps[-1]


def test_beyond_the_end_is_the_usual_error(step: Path) -> None:
    with pytest.raises(TruncatedError):
        read(step, [(SIZE - 10, 20)])


def test_other_files_and_calls_go_to_the_underlying_store(step: Path) -> None:
    reader = open_checkpoint(str(step))
    assert reader.store.list() == reader.raw_store.list()
    assert reader.store.size("COMMIT") == (step / "COMMIT").stat().st_size
    assert reader.store.url == reader.raw_store.url
    assert reader.store.capabilities == replace(reader.raw_store.capabilities, block_bytes=GROUP_BYTES)
    with reader.store.create("x") as writer:
        writer.write(b"1")
    buffer = bytearray(1)
    reader.store.rename("x", "y")
    reader.store.read([Read("y", 0, memoryview(buffer))])
    assert buffer == b"1"
    reader.store.delete("y")
    assert not (step / "y").exists()
    (step / "sub").mkdir()
    assert reader.store.changed_at("sub") == reader.raw_store.changed_at("sub") is not None
    reader.store.delete_folder("sub")
    assert not (step / "sub").exists()
