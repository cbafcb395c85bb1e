"""The check for `verify="live"`: compare a state's memory with the checkpoint after a load.

The state is flattened again, so that the check finds memory where training will find it. A tensor differs if it was
replaced, initialized or cast meanwhile, or if it shares memory with another.

Three ways prove that memory has the saved elements. Each part takes the first that applies:

1. Memory that equals file bytes is hashed by the file's blocks. The manifest has the hashes, so an equal hash proves
   file and memory at once. A load from local files therefore leaves the file check to this one.
2. Memory in another form, such as on a device, is hashed if the step has a digest for its box.
3. All other memory is compared with the checkpoint, which is read again and verified. So are parts of blocks that
   differ: this names the tensor, or finds that the file is damaged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from shardckpt.boxes import Box, contiguous_blocks, narrow_to_box, shift
from shardckpt.checkpoint.load.source import CheckpointSource
from shardckpt.checkpoint.load.tensor_loader import ReadRequest, plan_straight
from shardckpt.checkpoint.stateful.flatten import FlattenedState, flatten_state
from shardckpt.checkpoint.stateful.stateful import dtype_name
from shardckpt.checkpoint.stateful.tensor_bytes import flat_bytes, is_flat_on_cpu, tensor_bytes
from shardckpt.divergence import Divergence
from shardckpt.errors import ResumeDivergence
from shardckpt.manifest import Path, TensorEntry, dotted
from shardckpt.native.reader import NativeReader
from shardckpt.native.records import DIGEST_BYTES
from shardckpt.native.verified_store import VerifiedStore
from shardckpt.state.local.tensor_shards import LocalShard, TensorShards
from shardckpt.storage.store import Read

BATCH_BYTES = 32 << 20  # bytes that are read again at a time

_ALIGNMENT = 16


class _LivePart(NamedTuple):
    """This rank's elements of an array, as they are in memory."""

    path: Path  # path of the array in the state
    entry: TensorEntry  # entry of the saved array, with located pieces
    shard: LocalShard  # the elements, with their box
    filled: LocalShard  # shard that the load filled


def check_live(
    state: Any, saved: CheckpointSource, items: Iterable[tuple[Path, ReadRequest]], rank: int, world: int
) -> None:
    """Compare a state's memory with the checkpoint that was loaded into it."""
    flat = flatten_state(state, rank, world)
    parts = [
        _LivePart(path, entry, shard, filled)
        for path, (entry, array) in items
        for shard, filled in _pair(flat.arrays.get(flat.ties.get(path, path), array), array)
        if shard.box.volume
    ]
    again, others = _check_blocks(parts, saved)
    digests = _read_digests(saved) if others else {}
    for part in others:
        digest = digests.get((part.entry.path, part.shard.box))
        if digest is None or part.entry.dtype != dtype_name(part.shard.tensor.dtype):
            again.append(part)
        elif _hash(part.shard.tensor) != digest:
            raise _build_error(part, flat, saved)
    _Rereader(flat, saved).compare(again)


def _pair(now: TensorShards, then: TensorShards) -> Iterable[tuple[LocalShard, LocalShard]]:
    """Return each array shard with the one that the load filled; with itself if there are other shards."""
    is_equal = len(now.shards) == len(then.shards)
    return zip(now.shards, then.shards if is_equal else now.shards, strict=True)


def _check_blocks(parts: Iterable[_LivePart], saved: CheckpointSource) -> tuple[list[_LivePart], list[_LivePart]]:
    """Return the parts in blocks that differ from their hash, and the parts that are not file bytes."""
    reads: list[Read] = []
    owners: list[_LivePart] = []
    others = []
    store, known = saved.reader.store, saved.elements.planned
    for part in parts:
        planned = _plan(part, known) if isinstance(store, VerifiedStore) else None
        if planned is None:
            others.append(part)
        else:
            reads += planned
            owners += [part] * len(planned)
    unequal = store.find_unequal(reads) if isinstance(store, VerifiedStore) else []
    return list({id(owners[number]): owners[number] for number in unequal}.values()), others


