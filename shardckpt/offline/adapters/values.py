"""Change a base's values as an adapter does, by boxes: products, norms, biases, tokens, and full tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shardckpt.boxes import Box, Shape, contiguous_blocks, flat_index, full_box
from shardckpt.dtypes import FLOATS, bits, nbytes
from shardckpt.encodings.element_values import numpy_dtype
from shardckpt.errors import PrecisionError, UnsupportedError
from shardckpt.manifest import TensorEntry
from shardckpt.plan.adapter.merge_plan import AddedBias, TokenRows
from shardckpt.plan.adapter.parameters import LowRank
from shardckpt.plan.layout.output_files import Change
from shardckpt.reader import Reader
from shardckpt.readers.chunk_reader import PieceReader, ReadItem
from shardckpt.storage.store import Store

__all__ = [
    "AdapterChange",
    "AdapterReader",
    "BiasSum",
    "FiniteChange",
    "LowRankSum",
    "RowsCopy",
    "ScaledSum",
    "TensorCopy",
]

_READ_BYTES = 1 << 19
_KEPT_FACTORS = 2  # in full; a layer's experts use two in turn

_Numbers = NDArray[Any]


class AdapterChange(Change, Protocol):
    """Changes a tensor's values as an adapter does."""

    @property
    def is_sum(self) -> bool:
        """Whether another adapter may add values to the result."""


class AdapterReader:
    """Reads an adapter's tensors as numbers; caches the last full factors."""

    def __init__(self, reader: Reader, entries: Mapping[str, TensorEntry]) -> None:
        self._pieces, self._entries, self._where = PieceReader(reader.store), entries, reader.store.url
        self._lock = threading.Lock()
        self._kept: tuple[tuple[str, str, _Numbers], ...] = ()
        for name, entry in entries.items():
            if entry.stored not in FLOATS:
                raise UnsupportedError(f"{name} must have a float type", where=reader.store.url, found=entry.stored)

    def shape(self, name: str) -> Shape:
        """Return a tensor's shape."""
        return self._entries[name].shape

    def raw(self, name: str, box: Box) -> tuple[memoryview, str]:
        """Return the bytes in a tensor's box, and their dtype."""
        entry = self._entries[name]
        data = memoryview(bytearray(nbytes(entry.stored, box.volume)))
        with self._lock:  # threads share the decoders of encoded factors
            self._pieces.fill([ReadItem(entry.pieces, box, entry.stored, data)])
        if not np.isfinite(np.frombuffer(data, numpy_dtype(entry.stored))).all():
            raise PrecisionError(
                f"the adapter's {name} must be finite",
                where=self._where,
                found="NaN or infinity",
                fix="The training diverged: take an earlier adapter.",
            )
        return data, entry.stored

    def numbers(self, name: str, box: Box, kind: str) -> _Numbers:
        """Return the numbers in a tensor's box."""
        return _as_numbers(*self.raw(name, box), kind).reshape(box.size)

    def rows(self, name: str, start: int, size: int, kind: str) -> _Numbers:
        """Return a factor's rows; dimensions after the first count as one."""
        shape = self.shape(name)
        box = Box((start, *(0 for _ in shape[1:])), (size, *shape[1:]))
        return self.numbers(name, box, kind).reshape(size, -1)

    def columns(self, name: str, rows: tuple[int, int], columns: tuple[int, int], kind: str) -> _Numbers:
        """Return some columns of a matrix's rows; both are a start and a size."""
        return self.numbers(name, Box((rows[0], columns[0]), (rows[1], columns[1])), kind)

    def full_factor(self, name: str, kind: str) -> _Numbers:
        """Return all of a factor."""
        kept = self._kept
        for each in kept:
            if each[:2] == (name, kind):
                return each[2]
        found = self.rows(name, 0, self.shape(name)[0], kind)
        self._kept = (*kept[1 - _KEPT_FACTORS :], (name, kind, found)) if kept else ((name, kind, found),)
        return found


def _as_numbers(data: memoryview, stored: str, kind: str) -> _Numbers:
    return np.frombuffer(data, numpy_dtype(stored)).astype(numpy_dtype(kind), copy=False)


def _as_bytes(values: _Numbers) -> memoryview:
    return np.ascontiguousarray(values).data.cast("B")


def _choose_kind(stored: str) -> str:
    return "float64" if stored == "float64" else "float32"


class _RowRun(NamedTuple):
    """Consecutive elements of a matrix: several rows, or a part of one row."""

    matrix: int  # among the experts of a weight
    row: int
    rows: int
    column: int
    columns: int


