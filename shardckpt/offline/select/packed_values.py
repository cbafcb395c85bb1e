"""Values of packed weights: changes that dequantize torchao's and bitsandbytes' weights, by boxes.

They calculate as the packages' own functions do, in the same types: torchao 0.18 (`quant_primitives.py`:
`_dequantize_affine_no_dtype_check`, `_dequantize_affine_float8`; `nf4_tensor.py`: `get_original_weight`) and
bitsandbytes 0.50 (`backends/default/ops.py`, `_ops.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardckpt.boxes import Box, Shape, flat_index, flat_to_boxes, full_box, is_contiguous
from shardckpt.dtypes import FLOATS, bits, nbytes
from shardckpt.encodings.element_values import numpy_dtype
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.manifest import Encoded, TensorEntry
from shardckpt.plan.layout.output_files import Change
from shardckpt.plan.packed_weights import PackedWeight
from shardckpt.readers.chunk_reader import PieceReader, ReadItem
from shardckpt.storage.store import Store

_MAX_DIMS = 8
_CODES = 16  # of 4 bits
_NESTED_CODES = 256
_INT8_STEP = np.float32(7.874015718698502e-3)  # 1 / 127, as bitsandbytes spells it
_SMOOTHING = "act_pre_scale"

Floats = NDArray[np.float32]


class PartReader:
    """Reads boxes of a packed weight's inner tensors."""

    def __init__(self, store: Store, name: str, weight: PackedWeight, entries: Mapping[str, TensorEntry]) -> None:
        self.name, self.weight, self._store = name, weight, store
        self._entries = entries  # by inner tensor's name
        for inner, entry in entries.items():
            if len(entry.shape) > _MAX_DIMS or bits(entry.stored) % 8 or "complex" in entry.stored:
                raise self.error(f"has an inner tensor {inner} of another kind", f"{entry.stored} {list(entry.shape)}")
        if len(self.shape) > _MAX_DIMS or min(self.shape, default=0) < 0:
            raise self.error("has an impossible shape", list(self.shape[:9]))
        if weight.record.dtype not in FLOATS:
            raise self.error("must have a float type", weight.record.dtype, ", ".join(sorted(FLOATS)))
        self._decoding = PieceReader(store)
        self._lock = threading.Lock()

    @property
    def shape(self) -> Shape:
        """The weight's shape."""
        return self.weight.record.shape

    def find(self, inner: str) -> TensorEntry:
        """Return an inner tensor's entry."""
        entry = self._entries.get(inner)
        if entry is None:
            raise self.error(f"lacks its inner tensor {inner}", sorted(self._entries))
        return entry

    def has(self, inner: str) -> bool:
        """Return True if an inner tensor exists."""
        return inner in self._entries

    def error(self, what: str, found: object = None, expected: object = None) -> FormatError:
        """Return an error for an inner tensor or a record that does not fit."""
        return FormatError(f"the {self.weight.record.kind} {what}", where=self.name, found=found, expected=expected)

    def require_length(self, inner: str, elements: int) -> None:
        """Require an inner tensor's number of elements."""
        shape = self.find(inner).shape
        if prod(shape) != elements:
            raise self.error(f"has an inner tensor {inner} of another size", list(shape), f"{elements} elements")

    def read(self, inner: str, box: Box) -> NDArray[Any]:
        """Return the elements in an inner tensor's box."""
        entry = self.find(inner)
        data = memoryview(bytearray(nbytes(entry.stored, box.volume)))
        item = ReadItem(entry.pieces, box, entry.stored, data)
        if any(isinstance(piece.layout, Encoded) for piece in entry.pieces):
            with self._lock:  # threads share the decoders
                self._decoding.fill([item])
        else:
            PieceReader(self._store).fill([item])
        return np.frombuffer(data, numpy_dtype(entry.stored)).reshape(box.size)

    def read_flat(self, inner: str, start: int, stop: int) -> NDArray[Any]:
        """Return the elements `[start, stop)` of a flattened inner tensor."""
        boxes = flat_to_boxes(self.find(inner).shape, start, stop)
        return np.concatenate([self.read(inner, box).ravel() for box in boxes])

    def read_floats(self, inner: str, start: int, stop: int) -> Floats:
        """Return the elements `[start, stop)` of a flattened inner tensor as float32."""
        return self.read_flat(inner, start, stop).astype(np.float32)

    def read_table(self, inner: str, elements: int) -> Floats:
        """Return a small inner tensor of floats."""
        self.require_length(inner, elements)
        entry = self.find(inner)
        if entry.stored not in FLOATS:
            raise self.error(f"has an inner tensor {inner} of another type", entry.stored, "a float type")
        return self.read(inner, full_box(entry.shape)).astype(np.float32).ravel()


