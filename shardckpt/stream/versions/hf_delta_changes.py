"""Apply the changes in a folder of slime, miles or ModelExpress to tensors' bytes.

A change is a zstd frame: the XOR with all bytes of the version before, or new bytes with their positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import zstandard

from shardckpt.encodings.codecs import MAX_WINDOW_BYTES
from shardckpt.errors import FormatError
from shardckpt.manifest import Span, TensorEntry
from shardckpt.reader import Reader
from shardckpt.storage.store import Read
from shardckpt.stream.format.held_boxes import HeldBox

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ENCODINGS", "ChangedFolder", "locate_bytes"]

ENCODINGS = ("xor", "overwrite")
_BLOCK = 1 << 20
_COUNT = np.dtype("<u4")  # of a number of positions, and of a position


class ChangedFolder(NamedTuple):
    """A version that has changes alone."""

    name: str
    encoding: str
    reader: Reader  # of the frames, as plain tensors of bytes
    algorithm: str  # of its checksums

    def read(self, boxes: Sequence[HeldBox], buffer: NDArray[np.uint8]) -> None:
        """Apply the changes of some tensors to their bytes, in place."""
        tensors = self.reader.manifest.tensors
        changed = [(box, tensors[box.name,]) for box in boxes if (box.name,) in tensors]
        frames = [memoryview(bytearray(self._require_frame(box, entry))) for box, entry in changed]
        self.reader.store.read(
            [Read(*locate_bytes(entry)[:2], frame) for (_, entry), frame in zip(changed, frames, strict=True)]
        )
        for (box, _), frame in zip(changed, frames, strict=True):
            where = f"{self.reader.store.url}: {box.name}"
            target = buffer[box.start : box.start + box.nbytes]
            (_apply_xor if self.encoding == "xor" else _overwrite)(frame, target, where)

    def _require_frame(self, box: HeldBox, entry: TensorEntry) -> int:
        """Return a frame's bytes. Raises FormatError if no tensor of this size needs as many."""
        _, _, nbytes = locate_bytes(entry)
        values = box.nbytes if self.encoding == "xor" else (box.nbytes + 1) * (_COUNT.itemsize + 1)
        most = values + (values >> 7) + 1024  # zstd stores what it cannot compress, with a few bytes for each block
        if nbytes > most:
            raise FormatError(
                "a change is longer than its tensor can need",
                where=f"{self.reader.store.url}: {box.name}",
                found=f"{nbytes} bytes",
                expected=f"at most {most}",
            )
        return nbytes


def locate_bytes(entry: TensorEntry) -> tuple[str, int, int]:
    """Return where a plain tensor is: file, first byte, number of bytes."""
    [(_, file, layout)] = entry.pieces
    assert isinstance(layout, Span), "safetensors have spans"
    return file, layout.offset, layout.nbytes


def _apply_xor(frame: memoryview, target: NDArray[np.uint8], where: str) -> None:
    at = 0
    for block in _decompress(frame, len(target), where):
        target[at : at + len(block)] ^= block
        at += len(block)


def _overwrite(frame: memoryview, target: NDArray[np.uint8], where: str) -> None:
    """Write new bytes: their number, the position of each, then the bytes."""
    most = (len(target) + 1) * (_COUNT.itemsize + 1)
    data = b"".join(block.data for block in _decompress(frame, None, where, most))
    count = int(np.frombuffer(data[: _COUNT.itemsize], _COUNT)[0]) if len(data) >= _COUNT.itemsize else -1
    if count < 0 or len(data) != _COUNT.itemsize + count * (_COUNT.itemsize + 1):
        raise FormatError("a change has another number of bytes than it says", where=where, found=len(data))
    positions = np.frombuffer(data, _COUNT, count, _COUNT.itemsize)
    if count and int(positions.max()) >= len(target):
        raise FormatError("a changed byte is after the end of its tensor", where=where, expected=len(target))
    target[positions] = np.frombuffer(data, np.uint8, count, _COUNT.itemsize * (count + 1))


def _decompress(frame: memoryview, size: int | None, where: str, most: int = 0) -> Iterator[NDArray[np.uint8]]:
    """Yield a frame's bytes in blocks: exactly `size`, or any number up to `most`."""
    left = most if size is None else size
    with zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).stream_reader(frame) as reader:
        try:
            while left and (block := reader.read(min(left, _BLOCK))):
                yield np.frombuffer(block, np.uint8)
                left -= len(block)
            is_longer = bool(reader.read(1))
        except zstandard.ZstdError as error:
            raise FormatError(f"a change cannot be decompressed: {error}", where=where) from error
    if is_longer or (left and size is not None):
        found = "more" if is_longer else f"{left} fewer"
        raise FormatError("a change has another size than its tensor", where=where, found=f"{found} bytes")
