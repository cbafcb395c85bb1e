"""Plan all arrays with disjoint parts on ranks at once.

Millions of boxes take a second.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardckpt.dtypes import bits
from shardckpt.plan.layout.box_codec import ArrayNames, PackedRows

_MAX_ELEMENTS = 1 << 62
_Integers = NDArray[np.int64]


class Tilings(NamedTuple):
    """Planned arrays, whose boxes fill them consecutively in row-major order."""

    tasks: list[PackedRows]  # boxes that each rank writes; it has them in memory
    nbytes: list[int]  # bytes that each rank writes
    others: list[int]  # indexes of other arrays, which are not assigned to ranks yet


class _Boxes(NamedTuple):
    """Every rank's boxes, rank by rank."""

    ranks: _Integers
    arrays: _Integers  # array index
    widths: _Integers  # integers that encode the box
    starts: _Integers  # first element's index in the row-major array
    volumes: _Integers  # elements
    are_ranges: NDArray[np.bool_]  # whether each box is inside its array and contiguous


def find_tilings(ranks: Sequence[PackedRows], excluded: Collection[int] = ()) -> Tilings:
    """Plan the arrays whose boxes fill them without overlaps."""
    names = ranks[0].names
    numbers = np.concatenate([rows.numbers for rows in ranks])
    counts = np.stack([rows.counts for rows in ranks])
    boxes = _locate_boxes(names, counts, numbers)
    is_tiled = np.array([bool(shape) and 0 < prod(shape) < _MAX_ELEMENTS for _, shape, _ in names.arrays], np.bool_)
    is_tiled[[*excluded]] = False
    is_tiled[boxes.arrays[~boxes.are_ranges]] = False
    _reject_gaps(names, boxes, is_tiled)
    is_task = is_tiled[boxes.arrays] & (boxes.volumes > 0)
    widths = np.array([bits(dtype) for _, _, dtype in names.arrays], np.int64)
    sizes = (boxes.volumes * widths[boxes.arrays] + 7 >> 3)[is_task]
    # sums of integers below 2**53 are exact
    nbytes = np.bincount(boxes.ranks[is_task], sizes, minlength=len(ranks)).astype(np.int64).tolist()
    tasks = [*ranks] if is_task.all() else _take_boxes(ranks, boxes, numbers, is_task)
    return Tilings(tasks, nbytes, np.flatnonzero(~is_tiled).tolist())


def _locate_boxes(names: ArrayNames, counts: _Integers, numbers: _Integers) -> _Boxes:
    """Locate every rank's boxes."""
    world, many = counts.shape
    arrays = np.repeat(np.tile(np.arange(many), world), counts.ravel())
    ranks = np.repeat(np.arange(world), counts.sum(axis=1))
    dims = names.dims[arrays]
    firsts = np.cumsum(2 * dims) - 2 * dims
    starts, volumes = np.zeros(len(arrays), np.int64), np.ones(len(arrays), np.int64)
    are_ranges = np.ones(len(arrays), np.bool_)
    for ndim in np.unique(dims).tolist():
        chosen = np.flatnonzero(dims == ndim)
        shapes = np.array([s if len(s) == ndim else (0,) * ndim for _, s, _ in names.arrays], np.int64)
        step = np.ones(len(chosen), np.int64)
        is_inner_full = np.ones(len(chosen), np.bool_)  # over the dimensions after
        for dim in reversed(range(ndim)):
            lengths = shapes[arrays[chosen], dim]
            offsets, sizes = numbers[firsts[chosen] + dim], numbers[firsts[chosen] + ndim + dim]
            is_inside = (offsets >= 0) & (sizes >= 0) & (offsets <= lengths - sizes)
            are_ranges[chosen] &= is_inside & (is_inner_full | (sizes <= 1))
            is_inner_full &= sizes == lengths
            starts[chosen] += offsets * step
            volumes[chosen] *= sizes
            step *= lengths
    return _Boxes(ranks, arrays, 2 * dims, starts, volumes, are_ranges)


def _reject_gaps(names: ArrayNames, boxes: _Boxes, is_tiled: NDArray[np.bool_]) -> None:
    """Clear `is_tiled` for arrays whose boxes leave gaps or overlap."""
    present = np.flatnonzero(is_tiled[boxes.arrays] & (boxes.volumes > 0))
    # most ranks have ascending ranges, for which sorting by array is enough; other arrays are fully sorted
    by_array = present[np.argsort(_narrow(boxes.arrays[present]), kind="stable")]
    doubted = np.flatnonzero(is_tiled & ~_are_filled(names, boxes, by_array))
    if not len(doubted):
        return
    is_tiled[doubted] = False
    again = present[np.isin(boxes.arrays[present], doubted)]
    in_full = again[np.lexsort((boxes.starts[again], boxes.arrays[again]))]
    is_tiled[doubted] = _are_filled(names, boxes, in_full)[doubted]


def _narrow(arrays: _Integers) -> NDArray[Any]:
    """Return indexes as 16-bit integers if possible; NumPy sorts them 10 times faster."""
    return arrays.astype(np.uint16) if not len(arrays) or arrays.max() < 1 << 16 else arrays


def _are_filled(names: ArrayNames, boxes: _Boxes, order: _Integers) -> NDArray[np.bool_]:
    """Return for each array whether its boxes, in this order, are consecutive."""
    totals = np.array([prod(shape) for _, shape, _ in names.arrays], dtype=object)
    totals = np.where(totals < _MAX_ELEMENTS, totals, -1).astype(np.int64)
    arrays, starts = boxes.arrays[order], boxes.starts[order]
    stops = starts + boxes.volumes[order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = arrays[1:] != arrays[:-1]
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = is_first[1:]
    expected = np.zeros(len(order), np.int64)
    expected[1:] = np.where(is_first[1:], 0, stops[:-1])
    is_wrong = (starts != expected) | (is_last & (stops != totals[arrays]))
    is_filled = np.zeros(len(names.arrays), np.bool_)
    is_filled[arrays] = True
    is_filled[arrays[is_wrong]] = False
    return is_filled


def _take_boxes(
    ranks: Sequence[PackedRows], boxes: _Boxes, numbers: _Integers, is_taken: NDArray[np.bool_]
) -> list[PackedRows]:
    """Return each rank's rows with only the taken boxes."""
    names, world = ranks[0].names, len(ranks)
    many = len(names.arrays)
    places = boxes.ranks[is_taken] * many + boxes.arrays[is_taken]
    counts = np.bincount(places, minlength=world * many).reshape(world, many)
    kept = numbers[np.repeat(is_taken, boxes.widths)]
    ends = (counts * 2 * names.dims).sum(axis=1).cumsum()
    return [PackedRows(names, mine, part) for mine, part in zip(counts, np.split(kept, ends[:-1]), strict=True)]
