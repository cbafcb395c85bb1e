"""Write `torch.save` files without torch: plan offsets, then write a stream.

The zip container from torch 1.6 on, which `torch.load(weights_only=True)` reads, also with `mmap=True`:
`{root}/data.pkl`, small records, and one stored entry for each storage, aligned to 64 bytes. An entry's checksum
follows it (APPNOTE 6.3, data descriptor), since it is known only after its bytes are written.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from struct import Struct, pack
from typing import NamedTuple

from shardckpt.boxes import Shape, strides
from shardckpt.dtypes import nbytes
from shardckpt.encodings.pickle_stubs import Dtype, Ordered
from shardckpt.encodings.pickle_writer import GlobalCall, GlobalName, PersistentId, encode_pickle
from shardckpt.encodings.tagged_json import NamedValue
from shardckpt.errors import UnsupportedError
from shardckpt.manifest import Path, dotted
from shardckpt.readers.torchsave.storages import UNORDERED

ALIGNMENT = 64  # of storages in the archive, in bytes

_LOCAL = Struct("<4sHHHHHIIIHH")
_CENTRAL = Struct("<4sHHHHHHIIIHHHHHII")
_END64 = Struct("<4sQHHIIQQQQ")
_END64_LOCATOR = Struct("<4sIQI")
_END = Struct("<4sHHHHIIH")
_STREAMED, _UTF8 = 0x0008, 0x0800
_VERSION, _VERSION64 = 20, 45
_FULL, _FULL16 = 0xFFFFFFFF, 0xFFFF
_ZIP64 = 1
_PADDING = b"FB"  # id of the extra field that torch uses for padding

_STORAGES = {  # dtypes with their own storage class
    "bfloat16": "BFloat16Storage",
    "bool": "BoolStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
    "float16": "HalfStorage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "uint8": "ByteStorage",
}

# Dtypes without a storage class: the tensor stores its dtype next to a byte storage.
_UNTYPED = frozenset(
    {
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
        "float4_e2m1fn_x2",
        *("complex32", "bcomplex32", "uint16", "uint32", "uint64"),
    }
)

TYPES = frozenset(_STORAGES) | _UNTYPED  # writable dtypes, in torch's spelling


class Storage(NamedTuple):
    """Bytes that one or several tensors use."""

    dtype: str  # in torch's spelling
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return nbytes(self.dtype, self.elements)


class TensorValue(NamedTuple):
    """A tensor in a value to write."""

    storage: int  # index; tied tensors share one
    dtype: str  # in torch's spelling
    shape: Shape
    start: int = 0  # elements from the start of the storage to the first element
    steps: Shape | None = None  # elements between neighbors in each dimension; None for contiguous row-major


class _Record(NamedTuple):
    """An archive entry: its content, or None for a storage, which is written later."""

    name: bytes
    content: bytes | None
    nbytes: int
    header: int
    extra: bytes

    @property
    def is_wide(self) -> bool:
        return self.nbytes >= _FULL

    @property
    def start(self) -> int:
        """Offset of its data in the archive, in bytes."""
        return self.header + _LOCAL.size + len(self.name) + len(self.extra)

    @property
    def end(self) -> int:
        """End of the entry in the archive, including its data descriptor, in bytes."""
        return self.start + self.nbytes + (0 if self.content is not None else 24 if self.is_wide else 16)


@dataclass(frozen=True, slots=True)
class TorchArchive:
    """A planned `torch.save` file, complete except for its checksums."""

    records: tuple[_Record, ...]  # in file order
    nbytes: int


def plan_archive(value: object, storages: Sequence[Storage] = (), *, keeps_order: bool = True) -> TorchArchive:
    """Plan a file's layout. Pass the storages' bytes to `ArchiveWriter` in the order of `storages`."""

    def special(each: object, path: Path) -> object:
        return _tensor(each, storages, path) if isinstance(each, TensorValue) else _plain(each, path)

    fixed = (
        ("data.pkl", encode_pickle(value, special)),
        (".format_version", b"1"),
        (".storage_alignment", str(ALIGNMENT).encode()),
        ("byteorder", b"little"),
        *(() if keeps_order else ((UNORDERED, b"1"),)),
    )
    records: list[_Record] = []
    at = 0
    for name, content in fixed:
        records.append(_Record(f"archive/{name}".encode(), content, len(content), at, b""))
        at = records[-1].end
    for number, storage in enumerate(storages):
        records.append(_storage_record(f"archive/data/{number}".encode(), storage.nbytes, at))
        at = records[-1].end
    records.append(_Record(b"archive/version", b"3\n", 2, at, b""))
    directory = sum(_CENTRAL.size + len(r.name) + len(_central_extra(r)) for r in records)
    start = records[-1].end
    return TorchArchive(tuple(records), start + directory + len(_end(len(records), directory, start)))


def _storage_record(name: bytes, size: int, at: int) -> _Record:
    """Return a storage's entry, padded so that its data is aligned."""
    wide = pack("<HHQQ", _ZIP64, 16, 0, 0) if size >= _FULL else b""
    pad = -(at + _LOCAL.size + len(name) + len(wide) + 4) % ALIGNMENT
    return _Record(name, None, size, at, wide + _PADDING + pack("<H", pad) + b"Z" * pad)


