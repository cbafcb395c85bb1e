"""One rank's state as a byte stream with hashes, without pickle.

A stream starts with `MAGIC`, the header's size in eight bytes, the header (JSON), and a hash of these. Then follow all
tensors' elements in blocks of 4 MiB, each with its hash after it. Hashes are xxh3-64, big-endian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, NamedTuple

import torch
import xxhash
from torch.distributed.tensor import DTensor

from shardckpt.checkpoint.stateful.flatten import encoded
from shardckpt.checkpoint.stateful.numpy_arrays import tensor_from_numpy
from shardckpt.checkpoint.stateful.stateful import check_tensor, dtype_name, from_named_value, require_memory
from shardckpt.checkpoint.stateful.tensor_bytes import is_flat, iter_bytes, view_as_bytes
from shardckpt.checkpoint.stateful.walk import Leaf, LeafKind, map_leaves
from shardckpt.devices import record_event, wait_for_deferred_copies
from shardckpt.dtypes import is_known
from shardckpt.encodings import tagged_json
from shardckpt.encodings.budget import require_small
from shardckpt.encodings.tagged_json import ArrayRef, NamedValue
from shardckpt.encodings.typed_json import dump, load
from shardckpt.errors import ChecksumError, FormatError, NoMemoryError, UnsupportedError, UsageError
from shardckpt.manifest import Path, dotted
from shardckpt.readers.opened.state_tree import TensorRef

MAGIC = b"shardckS"
MAX_HEADER_BYTES = 1 << 26
BLOCK_BYTES = 1 << 22  # bytes of elements that one hash covers

_MAX_BYTES = 1 << 62
_MAX_DIMS = 64
_DIGEST_BYTES = 8

Read = Callable[[memoryview], object]  # fills a buffer with the next bytes of a stream, or raises an exception


_Shape = Annotated[tuple[Annotated[int, range(_MAX_BYTES)], ...], range(_MAX_DIMS + 1)]


class _Row(NamedTuple):
    """A tensor in a stream."""

    path: Path  # path in the state
    dtype: str  # dtype in torch's spelling
    shape: _Shape  # shape of this rank's elements
    sharding: str  # text that describes the sharding of a DTensor; empty for other tensors

    @property
    def nbytes(self) -> int:
        """Element bytes."""
        return prod(self.shape) * _torch_dtype(self).itemsize


@dataclass(frozen=True)
class _Header:
    tensors: Sequence[_Row]
    state: object  # tagged JSON, with tensors as their position


@dataclass(frozen=True)
class StateStream:
    """A state that can be sent, also several times, until it changes."""

    head: bytes  # bytes before the elements
    tensors: Sequence[torch.Tensor]  # tensors of this rank, in the order of their elements in the stream

    def __iter__(self) -> Iterator[memoryview]:
        """Yield the stream's bytes; each part is valid until the next one is requested."""
        yield memoryview(self.head)
        hasher, filled = xxhash.xxh3_64(), 0
        for part in iter_bytes(self.tensors, sum(tensor.nbytes for tensor in self.tensors)):
            while len(part):
                piece = part[: BLOCK_BYTES - filled]
                hasher.update(piece)
                yield piece
                part, filled = part[len(piece) :], filled + len(piece)
                if filled == BLOCK_BYTES:
                    yield memoryview(hasher.digest())
                    hasher, filled = xxhash.xxh3_64(), 0
        if filled:
            yield memoryview(hasher.digest())


