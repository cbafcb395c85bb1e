"""A reader of tensors that are in no file: it makes their bytes when they are read."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shardckpt.boxes import Box, Shape, full_box
from shardckpt.dtypes import array_nbytes
from shardckpt.errors import TruncatedError
from shardckpt.manifest import Manifest, Path, Piece, Span, TensorEntry
from shardckpt.reader import Reader
from shardckpt.storage.store import Capabilities, Listed, Read, Store, WrappedStore
from shardckpt.stream.format.held_boxes import HeldBox, place_boxes

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["MADE_FILE", "MadeReader", "TensorMaker", "group_tensors"]

MADE_FILE = "model.safetensors"  # name of the file that the tensors seem to be in
_GROUP_BYTES = 64 << 20  # of small tensors that are made together


class TensorMaker(Protocol):
    """Makes full tensors on demand."""

    @property
    def url(self) -> str:
        """Path or URL of the folder, for messages."""
        ...

    @property
    def store(self) -> Store:
        """Store of the folder."""
        ...

    @property
    def groups(self) -> Sequence[tuple[HeldBox, ...]]:
        """All tensors in full, in groups to make together."""
        ...

    def read(self, boxes: Sequence[HeldBox]) -> NDArray[np.uint8]:
        """Return a buffer with full tensors. Raises CheckpointError, StorageError."""
        ...

    def check(self, boxes: Sequence[HeldBox], buffer: NDArray[np.uint8]) -> None:
        """Require that tensors have their stored checksums. Raises ChecksumError."""
        ...


def group_tensors(tensors: Iterable[tuple[str, str, Shape]]) -> tuple[tuple[HeldBox, ...], ...]:
    """Group full tensors, given by name, dtype and shape: neighbours of limited size, or one tensor."""
    groups: list[list[tuple[str, Shape, str, Box]]] = []
    left = 0
    for name, dtype, shape in tensors:
        nbytes = array_nbytes(dtype, shape)
        if nbytes > left or not groups:
            groups.append([])
            left = _GROUP_BYTES
        left -= nbytes
        groups[-1].append((name, shape, dtype, full_box(shape)))
    return tuple(map(place_boxes, groups))


class _MadeFile(WrappedStore):
    """A folder whose only file is the tensors' bytes one after the other, made on demand.

    It keeps the last group of tensors that it made.
    """

    def __init__(self, maker: TensorMaker, *, checks: bool) -> None:
        super().__init__(maker.store)
        self._maker, self._checks = maker, checks
        self._boxes: list[tuple[int, HeldBox]] = [(at, box) for at, boxes in enumerate(maker.groups) for box in boxes]
        self.starts = [0, *accumulate(box.nbytes for _, box in self._boxes)]
        self._lock = threading.Lock()
        self._group, self._buffer = -1, np.empty(0, np.uint8)

    @property
    def url(self) -> str:
        """Path or URL of the folder."""
        return self._maker.url

    @property
    def capabilities(self) -> Capabilities:
        """Reads are not cheap, wherever the folder is."""
        return Capabilities(renames=False, is_local=False)

    def list(self, folder: str = "") -> list[Listed]:
        """Return the file."""
        return [] if folder else [Listed(MADE_FILE, self.starts[-1], False)]

    def size(self, name: str) -> int:  # noqa: ARG002  (there is one file)
        """Return the file's size."""
        return self.starts[-1]

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer, in the file's order, so that each group is made once."""
        for read in sorted(reads, key=lambda each: each.offset):
            end = read.offset + len(read.buffer)
            if end > self.starts[-1]:
                raise TruncatedError.from_size(f"{self.url}/{MADE_FILE}", self.starts[-1], end)
            self._fill(read.offset, read.buffer)

    def _fill(self, offset: int, buffer: memoryview) -> None:
        at = bisect_right(self.starts, offset) - 1
        with self._lock:
            while len(buffer):
                group, box = self._boxes[at]
                skipped = offset - self.starts[at]
                size = min(box.nbytes - skipped, len(buffer))
                if size:
                    made = self._make(group)
                    buffer[:size] = memoryview(made[box.start + skipped : box.start + skipped + size])  # type: ignore[arg-type]
                offset, buffer, at = offset + size, buffer[size:], at + 1

    def _make(self, group: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        if group != self._group:
            self._group, self._buffer = -1, np.empty(0, np.uint8)  # one at a time
            boxes = self._maker.groups[group]
            self._buffer = self._maker.read(boxes)
            if self._checks:
                self._maker.check(boxes, self._buffer)
            self._group = group
        return self._buffer


class MadeReader(Reader):
    """An open checkpoint whose tensors are made on demand, and checked when they are read.

    Args:
        maker: Makes the tensors.
        format: Name of the format.
        ties: Further names of tensors, each with the name in `maker`.
        metadata: Text about the checkpoint.
        warnings: As in a manifest.
        missing: As in a manifest.
    """

    def __init__(
        self,
        maker: TensorMaker,
        format: str,
        ties: Mapping[str, str],
        metadata: Mapping[str, str],
        *,
        warnings: tuple[str, ...] = (),
        missing: tuple[str, ...] = (),
    ) -> None:
        made = _MadeFile(maker, checks=True)
        self._maker, self._unchecked = maker, _MadeFile(maker, checks=False)
        entries: dict[Path, TensorEntry] = {}
        for start, box in self.iter_places():
            piece = Piece(box.box, MADE_FILE, Span(start, box.nbytes))
            entries[box.name,] = TensorEntry((box.name,), box.shape, box.dtype, (piece,))
        for name, kept in ties.items():
            entries[name,] = entries[kept,]._replace(path=(name,))
        manifest = Manifest(
            format=format,
            files={MADE_FILE: made.starts[-1]},
            tensors=entries,
            aliases={(name,): (kept,) for name, kept in ties.items()},
            metadata=metadata,
            warnings=warnings,
            missing=missing,
        )
        super().__init__(made, manifest)

    def iter_places(self) -> Iterator[tuple[int, HeldBox]]:
        """Yield where each tensor starts in the file."""
        return zip(self._unchecked.starts, chain.from_iterable(self._maker.groups), strict=False)

    @property
    def raw_store(self) -> Store:
        """The tensors without a comparison of their checksums; hashes of files are compared."""
        return self._unchecked
