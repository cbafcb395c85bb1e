"""A store that verifies the hash of each block before it returns bytes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

import xxhash

from shardckpt.errors import ChecksumError
from shardckpt.format.native.payload import BLOCK_BYTES
from shardckpt.storage.store import Capabilities, Read, Store, WrappedStore

_AT_ONCE = 4
"""Maximum partly wanted blocks in memory at a time."""

_DIRECT_BYTES = 1 << 20
"""Minimum bytes of a part of a block that is read directly into its buffer and hashed there.

Smaller parts are copied out of the block, which is cached; so are all parts if reading again would be a request.
"""


_Block = tuple[str, int]
"""File name and block number."""


class Hashed(NamedTuple):
    """A file with hashes of its blocks.

    Attributes:
        nbytes: Size when it was hashed, in bytes.
        hashes: xxh3-64 of each block.
    """

    nbytes: int
    hashes: tuple[int, ...]


class _BlockPart(NamedTuple):
    """The part of a wanted range inside one block.

    Attributes:
        start: First byte, relative to the block.
        target: Buffer of the part.
    """

    start: int
    target: memoryview


@dataclass(slots=True)
class _ReadPlan:
    """The plan of a batch of reads.

    Attributes:
        direct: Ranges to read directly into their buffers.
        complete: Blocks whose bytes are all in these buffers, in order; they are hashed there.
        parts: Blocks to read elsewhere, with their wanted parts.
    """

    direct: list[Read] = field(default_factory=list)
    complete: list[tuple[_Block, list[memoryview]]] = field(default_factory=list)
    parts: dict[_Block, list[_BlockPart]] = field(default_factory=dict)


class VerifiedStore(WrappedStore):
    """A store that verifies reads of hashed files.

    All other calls go to the underlying store. A block that is wanted in full, possibly by several reads, is read into
    its final buffers and hashed there. A block that is wanted in part is read in full the first time; large parts are
    read into their final buffers. Each thread caches the last block of which only small parts were wanted, since small
    reads often follow one another.

    Args:
        store: Store of the files.
        files: Files with hashes, by name.
    """

    def __init__(self, store: Store, files: Mapping[str, Hashed]) -> None:
        super().__init__(store)
        self._files = files
        self._good: set[_Block] = set()
        self._recent = threading.local()
        self._most = max((min(file.nbytes, BLOCK_BYTES) for file in files.values()), default=0)

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the underlying store, with the size of the verified blocks."""
        return replace(self._store.capabilities, block_bytes=BLOCK_BYTES)

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer after verifying the hashes of the blocks that it touches.

        Raises:
            ChecksumError: A block does not match its hash; the message names file and block.
            ShardckptError: The underlying store failed.
        """
        plan = _ReadPlan()
        for read in reads:
            self._add(read, plan)
        self._join(plan)
        self._store.read(plan.direct)
        for block, data in plan.complete:
            self._check(block, data)
        blocks = iter(plan.parts.items())
        while some := list(islice(blocks, _AT_ONCE)):
            self._fill(some)

    def _add(self, read: Read, plan: _ReadPlan) -> None:
        name, offset, buffer = read
        file = self._files.get(name)
        end = offset + len(buffer)
        if file is None or not len(buffer) or end > file.nbytes:
            plan.direct.append(read)  # beyond the end: the underlying store raises the error
            return
        for number in range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            start, size = _extent(file, number)
            low, high = max(offset, start), min(end, start + size)
            target = buffer[low - offset : high - offset]
            if len(target) == size:
                plan.complete.append(((name, number), [target]))
            elif (name, number) not in self._good or self._is_recent((name, number)):
                plan.parts.setdefault((name, number), []).append(_BlockPart(low - start, target))
                continue
            plan.direct.append(Read(name, low, target))

    def _join(self, plan: _ReadPlan) -> None:
        """Read blocks directly into the buffers of parts that cover them."""
        for block in [block for block, parts in plan.parts.items() if len(parts) > 1 and not self._is_recent(block)]:
            parts = sorted(plan.parts[block], key=lambda part: part.start)
            at = 0
            for start, target in parts:
                if start != at:
                    break
                at += len(target)
            else:
                first, size = _extent(self._files[block[0]], block[1])
                if at == size:
                    plan.direct += [Read(block[0], first + part.start, part.target) for part in parts]
                    plan.complete.append((block, [part.target for part in parts]))
                    del plan.parts[block]

    def _is_recent(self, block: _Block) -> bool:
        return getattr(self._recent, "block", None) == block

    def _fill(self, wanted: Sequence[tuple[_Block, Sequence[_BlockPart]]]) -> None:
        """Fill the parts of a few blocks."""
        wanted = [(block, parts) for block, parts in wanted if not self._serve_recent(block, parts)]
        direct_bytes = _DIRECT_BYTES if self._store.capabilities.is_local else BLOCK_BYTES
        targets = []
        for ((name, number), parts), buffer in zip(wanted, self._buffers(len(wanted)), strict=True):
            targets.append(_place_block(parts, buffer[: _extent(self._files[name], number)[1]], direct_bytes))
        self._store.read(
            [
                Read(name, number * BLOCK_BYTES + start, view)
                for ((name, number), _), each in zip(wanted, targets, strict=True)
                for start, view in each.parts
            ]
        )
        for (block, _), each in zip(wanted, targets, strict=True):
            self._check(block, [part.target for part in each.parts])
            for start, target in each.copied:
                target[:] = each.data[start : start + len(target)]
            if len(each.parts) == 1:  # a complete block in memory of this store
                self._recent.block, self._recent.data = block, each.data

    def _serve_recent(self, block: _Block, parts: Sequence[_BlockPart]) -> bool:
        """Copy the parts of a block if it is cached; return False if it is not."""
        if not self._is_recent(block):
            return False
        for start, target in parts:
            target[:] = self._recent.data[start : start + len(target)]
        return True

    def _buffers(self, count: int) -> Sequence[memoryview]:
        """Return buffers for `count` blocks, reused by this thread.

        The cached block has another buffer.
        """
        pool = self._recent.__dict__.setdefault("pool", [])
        kept = getattr(self._recent, "data", None)
        free = [each for each in pool if kept is None or kept.obj is not each.obj]
        while len(free) < count:
            free.append(memoryview(bytearray(self._most)))
            pool.append(free[-1])
        return free[:count]

    def _check(self, block: _Block, data: Sequence[memoryview]) -> None:
        name, number = block
        hasher = xxhash.xxh3_64()
        for part in data:
            hasher.update(part)
        expected, found = self._files[name].hashes[number], hasher.intdigest()
        if found != expected:
            start, size = _extent(self._files[name], number)
            raise ChecksumError(
                f"block {number}, bytes {start} to {start + size}, does not match its checksum",
                where=f"{self.url}/{name}",
                found=f"{found:016x}",
                expected=f"{expected:016x}",
                fix="Restore the file from another copy: `shardckpt verify` lists every damaged block and its tensors.",
            )
        self._good.add(block)


class _BlockTarget(NamedTuple):
    """Destination of a block that is read.

    Attributes:
        parts: Buffers that together receive the block, in order: buffers of the caller, or parts of `data`.
        data: Memory as large as the block, of which only those in `parts` are filled.
        copied: Wanted parts to copy out of `data`.
    """

    parts: list[_BlockPart]
    data: memoryview
    copied: list[_BlockPart]


def _place_block(wanted: Sequence[_BlockPart], data: memoryview, direct_bytes: int) -> _BlockTarget:
    """Return the destination of a block.

    Large parts go directly into their buffers unless some overlap.
    """
    ordered = sorted(wanted, key=lambda part: part.start)
    ends = [0, *(part.start + len(part.target) for part in ordered)]
    if any(part.start < end for end, part in zip(ends, ordered, strict=False)):
        return _BlockTarget([_BlockPart(0, data)], data, ordered)
    direct = [part for part in ordered if len(part.target) >= direct_bytes]
    parts: list[_BlockPart] = []
    at = 0
    for part in direct:
        if part.start > at:
            parts.append(_BlockPart(at, data[at : part.start]))
        parts.append(part)
        at = part.start + len(part.target)
    if at < len(data):
        parts.append(_BlockPart(at, data[at:]))
    return _BlockTarget(parts, data, [part for part in ordered if len(part.target) < direct_bytes])


def _extent(file: Hashed, number: int) -> tuple[int, int]:
    """Return start and size of a block, in bytes."""
    start = number * BLOCK_BYTES
    return start, min(BLOCK_BYTES, file.nbytes - start)