class _Matrices:
    """A weight as one matrix, or as a matrix for each expert."""

    def __init__(self, shape: Shape, *, has_experts: bool) -> None:
        # Dimensions after the first (in a convolution's kernel) count as one.
        self.rows = shape[-2] if has_experts else shape[0]
        self.columns = shape[-1] if has_experts else int(np.prod(shape[1:]))
        self._shape = shape

    def runs(self, box: Box) -> Iterator[_RowRun]:
        """Yield the runs in a contiguous box."""
        start, volume = flat_index(self._shape, box.offset), box.volume
        stop, size = start + volume, self.rows * self.columns
        while start < stop:
            matrix, at = divmod(start, size)
            count = min(stop - start, size - at)
            row, column = divmod(at, self.columns)
            if count < self.columns:
                yield _RowRun(matrix, row, 1, column, count)
            else:
                yield _RowRun(matrix, row, count // self.columns, 0, self.columns)
            start += count


class LowRankSum:
    """Adds two factors' product to a weight."""

    def __init__(self, source: AdapterReader, low_rank: LowRank, shape: Shape, before: Change | None) -> None:
        self._source, self._low_rank, self._before = source, low_rank, before
        has_experts = low_rank.experts > 1 and len(shape) == 3
        self.matrices = _Matrices(shape, has_experts=has_experts)

    @property
    def is_sum(self) -> bool:
        """Whether another adapter may add values: not if this adapter contains the weight."""
        return getattr(self._before, "is_sum", True)

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:
        """Return the weight plus the product in a box, in the computation's dtype."""
        found = self.add(box, data, stored)
        return _as_bytes(found), str(found.dtype)

    def add(self, box: Box, data: memoryview, stored: str) -> _Numbers:
        """Return the weight plus the product in a box, flattened."""
        if self._before is not None:
            data, stored = self._before(box, data, stored)
        kind = _choose_kind(stored)
        parts = [self._multiply(run, kind).reshape(-1) for run in self.matrices.runs(box)]
        added = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return np.asarray(_as_numbers(data, stored, kind) + added)

    def _multiply(self, run: _RowRun, kind: str) -> _Numbers:
        each, source = self._low_rank, self._source
        rank = source.shape(each.a)[0] // each.experts
        expert = each.expert + run.matrix
        factor = numpy_dtype(kind).type(each.scale)
        if each.is_turned:
            a = source.columns(each.a, (expert * rank, rank), (run.row, run.rows), kind)
            b = self._read_b(expert, run.column, run.columns, kind)
            return np.asarray((a.T @ b.T) * factor)
        b = self._read_b(expert, each.row + run.row, run.rows, kind)
        a = source.rows(each.a, expert * rank, rank, kind) if each.experts > 1 else source.full_factor(each.a, kind)
        return np.asarray((b @ a[:, run.column : run.column + run.columns]) * factor)

    def _read_b(self, expert: int, start: int, size: int, kind: str) -> _Numbers:
        """Return an expert's columns in the second factor's rows."""
        name, experts = self._low_rank.b, self._low_rank.experts
        if experts == 1:
            return self._source.rows(name, start, size, kind)
        return self._source.full_factor(name, kind)[start : start + size, expert::experts]


class ScaledSum:
    """Adds a product to a weight, and gives the result's rows (columns if turned) the adapter's norms, as DoRA does."""

    is_sum = False

    def __init__(
        self, added: LowRankSum, source: AdapterReader, low_rank: LowRank, weight: TensorEntry, store: Store
    ) -> None:
        self._added, self._source, self._low_rank = added, source, low_rank
        self._weight, self._pieces = weight, PieceReader(store)
        self._lock = threading.Lock()
        self._norms: _Numbers | None = None

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:
        """Return the scaled weight in a box, in the computation's dtype."""
        values = self._added.add(box, data, stored)
        [run] = self._added.matrices.runs(box)
        values = values.reshape(run.rows, run.columns)
        is_turned = self._low_rank.is_turned
        start, size = (run.column, run.columns) if is_turned else (run.row, run.rows)
        if is_turned or run.columns < self._added.matrices.columns:
            norms = self._find_norms()[start : start + size]
        else:
            norms = np.sqrt(_sum_squares(values, axis=1))
        if not norms.all():
            raise PrecisionError(
                "DoRA divides by a norm that is zero",
                where=self._low_rank.weight,
                found=f"{'column' if is_turned else 'row'} {start + int(np.argmin(norms))} of the sum",
                fix="The adapter does not work with this base, in peft neither.",
            )
        factors = self._magnitudes(start, size, str(values.dtype)) / norms.astype(values.dtype)
        values = values * (factors[None, :] if is_turned else factors[:, None])
        return _as_bytes(values), str(values.dtype)

    def _magnitudes(self, start: int, size: int, kind: str) -> _Numbers:
        name = self._low_rank.magnitude
        shape = self._source.shape(name)
        return self._source.numbers(name, full_box(shape), kind).reshape(-1)[start : start + size]

    def _find_norms(self) -> _Numbers:
        """Return all norms, computed once, in a pass of their own."""
        with self._lock:
            if self._norms is None:
                self._norms = self._compute()
            return self._norms

    def _compute(self) -> _Numbers:
        matrices, is_turned = self._added.matrices, self._low_rank.is_turned
        squares = np.zeros(matrices.columns if is_turned else matrices.rows, np.float64)
        stored = self._weight.stored
        for box in contiguous_blocks(full_box(self._weight.shape), _READ_BYTES * 8 // bits(stored)):
            data = memoryview(bytearray(nbytes(stored, box.volume)))
            self._pieces.fill([ReadItem(self._weight.pieces, box, stored, data)])
            [run] = matrices.runs(box)
            values = self._added.add(box, data, stored).reshape(run.rows, run.columns)
            if is_turned:
                squares[run.column : run.column + run.columns] += _sum_squares(values, axis=0)
            else:
                squares[run.row : run.row + run.rows] += _sum_squares(values, axis=1)
        self._pieces.forget()
        return np.asarray(np.sqrt(squares))


def _sum_squares(values: _Numbers, axis: int) -> _Numbers:
    return np.asarray(np.einsum("ij,ij->j" if axis == 0 else "ij,ij->i", values, values, dtype=np.float64))


class FiniteChange:
    """Requires that a change keeps finite values finite."""

    def __init__(self, change: Change, name: str) -> None:
        self._change, self._name = change, name

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:
        """Return the changed values in a box."""
        with np.errstate(over="ignore", invalid="ignore"):
            changed, kind = self._change(box, data, stored)
        wrong = ~np.isfinite(np.frombuffer(changed, numpy_dtype(kind)))
        if wrong.any() and stored in FLOATS and len(data) == nbytes(stored, box.volume):
            wrong &= np.isfinite(np.frombuffer(data, numpy_dtype(stored)))
        if wrong.any():
            raise PrecisionError(
                f"finite values of {self._name!r} become infinite or NaN with the adapter",
                found=f"{np.count_nonzero(wrong)} of {wrong.size} values, computed in {kind}",
                fix="Give a smaller --adapter-weight, or allow it with --allow-overflow.",
            )
        return changed, kind


class TensorCopy:
    """Replaces a tensor's values with another tensor's values."""

    is_sum = False

    def __init__(self, source: AdapterReader, name: str) -> None:
        self._source, self._name = source, name

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:  # noqa: ARG002
        """Return the other tensor's values in a box."""
        return self._source.raw(self._name, box)


class BiasSum:
    """Adds an adapter's bias to a layer's."""

    def __init__(self, source: AdapterReader, added: AddedBias, scale: float, before: Change | None) -> None:
        self._source, self._added, self._scale, self._before = source, added, scale, before

    @property
    def is_sum(self) -> bool:
        """Whether another adapter may add values: not if this adapter contains the bias."""
        return getattr(self._before, "is_sum", True)

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:
        """Return the sum in a box, in the computation's dtype."""
        if self._before is not None:
            data, stored = self._before(box, data, stored)
        kind = _choose_kind(stored)
        added = self._source.numbers(self._added.source, box, kind).reshape(-1)
        found = _as_numbers(data, stored, kind) + added * numpy_dtype(kind).type(self._scale)
        return _as_bytes(found), kind


class RowsCopy:
    """Replaces single rows of an embedding."""

    is_sum = False

    def __init__(self, source: AdapterReader, tokens: TokenRows, before: Change | None) -> None:
        self._source, self._before, self._name = source, before, tokens.source
        self._at = {row: at for at, row in enumerate(tokens.rows)}

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:
        """Return the values in a box, in a dtype that holds both sources' values."""
        if self._before is not None:
            data, stored = self._before(box, data, stored)
        start, size = box.offset[0], box.size[0]
        found = [row for row in range(start, start + size) if row in self._at]
        if not found:
            return data, stored
        kind = _choose_kind(stored)
        values = np.array(_as_numbers(data, stored, kind)).reshape(size, -1)
        for row in found:
            own = Box((self._at[row], *box.offset[1:]), (1, *box.size[1:]))
            values[row - start] = self._source.numbers(self._name, own, kind).reshape(-1)
        return _as_bytes(values), kind