def _tensor(value: TensorValue, storages: Sequence[Storage], path: Path) -> GlobalCall:
    dtype, storage = value.dtype, storages[value.storage]
    key = str(value.storage)
    steps = strides(value.shape) if value.steps is None else value.steps
    arguments = (
        value.start,
        tuple(value.shape),
        tuple(steps),
        False,
        GlobalCall(GlobalName("collections", "OrderedDict")),
    )
    if dtype in _STORAGES:
        kind = GlobalName("torch", _STORAGES[dtype])
        place = PersistentId(("storage", kind, key, "cpu", storage.elements))
        return GlobalCall(GlobalName("torch._utils", "_rebuild_tensor_v2"), (place, *arguments))
    if dtype in _UNTYPED:
        kind = GlobalName("torch.storage", "UntypedStorage")
        place = PersistentId(("storage", kind, key, "cpu", storage.nbytes))
        return GlobalCall(
            GlobalName("torch._utils", "_rebuild_tensor_v3"), (place, *arguments, GlobalName("torch", dtype))
        )
    raise UnsupportedError(
        f"torch has no tensors of type {dtype}", where=dotted(path), fix="Leave it out with --exclude."
    )


def _plain(value: object, path: Path) -> object:
    """Return the replacement for a value that a reader in this package created."""
    if isinstance(value, Ordered):
        return GlobalCall(GlobalName("collections", "OrderedDict"), items=value)
    if isinstance(value, Dtype):
        return GlobalName("torch", value.name)
    if isinstance(value, NamedValue) and value.kind == "dtype":
        return GlobalName("torch", str(value.value))
    if isinstance(value, NamedValue) and value.kind == "size":
        return GlobalCall(GlobalName("torch", "Size"), (tuple(value.value),))
    if isinstance(value, NamedValue) and value.kind == "device":
        name, _, index = str(value.value).partition(":")
        return GlobalCall(GlobalName("torch", "device"), (name, int(index)) if index else (name,))
    raise UnsupportedError(
        f"torch.load(weights_only=True) would refuse a value of type {type(value).__name__}",
        where=dotted(path),
        found=value,
    )


