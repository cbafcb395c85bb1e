"""Implement `stats`: counts, extremes and norms for each tensor."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from shardckpt.dtypes import bits
from shardckpt.encodings.budget import gc_paused
from shardckpt.encodings.element_values import measure_values
from shardckpt.encodings.value_stats import merge_stats
from shardckpt.errors import require_bools
from shardckpt.manifest import TensorEntry, split_numbers
from shardckpt.offline.compare.canonical import read_canonical
from shardckpt.offline.compare.tensor_distance import BLOCK_BYTES, read_values
from shardckpt.offline.results.computed_parts import ComputedPart, compute_parts
from shardckpt.offline.results.tensor_stats import (
    LayerStats,
    Statistics,
    TensorStats,
    describe_values,
    find_layer,
    find_stored_stats,
)
from shardckpt.offline.select.options import parse_globs, parse_part
from shardckpt.plan.layout.coverage import locate
from shardckpt.plan.naming.fqn import select_names
from shardckpt.reader import NamedBases, Reader
from shardckpt.readers.registry import open_checkpoint, resolve_step


def stats(
    src: str | os.PathLike[str],
    *,
    part: str = "",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    base: NamedBases = "",
    recompute: bool = False,
) -> Statistics:
    """Return statistics for a checkpoint's tensors, in bounded memory and without torch.

    Stored statistics (`save(..., stats=True)`) are read; others are computed from all values.

    Names are as in `diff`: parameters as in the unwrapped model, optimizer state as `<fqn>/<slot>`. Tied tensors count
    once, under the first name.

    Args:
        src: Checkpoint in any readable format: a path or URL.
        part: `model` or `optim`; everything if empty or `all`. Without `all` or `include`, counters (steps, batches)
            are skipped, and integers and single numbers outside model and optimizer, such as random states.
        include: Globs for names; empty for all.
        exclude: Globs for names to skip.
        base: Folder of the base checkpoint if it was moved, as for `load`.
        recompute: Compute all statistics from the values.

    Returns:
        Statistics by tensor and by layer.

    Raises:
        UsageError: The source does not exist or is not recognized; a glob matches nothing, or nothing remains.
        CheckpointError: The checkpoint is damaged or incomplete.
        StorageError: Reading failed.

    Examples:
        >>> shardckpt.stats("run/step-100").nans  # doctest: +SKIP
        0
    """
    source, include, exclude = resolve_step(src), parse_globs("include", include), parse_globs("exclude", exclude)
    require_bools(recompute=recompute)
    with gc_paused():
        reader = open_checkpoint(source, base)
        found = read_canonical(reader, parse_part(part or "all"))
        found.merge_slots()
    entries, unwanted = found.tensors, set[str]() if part == "all" or include else found.counters
    chosen = select_names(entries, include, exclude)
    names = [name for name in chosen if name not in unwanted]
    measure = partial(_measure, reader, entries, recompute=recompute)
    parts = (ComputedPart(name, entries[name].nbytes, partial(measure, name)) for name in names)
    tensors = tuple(found for [found] in compute_parts(parts, TensorStats))
    left_out = tuple(name for name in chosen if name in unwanted)
    return Statistics(source, reader.manifest.format, tensors, _sum_layers(tensors), left_out)


def _measure(reader: Reader, entries: Mapping[str, TensorEntry], name: str, *, recompute: bool) -> tuple[TensorStats]:
    entry = entries[name]
    found = None if recompute else find_stored_stats(reader, entry)
    if found is not None:
        return (describe_values(name, entry, found, is_stored=True),)
    [entry] = locate(reader, reader.manifest, [entry])
    blocks = read_values((reader, entry), max(BLOCK_BYTES * 8 // bits(entry.stored), 1))
    computed = merge_stats(measure_values(block, entry.dtype) for block in blocks)
    return (describe_values(name, entry, computed, is_stored=False),)


def _sum_layers(tensors: Iterable[TensorStats]) -> tuple[LayerStats, ...]:
    """Return the layers in natural name order."""
    members: dict[str, list[TensorStats]] = {}
    for tensor in tensors:
        members.setdefault(find_layer(tensor.name), []).append(tensor)
    return tuple(_sum_layer(name, members[name]) for name in sorted(members, key=split_numbers))


def _sum_layer(name: str, tensors: Sequence[TensorStats]) -> LayerStats:
    least = [tensor.min for tensor in tensors if tensor.min is not None]
    largest = [tensor.max for tensor in tensors if tensor.max is not None]
    return LayerStats(
        name=name,
        tensor_count=len(tensors),
        nans=sum(tensor.nans for tensor in tensors),
        infs=sum(tensor.infs for tensor in tensors),
        zeros=sum(tensor.zeros for tensor in tensors),
        min=min(least, default=None),
        max=max(largest, default=None),
        l2=math.hypot(*(tensor.l2 for tensor in tensors)),
    )
