"""This rank's part of the weights in the dtype of the stream: two buffers, of which one has the published version."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardckpt.boxes import contiguous_blocks
from shardckpt.errors import NoMemoryError, PrecisionError
from shardckpt.native.payload import PayloadChunk
from shardckpt.state.local.tensor_shards import LocalShard, TensorShards
from shardckpt.stream.format.codec import encode_change
from shardckpt.stream.format.delta_file import EncodedChange
from shardckpt.stream.format.digest import ZERO, Digest
from shardckpt.stream.format.held_boxes import (
    HeldBox,
    compare_box,
    map_shared,
    place_boxes,
    sum_digests,
)
from shardckpt.stream.format.stream_records import StreamTensor

__all__ = ["FoundChanges", "Snapshot", "WirePlan", "plan_wire", "require_range"]

_MAX_ELEMENTS = 1 << 22  # in a change: a receiver that needs a part of it reads all of it


@dataclass(frozen=True, slots=True)
class WirePlan:
    """The boxes that this rank publishes, with the chunks of its state that they come from."""

    chunks: tuple[PayloadChunk, ...]
    boxes: tuple[HeldBox, ...]
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
    split = tuple(chunk._replace(box=box) for chunk in chunks for box in contiguous_blocks(chunk.box, _MAX_ELEMENTS))
    named = ((names[each.path], each) for each in split)
    boxes = place_boxes((name, each.shape, tensors[name].dtype, each.box) for name, each in named)
    return WirePlan(split, boxes, boxes[-1].start + boxes[-1].nbytes if boxes else 0)


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
                require_range(box.name, view, getattr(torch, box.dtype))
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
        bits = self._candidate.numpy()
        return sum_digests(self.plan.boxes, lambda box: box.digest(bits))

    def find_changes(self) -> FoundChanges:
        """Compare the candidate with the published version."""
        encoded: list[EncodedChange] = []
        digests: dict[str, Digest] = {}
        changed = 0
        for box, found in zip(self.plan.boxes, map_shared(self._compare, self.plan.boxes), strict=True):
            if found is None:
                continue
            data, digest, count = found
            digests[box.name] = digests.get(box.name, ZERO) + digest
            encoded.append(EncodedChange(box.name, box.box, data))
            changed += count
        return FoundChanges(tuple(encoded), digests, changed)

    def _compare(self, box: HeldBox) -> tuple[bytes, Digest, int] | None:
        """Return a box's encoded change, what it adds to the digest, and its number of elements; None if equal."""
        old, new = box.view(self._published.numpy()), box.view(self._candidate.numpy())
        change, digest = compare_box(box, old, new)
        if not len(change.values):
            return None
        return encode_change(change), digest, len(change.values)

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


def require_range(name: str, view: torch.Tensor, dtype: torch.dtype) -> None:
    """Refuse numbers that a cast to float16 makes infinite. Raises PrecisionError."""
    if dtype != torch.float16 or view.dtype == dtype:  # the other dtypes have the largest number of float32
        return
    if bool((view.to(dtype).isinf() & ~view.isinf()).any()):
        raise PrecisionError(
            "a number is too large for float16", where=name, fix="Publish with dtype='bfloat16', or dtype=None."
        )


def _allocate(size: int) -> torch.Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    except (RuntimeError, MemoryError) as error:
        raise NoMemoryError.from_array("the stream's snapshot", size, "uint8", (size,), "Use more ranks.") from error


def _view(buffer: torch.Tensor, box: HeldBox) -> torch.Tensor:
    return buffer[box.start : box.start + box.nbytes].view(getattr(torch, box.dtype)).view(box.box.size)