class ArchiveWriter:
    """Writes an archive from its storages' bytes, in pieces of any size."""

    def __init__(self, archive: TorchArchive, write: Callable[[bytes | bytearray | memoryview], None]) -> None:
        self._archive, self._write = archive, write
        self._sums: list[int] = []
        self._sum = self._missing = 0
        self._advance()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write the storages' next bytes, which may span several storages."""
        rest = memoryview(data).cast("B")
        while len(rest):
            if not self._missing:
                raise ValueError(f"got {len(rest)} bytes more than the storages have")
            part = rest[: self._missing]
            self._sum = zlib.crc32(part, self._sum)
            self._write(part)
            self._missing -= len(part)
            rest = rest[len(part) :]
            if not self._missing:
                self._close_storage()
                self._advance()

    def close(self) -> None:
        """Write the directory, after all storages are complete."""
        records = self._archive.records
        if self._missing or len(self._sums) < len(records):
            raise ValueError(f"{self._missing} bytes of {records[len(self._sums)].name.decode()} are missing")
        directory = b"".join(map(_central, records, self._sums))
        start = records[-1].end
        self._write(directory + _end(len(records), len(directory), start))

    def _advance(self) -> None:
        """Write records until one waits for bytes."""
        records = self._archive.records
        while len(self._sums) < len(records):
            record = records[len(self._sums)]
            if record.content is not None:
                crc = zlib.crc32(record.content)
                self._write(_local(record, crc) + record.content)
                self._sums.append(crc)
                continue
            self._write(_local(record, 0))
            self._sum, self._missing = 0, record.nbytes
            if self._missing:
                return
            self._close_storage()

    def _close_storage(self) -> None:
        record = self._archive.records[len(self._sums)]
        form = "<4sIQQ" if record.is_wide else "<4sIII"
        self._write(pack(form, b"PK\x07\x08", self._sum, record.nbytes, record.nbytes))
        self._sums.append(self._sum)


def encode_archive(value: object) -> bytes:
    """Return the archive for a value without tensors."""
    parts: list[bytes] = []
    ArchiveWriter(plan_archive(value), lambda data: parts.append(bytes(data))).close()
    return b"".join(parts)


def _local(record: _Record, crc: int) -> bytes:
    """Return a local header; a storage's header lacks the sizes, which follow its data."""
    is_stream = record.content is None
    size = 0 if is_stream and not record.is_wide else _FULL if record.is_wide else record.nbytes
    flags = _UTF8 | (_STREAMED if is_stream else 0)
    version = _VERSION64 if record.is_wide else _VERSION
    lengths = (len(record.name), len(record.extra))
    return _LOCAL.pack(b"PK\x03\x04", version, flags, 0, 0, 0, crc, size, size, *lengths) + record.name + record.extra


def _central_extra(record: _Record) -> bytes:
    """Return the extra field with the record's numbers that exceed 32 bits."""
    wide = [record.nbytes, record.nbytes] if record.is_wide else []
    wide += [record.header] if record.header >= _FULL else []
    return pack(f"<HH{len(wide)}Q", _ZIP64, 8 * len(wide), *wide) if wide else b""


def _central(record: _Record, crc: int) -> bytes:
    extra = _central_extra(record)
    size = min(record.nbytes, _FULL)
    flags = _UTF8 | (_STREAMED if record.content is None else 0)
    version = _VERSION64 if extra else _VERSION
    head = (b"PK\x01\x02", version, version, flags, 0, 0, 0, crc, size, size, len(record.name), len(extra))
    return _CENTRAL.pack(*head, 0, 0, 0, 0, min(record.header, _FULL)) + record.name + extra


def _end(count: int, nbytes: int, start: int) -> bytes:
    """Return the records at an archive's end."""
    wide = b""
    if count >= _FULL16 or start >= _FULL or nbytes >= _FULL:
        numbers = (_END64.size - 12, _VERSION64, _VERSION64, 0, 0, count, count, nbytes, start)
        wide = _END64.pack(b"PK\x06\x06", *numbers)
        wide += _END64_LOCATOR.pack(b"PK\x06\x07", 0, start + nbytes, 1)
    few = min(count, _FULL16)
    return wide + _END.pack(b"PK\x05\x06", 0, 0, few, few, min(nbytes, _FULL), min(start, _FULL), 0)