def _plan(part: _LivePart, known: Mapping[int, list[Read]]) -> list[Read] | None:
    """Return the reads that fill a part: the load's own reads, if it filled this memory."""
    reads = known.get(id(part.filled))
    if reads is None:
        return plan_straight(part.shard, part.entry)
    (box, tensor), (filled_box, filled) = part.shard, part.filled
    is_same = tensor.data_ptr() == filled.data_ptr() and tensor.dtype == filled.dtype and box == filled_box
    return reads if is_same and is_flat_on_cpu(tensor) else plan_straight(part.shard, part.entry)


def _read_digests(saved: CheckpointSource) -> dict[tuple[Path, Box], bytes]:
    """Return the digests of boxes that the checkpoint stores as pieces."""
    reader = saved.reader
    if not isinstance(reader, NativeReader):
        return {}
    return {
        (record.path, box): record.digests[at * DIGEST_BYTES : (at + 1) * DIGEST_BYTES]
        for record in reader.contents.arrays
        if record.digests
        for at, box in enumerate(record.boxes())
    }


def _hash(tensor: torch.Tensor) -> bytes:
    if is_flat_on_cpu(tensor):
        return xxhash.xxh3_128_digest(flat_bytes(tensor))
    hasher = xxhash.xxh3_128()
    for data in tensor_bytes(tensor):
        hasher.update(data)
    return hasher.digest()


class _Rereader:
    """Reads boxes again and compares them, in batches through one buffer."""

    def __init__(self, flat: FlattenedState, saved: CheckpointSource) -> None:
        self._flat, self._saved = flat, saved
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._batch: list[tuple[_LivePart, torch.Tensor]] = []
        self._used = 0

    def compare(self, parts: Sequence[_LivePart]) -> None:
        """Compare the parts' memory with the checkpoint."""
        most = sum(part.shard.tensor.nbytes + _ALIGNMENT for part in parts)
        self._buffer = torch.empty(min(most, BATCH_BYTES + _ALIGNMENT), dtype=torch.uint8)
        self._saved.elements.meter = None
        for part in _split(parts):
            nbytes = part.shard.tensor.nbytes
            if self._used + nbytes > self._buffer.numel():
                self._compare_batch()
            stored = self._buffer[self._used : self._used + nbytes].view(part.shard.tensor.dtype)
            self._batch.append((part, stored.view(part.shard.box.size)))
            self._used += -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._compare_batch()

    def _compare_batch(self) -> None:
        self._saved.elements.read([_request(part, stored) for part, stored in self._batch])
        for part, stored in self._batch:
            if _hash(part.shard.tensor) != _hash(stored):  # torch compares bytes one by one
                raise _build_error(part, self._flat, self._saved)
        self._batch, self._used = [], 0


def _request(part: _LivePart, stored: torch.Tensor) -> ReadRequest:
    return part.entry, TensorShards(part.entry.shape, stored.dtype, (LocalShard(part.shard.box, stored),))


def _split(parts: Iterable[_LivePart]) -> Iterator[_LivePart]:
    """Yield parts that each fit a batch."""
    for part in parts:
        box, tensor = part.shard
        for inner in contiguous_blocks(box, max(BATCH_BYTES // tensor.element_size(), 1)):
            yield part._replace(shard=LocalShard(inner, narrow_to_box(tensor, shift(inner, box.offset))))


def _build_error(part: _LivePart, flat: FlattenedState, saved: CheckpointSource) -> ResumeDivergence:
    is_slot = any(part.path[: len(root)] == root for root in flat.slots)
    box = part.shard.box
    where = "" if box.size == part.entry.shape else f" in the box {box}"
    return ResumeDivergence(
        Divergence(
            "optimizer" if is_slot else "parameter",
            -1,
            dotted(part.path),
            f"after the load, the memory of {dotted(part.path)} differs from the checkpoint{where}",
            "Look for an object that changes it in load_state_dict, or for another tensor in the same memory.",
            since="load",
        ),
        saved.url,
    )
