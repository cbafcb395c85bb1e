"""Read, validate and write safetensors headers.

Format: 8 bytes little-endian header length N, N bytes of JSON, data without holes
(https://github.com/huggingface/safetensors, section "Format").
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isinf, prod
from typing import NamedTuple

from shardckpt.boxes import Shape
from shardckpt.dtypes import HALF_BYTE, HALF_BYTE_PAIR, SAFETENSORS_NAMES, TORCH_NAMES, array_nbytes, bits
from shardckpt.encodings.budget import ReadBudget
from shardckpt.errors import FormatError, TruncatedError, UnsafeError, UnsupportedError
from shardckpt.storage.store import Read, Store

MAX_HEADER_BYTES = 100_000_000  # maximum header size, as defined by the format
MAX_DIMS = 64  # maximum dimensions: NumPy's limit; each number of a shape also costs readers memory

_MAX_BYTES = 1 << 62


class Header(NamedTuple):
    """Content of a file's header."""

    data_start: int  # byte in the file at which the data starts
    # Name to (torch dtype name, shape, first byte, end byte), offsets relative to `data_start`.
    tensors: dict[str, tuple[str, Shape, int, int]]
    metadata: dict[str, str]  # the file's `__metadata__`

    @property
    def data_bytes(self) -> int:
        """Data bytes according to the header."""
        return max((end for _, _, _, end in self.tensors.values()), default=0)


def looks_like_safetensors(head: bytes) -> bool:
    """Return True if a safetensors file may start with these 9 bytes."""
    return len(head) >= 9 and struct.unpack_from("<Q", head)[0] <= MAX_HEADER_BYTES and head[8:9] == b"{"


def read_headers(store: Store, sizes: Mapping[str, int]) -> dict[str, Header]:
    """Read several files' headers in two batches of requests."""
    starts = {name: bytearray(8) for name in sizes}
    for name, size in sizes.items():
        if size < 8:
            store.size(name)  # of a link to nowhere, this is the error
            raise TruncatedError("no room for a safetensors header", where=_at(store, name), found=f"{size} bytes")
    store.read([Read(name, 0, memoryview(buffer)) for name, buffer in starts.items()])
    bodies = {name: bytearray(_header_length(store, name, starts[name], size)) for name, size in sizes.items()}
    store.read([Read(name, 8, memoryview(body)) for name, body in bodies.items()])
    return {name: parse_header(body, where=_at(store, name)) for name, body in bodies.items()}


def _at(store: Store, name: str) -> str:
    return f"{store.url}/{name}"


def _header_length(store: Store, name: str, start: bytearray, size: int) -> int:
    length = int(struct.unpack("<Q", start)[0])
    if length > MAX_HEADER_BYTES:
        raise UnsafeError(
            "the safetensors header is longer than the format allows",
            where=_at(store, name),
            found=f"{length} bytes",
            expected=f"at most {MAX_HEADER_BYTES}",
        )
    if 8 + length > size:
        raise TruncatedError(
            "the file ends inside its safetensors header",
            where=_at(store, name),
            found=f"{size} bytes",
            expected=f"at least {8 + length}",
            fix="Copy the file again.",
        )
    return length


def parse_header(body: bytes | bytearray, *, where: str) -> Header:
    """Parse and validate a header's JSON, without the preceding length."""
    raw = parse_json(body, where=where)
    if not isinstance(raw, dict):
        raise FormatError("the safetensors header must be a JSON object", where=where)
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError("`__metadata__` does not map strings to strings", where=where)
    tensors = {name: _parse_tensor(name, entry, where) for name, entry in raw.items()}
    _check_no_holes(tensors, where)
    return Header(8 + len(body), tensors, metadata)


def require_affordable(body: bytes | bytearray, *, where: str) -> None:
    """Reject JSON whose values would take far more memory than its text. Checked before parsing."""
    budget = ReadBudget(len(body), where=where)
    if _CONTAINER_BYTES * len(body) <= budget.left:
        return  # even if each byte were a bracket; to count is as slow as to parse long texts
    made = _CONTAINER_BYTES * (body.count(b"[") + body.count(b"{")) + _MEMBER_BYTES * body.count(b",")
    budget.spend(made)


# Memory for JSON lists and objects, and for their members, beyond their text, in bytes.
_CONTAINER_BYTES, _MEMBER_BYTES = 64, 8


def parse_json(body: bytes | bytearray, *, where: str) -> object:
    """Parse JSON strictly: UTF-8, unique keys, no NaN or infinity, bounded nesting and memory."""
    require_affordable(body, where=where)
    try:
        return _DECODER.decode(bytes(body).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else str(error)
        raise FormatError(f"not valid JSON: {reason}", where=where) from error


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} stands twice")
    return result


def _finite(text: str) -> float:
    number = float(text)
    if isinf(number):
        raise ValueError(f"{text[:40]} is larger than any JSON number may be")
    return number


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)


