"""Read boxes of an anchor: a step with all weights of a version."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardckpt.errors import CheckpointError
from shardckpt.native.reader import open_source as open_step
from shardckpt.plan.layout.coverage import locate
from shardckpt.reader import Reader, Source
from shardckpt.readers.chunk_reader import PieceReader, ReadItem
from shardckpt.storage.store import SubfolderStore
from shardckpt.stream.format.held_boxes import HeldBox
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import ANCHOR, Version

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["ROOT", "open_anchor", "read_anchor"]

ROOT = "model"  # key of the weights in a step


def open_anchor(folder: StreamFolder, version: Version) -> Reader:
    """Return the reader of a version's anchor. Raises CheckpointError, StorageError."""
    return open_step(Source(SubfolderStore(folder.store, f"{version.folder}/{ANCHOR}")))


def read_anchor(reader: Reader, boxes: Sequence[HeldBox], buffer: NDArray[np.uint8]) -> None:
    """Read boxes into their places in a buffer, verified block by block. Raises CheckpointError, StorageError."""
    entries, tensors = [], reader.manifest.tensors
    for each in boxes:
        entry = tensors.get((ROOT, each.name)) or tensors.get((each.name,))  # a publisher's, or a compaction's
        if entry is None or (tuple(entry.shape), entry.dtype) != (each.shape, each.dtype):
            raise CheckpointError(
                "the anchor has another tensor than the stream", where=reader.store.url, found=each.name
            )
        entries.append(entry)
    wants = [
        ReadItem(entry.pieces, each.box, each.dtype, memoryview(buffer[each.start : each.start + each.nbytes]))  # type: ignore[arg-type]
        for each, entry in zip(boxes, locate(reader, reader.manifest, entries), strict=True)
    ]
    PieceReader(reader.store).fill(wants)
