"""Write headers for GGUF files, and recognize such files.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) has magic, version, counts and metadata as typed
key-value pairs. Then come each tensor's name, dimensions and offset, and data at multiples of 32 bytes. All numbers are
little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from shardckpt.encodings.safetensors import HeaderTensor
from shardckpt.errors import UnsupportedError

# Each tensor's data starts at a multiple of this; it is the default, which the metadata need not name.
ALIGNMENT = 32

# Dtype to its number in GGUF; GGUF has more types.
TENSOR_TYPES = {"float32": 0, "float16": 1, "q8_0": 8, "bfloat16": 30}

# A metadata value: numbers are stored with 32 bits; in lists they are signed.
MetadataValue = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]

_MAGIC = b"GGUF"
_VERSION = 3
_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


class GgufTensor(HeaderTensor):
    """A tensor in a file's header. Its dtype is a key of `TENSOR_TYPES`."""

    # The shape starts with the slowest dimension; the file stores the dimensions in reverse.

    __slots__ = ()


def looks_like_gguf(head: bytes) -> bool:
    """Return True if a file's first bytes are GGUF's magic."""
    return head.startswith(_MAGIC)


def padding(nbytes: int) -> bytes:
    """Return the zeros after `nbytes` data bytes, up to the next multiple of the alignment."""
    return bytes(-nbytes % ALIGNMENT)


def encode_header(metadata: Mapping[str, MetadataValue], tensors: Sequence[GgufTensor]) -> bytes:
    """Return a padded header; the tensors' data follows in their order, each with its padding."""
    parts = [_MAGIC, struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))]
    for key, value in metadata.items():
        try:
            parts += [_encode_string(key), _encode_value(value)]
        except (struct.error, OverflowError, UnicodeEncodeError) as error:
            raise UnsupportedError(f"GGUF cannot hold the value of {key}", found=str(error)) from error
    offset = 0
    for tensor in tensors:
        dims = struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *reversed(tensor.shape))
        parts += [_encode_string(tensor.name), dims, struct.pack("<IQ", TENSOR_TYPES[tensor.dtype], offset)]
        offset += tensor.nbytes + len(padding(tensor.nbytes))
    header = b"".join(parts)
    return header + padding(len(header))


def _encode_string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _encode_value(value: MetadataValue) -> bytes:
    """Return a value's type and bytes."""
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _encode_string(value)
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", _UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    kind, data = _encode_items(value)
    return struct.pack("<IIQ", _ARRAY, kind, len(value)) + data


def _encode_items(items: Sequence[str] | Sequence[int] | Sequence[float]) -> tuple[int, bytes]:
    """Return the type and bytes of a list's values."""
    texts = [item for item in items if isinstance(item, str)]
    if texts:
        return _STRING, b"".join(map(_encode_string, texts))
    if all(isinstance(item, int) for item in items):
        return _INT32, struct.pack(f"<{len(items)}i", *items)
    return _FLOAT32, struct.pack(f"<{len(items)}f", *items)
