"""Value statistics that a checkpoint's save stored."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence

from shardckpt.boxes import Box
from shardckpt.encodings.value_stats import ValueStats, merge_stats
from shardckpt.manifest import TensorEntry
from shardckpt.offline.results.tensor_stats import TensorStats
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.reader import Reader


def describe_values(name: str, entry: TensorEntry, found: ValueStats, *, is_stored: bool) -> TensorStats:
    """Return a tensor's statistics for callers."""
    has_values = found.finite > 0
    return TensorStats(
        name=name,
        dtype=entry.dtype,
        shape=entry.shape,
        nans=found.nans,
        infs=found.infs,
        zeros=found.zeros,
        min=found.min if has_values else None,
        max=found.max if has_values else None,
        mean=found.total / found.finite if has_values else None,
        l2=math.sqrt(found.squares),
        is_stored=is_stored,
    )


def find_piece_stats(reader: Reader, tensor: OutputTensor) -> Mapping[Box, ValueStats]:
    """Return the stored statistics by piece; empty without them, or if the tensor is changed."""
    entry = tensor.entry
    if tensor.is_computed or tensor.members or not _is_as_saved(reader, entry):
        return {}
    return reader.piece_stats(entry.path)


def merge_piece_stats(boxes: Sequence[Box], stored: Mapping[Box, ValueStats]) -> list[ValueStats]:
    """Return statistics for boxes that stored pieces make up; empty if there is another box."""
    if not boxes:
        return []
    order = sorted(boxes)
    inside: dict[Box, list[Box]] = {box: [] for box in boxes}
    for piece in stored:
        box = order[bisect_right(order, (piece.offset, piece.size)) - 1]
        if piece not in inside and not _contains(box, piece):
            return []
        inside[piece if piece in inside else box].append(piece)
    found = [merge_stats(stored[piece] for piece in pieces) for pieces in inside.values()]
    sizes = (sum(piece.volume for piece in pieces) for pieces in inside.values())
    is_made_up = all(
        size == box.volume and stats.may_describe(size) for box, size, stats in zip(boxes, sizes, found, strict=True)
    )
    return found if is_made_up else []


def _contains(box: Box, piece: Box) -> bool:
    return all(start >= first for start, first in zip(piece.offset, box.offset, strict=True)) and all(
        stop <= last for stop, last in zip(piece.stop, box.stop, strict=True)
    )


def find_stored_stats(reader: Reader, entry: TensorEntry) -> ValueStats | None:
    """Return a tensor's stored statistics; None without them, or if a reader changed the tensor."""
    return reader.value_stats(entry.path) if _is_as_saved(reader, entry) else None


def _is_as_saved(reader: Reader, entry: TensorEntry) -> bool:
    saved = reader.manifest.tensors.get(entry.path)
    return saved is not None and (saved.pieces, saved.dtype) == (entry.pieces, entry.dtype)
