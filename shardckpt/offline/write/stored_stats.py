"""Statistics of values that the save of a checkpoint stored."""

from __future__ import annotations

import math

from shardckpt.format.reader import Reader
from shardckpt.format.value_stats import ValueStats
from shardckpt.manifest import TensorEntry
from shardckpt.offline.write.report import TensorStats


def describe_values(name: str, entry: TensorEntry, found: ValueStats, *, is_stored: bool) -> TensorStats:
    """Return the statistics of a tensor for callers.

    Args:
        name: Name to show.
        entry: Entry of the tensor.
        found: Statistics of its values.
        is_stored: Whether the save stored them.
    """
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


def find_stored_stats(reader: Reader, entry: TensorEntry) -> ValueStats | None:
    """Return the statistics that the save stored for a tensor; None without them, or if a reader changed the tensor."""
    saved = reader.manifest.tensors.get(entry.path)
    if saved is None or (saved.pieces, saved.dtype) != (entry.pieces, entry.dtype):
        return None
    return reader.value_stats(entry.path)
