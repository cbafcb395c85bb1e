"""This rank's part of the weights in the dtype of the stream: two buffers, of which one has the published version."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from shardckpt.boxes import Box, Shape, contiguous_blocks
from shardckpt.dtypes import nbytes
from shardckpt.errors import NoMemoryError
from shardckpt.native.payload import PayloadChunk
from shardckpt.state.local.tensor_shards import LocalShard, TensorShards
from shardckpt.storage.thread_pool import ThreadPool
from shardckpt.stream.format.codec import BoxChange, encode_change, find_changes, shift_positions
from shardckpt.stream.format.delta_file import EncodedChange
from shardckpt.stream.format.digest import ZERO, Digest, digest_box, digest_changes
from shardckpt.stream.format.stream_records import StreamTensor
from shardckpt.torchrun import has_second_core

__all__ = ["FoundChanges", "Snapshot", "WireBox", "WirePlan", "plan_wire"]

_T = TypeVar("_T")

_ALIGNMENT = 64
_MIN_SHARED = 4  # boxes
_MAX_ELEMENTS = 1 << 22  # in a change: a receiver that needs a part of it reads all of it


class WireBox(NamedTuple):
    """A box that this rank publishes."""

    name: str  # in the stream
    shape: Shape
    dtype: str  # in the stream
    box: Box
    start: int  # first byte in the buffer

    @property
    def nbytes(self) -> int:
        """Bytes in the buffer."""
        return nbytes(self.dtype, self.box.volume)


@dataclass(frozen=True, slots=True)
class WirePlan:
    """The boxes that this rank publishes, with the chunks of its state that they come from."""

    chunks: tuple[PayloadChunk, ...]
    boxes: tuple[WireBox, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class FoundChanges:
    """What a rank has to publish."""

    encoded: tuple[EncodedChange, ...]
    digests: Mapping[str, Digest]  # what to add to the digests of tensors
    changed: int  # number of changed elements


def plan_wire(
    chunks: Iterable[PayloadChunk], names: Mapping[Any, str], tensors: Mapping[str, StreamTensor]
) -> WirePlan:
    """Place a rank's chunks in a buffer, large ones in several boxes."""
    boxes, split, at = [], [], 0
    for chunk in chunks:
        name = names[chunk.path]
        for box in contiguous_blocks(chunk.box, _MAX_ELEMENTS):
            placed = WireBox(name, chunk.shape, tensors[name].dtype, box, at)
            split.append(chunk._replace(box=box))
            boxes.append(placed)
            at += -(-placed.nbytes // _ALIGNMENT) * _ALIGNMENT
    return WirePlan(tuple(split), tuple(boxes), at)


class Snapshot:
    """The published version and the one that follows it."""

    def __init__(self, plan: WirePlan, tensors: Mapping[str, StreamTensor]) -> None:
        self.plan, self._tensors = plan, tensors
        self._published = _allocate(plan.nbytes)
        self._candidate = _allocate(plan.nbytes)

    def capture(self, views: Iterable[torch.Tensor]) -> None:
        """Copy the state's elements into the candidate, and cast them."""
        devices = set()
        with torch.no_grad():
            for box, view in zip(self.plan.boxes, views, strict=True):
                _view(self._candidate, box).copy_(view, non_blocking=True)
                devices.add(view.device)
        for device in devices:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)

    def promote(self) -> None:
        """Make the candidate the published version."""
        self._published, self._candidate = self._candidate, self._published

    def digest_all(self) -> dict[str, Digest]:
        """Return this rank's part of the candidate's digests, by tensor."""
        digests: dict[str, Digest] = {}
        parts = _map_boxes(lambda box: digest_box(_bits(self._candidate, box), box.shape, box.box), self.plan.boxes)
        for box, part in zip(self.plan.boxes, parts, strict=True):
            digests[box.name] = digests.get(box.name, ZERO) + part
        return digests

    def find_changes(self) -> FoundChanges:
        """Compare the candidate with the published version."""
        encoded: list[EncodedChange] = []
        digests: dict[str, Digest] = {}
        changed = 0
        for box, found in zip(self.plan.boxes, _map_boxes(self._compare, self.plan.boxes), strict=True):
            if found is None:
                continue
            data, digest, count = found
            digests[box.name] = digests.get(box.name, ZERO) + digest
            encoded.append(EncodedChange(box.name, box.box, data))
            changed += count
        return FoundChanges(tuple(encoded), digests, changed)

    def _compare(self, box: WireBox) -> tuple[bytes, Digest, int] | None:
        """Return a box's encoded change, what it adds to the digest, and its number of elements; None if equal."""
        old, new = _bits(self._published, box), _bits(self._candidate, box)
        change = find_changes(old, new)
        if not len(change.values):
            return None
        return encode_change(change), _digest_change(box, change, old, new), len(change.values)

    def candidate_arrays(self) -> dict[str, TensorShards]:
        """Return the candidate as a state of `save`: this rank's shards by name."""
        return self._as_shards(self._candidate)

    def published_arrays(self) -> dict[str, TensorShards]:
        """Return the published version, as `candidate_arrays`."""
        return self._as_shards(self._published)

    def _as_shards(self, buffer: torch.Tensor) -> dict[str, TensorShards]:
        shards: dict[str, list[LocalShard]] = {}
        for box in self.plan.boxes:
            shards.setdefault(box.name, []).append(LocalShard(box.box, _view(buffer, box)))
        # Each rank's state has all names; of most tensors another rank has all elements.
        return {
            name: TensorShards(tuple(shape), getattr(torch, dtype), tuple(shards.get(name, ())))
            for name, (dtype, shape) in self._tensors.items()
        }


def _digest_change(box: WireBox, change: BoxChange, old: NDArray[Any], new: NDArray[Any]) -> Digest:
    if change.positions is None:
        return digest_box(new, box.shape, box.box) - digest_box(old, box.shape, box.box)
    positions, before = shift_positions(change, box.shape, box.box), old[change.positions]
    return digest_changes(box.shape, old.itemsize, positions, before, before ^ change.values)


def _map_boxes(work: Callable[[WireBox], _T], boxes: Sequence[WireBox]) -> list[_T]:
    """Return the results for boxes, in order; a second core takes a part of them."""
    if len(boxes) < _MIN_SHARED or not has_second_core():
        return [work(box) for box in boxes]
    with ThreadPool(2, thread_name_prefix="shardckpt-compare") as pool:
        return list(pool.map(work, boxes))


def _allocate(size: int) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    except (RuntimeError, MemoryError) as error:
        raise NoMemoryError.from_array("the stream's snapshot", size, "uint8", (size,), "Use more ranks.") from error


def _view(buffer: torch.Tensor, box: WireBox) -> torch.Tensor:
    return buffer[box.start : box.start + box.nbytes].view(getattr(torch, box.dtype)).view(box.box.size)


def _bits(buffer: torch.Tensor, box: WireBox) -> NDArray[Any]:
    width = box.nbytes // box.box.volume if box.box.volume else 1
    return buffer[box.start : box.start + box.nbytes].numpy().view(np.dtype(f"u{width}"))