def build_stream(state: Any) -> StateStream:
    """Return a state's stream, without copying it."""
    # Kernels that are queued on the current stream of a device finish first.
    found: dict[Path, torch.Tensor] = {}
    tree = take_tensors(state, (), found)
    tensors = {path: _local(tensor) for path, tensor in found.items()}
    for path, tensor in tensors.items():
        require_memory(tensor, path)
    for event in [record_event(device) for device in {tensor.device for tensor in tensors.values()}]:
        if event is not None:
            event.synchronize()
    numbers = {path: number for number, path in enumerate(tensors)}
    rows = [
        _Row(path, dtype_name(tensor.dtype), tuple(tensor.shape), _describe_sharding(found[path]))
        for path, tensor in tensors.items()
    ]
    header = dump(_Header(rows, encoded(tree, lambda ref: numbers[ref.path])))
    if len(header) > MAX_HEADER_BYTES:
        raise UnsupportedError(
            "the state's values that are not tensors are too large to send",
            found=f"{len(header)} bytes",
            expected=f"at most {MAX_HEADER_BYTES}",
            fix="Convert long lists of numbers to tensors.",
        )
    head = MAGIC + len(header).to_bytes(8, "little") + header
    return StateStream(head + xxhash.xxh3_64(head).digest(), list(tensors.values()))


def _go_on() -> None:
    """Do nothing, so that a stream is read to its end."""


def read_stream(read: Read, target: Any = None, where: str = "", check: Callable[[], None] = _go_on) -> Any:
    """Return the state that a stream contains."""
    # Elements are used only after the hash of their block was checked. If the stream fails later, tensors of the target
    # are filled in part.
    header = _read_header(read, where, check)
    rows = header.tensors
    own: dict[Path, torch.Tensor] = {}
    take_tensors(target, (), own)
    for row in rows:
        check()
        _require_fit(row, own.get(row.path), where)
    wait_for_deferred_copies()
    blocks = _VerifiedBlocks(read, sum(row.nbytes for row in rows), where)
    tensors = []
    for row in rows:
        check()
        tensors.append(_fill(row, own.get(row.path), blocks))

    def decode_ref(value: ArrayRef | NamedValue) -> object:
        if isinstance(value, NamedValue):
            return from_named_value(value)
        if value.number >= len(tensors):
            raise FormatError("a value refers to a tensor that does not exist", where=where, found=value.number)
        tensor = tensors[value.number]
        if value.kind != "numpy":
            return tensor
        try:
            return tensor.numpy()
        except (TypeError, RuntimeError) as error:
            raise FormatError("numpy has no such array", where=where, found=dtype_name(tensor.dtype)) from error

    return tagged_json.decode(header.state, decode_ref, where=where)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements; a DTensor's own `detach` loses them if this rank is not in its mesh."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _describe_sharding(tensor: torch.Tensor | None) -> str:
    """Return a DTensor's sharding as text; empty for other tensors."""
    if not isinstance(tensor, DTensor):
        return ""
    mesh = tensor.device_mesh
    return f"{tuple(tensor.shape)} {tensor.placements} on {tuple(mesh.shape)} at {mesh.get_coordinate()}"


def _read_header(read: Read, where: str, check: Callable[[], None]) -> _Header:
    prefix = _read_bytes(read, 16)
    if prefix[:8] != MAGIC:
        raise FormatError("this is not a state stream", where=where, found=bytes(prefix[:8]))
    length = int.from_bytes(prefix[8:], "little")
    require_small("the stream header", length, MAX_HEADER_BYTES, where)
    body = _read_bytes(read, length)
    _check(xxhash.xxh3_64(prefix + body).digest(), _read_bytes(read, _DIGEST_BYTES), where)
    header = load(_Header, body, where=where)
    for row in header.tensors:
        check()
        if row.nbytes >= _MAX_BYTES:
            raise FormatError("the stream header has a tensor that is too large", where=where, found=row)
    return header


def _torch_dtype(row: _Row) -> torch.dtype:
    dtype = getattr(torch, row.dtype, None) if is_known(row.dtype) else None
    if not isinstance(dtype, torch.dtype):
        raise FormatError("torch has no such type", where=dotted(row.path), found=row.dtype[:40])
    return dtype


