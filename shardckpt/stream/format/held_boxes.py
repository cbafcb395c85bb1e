"""Boxes of tensors in one buffer, and the changes of a chain of versions for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from shardckpt.boxes import Box, Shape, flat_index, intersect, is_contiguous
from shardckpt.dtypes import nbytes
from shardckpt.storage.store import Store
from shardckpt.storage.thread_pool import ThreadPool
from shardckpt.stream.format.codec import BoxChange, decode_change, find_changes, map_change, shift_positions
from shardckpt.stream.format.delta_file import LocatedChange, read_changes
from shardckpt.stream.format.digest import ZERO, Digest, digest_box, digest_changes, digest_words
from shardckpt.stream.format.stream_records import StreamTensor
from shardckpt.torchrun import has_second_core

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "HeldBox",
    "NewElements",
    "PartChange",
    "collect_changes",
    "compare_box",
    "digest_change",
    "map_shared",
    "place_boxes",
    "sum_digests",
    "write_elements",
]

_S = TypeVar("_S")
_T = TypeVar("_T")

_ALIGNMENT = 64
_WORD = 8  # bytes


class HeldBox(NamedTuple):
    """A box with its place in a buffer."""

    name: str
    shape: Shape
    dtype: str
    box: Box
    start: int  # first byte in the buffer

    @property
    def nbytes(self) -> int:
        """Bytes in the buffer."""
        return nbytes(self.dtype, self.box.volume)

    def view(self, buffer: NDArray[np.uint8]) -> NDArray[Any]:
        """Return its elements in a buffer, flat, as unsigned integers."""
        width = self.nbytes // self.box.volume if self.box.volume else 1
        return buffer[self.start : self.start + self.nbytes].view(np.dtype(f"u{width}"))

    def digest(self, buffer: NDArray[np.uint8]) -> Digest:
        """Return what its elements in a buffer add to the digest of their tensor."""
        return digest_box(self.view(buffer), self.shape, self.box)


class PartChange(NamedTuple):
    """What a version changed in a part of a held box."""

    change: BoxChange
    box: Box  # the part, in the full tensor


class NewElements(NamedTuple):
    """Elements of a held box that a version replaces."""

    positions: NDArray[np.int64] | None  # in the box; None for every element
    values: NDArray[Any]


def place_boxes(boxes: Iterable[tuple[str, Shape, str, Box]]) -> tuple[HeldBox, ...]:
    """Place boxes in a buffer, one after the other."""
    placed, at = [], 0
    for name, shape, dtype, box in boxes:
        placed.append(HeldBox(name, shape, dtype, box, at))
        at += -(-placed[-1].nbytes // _ALIGNMENT) * _ALIGNMENT
    return tuple(placed)


def map_shared(work: Callable[[_S], _T], items: Iterable[_S]) -> Iterator[_T]:
    """Yield the results for items, in order; a second core takes a part of them."""
    if not has_second_core():
        yield from map(work, items)
        return
    with ThreadPool(2, thread_name_prefix="shardckpt-boxes") as pool:
        yield from pool.map(work, items)


def sum_digests(boxes: Sequence[HeldBox], work: Callable[[HeldBox], Digest]) -> dict[str, Digest]:
    """Return the digests of boxes, added up by tensor."""
    digests: dict[str, Digest] = {}
    for box, digest in zip(boxes, map_shared(work, boxes), strict=True):
        digests[box.name] = digests.get(box.name, ZERO) + digest
    return digests


def compare_box(held: HeldBox, old: NDArray[Any], new: NDArray[Any]) -> tuple[BoxChange, Digest]:
    """Return what changed in a held box, and what that adds to its tensor's digest."""
    change, words = find_changes(old, new)
    start, rest = divmod(flat_index(held.shape, held.box.offset) * old.itemsize, _WORD)
    if words is None or rest or not is_contiguous(held.shape, held.box):
        return change, digest_change(held, change, old)[0]
    return change, digest_words((words.at + start).view(np.uint64), words.old, words.new)


def digest_change(held: HeldBox, change: BoxChange, old: NDArray[Any]) -> tuple[Digest, NewElements]:
    """Return what a change of a held box adds to its tensor's digest, and the elements that it makes."""
    if change.positions is None:
        digest = digest_box(change.values, held.shape, held.box) - digest_box(old, held.shape, held.box)
        return digest, NewElements(None, change.values)
    before = old[change.positions]
    after = before ^ change.values
    positions = shift_positions(change, held.shape, held.box)
    return digest_changes(held.shape, old.itemsize, positions, before, after), NewElements(change.positions, after)


def write_elements(new: NewElements, values: NDArray[Any]) -> None:
    """Replace elements of a held box, in place."""
    values[slice(None) if new.positions is None else new.positions] = new.values


def collect_changes(
    store: Store,
    indexes: Iterable[Sequence[LocatedChange]],
    tensors: Mapping[str, StreamTensor],
    boxes: Sequence[HeldBox],
) -> dict[HeldBox, list[PartChange]]:
    """Return the changes for held boxes, in the order of versions, each without what is not held.

    Args:
        store: The stream.
        indexes: For each version, where its files have changes.
        tensors: The stream's tensors.
        boxes: Held boxes.
    """
    by_name: dict[str, list[HeldBox]] = {}
    for held in boxes:
        by_name.setdefault(held.name, []).append(held)

    def decode(read: tuple[LocatedChange, memoryview]) -> tuple[LocatedChange, BoxChange]:
        located, data = read
        width = nbytes(tensors[located.name].dtype, 1)
        where = f"{store.url}/{located.file}: {located.name}"
        return located, decode_change(data, numel=located.box.volume, itemsize=width, where=where)

    found: dict[HeldBox, list[PartChange]] = {}
    for index in indexes:
        wanted = [each for each in index if _is_held(each, by_name)]
        for batch in read_changes(store, wanted):
            for located, change in map_shared(decode, batch):
                for held in by_name[located.name]:
                    part = intersect(located.box, held.box)
                    if part is not None and part.volume:
                        found.setdefault(held, []).append(PartChange(map_change(change, located.box, part), part))
    return found


def _is_held(change: LocatedChange, by_name: Mapping[str, Sequence[HeldBox]]) -> bool:
    return any(intersect(change.box, held.box) is not None for held in by_name.get(change.name, ()))
