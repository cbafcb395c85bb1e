"""Check of `verify="live"`: after a load, the memory of a state is compared with the checkpoint.

The state is flattened again, so that memory is found where training will find it: a tensor that was replaced,
initialized or cast meanwhile, or that shares memory with another, differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from shardckpt.boxes import Box, contiguous_blocks, narrow_to_box, shift
from shardckpt.checkpoint.load.load_plan import LoadItem
from shardckpt.checkpoint.load.source import CheckpointSource
from shardckpt.checkpoint.load.tensor_loader import ReadRequest
from shardckpt.checkpoint.stateful.flatten import FlattenedState, flatten_state
from shardckpt.checkpoint.stateful.stateful import dtype_name
from shardckpt.checkpoint.stateful.tensor_bytes import flat_bytes, is_flat_on_cpu, tensor_bytes
from shardckpt.format.native.reader import NativeReader
from shardckpt.format.native.records import DIGEST_BYTES
from shardckpt.manifest import Path, TensorEntry, dotted
from shardckpt.plan.resume.verdict import Divergence, ResumeDivergence
from shardckpt.state.local.local_shards import LocalShard, TensorShards

BATCH_BYTES = 32 << 20
"""Bytes that are read again at a time."""

_ALIGNMENT = 16


class _LivePart(NamedTuple):
    """Elements of an array on this rank, as they are in memory.

    Attributes:
        path: Path of the array in the state.
        entry: Entry of the saved array, with located pieces.
        shard: The elements, with their box.
    """

    path: Path
    entry: TensorEntry
    shard: LocalShard


def check_live(state: Any, saved: CheckpointSource, items: Iterable[LoadItem], rank: int, world: int) -> None:
    """Compare the memory of a state with the checkpoint that was loaded into it.

    Boxes whose digest the checkpoint has (`store_digests=True`) are hashed. Others are read again, in batches.

    Args:
        state: The loaded state.
        saved: Open checkpoint.
        items: Arrays of the load.
        rank: Index of this rank.
        world: Number of ranks.

    Raises:
        ResumeDivergence: Memory differs; the message names the first tensor.
        CheckpointError: Bytes that are read again are damaged.
    """
    flat = flatten_state(state, rank, world)
    digests = _read_digests(saved)
    again = []
    for item in items:
        live = flat.arrays.get(flat.ties.get(item.path, item.path), item.array)
        for shard in live.shards:
            part = _LivePart(item.path, item.entry, shard)
            digest = digests.get((item.entry.path, shard.box))
            if digest is None or item.entry.dtype != dtype_name(shard.tensor.dtype):
                again.append(part)
            elif _hash(shard.tensor) != digest:
                raise _build_error(part, flat, saved)
    _Rereader(flat, saved).compare(again)


def _read_digests(saved: CheckpointSource) -> dict[tuple[Path, Box], bytes]:
    """Return the digests of the boxes that the checkpoint stores as pieces."""
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
    """Reads boxes again and compares them, in batches through one buffer.

    Args:
        flat: The loaded state.
        saved: Open checkpoint.
    """

    def __init__(self, flat: FlattenedState, saved: CheckpointSource) -> None:
        self._flat, self._saved = flat, saved
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._batch: list[tuple[_LivePart, torch.Tensor]] = []
        self._used = 0

    def compare(self, parts: Sequence[_LivePart]) -> None:
        """Compare the memory of parts with the checkpoint."""
        located = self._saved.locate([part.entry for part in parts])
        most = sum(part.shard.tensor.nbytes + _ALIGNMENT for part in parts)
        self._buffer = torch.empty(min(most, BATCH_BYTES + _ALIGNMENT), dtype=torch.uint8)
        self._saved.elements.meter = None
        for part in _split([part._replace(entry=entry) for part, entry in zip(parts, located, strict=True)]):
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
    """Yield parts of at most the size of a batch."""
    for part in parts:
        box, tensor = part.shard
        for inner in contiguous_blocks(box, max(BATCH_BYTES // tensor.element_size(), 1)) if box.volume else ():
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
            "Look for an object that changes it in its load_state_dict, or for another tensor in the same memory.",
            since="load",
        ),
        saved.url,
    )
