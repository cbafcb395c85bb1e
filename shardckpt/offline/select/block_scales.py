"""Quantize to fp8, or undo it: block scales, computed from the source, and the changes that use them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardckpt.boxes import Box, contiguous_blocks
from shardckpt.dtypes import bits, nbytes
from shardckpt.encodings.element_values import numpy_dtype
from shardckpt.errors import PrecisionError, UsageError
from shardckpt.manifest import TensorEntry
from shardckpt.offline.select.config_files import ConfigFiles, read_dtype
from shardckpt.offline.select.options import Options, parse_dtype
from shardckpt.offline.select.selection import Selection
from shardckpt.plan import quantized_weights
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.plan.naming.model_files import CONFIG
from shardckpt.plan.quantized_weights import (
    BLOCK,
    DTYPE,
    LARGEST,
    QUANTIZATION_CONFIG,
    Blocks,
    find_quantized,
    list_uncast,
)
from shardckpt.reader import Reader
from shardckpt.readers.chunk_reader import PieceReader, ReadItem
from shardckpt.storage.store import Store

_READ_BYTES = 1 << 19
_MIN_SCALE = np.finfo(np.float32).tiny  # devices may flush smaller numbers to zero


class WeightScales:
    """One weight's scales, computed by strips with as many rows as a block."""

    def __init__(self, store: Store, weight: OutputTensor) -> None:
        self._weight, self._pieces = weight, PieceReader(store)
        self._lock = threading.Lock()
        self._kept: dict[int, NDArray[np.float32]] = {}  # until the strip is written
        self._unused: dict[int, int] = {}

    def strip(self, index: int) -> NDArray[np.float32]:
        """Return the block scales in one strip."""
        with self._lock:  # decoders are shared, and a strip is read once
            scales = self._kept.get(index)
            if scales is None:
                scales = self._kept[index] = self._compute(index)
            return scales

    def count_use(self, index: int, elements: int) -> None:
        """Forget a strip's scales once all its elements are written."""
        rows, columns = self._weight.shape
        with self._lock:
            left = self._unused.get(index, min(BLOCK[0], rows - index * BLOCK[0]) * columns) - elements
            self._unused[index] = left
            if not left:
                del self._unused[index]
                self._kept.pop(index, None)

    def _compute(self, index: int) -> NDArray[np.float32]:
        entry = self._weight.entry
        rows, columns = entry.shape
        start = index * BLOCK[0]
        strip = Box((start, 0), (min(BLOCK[0], rows - start), columns))
        largest = np.zeros(columns, np.float32)
        for box in contiguous_blocks(strip, _READ_BYTES * 8 // bits(entry.stored)):
            data = memoryview(bytearray(nbytes(entry.stored, box.volume)))
            self._pieces.fill([ReadItem(entry.pieces, box, entry.stored, data)])
            stored = entry.stored
            if self._weight.change is not None:
                data, stored = self._weight.change(box, data, stored)
            part = largest[box.offset[1] : box.offset[1] + box.size[1]]
            np.maximum(part, _find_largest(data, stored, box), out=part)
        if start + BLOCK[0] >= rows:
            self._pieces.forget()
        return self._divide(np.maximum.reduceat(largest, np.arange(0, columns, BLOCK[1])), index)

    def _divide(self, largest: NDArray[np.float32], index: int) -> NDArray[np.float32]:
        if not np.isfinite(largest).all():
            column = int(np.flatnonzero(~np.isfinite(largest))[0]) * BLOCK[1]
            raise PrecisionError(
                f"the block at [{index * BLOCK[0]}, {column}] has values that fp8 cannot hold with any scale",
                where=self._weight.name,
                found="NaN, infinity or a value beyond float32",
                fix="`shardckpt stats` counts them; leave the tensor in its type with --quantize-exclude.",
            )
        scales: NDArray[np.float32] = np.maximum(largest / np.float32(LARGEST), _MIN_SCALE)
        scales[largest == 0] = 1
        return scales


def _find_largest(data: memoryview, stored: str, box: Box) -> NDArray[np.float32]:
    """Return the largest magnitude in each column; NaN counts as larger than infinity."""
    kind = numpy_dtype(stored)
    unsigned = np.dtype(f"u{kind.itemsize}")
    magnitudes = np.frombuffer(data, unsigned).reshape(box.size) & unsigned.type(np.iinfo(unsigned).max >> 1)
    with np.errstate(over="ignore", invalid="ignore"):
        largest: NDArray[np.float32] = magnitudes.max(axis=0).view(kind).astype(np.float32)
    return largest


class ScaleValues:
    """Yields scales as values for a tensor that no file contains."""

    def __init__(self, scales: WeightScales) -> None:
        self._scales = scales

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:  # noqa: ARG002
        """Return the scales in a box."""
        found = np.empty(box.size, np.float32)
        column, width = box.offset[1], box.size[1]
        for row in range(box.size[0]):
            found[row] = self._scales.strip(box.offset[0] + row)[column : column + width]
        return _as_bytes(found), "float32"


class BlockQuantizer:
    """Divides a weight by its block scales and rounds to fp8."""

    def __init__(self, scales: WeightScales, weight: OutputTensor) -> None:
        self._scales, self._weight = scales, weight

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:
        """Return the quantized elements in a box."""
        if self._weight.change is not None:
            data, stored = self._weight.change(box, data, stored)
        values = np.frombuffer(data, numpy_dtype(stored)).reshape(box.size)
        found = np.empty(box.size, numpy_dtype(DTYPE))
        for index, rows in iter_strips(box, BLOCK[0]):
            part = values[rows].astype(np.float32)
            part /= spread(self._scales.strip(index), box, BLOCK[1])
            found[rows] = part
            self._scales.count_use(index, part.size)
        return _as_bytes(found), DTYPE


class BlockDequantizer:
    """Multiplies a weight by its stored block scales."""

    def __init__(self, store: Store, scales: TensorEntry, block: Blocks) -> None:
        self._pieces, self._entry, self._block = PieceReader(store), scales, block
        self._lock = threading.Lock()

    def __call__(self, box: Box, data: memoryview, stored: str) -> tuple[memoryview, str]:
        """Return the elements in a box as float32."""
        values = np.frombuffer(data, numpy_dtype(stored)).reshape(box.size).astype(np.float32)
        for index, rows in iter_strips(box, self._block[0]):
            values[rows] *= spread(self._read(index), box, self._block[1])
        return _as_bytes(values), "float32"

    def _read(self, index: int) -> NDArray[np.float32]:
        entry = self._entry
        one_row = (1, entry.shape[1]) if len(entry.shape) == 2 else entry.shape  # a weight may have one scale
        box = Box((index, 0)[: len(one_row)], one_row)
        data = memoryview(bytearray(nbytes(entry.stored, box.volume)))
        with self._lock:  # threads share the decoders of encoded scales
            self._pieces.fill([ReadItem(entry.pieces, box, entry.stored, data)])
        return np.frombuffer(data, numpy_dtype(entry.stored)).astype(np.float32)


def iter_strips(box: Box, height: int) -> Iterator[tuple[int, slice]]:
    """Yield the strips with `height` rows that a box touches: index, and the box's rows in it."""
    first, stop = box.offset[0], box.offset[0] + box.size[0]
    for index in range(first // height, -(-stop // height)):
        yield index, slice(max(index * height, first) - first, min((index + 1) * height, stop) - first)


def spread(scales: NDArray[np.float32], box: Box, width: int) -> NDArray[np.float32]:
    """Return a scale for each column in a box, from scales for blocks with `width` columns."""
    start = box.offset[1]
    first, stop = start // width, -(-(start + box.size[1]) // width)
    found: NDArray[np.float32] = np.repeat(scales[first:stop], width)
    return found[start - first * width :][: box.size[1]]


def _as_bytes(values: NDArray[Any]) -> memoryview:
    return values.view(np.uint8).data.cast("B")


def quantize(
    reader: Reader, options: Options, selection: Selection, config: ConfigFiles
) -> tuple[Selection, ConfigFiles]:
    """Return a selection with fp8 weights and scales for linear layers, and the config that says so."""
    if not config.config:
        raise UsageError(
            f"--quantize needs the model's {CONFIG}, which lists the fp8 weights for readers",
            where=reader.store.url,
            fix="Name its folder with --config-from.",
        )
    tensors = {tensor.name: tensor for tensor in selection.model}
    entries = {name: tensor.entry for name, tensor in tensors.items()}
    exclude = (*options.quantize_exclude, *options.keep_fp32)
    chosen = quantized_weights.choose_weights(entries, config.config, include=options.quantize_include, exclude=exclude)
    model: list[OutputTensor] = []
    for name, tensor in tensors.items():
        model += _quantize_weight(reader, tensor) if name in set(chosen) else [tensor]
    changed = {**config.config, QUANTIZATION_CONFIG: quantized_weights.plan_config(entries, chosen)}
    left = [name for name in tensors if name not in set(chosen) and not any(fnmatchcase(name, g) for g in exclude)]
    warnings = (
        *selection.warnings,
        *_warn_of_shapes([tensors[name] for name in chosen]),
        *(() if options.quantize_include else _warn_of_left([tensors[name] for name in left])),
    )
    return replace(selection, model=tuple(model), warnings=warnings), replace(config, config=changed, is_changed=True)


def _quantize_weight(reader: Reader, weight: OutputTensor) -> list[OutputTensor]:
    scales = WeightScales(reader.store, weight)
    name = quantized_weights.name_scale(weight.name)
    entry = TensorEntry((name,), quantized_weights.count_blocks(weight.shape), "float32", ())
    return [
        replace(weight, dtype=quantized_weights.DTYPE, change=BlockQuantizer(scales, weight)),
        OutputTensor(name, entry, "float32", change=ScaleValues(scales)),
    ]


def _warn_of_shapes(weights: list[OutputTensor]) -> Iterator[str]:
    odd = [weight for weight in weights if quantized_weights.ends_in_smaller_blocks(weight.shape)]
    if odd:
        yield (
            f"{len(odd)} quantized weights end in smaller blocks, such as {odd[0].name} of {list(odd[0].shape)}: vLLM"
            " refuses some of them, and transformers dequantizes them wrongly without a GPU"
        )


def _warn_of_left(tensors: list[OutputTensor]) -> Iterator[str]:
    """Yield warnings about weights that are not quantized, although no option says so."""
    if odd := [t for t in tensors if quantized_weights.is_linear(t.name, t.entry)]:
        yield (
            f"not quantized, since 128 does not divide a width: {_name_first(odd)} (--quantize-include quantizes"
            " them, but some readers reject them)"
        )
    if stacked := [t for t in tensors if quantized_weights.is_stacked(t.name, t.entry)]:
        yield (
            f"not quantized, since experts are stacked: {_name_first(stacked)} (give each expert its own weights"
            " before, with rules that unstack)"
        )


def _name_first(tensors: list[OutputTensor]) -> str:
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{tensors[0].name} of {list(tensors[0].shape)}{more}"


def dequantize(
    reader: Reader, options: Options, selection: Selection, config: ConfigFiles
) -> tuple[Selection, ConfigFiles]:
    """Return a selection whose fp8 weights with scales are floats in `--dtype` or the config's, without the scales."""
    tensors = {tensor.name: tensor for tensor in selection.model}
    entries = {name: tensor.entry for name, tensor in tensors.items()}
    found = quantized_weights.find_scaled(entries, config.config, options.keep_fp32)
    if not found:
        return selection, config
    dtype = parse_dtype(options.dtype) or read_dtype(config.config) or "float32"
    for name, block in found.items():
        scales = tensors.pop(quantized_weights.name_scale(name)).entry
        tensors[name] = replace(tensors[name], dtype=dtype, change=BlockDequantizer(reader.store, scales, block))
    rest = [name for name, tensor in tensors.items() if tensor.dtype == quantized_weights.DTYPE]
    changed = quantized_weights.drop_quantization(config.config, found if rest else None)
    config = replace(config, config=changed, is_changed=changed != config.config)
    unused = _list_unused(entries, tensors, found)
    left_out = (*selection.left_out, *(f"{name} (for a dequantized weight)" for name in unused))
    model = tuple(tensor for name, tensor in tensors.items() if name not in unused)
    return replace(selection, model=model, left_out=left_out), config


def _list_unused(
    entries: Mapping[str, TensorEntry], tensors: Mapping[str, OutputTensor], found: Iterable[str]
) -> list[str]:
    """Return tensors that only fp8 weights needed and no dequantized weight needs, such as input scales."""
    written = {name: entries[name]._replace(stored=tensor.dtype, delivered="") for name, tensor in tensors.items()}
    plain = {name.rpartition(".")[0] for name in found} - find_quantized(written).keys()
    return [name for name in list_uncast(entries, {}) if name in tensors and name.rpartition(".")[0] in plain]
