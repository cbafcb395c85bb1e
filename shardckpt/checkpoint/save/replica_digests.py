"""Hash replicated data, so that ranks can compare it.

A save does not wait for copies from devices before its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import xxhash

from shardckpt.boxes import Box
from shardckpt.checkpoint.stateful.tensor_bytes import is_flat, tensor_bytes, view_as_bytes
from shardckpt.devices import CurrentStreams, Event, has_pinned_copies, has_pinned_memory
from shardckpt.manifest import Path, dotted
from shardckpt.state.local.tensor_shards import LocalShard

PINNED_BYTES = 64 << 20  # maximum of pinned memory for copies of replicated data


class Replica(NamedTuple):
    """A box that several ranks have."""

    path: Path
    box: Box | None  # None for the entire array
    digest: bytes

    @property
    def name(self) -> str:
        """Name in messages."""
        return dotted(self.path) + ("" if self.box is None else str(self.box))


class ReplicatedBox(NamedTuple):
    """A box that several ranks have, before it is hashed."""

    path: Path
    shape: Sequence[int]
    shard: LocalShard

    def with_digest(self, parts: Iterable[memoryview]) -> Replica:
        """Return the box with its digest."""
        digest = xxhash.xxh3_128()
        for part in parts:
            digest.update(part)
        return Replica(self.path, None if self.shard.box.size == self.shape else self.shard.box, digest.digest())


class ReplicaDigests:
    """Digests for a rank's boxes, by replica group."""

    def __init__(self, boxes: Mapping[int, Sequence[ReplicatedBox]]) -> None:
        self._copies = _PinnedCopies([box.shard.tensor for group in boxes.values() for box in group])
        # Boxes in CPU memory, or that exceed the 64 MiB of pinned memory, are hashed at once; the others by `finish`.
        self._boxes = {
            number: [box if self._copies.has(box.shard.tensor) else _hash(box) for box in group]
            for number, group in boxes.items()
        }

    def finish(self) -> None:
        """Wait for the copies, and hash them."""
        self._copies.wait()
        for group in self._boxes.values():
            for at, box in enumerate(group):
                if isinstance(box, ReplicatedBox):
                    group[at] = box.with_digest((self._copies.get(box.shard.tensor),))
        self._copies = _PinnedCopies(())

    def by_group(self) -> dict[int, list[Replica]]:
        """Return the digests by group number, after `finish`."""
        return {number: [box for box in group if isinstance(box, Replica)] for number, group in self._boxes.items()}


def _hash(box: ReplicatedBox) -> Replica | ReplicatedBox:
    return box.with_digest(tensor_bytes(box.shard.tensor))


class _PinnedCopies:
    """Copies device tensors that fit, on the current streams."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._places: dict[int, tuple[int, int]] = {}
        self._events: tuple[Event, ...] = ()
        chosen, stop = [], 0
        for tensor in tensors:
            fits = has_pinned_copies(tensor.device) and stop + tensor.nbytes <= PINNED_BYTES
            if fits and id(tensor) not in self._places:
                self._places[id(tensor)] = stop, stop + tensor.nbytes
                chosen.append(tensor)
                stop += tensor.nbytes
        if chosen:
            self._copy(chosen, stop)

    def _copy(self, tensors: Sequence[torch.Tensor], nbytes: int) -> None:
        self._buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=has_pinned_memory())
        for tensor in tensors:
            start, stop = self._places[id(tensor)]
            flat = tensor if is_flat(tensor) else tensor.resolve_conj().resolve_neg().contiguous()
            self._buffer[start:stop].copy_(view_as_bytes(flat), non_blocking=True)
        self._events = CurrentStreams(tensor.device for tensor in tensors).record_events()

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is copied."""
        return id(tensor) in self._places

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()

    def get(self, tensor: torch.Tensor) -> memoryview:
        """Return a tensor's bytes, after `wait`."""
        start, stop = self._places[id(tensor)]
        return memoryview(self._buffer[start:stop].numpy())  # type: ignore[arg-type]