def _parse_tensor(name: str, entry: object, where: str) -> tuple[str, Shape, int, int]:
    try:
        kind, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]  # type: ignore[index]
        if type(start) is not int or type(end) is not int or not 0 <= start <= end <= _MAX_BYTES:
            raise TypeError
        for n in shape:
            if type(n) is not int or not 0 <= n <= _MAX_BYTES:
                raise TypeError
    except (TypeError, KeyError, ValueError) as error:
        raise FormatError(f"tensor {name!r} has no valid dtype, shape and data_offsets", where=where) from error
    dtype = TORCH_NAMES.get(kind) if isinstance(kind, str) else None
    if dtype is None:
        raise UnsupportedError(f"tensor {name!r} has an unknown dtype", where=where, found=kind)
    require_dims(name, shape, where)
    size = array_nbytes(dtype, shape)
    if size != end - start or size > _MAX_BYTES or (bits(dtype) < 8 and prod(shape) * bits(dtype) % 8):
        raise FormatError(
            f"tensor {name!r} does not fill its data_offsets",
            where=where,
            found=f"{end - start} bytes",
            expected=f"{size} bytes for {kind} of shape {list(shape)}",
        )
    if dtype == HALF_BYTE and shape and shape[-1] % 2 == 0:
        return HALF_BYTE_PAIR, (*shape[:-1], shape[-1] // 2), start, end
    return dtype, shape, start, end


def _check_no_holes(tensors: Mapping[str, tuple[str, Shape, int, int]], where: str) -> None:
    at = 0
    for start, end, name in sorted((start, end, name) for name, (_, _, start, end) in tensors.items()):
        if start != at:
            what = "overlaps the tensor before it" if start < at else "follows a hole in the data"
            raise FormatError(f"tensor {name!r} {what}", where=where, found=f"byte {start}", expected=f"byte {at}")
        at = end


def require_dims(name: str, shape: Sequence[int], where: object) -> None:
    """Require no more dimensions than libraries support. Raises UnsupportedError."""
    if len(shape) > MAX_DIMS:
        raise UnsupportedError(
            f"tensor {name!r} has more dimensions than any library holds",
            where=where,
            found=len(shape),
            expected=f"at most {MAX_DIMS}",
        )


@dataclass(frozen=True, slots=True)
class HeaderTensor:
    """One tensor in a file to write."""

    name: str  # name in the file
    dtype: str  # dtype in torch's spelling
    shape: Shape

    @property
    def nbytes(self) -> int:
        """Its data bytes."""
        return array_nbytes(self.dtype, self.shape)


_RANK = {name: rank for rank, name in enumerate(reversed(SAFETENSORS_NAMES))}


def file_order(tensors: Iterable[HeaderTensor]) -> list[HeaderTensor]:
    """Return tensors in the reference writer's order: wide dtypes first, then by name."""
    # Dtypes without a name in safetensors come last; `encode_header` rejects them.
    return sorted(tensors, key=lambda t: (_RANK.get(t.dtype, len(_RANK)), t.name))


def encode_header(tensors: Sequence[HeaderTensor], metadata: Mapping[str, str], *, align: int = 8) -> bytes:
    """Return a file's length and header; its JSON is padded so that data starts at a multiple of `align` bytes."""
    return join_header(encode_entries(tensors), metadata, align=align)


def encode_entries(tensors: Sequence[HeaderTensor]) -> str:
    """Return the JSON that describes the tensors, without metadata."""
    entries: dict[str, object] = {}
    at = 0
    for tensor in tensors:
        short = SAFETENSORS_NAMES.get(tensor.dtype)
        if short is None:
            raise UnsupportedError(
                f"safetensors has no name for {tensor.dtype}", where=tensor.name, fix="Exclude it with --exclude."
            )
        if tensor.name == "__metadata__":
            raise UnsupportedError(
                "safetensors keeps the name '__metadata__' for itself", fix="Leave the tensor out with --exclude."
            )
        end = at + tensor.nbytes
        entries[tensor.name] = {"dtype": short, "shape": _count_numbers(tensor), "data_offsets": [at, end]}
        at = end
    return _json(entries)[1:-1]


def _count_numbers(tensor: HeaderTensor) -> list[int]:
    """Return the shape in the header, which counts numbers where torch counts pairs."""
    if tensor.dtype != HALF_BYTE_PAIR:
        return list(tensor.shape)
    if not tensor.shape:
        raise UnsupportedError(
            f"safetensors has no {tensor.dtype} without dimensions", where=tensor.name, fix="Exclude it with --exclude."
        )
    return [*tensor.shape[:-1], 2 * tensor.shape[-1]]


def join_header(entries: str, metadata: Mapping[str, str], *, align: int = 8) -> bytes:
    """Return a file's length and header, like `encode_header`."""
    members = ([f'"__metadata__":{_json(dict(metadata))}'] if metadata else []) + ([entries] if entries else [])
    try:
        body = f"{{{','.join(members)}}}".encode()
    except UnicodeEncodeError as error:
        raise UnsupportedError(
            "a name with half a surrogate pair cannot be written", found=error.object[error.start : error.end]
        ) from error
    body += b" " * (-(8 + len(body)) % align)
    return struct.pack("<Q", len(body)) + body


def _json(content: object) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)
