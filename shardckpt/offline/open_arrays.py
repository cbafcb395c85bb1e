"""Open a checkpoint for NumPy, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from shardckpt.boxes import Box, contiguous_blocks, full_box
from shardckpt.dtypes import array_nbytes, bits, nbytes
from shardckpt.encodings.element_values import numpy_dtype
from shardckpt.encodings.tagged_json import NamedValue
from shardckpt.errors import NoMemoryError, UnsupportedError, UsageError
from shardckpt.manifest import Path, TensorEntry, dotted
from shardckpt.offline.write.numpy_casts import cast_into
from shardckpt.plan.layout.coverage import locate
from shardckpt.plan.naming.sections import split_flat_names
from shardckpt.reader import NamedBases, missing_shapes_error
from shardckpt.readers.chunk_reader import PieceReader, ReadItem
from shardckpt.readers.opened.mapping import Opened, StoredTensor
from shardckpt.readers.opened.state_tree import TensorRef, build_tree, fill_tree, find, iter_refs
from shardckpt.readers.registry import open_checkpoint, resolve_step
from shardckpt.storage.resolve_url import fix_folder

# Per read; a cast or reordered array takes this much memory in addition.
_BATCH_BYTES = 64 << 20


class ArraySource:
    """An open checkpoint whose tensors are read into NumPy arrays."""

    def __init__(self, url: str, verify: bool, bases: NamedBases) -> None:
        reader = open_checkpoint(url, bases)
        if reader.needs_param_shapes:
            fix = "Open the result of `shardckpt consolidate SRC DST --shapes-from MODEL --part all`."
            raise missing_shapes_error(reader, fix)
        self.url = url
        self._reader = reader
        self._manifest = split_flat_names(reader.manifest)
        self._store = reader.store if verify else reader.unverified_store

    @property
    def arrays(self) -> Mapping[Path, TensorEntry]:
        """Tensors by path."""
        return self._manifest.tensors

    @cached_property
    def paths(self) -> list[Path]:
        """Paths of tensors and other values."""
        return [*self._manifest.tensors, *self._manifest.objects]

    @cached_property
    def _tree(self) -> Any:
        return build_tree(self._reader, self.arrays, self._manifest.objects, decode_named_value)

    def find(self, path: Path) -> tuple[Any, bool]:
        """Return the value at a path, and whether it exists."""
        return find(self._tree, path)

    def read_tree(self, tree: Any) -> Any:
        """Return a subtree with its tensors read into arrays."""
        paths = list(dict.fromkeys(ref.path for ref in iter_refs(tree)))
        located = locate(self._reader, self._manifest, [self.arrays[path] for path in paths])  # before allocating
        arrays = {
            path: self._read_located(entry, full_box(entry.shape)) for path, entry in zip(paths, located, strict=True)
        }

        def get_array(ref: TensorRef) -> object:
            return arrays[ref.path]

        return fill_tree(tree, get_array)

    def read(self, entry: TensorEntry, box: Box) -> NDArray[Any]:
        """Return the elements in a box."""
        (located,) = locate(self._reader, self._manifest, [entry])
        return self._read_located(located, box)

    def _read_located(self, entry: TensorEntry, box: Box) -> NDArray[Any]:
        array = _allocate(entry, box)
        if box.volume:
            self._fill(entry, box, memoryview(array.reshape(-1).view(np.uint8)))  # type: ignore[arg-type]
        return array

    def _fill(self, entry: TensorEntry, box: Box, into: memoryview) -> None:
        """Read a box in parts that are consecutive in memory, with casts."""
        pieces = PieceReader(self._store)
        stop = 0
        for part in contiguous_blocks(box, max(_BATCH_BYTES * 8 // bits(entry.stored), 1)):
            start, stop = stop, stop + nbytes(entry.dtype, part.volume)
            if entry.stored == entry.dtype:
                pieces.fill([ReadItem(entry.pieces, part, entry.stored, into[start:stop])])
                continue
            staged = memoryview(bytearray(nbytes(entry.stored, part.volume)))
            pieces.fill([ReadItem(entry.pieces, part, entry.stored, staged)])
            name = dotted(entry.path)
            cast_into(staged, entry.stored, into[start:stop], entry.dtype, name=name, allow_overflow=True)


def _allocate(entry: TensorEntry, box: Box) -> NDArray[Any]:
    dtype = array_dtype(entry)
    try:
        flat = np.empty(box.volume, dtype)
    except (ValueError, MemoryError) as error:
        fix, size = "Read a part of it: opened[name][rows].", array_nbytes(entry.dtype, box.size)
        raise NoMemoryError.from_array(dotted(entry.path), size, entry.dtype, box.size, fix) from error
    try:
        return flat.reshape(box.size)
    except ValueError as error:
        raise UnsupportedError(
            "numpy has no such shape", where=dotted(entry.path), found=len(box.size), expected="fewer dimensions"
        ) from error


def array_dtype(entry: TensorEntry) -> np.dtype[Any]:
    """Return the NumPy dtype for a tensor's arrays."""
    try:
        return numpy_dtype(entry.dtype)
    except (TypeError, KeyError) as error:
        raise UnsupportedError("numpy has no such type", where=dotted(entry.path), found=entry.dtype) from error


def decode_named_value(value: NamedValue) -> object:
    """Convert a torch value without torch: size to tuple, device to text, dtype to NumPy's dtype."""
    if value.kind == "size":
        return value.value
    if value.kind == "device":
        return str(value.value)
    if value.kind == "numpy":
        name, data = str(value.value).split(" ")
        return np.frombuffer(bytes.fromhex(data), name)[0]
    try:
        return numpy_dtype(str(value.value))
    except (TypeError, KeyError) as error:
        raise UnsupportedError("numpy has no such type", found=value.value) from error


class SavedArray(StoredTensor[ArraySource, NDArray[Any]]):
    """A tensor in an open checkpoint; indexing reads elements, `[...]` reads all."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in elements."""
        return self._entry.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the arrays; from `ml_dtypes` if NumPy itself lacks it."""
        return array_dtype(self._entry)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[Any]:
        """Return all elements."""
        self._require_copy(copy)
        return np.asarray(self[...], dtype)

    def _read(self, saved: ArraySource, box: Box) -> NDArray[Any]:
        return saved.read(self._entry, box)

    def _pick(self, read: NDArray[Any], index: tuple[int | slice, ...]) -> NDArray[Any]:
        some = (*index, ...)  # the ellipsis makes an array of a single element, too
        picked: NDArray[Any] = read[some]
        return picked.copy() if any(isinstance(pick, slice) and pick.step != 1 for pick in index) else picked


OpenedArrays: TypeAlias = Opened[ArraySource]


def open_arrays(path: Any, *, verify: str | bool, base: NamedBases | None) -> OpenedArrays:
    """Open a checkpoint in any format to read parts into NumPy arrays."""
    if verify not in (False, True, "read"):
        raise UsageError("`verify` must be False or 'read'", found=repr(verify))
    return Opened(ArraySource(fix_folder(resolve_step(path)), bool(verify), base or ""), SavedArray)
