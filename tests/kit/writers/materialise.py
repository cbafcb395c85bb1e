"""A tensor put together from its pieces with numpy alone: what the readers' tests compare with the truth."""

from __future__ import annotations

from math import prod
from pathlib import Path
from zlib import decompressobj

import numpy as np
import torch
import zstandard
from safetensors.torch import load_file

from shardckpt.boxes import Shape, strides
from shardckpt.dtypes import bits, nbytes
from shardckpt.manifest import Encoded, Piece, Span, Strided, TensorEntry
from shardckpt.manifest import Path as TreePath
from shardckpt.reader import Reader
from shardckpt.storage.store import read_bytes


def materialise(reader: Reader, path: TreePath) -> np.ndarray:
    """Return a tensor's elements as raw fixed-width items, in its global shape; every element must be in one piece."""
    entry = reader.manifest.tensors[path]
    kind = np.dtype((np.void, bits(entry.stored) // 8))
    out = np.zeros(entry.shape, kind)
    times = np.zeros(entry.shape, np.uint8)
    for piece in reader.resolve(entry.pieces):
        at = tuple(slice(o, o + n) for o, n in zip(piece.box.offset, piece.box.size, strict=True))
        out[at] = _elements(reader, entry, piece, kind)
        times[at] += 1
    assert (times == 1).all(), f"{path}: not every element lies in exactly one piece"
    return out


def _elements(reader: Reader, entry: TensorEntry, piece: Piece, kind: np.dtype) -> np.ndarray:
    layout, start, base = piece.layout, 0, b""
    steps: Shape = strides(piece.box.size)
    if isinstance(layout, Encoded):
        raw = read_bytes(reader.store, piece.file, layout.offset, layout.nbytes)
        base = _decode(layout.codec, raw)[layout.inner.offset : layout.inner.offset + layout.inner.nbytes]
        layout = layout.inner
    elif isinstance(layout, Span | Strided):
        base = read_bytes(reader.store, piece.file, layout.offset, layout.nbytes)
    if isinstance(layout, Strided):
        steps, start = layout.strides, layout.start
    else:
        assert len(base) == nbytes(entry.stored, prod(piece.box.size)), "a span holds its box and no more"
    width = kind.itemsize
    return np.ndarray(piece.box.size, kind, base, start * width, tuple(s * width for s in steps))


def _decode(codec: str, raw: bytes) -> bytes:
    if codec == "zstd":
        return zstandard.ZstdDecompressor().decompressobj().decompress(raw)
    return decompressobj(-15).decompress(raw)


def raw_items(tensor: torch.Tensor) -> np.ndarray:
    """Return a torch tensor in the form that `materialise` gives."""
    flat = tensor.detach().cpu().contiguous()
    items = flat.reshape(-1).view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    return items.view(np.dtype((np.void, tensor.element_size()))).reshape(tuple(tensor.shape))


def truth(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a truth file of the fixtures."""
    return load_file(file)


def assert_same(reader: Reader, path: TreePath, expected: torch.Tensor) -> None:
    """Compare one tensor of a checkpoint with `expected`: type, shape and bits."""
    entry = reader.manifest.tensors[path]
    assert (entry.stored, entry.shape) == (str(expected.dtype).removeprefix("torch."), tuple(expected.shape)), path
    assert materialise(reader, path).tobytes() == raw_items(expected).tobytes(), path


def assert_model(reader: Reader, file: Path) -> None:
    """Compare all tensors below `model` with those of a truth file."""
    expected = truth(file)
    assert {path[1] for path in reader.manifest.tensors if path[0] == "model"} == set(expected)
    for name, tensor in expected.items():
        assert_same(reader, ("model", name), tensor)