def _require_fit(row: _Row, target: torch.Tensor | None, where: str) -> None:
    """Require that a streamed tensor fits the target, and that a DTensor has a target."""
    expected = f"{row.dtype} {list(row.shape)} {row.sharding}".strip()
    if target is None and row.sharding:
        raise UsageError(
            "a DTensor can only be received into a DTensor",
            where=f"{where}: {dotted(row.path)}",
            found=row.sharding,
            fix="Pass a function that returns the state to fill.",
        )
    if target is None:
        return
    check_tensor(target, row.path)
    local = _local(target)
    require_memory(local, row.path)
    found = f"{dtype_name(local.dtype)} {list(local.shape)} {_describe_sharding(target)}".strip()
    if found != expected:
        raise UsageError(
            "a received tensor does not fit the state to fill", where=dotted(row.path), found=expected, expected=found
        )
    if any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True)):
        raise UsageError(
            "an expanded tensor cannot be filled: its elements share memory",
            where=dotted(row.path),
            fix="Pass its `contiguous()`.",
        )


def _fill(row: _Row, target: torch.Tensor | None, blocks: _VerifiedBlocks) -> torch.Tensor:
    """Return the target, or a new tensor, filled with the stream's next elements."""
    filled = _allocate(row) if target is None else target
    local = _local(filled)
    staged = local if is_flat(local) else _allocate(row)
    data, at = view_as_bytes(staged), 0
    while at < row.nbytes:
        piece = blocks.take(row.nbytes - at)
        data[at : at + len(piece)].copy_(torch.frombuffer(piece, dtype=torch.uint8))
        at += len(piece)
    if staged is not local:
        local.copy_(staged)
    return filled


def _allocate(row: _Row) -> torch.Tensor:
    """Return a new CPU tensor whose memory is not touched yet."""
    try:
        return torch.empty(row.shape, dtype=_torch_dtype(row))
    except (RuntimeError, MemoryError) as error:
        fix = "The sender may be wrong, or memory is used up."
        raise NoMemoryError.from_array(dotted(row.path), row.nbytes, row.dtype, row.shape, fix) from error


class _VerifiedBlocks:
    """A stream's elements, block by block; a block is used only after its hash was checked."""

    def __init__(self, read: Read, nbytes: int, where: str) -> None:
        self._read, self._left, self._where = read, nbytes, where
        self._buffer = memoryview(bytearray(min(BLOCK_BYTES, nbytes)))
        self._unused = self._buffer[:0]

    def take(self, most: int) -> memoryview:
        """Return the next bytes, at least one, valid until the next call."""
        if not len(self._unused):
            self._unused = self._buffer[: self._left]
            self._read(self._unused)
            _check(xxhash.xxh3_64(self._unused).digest(), _read_bytes(self._read, _DIGEST_BYTES), self._where)
            self._left -= len(self._unused)
        piece, self._unused = self._unused[:most], self._unused[most:]
        return piece


def _read_bytes(read: Read, nbytes: int) -> bytearray:
    data = bytearray(nbytes)
    read(memoryview(data))
    return data


def _check(digest: bytes, expected: bytearray, where: str) -> None:
    if digest != expected:
        raise ChecksumError(
            "received bytes do not match their hash", where=where, found=digest.hex(), expected=expected.hex()
        )


def take_tensors(value: Any, path: Path, tensors: dict[Path, torch.Tensor]) -> Any:
    """Return a value with its tensors and arrays as `TensorRef`, also inside dicts, lists and tuples."""

    def take(leaf: Leaf) -> Any:
        if leaf.kind not in (LeafKind.TENSOR, LeafKind.ARRAY):
            return leaf.value
        is_array = leaf.kind is LeafKind.ARRAY
        tensors[leaf.path] = tensor_from_numpy(leaf.value, leaf.path) if is_array else leaf.value
        check_tensor(tensors[leaf.path], leaf.path)
        return TensorRef(leaf.path, "numpy" if is_array else "tensor")

    return map_leaves(value, take, path)