# ---------------------------------------------------------------------------------------------- blocks along dimensions


class AffineValues:
    """Subtracts zero points from integers or fp8 numbers, and multiplies by scales of blocks."""

    def __init__(self, tensors: PartReader, block: Shape) -> None:
        self._tensors, self._block = tensors, block
        self._factors = [name for name in ("zero_point", "scale") if tensors.has(name)]
        for name in self._factors:
            self._keep_dims(name)

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:
        """Return the elements in a box as float32."""
        values = np.frombuffer(data, numpy_dtype(stored)).reshape(box.size).astype(np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            if "zero_point" in self._factors:
                values -= self._spread("zero_point", box)
            values *= self._spread("scale", box)
        return _as_bytes(values), "float32"

    def _keep_dims(self, name: str) -> list[int]:
        """Return the weight's dimensions that a factor has; it may lack those with one block."""
        shape = self._tensors.find(name).shape
        counts = tuple(-(-n // step) for n, step in zip(self._tensors.shape, self._block, strict=True))
        dims = list(range(len(counts))) if shape == counts else [dim for dim, n in enumerate(counts) if n != 1]
        if shape != tuple(counts[dim] for dim in dims) and not (prod(shape) == prod(counts) == 1):
            raise self._tensors.error(f"has a {name} that does not fit its blocks", list(shape), list(counts))
        return dims if prod(shape) != 1 else []

    def _spread(self, name: str, box: Box) -> Floats:
        """Return a factor for each element in a box, to be broadcast."""
        dims = self._keep_dims(name)
        shape = self._tensors.find(name).shape
        if not dims:
            return self._tensors.read(name, full_box(shape)).astype(np.float32).reshape((1,) * len(box.size))
        firsts = [box.offset[dim] // self._block[dim] for dim in dims]
        lasts = [(box.offset[dim] + box.size[dim] - 1) // self._block[dim] for dim in dims]
        part = Box(tuple(firsts), tuple(last - first + 1 for first, last in zip(firsts, lasts, strict=True)))
        found: Floats = self._tensors.read(name, part).astype(np.float32)
        for at, dim in enumerate(dims):
            if found.shape[at] > 1:
                index = (box.offset[dim] + np.arange(box.size[dim])) // self._block[dim] - firsts[at]
                found = found.take(index, axis=at)
        sizes = [1] * len(box.size)
        for at, dim in enumerate(dims):
            sizes[dim] = found.shape[at]
        return found.reshape(sizes)


def plan_affine(tensors: PartReader) -> tuple[TensorEntry, Change]:
    """Plan a weight with integers or fp8 numbers in `qdata`."""
    if tensors.has(_SMOOTHING):
        raise UnsupportedError(
            f"a weight with {_SMOOTHING} cannot be dequantized: the layer multiplies its inputs too",
            where=tensors.name,
            fix="Leave it as it is with --keep-fp32.",
        )
    entry = tensors.find("qdata")
    if entry.shape != tensors.shape or not tensors.has("scale"):
        raise tensors.error("must have qdata of its own shape, and a scale", list(entry.shape), list(tensors.shape))
    return entry, AffineValues(tensors, _read_block(tensors))


def _read_block(tensors: PartReader) -> Shape:
    """Return the elements per block in each dimension."""
    shape, context = tensors.shape, tensors.weight.record.context
    block = context.get("block_size") if isinstance(context, Mapping) else None
    if isinstance(block, Mapping):
        block = block.get("$tuple")
    if block is None:  # Float8Tensor may lack it
        scale = tensors.find("scale").shape
        block = list(shape) if prod(scale) == 1 else [n // max(m, 1) for n, m in zip(shape, scale, strict=False)]
    if isinstance(block, list) and len(block) == len(shape) and all(type(n) is int and n > 0 for n in block):
        return tuple(block)
    raise tensors.error("must have a block_size with a number for each dimension", block, f"{len(shape)} numbers")


class RowValues:
    """Multiplies rows of integers by their largest magnitudes, as bitsandbytes does."""

    def __init__(self, tensors: PartReader) -> None:
        self._tensors = tensors

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:
        """Return the elements in a box as float32."""
        values = np.frombuffer(data, numpy_dtype(stored)).reshape(box.size).astype(np.float32)
        start = box.offset[0]
        scales = self._tensors.read_floats("SCB", start, start + box.size[0])
        with np.errstate(over="ignore", invalid="ignore"):
            values *= scales[:, None]
            values *= _INT8_STEP
        return _as_bytes(values), "float32"


def plan_rows(tensors: PartReader) -> tuple[TensorEntry, Change]:
    """Plan an 8-bit weight of bitsandbytes."""
    if len(tensors.shape) != 2:
        raise tensors.error("must be a matrix", list(tensors.shape))
    tensors.require_length("SCB", tensors.shape[0])
    if tensors.has("weight_format"):
        tensors.require_length("weight_format", 1)
        form = tensors.read_flat("weight_format", 0, 1).tolist()
        if form != [0]:
            raise tensors.error("must be stored by rows", f"weight_format {form[0]}", "0")
    return tensors.find("weight"), RowValues(tensors)


# ------------------------------------------------------------------------------------------------------- pairs of codes


class CodeValues:
    """Looks up codes of 4 bits in a table, and multiplies by scales of blocks of the flattened weight."""

    def __init__(
        self,
        tensors: PartReader,
        packed: str,
        table: Floats,
        block: int,
        read_scales: Callable[[int, int], Floats],
        dtype: str = "float32",
    ) -> None:
        self._tensors, self._packed, self._table, self._block = tensors, packed, table, block
        self._read_scales, self._dtype = read_scales, dtype

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:  # noqa: ARG002
        """Return the elements in a box."""
        runs = [self._compute(start, start + n) for start, n in _iter_runs(self._tensors.shape, box)]
        return _as_bytes(np.concatenate(runs).astype(numpy_dtype(self._dtype), copy=False)), self._dtype

    def _compute(self, start: int, stop: int) -> Floats:
        values = self._table[self._read_codes(start, stop)]
        scales = self._read_scales(start // self._block, -(-stop // self._block))
        with np.errstate(over="ignore", invalid="ignore"):
            values *= _repeat(scales, self._block, start, stop)
        return values

    def _read_codes(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Return the codes for the elements `[start, stop)`; the first of a pair is in the upper bits."""
        first, last = start // 2, -(-stop // 2)  # bytes
        width = bits(self._tensors.find(self._packed).stored) // 8
        words = self._tensors.read_flat(self._packed, first // width, -(-last // width))
        pairs = words.view(np.uint8)[first % width :][: last - first]
        codes = np.stack([pairs >> 4, pairs & 15], axis=-1).ravel()
        return codes[start % 2 :][: stop - start]


def _repeat(scales: Floats, block: int, start: int, stop: int) -> Floats:
    """Return a scale for each of the elements `[start, stop)`, from the scales of their blocks."""
    ends = np.clip(np.arange(start // block, -(-stop // block) + 1) * block, start, stop)
    found: Floats = np.repeat(scales, np.diff(ends))
    return found


class NestedScales:
    """Scales of bitsandbytes that are packed too: codes in a byte, with scales of their own."""

    def __init__(self, tensors: PartReader, block: int, offset: float) -> None:
        self._tensors, self._block, self._offset = tensors, block, np.float32(offset)
        self._table = tensors.read_table("nested_quant_map", _NESTED_CODES)

    def __call__(self, start: int, stop: int) -> Floats:
        """Return some blocks' scales."""
        block = self._block
        values: Floats = self._table[self._tensors.read_flat("absmax", start, stop)]
        values *= _repeat(
            self._tensors.read_floats("nested_absmax", start // block, -(-stop // block)), block, start, stop
        )
        values += self._offset
        return values


class NF4Scalers:
    """The scales of torchao's NF4Tensor, which rounds each step to the weight's type."""

    def __init__(self, tensors: PartReader, block: int) -> None:
        self._tensors, self._block, self._kind = tensors, block, numpy_dtype(tensors.weight.record.dtype)
        self._mean = tensors.read_table("scaler_mean", 1)[0]

    def __call__(self, start: int, stop: int) -> Floats:
        """Return some blocks' scalers."""
        block = self._block
        factors = self._tensors.read_floats("quantization_factor", start // block, -(-stop // block))
        values = self._tensors.read_floats("quantized_scalers", start, stop)
        with np.errstate(all="ignore"):
            values /= _repeat(factors, block, start, stop)
            return self._round(self._round(values) + self._mean)

    def _round(self, values: Floats) -> Floats:
        return values.astype(self._kind).astype(np.float32)


def plan_4bit(tensors: PartReader) -> tuple[TensorEntry, Change]:
    """Plan a 4-bit weight of bitsandbytes."""
    elements, text = prod(tensors.shape), tensors.weight.record.context
    packed = tensors.find("weight")
    found = prod(packed.shape) * bits(packed.stored) // 8
    needed = -(-elements // 2)
    if bits(packed.stored) % 8 or not needed <= found < needed + bits(packed.stored) // 8:
        raise tensors.error("must have two codes in a byte", f"{found} bytes", f"{needed} bytes")
    block = _read_count(tensors, text, "blocksize")
    blocks = -(-elements // block)
    tensors.require_length("absmax", blocks)
    read_scales: Callable[[int, int], Floats] = partial(tensors.read_floats, "absmax")
    if tensors.has("nested_absmax"):
        inner_block = _read_count(tensors, text, "nested_blocksize")
        tensors.require_length("nested_absmax", -(-blocks // inner_block))
        if tensors.find("absmax").stored != "uint8":
            raise tensors.error("must have absmax in bytes", tensors.find("absmax").stored, "uint8")
        read_scales = NestedScales(tensors, inner_block, _read_number(tensors, text, "nested_offset"))
    table = tensors.read_table("quant_map", _CODES)
    return _without_pieces(packed, tensors.shape), CodeValues(tensors, "weight", table, block, read_scales)


def plan_nf4(tensors: PartReader) -> tuple[TensorEntry, Change]:
    """Plan an NF4Tensor."""
    elements, context = prod(tensors.shape), tensors.weight.record.context
    packed = tensors.find("quantized_data")
    if packed.stored != "uint8":
        raise tensors.error("must have codes in bytes", packed.stored, "uint8")
    block, scaler_block = (_read_count(tensors, context, key) for key in ("block_size", "scaler_block_size"))
    blocks = -(-elements // block)
    for inner, count in (
        ("quantized_data", -(-elements // 2)),
        ("quantized_scalers", blocks),
        ("quantization_factor", -(-blocks // scaler_block)),
    ):
        tensors.require_length(inner, count)
    table, scalers = tensors.read_table("nf4", _CODES), NF4Scalers(tensors, scaler_block)
    dtype = tensors.weight.record.dtype
    return _without_pieces(packed, tensors.shape), CodeValues(tensors, "quantized_data", table, block, scalers, dtype)


def _without_pieces(packed: TensorEntry, shape: Shape) -> TensorEntry:
    """Return an entry for elements that only a change reads."""
    return TensorEntry(packed.path, shape, "uint8", ())


def _read_count(tensors: PartReader, values: object, key: str) -> int:
    found = values.get(key) if isinstance(values, Mapping) else None
    if type(found) is not int or not 0 < found < 1 << 31:
        raise tensors.error(f"must have a positive {key}", found)
    return found


def _read_number(tensors: PartReader, values: object, key: str) -> float:
    found = values.get(key) if isinstance(values, Mapping) else None
    if isinstance(found, (int, float)) and isfinite(found):
        return float(found)
    raise tensors.error(f"must have a number as {key}", found)


def _iter_runs(shape: Shape, box: Box) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a flattened tensor that make up a box: first element and length."""
    if is_contiguous(shape, box):
        yield flat_index(shape, box.offset), box.volume
        return
    dim = next(dim for dim, n in enumerate(box.size) if n > 1)
    for at in range(box.offset[dim], box.offset[dim] + box.size[dim]):
        yield from _iter_runs(shape, Box(_put(box.offset, dim, at), _put(box.size, dim, 1)))


def _put(values: Sequence[int], dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])


def _as_bytes(values: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(values).view(np.uint8).data.cast("B")


# By package and class.
PLANS: Mapping[str, Callable[[PartReader], tuple[TensorEntry, Change]]] = {
    "torchao.Int8Tensor": plan_affine,
    "torchao.IntxUnpackedToInt8Tensor": plan_affine,
    "torchao.Float8Tensor": plan_affine,
    "torchao.NF4Tensor": plan_nf4,
    "bitsandbytes.nf4": plan_4bit,
    "bitsandbytes.fp4": plan_4bit,
    "bitsandbytes.int8": plan_rows,
}
