"""Implement `stats`: count, extremes and norms of the values of each tensor."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardckpt.dtypes import bits
from shardckpt.format.budget import gc_paused
from shardckpt.format.reader import NamedBases, Reader
from shardckpt.format.registry import open_checkpoint
from shardckpt.manifest import TensorEntry
from shardckpt.offline.compare.canonical import read_canonical
from shardckpt.offline.compare.stored_values import BLOCK_BYTES, read_values, sum_squares, to_numbers
from shardckpt.offline.select.options import parse_part
from shardckpt.offline.write.report import LayerStats, Statistics, TensorStats, find_layer, split_numbers
from shardckpt.plan.layout.coverage import locate
from shardckpt.plan.naming.fqn import select_names

_HALF_BYTES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
"""Values of `float4_e2m1fn` by their bits."""


def stats(
    src: str | os.PathLike[str],
    *,
    part: str = "all",
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    base: NamedBases = "",
) -> Statistics:
    """Compute statistics of the values of a checkpoint, in bounded memory and without torch.

    Names are those of `diff`: parameters by the names of the unwrapped model, optimizer state by `<fqn>/<slot>`. A
    tensor that is tied to another one counts under its first name alone.

    Args:
        src: Checkpoint in any readable format: path or URL of a folder or file.
        part: `model`, `optim` or `all`.
        include: Globs of names; empty for all.
        exclude: Globs of names to skip.
        base: Folder of the base checkpoint if it was moved, as for `load`.

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
    source = os.fspath(src)
    with gc_paused():
        reader = open_checkpoint(source, base)
        entries = read_canonical(reader, parse_part(part)).tensors
    chosen = select_names(entries, include, exclude)
    tensors = tuple(_measure(name, reader, entries[name]) for name in chosen)
    return Statistics(source, reader.manifest.format, tensors, _sum_layers(tensors))


@dataclass(slots=True)
class _Sums:
    """Statistics of the blocks of one tensor that were read so far."""

    nans: int = 0
    infs: int = 0
    zeros: int = 0
    least: float = math.inf
    largest: float = -math.inf
    total: float = 0.0
    squares: float = 0.0
    finite: int = 0

    def add(self, values: NDArray[Any]) -> None:
        """Add a block; complex numbers count by their magnitude."""
        values = np.abs(values) if values.dtype.kind == "c" else values
        is_finite = np.isfinite(values)
        self.nans += int(np.isnan(values).sum())
        self.infs += int(np.isinf(values).sum())
        if not is_finite.all():
            values = values[is_finite]
        self.zeros += values.size - int(np.count_nonzero(values))
        if values.size:
            self.least, self.largest = min(self.least, float(values.min())), max(self.largest, float(values.max()))
            with np.errstate(over="ignore"):
                self.total += float(values.sum())
                self.squares += sum_squares(values)
            self.finite += values.size


def _measure(name: str, reader: Reader, entry: TensorEntry) -> TensorStats:
    [entry] = locate(reader, reader.manifest, [entry])
    sums = _Sums()
    for data in read_values((reader, entry), max(BLOCK_BYTES * 8 // bits(entry.stored), 1)):
        sums.add(_unpack(data) if entry.dtype == "float4_e2m1fn" else to_numbers(data, entry.dtype))
    has_values = sums.finite > 0
    return TensorStats(
        name=name,
        dtype=entry.dtype,
        shape=entry.shape,
        nans=sums.nans,
        infs=sums.infs,
        zeros=sums.zeros,
        min=sums.least if has_values else None,
        max=sums.largest if has_values else None,
        mean=sums.total / sums.finite if has_values else None,
        l2=math.sqrt(sums.squares),
    )


def _unpack(data: bytearray) -> NDArray[Any]:
    """Return numbers of 4 bits, the lower half of each byte first."""
    packed = np.frombuffer(data, np.uint8)
    return _HALF_BYTES[np.stack([packed & 15, packed >> 4], axis=-1)].ravel()


def _sum_layers(tensors: Iterable[TensorStats]) -> tuple[LayerStats, ...]:
    """Return the layers in natural order of their names."""
    members: dict[str, list[TensorStats]] = {}
    for tensor in tensors:
        members.setdefault(find_layer(tensor.name), []).append(tensor)
    return tuple(_sum_layer(name, members[name]) for name in sorted(members, key=split_numbers))


def _sum_layer(name: str, tensors: Sequence[TensorStats]) -> LayerStats:
    least = [tensor.min for tensor in tensors if tensor.min is not None]
    largest = [tensor.max for tensor in tensors if tensor.max is not None]
    return LayerStats(
        name=name,
        tensors=len(tensors),
        nans=sum(tensor.nans for tensor in tensors),
        infs=sum(tensor.infs for tensor in tensors),
        zeros=sum(tensor.zeros for tensor in tensors),
        min=min(least, default=None),
        max=max(largest, default=None),
        l2=math.hypot(*(tensor.l2 for tensor in tensors)),
    )
