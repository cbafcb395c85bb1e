"""A store that verifies the hash of each block before it returns bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from typing import NamedTuple

import xxhash

from shardckpt.errors import ChecksumError
from shardckpt.native.payload import BLOCK_BYTES, GROUP_BYTES, HASH_BYTES, GroupHasher, group_hashes
from shardckpt.storage.store import Capabilities, Read, Store, WrappedStore

# Bytes of local files that are read at a time and then hashed: with the file's pages they fit a core's own cache.
_STEP_BYTES = 1 << 18

# Maximum bytes of small local ranges that are read in one batch, neighbours in one call, and then hashed.
_BATCH_BYTES = 1 << 19

# Bytes of partly wanted blocks that are read at a time from a remote store, whose requests run concurrently.
_REMOTE_STEP_BYTES = 16 << 20

# A part of at least a block's bytes divided by this is read directly into its buffer and hashed there. Smaller parts
# are copied out of the block, which is cached; so are all parts if reading again would be a request.
_DIRECT_SHARE = 4

_Block = tuple[str, int]  # file name and block number


class Hashed(NamedTuple):
    """A file with hashes. Here a block is what one hash covers, even if it is a block group."""

    nbytes: int  # size when it was hashed, in bytes
    block_bytes: int
    hashes: bytes  # hash of each block, big-endian, back to back
    is_grouped: bool = False  # whether each hash covers a group

    def extent(self, number: int) -> tuple[int, int]:
        """Return a block's start and size, in bytes."""
        start = number * self.block_bytes
        return start, min(self.block_bytes, self.nbytes - start)

    def describe(self, number: int) -> str:
        """Return which blocks of 128 KiB one hash covers, for messages."""
        start, nbytes = self.extent(number)
        first, last = start // BLOCK_BYTES, (start + nbytes - 1) // BLOCK_BYTES
        return f"block {first}" if first == last else f"blocks {first} to {last}"

    def split(self) -> Iterator[bytes]:
        """Yield each block's hash."""
        return _split_hashes(self.hashes)

    def hash(self, views: Sequence[memoryview]) -> bytes:
        """Return consecutive blocks' hashes; several buffers are one block."""
        if len(views) == 1:
            [view] = views
            size = BLOCK_BYTES if self.is_grouped else self.block_bytes
            found = b"".join(xxhash.xxh3_64_digest(view[at : at + size]) for at in range(0, len(view), size))
        else:
            hasher = GroupHasher()
            for view in views:
                hasher.update(view)
            found = hasher.digests()
        return group_hashes(found) if self.is_grouped else found

    def find_complete(self, start: int, end: int) -> range:
        """Return the blocks that a byte range covers completely."""
        size = self.block_bytes
        return range(-(-start // size), -(-end // size) if end == self.nbytes else end // size)

    def find_partial(self, start: int, end: int) -> list[int]:
        """Return the blocks that a byte range touches only in part."""
        touched, complete = (
            range(start // self.block_bytes, -(-end // self.block_bytes)),
            self.find_complete(start, end),
        )
        if not complete:
            return [*touched]
        return [*range(touched.start, complete.start), *range(complete.stop, touched.stop)]


class _BlockPart(NamedTuple):
    """The part of a wanted range inside one block."""

    start: int  # first byte, relative to the block
    target: memoryview  # buffer of the part


class _HeldPart(NamedTuple):
    """A block's part in a buffer."""

    start: int  # first byte, relative to the block
    view: memoryview  # the bytes, in a buffer of the caller
    of: int  # number of the caller's range


class _Task(NamedTuple):
    """Consecutive blocks to read from a file."""

    name: str  # name of the file
    first: int
    nbytes: int  # bytes of the blocks
    # Buffers of the caller that together receive the blocks, in order; several only for a single block.
    views: Sequence[memoryview] = ()
    # Wanted parts if a single block is wanted in part; then `views` is empty.
    parts: Sequence[_BlockPart] = ()


@dataclass(slots=True)
class _ReadPlan:
    """Plan for one batch."""

    direct: list[Read] = field(default_factory=list)  # ranges that need no check
    complete: list[_Task] = field(default_factory=list)  # blocks that are wanted in full
    parts: dict[_Block, list[_BlockPart]] = field(default_factory=dict)  # other blocks, with their wanted parts


class BlockMemory(threading.local):
    """A thread's memory for partly wanted blocks."""

    def __init__(self) -> None:
        # Cached block: the last one with only small wanted parts; None without one.
        self.block: _Block | None = None
        self.data = self._spare = memoryview(b"")  # bytes of that block, and memory for another

    def take(self, nbytes: int) -> memoryview:
        """Return memory that does not contain the cached block."""
        if len(self._spare) < nbytes:
            self._spare = memoryview(bytearray(nbytes))
        return self._spare[:nbytes]

    def cache(self, block: _Block, data: memoryview) -> None:
        """Cache a block in the memory that was taken last, which the next call does not return again."""
        self._spare, self.block, self.data = memoryview(self.data.obj), block, data


class VerifiedStore(WrappedStore):
    """A store that verifies reads in hashed files. All other calls go to the underlying store."""

    # A block that is wanted in full, possibly by several reads, is read into its final buffers and hashed there. A
    # block that is wanted in part is read in full the first time; large parts are read into their final buffers. Each
    # thread caches the last block with only small wanted parts, since small reads often follow one another.

    def __init__(self, store: Store, files: Mapping[str, Hashed]) -> None:
        super().__init__(store)
        self._files = files
        self._good: dict[str, bytearray] = {}
        self._memory = BlockMemory()
        self._is_local = store.capabilities.is_local

    @property
    def capabilities(self) -> Capabilities:
        """The underlying store's capabilities; its size is a multiple of every verified block."""
        return replace(self._store.capabilities, block_bytes=GROUP_BYTES)

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer after verifying all blocks that it touches."""
        plan = _ReadPlan()
        for read in reads:
            self._add(read, plan)
        if not (plan.direct or plan.complete or plan.parts):
            return
        self._join(plan)
        if self._memory.block is not None:
            _copy_parts(plan.parts.pop(self._memory.block, ()), self._memory.data)
        groups = self._divide(self._list_tasks(plan))
        self._carry_out(next(groups, ()), plan.direct)
        for tasks in groups:
            self._carry_out(tasks)

    def find_unequal(self, reads: Sequence[Read]) -> list[int]:
        """Return the numbers of the ranges whose buffers may differ from the files, in ascending order."""
        # Buffers are hashed where they are, by blocks; only bytes of a block that no buffer has are read. A range is
        # returned if a block of it does not match its hash, if it overlaps another in a block, or if its file has no
        # hashes.
        unequal: set[int] = set()
        held: dict[_Block, list[_HeldPart]] = {}
        for number, read in enumerate(reads):
            if len(read.buffer) and not self._has_equal_blocks(read, number, held):
                unequal.add(number)
        for blocks in self._divide_held(held):
            unequal.update(self._find_unequal_parts({block: held[block] for block in blocks}))
        return sorted(unequal)

    def _has_equal_blocks(self, read: Read, number: int, held: dict[_Block, list[_HeldPart]]) -> bool:
        """Compare a range's complete blocks with their hashes, and add its parts of other blocks to `held`."""
        name, offset, buffer = read
        file, end = self._files.get(name), offset + len(buffer)
        if file is None or end > file.nbytes:
            return False
        complete = file.find_complete(offset, end)
        if complete:
            low, high = complete.start * file.block_bytes, min(complete.stop * file.block_bytes, end)
            expected = file.hashes[complete.start * HASH_BYTES : complete.stop * HASH_BYTES]
            if file.hash([buffer[low - offset : high - offset]]) != expected:
                return False
        for block in file.find_partial(offset, end):
            start, nbytes = file.extent(block)
            low, high = max(offset, start), min(end, start + nbytes)
            part = _HeldPart(low - start, buffer[low - offset : high - offset], number)
            held.setdefault((name, block), []).append(part)
        return True

    def _divide_held(self, held: Mapping[_Block, Sequence[_HeldPart]]) -> Iterator[list[_Block]]:
        """Divide blocks into groups, each with a limited number of bytes to read."""
        group: list[_Block] = []
        nbytes = 0
        for block, parts in held.items():
            missing = self._files[block[0]].extent(block[1])[1] - sum(len(part.view) for part in parts)
            if group and nbytes + missing > _REMOTE_STEP_BYTES:
                yield group
                group, nbytes = [], 0
            group.append(block)
            nbytes += max(missing, 0)
        yield group

    def _find_unequal_parts(self, held: Mapping[_Block, list[_HeldPart]]) -> Iterator[int]:
        """Yield the range numbers in blocks that do not match their hashes."""
        views: dict[_Block, list[memoryview]] = {}
        gaps: list[Read] = []
        for (name, number), parts in held.items():
            start, nbytes = self._files[name].extent(number)
            joined = _fill_gaps(sorted(parts, key=lambda part: part.start), nbytes)
            if joined is None:
                yield from (part.of for part in parts)
                continue
            views[name, number] = [view for _, view, _ in joined]
            gaps += [Read(name, start + part.start, part.view) for part in joined if part.of < 0]
        if gaps:
            self._store.read(gaps)
        for (name, number), of_block in views.items():
            at = number * HASH_BYTES
            file = self._files[name]
            if file.hash(of_block) != file.hashes[at : at + HASH_BYTES]:
                yield from (part.of for part in held[name, number])

    def _add(self, read: Read, plan: _ReadPlan) -> None:
        name, offset, buffer = read
        file = self._files.get(name)
        end = offset + len(buffer)
        if file is None or not len(buffer) or end > file.nbytes:
            plan.direct.append(read)  # beyond the end: the underlying store raises the error
            return
        complete = file.find_complete(offset, end)
        if complete:
            low, high = complete.start * file.block_bytes, min(complete.stop * file.block_bytes, end)
            view = buffer[low - offset : high - offset]
            if self._is_local and high - low >= _BATCH_BYTES:
                self._read_in_steps(name, complete.start, view)
            else:
                plan.complete.append(_Task(name, complete.start, high - low, [view]))
            if high - low == len(buffer):
                return
        for number in file.find_partial(offset, end):
            self._add_part(read, file, number, plan)

    def _add_part(self, read: Read, file: Hashed, number: int, plan: _ReadPlan) -> None:
        """Plan to read a block's wanted part."""
        block = read.name, number
        start, size = file.extent(number)
        low, high = max(read.offset, start), min(read.offset + len(read.buffer), start + size)
        target = read.buffer[low - read.offset : high - read.offset]
        if self._is_good(block) and block != self._memory.block:
            plan.direct.append(Read(read.name, low, target))
        else:
            plan.parts.setdefault(block, []).append(_BlockPart(low - start, target))

    def _join(self, plan: _ReadPlan) -> None:
        """Read blocks directly into the buffers that cover them."""
        for block in [block for block, parts in plan.parts.items() if len(parts) > 1 and block != self._memory.block]:
            parts = sorted(plan.parts[block], key=lambda part: part.start)
            at = 0
            for start, target in parts:
                if start != at:
                    break
                at += len(target)
            else:
                if at == self._files[block[0]].extent(block[1])[1]:
                    plan.complete.append(_Task(*block, at, [part.target for part in parts]))
                    del plan.parts[block]

    def _list_tasks(self, plan: _ReadPlan) -> list[_Task]:
        """Return what to read; from a local store in file order, so that neighbours are read in one call."""
        partial = (
            _Task(name, number, self._files[name].extent(number)[1], parts=parts)
            for (name, number), parts in plan.parts.items()
        )
        if not self._is_local:
            return [*plan.complete, *partial]
        return sorted(chain(plan.complete, partial), key=lambda task: (task.name, task.first))

    def _divide(self, tasks: Iterable[_Task]) -> Iterator[list[_Task]]:
        """Divide tasks into groups that fit the processor's cache; for a remote store, only their memory is limited."""
        most = _BATCH_BYTES if self._is_local else _REMOTE_STEP_BYTES
        group: list[_Task] = []
        nbytes = 0
        for task in tasks:
            size = task.nbytes if self._is_local or task.parts else 0
            if group and nbytes + size > most:
                yield group
                group, nbytes = [], 0
            group.append(task)
            nbytes += size
        if group:
            yield group

    def _read_in_steps(self, name: str, first: int, view: memoryview) -> None:
        """Read consecutive blocks, and hash each step while it is in the processor's cache."""
        file = self._files[name]
        size = file.block_bytes
        step, start, read = max(_STEP_BYTES // size, 1) * size, first * size, self._store.read
        found: list[bytes] = []
        for at in range(0, len(view), step):
            part = view[at : at + step]
            read((Read(name, start + at, part),))
            found.append(file.hash([part]))
        self._check(name, first, [view], b"".join(found))

    def _carry_out(self, tasks: Sequence[_Task], more: Sequence[Read] = ()) -> None:
        """Read blocks, and further ranges in the same batch; check the blocks and copy their small parts."""
        memory = self._memory.take(sum(task.nbytes for task in tasks if task.parts))
        share = _DIRECT_SHARE if self._is_local else 1
        reads = [*more]
        targets: list[tuple[_Task, _BlockTarget]] = []
        for task in tasks:
            if task.parts:
                target = _place_block(task.parts, memory[: task.nbytes], task.nbytes // share)
                memory = memory[task.nbytes :]
            else:
                target = _BlockTarget(task.views)
            targets.append((task, target))
            at = task.first * self._files[task.name].block_bytes
            for view in target.views:
                reads.append(Read(task.name, at, view))
                at += len(view)
        self._store.read(reads)
        for task, target in targets:
            self._check(task.name, task.first, target.views, self._files[task.name].hash(target.views))
            _copy_parts(target.copied, target.data)
        if targets and targets[-1][1].is_cached:
            self._memory.cache((task.name, task.first), target.data)

    def _is_good(self, block: _Block) -> bool:
        checked = self._good.get(block[0])
        return checked is not None and bool(checked[block[1]])

    def _check(self, name: str, first: int, views: Sequence[memoryview], found: bytes) -> None:
        """Compare consecutive blocks with their hashes; read a damaged one from another copy, if there is one."""
        file = self._files[name]
        at = first * HASH_BYTES
        while found != file.hashes[at : at + len(found)]:
            self._read_again(name, first, views, found)
            found = file.hash(views)
        count = len(found) // HASH_BYTES
        checked = self._good.get(name)
        if checked is None:
            checked = self._good.setdefault(name, bytearray(len(file.hashes) // HASH_BYTES))
        checked[first : first + count] = b"\1" * count

    def _read_again(self, name: str, first: int, views: Sequence[memoryview], found: bytes) -> None:
        """Read the first block that differs from its hash from another copy; without one raise its error."""
        file = self._files[name]
        hashes = zip(_split_hashes(found), _split_hashes(file.hashes[first * HASH_BYTES :]), strict=False)
        number, (digest, expected) = next(
            (number, pair) for number, pair in enumerate(hashes, first) if pair[0] != pair[1]
        )
        start, size = file.extent(number)
        if self.reject(name, start, size):
            at = start - first * file.block_bytes
            again = [views[0][at : at + size]] if len(views) == 1 else views
            ends = accumulate(map(len, again), initial=start)
            self._store.read([Read(name, offset, view) for offset, view in zip(ends, again, strict=False)])
            return
        raise ChecksumError(
            f"{file.describe(number)}, bytes {start} to {start + size} do not match their checksum",
            where=self.locate(name, start, size),
            found=digest.hex(),
            expected=expected.hex(),
            fix="Restore the file from another copy: `shardckpt verify` lists every damaged block and its tensors.",
        )


class _BlockTarget(NamedTuple):
    """Destination for blocks that are read."""

    # Buffers that together receive the blocks, in order: buffers of the caller, or parts of `data`.
    views: Sequence[memoryview]
    # Memory as large as a partly wanted block; only the parts in `views` are filled.
    data: memoryview = memoryview(b"")
    copied: Sequence[_BlockPart] = ()  # wanted parts to copy out of `data`

    @property
    def is_cached(self) -> bool:
        """Whether `data` has the complete block."""
        return len(self.views) == 1 and self.views[0] is self.data


def _place_block(wanted: Sequence[_BlockPart], data: memoryview, direct_bytes: int) -> _BlockTarget:
    """Return a block's destination; large parts go directly into their buffers unless some overlap."""
    ordered = sorted(wanted, key=lambda part: part.start)
    ends = [0, *(part.start + len(part.target) for part in ordered)]
    direct = [part for part in ordered if len(part.target) >= direct_bytes]
    if not direct or any(part.start < end for end, part in zip(ends, ordered, strict=False)):
        return _BlockTarget([data], data, ordered)
    views: list[memoryview] = []
    at = 0
    for start, target in direct:
        if start > at:
            views.append(data[at:start])
        views.append(target)
        at = start + len(target)
    if at < len(data):
        views.append(data[at:])
    return _BlockTarget(views, data, [part for part in ordered if len(part.target) < direct_bytes])


def _fill_gaps(ordered: Sequence[_HeldPart], nbytes: int) -> list[_HeldPart] | None:
    """Return a block's parts, with buffers for range -1 between them; None if some overlap."""
    joined: list[_HeldPart] = []
    at = 0
    for part in (*ordered, _HeldPart(nbytes, memoryview(b""), -1)):
        if part.start < at:
            return None
        if part.start > at:
            joined.append(_HeldPart(at, memoryview(bytearray(part.start - at)), -1))
        joined.append(part)
        at = part.start + len(part.view)
    return joined[:-1]


def _copy_parts(parts: Iterable[_BlockPart], data: memoryview) -> None:
    """Copy a block's parts to their buffers."""
    for start, target in parts:
        target[:] = data[start : start + len(target)]


def _split_hashes(hashes: bytes) -> Iterator[bytes]:
    return (hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))
