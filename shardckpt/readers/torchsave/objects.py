"""Read small objects that torch saved as plain values."""

from __future__ import annotations

import struct

from shardckpt.encodings import pickle_reader
from shardckpt.encodings.budget import ReadBudget, require_small
from shardckpt.encodings.codecs import DecodedStream
from shardckpt.encodings.pickle_reader import InstanceStub, Limits, Ordered, TensorStub
from shardckpt.encodings.zip_archive import LOCAL_SIGNATURE, walk_front
from shardckpt.errors import FormatError, TruncatedError, UnsafeError
from shardckpt.manifest import Encoded, Span
from shardckpt.readers.torchsave.storages import StorageRef, Storages, require_little
from shardckpt.storage.store import Store, read_bytes

_MAX_OBJECT_BYTES = 1 << 28
_LIMITS = Limits(nbytes=_MAX_OBJECT_BYTES)
_FREE_DECODED_BYTES, _DECODED_FACTOR = 4 << 20, 16
_DECODED_COST = 8  # maximum expansion of a compressed object; also the budget cost of each byte beyond the file's

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_PREFIX = 3
_STREAMS = ("_io.BytesIO", "io.BytesIO")
_SCALARS = {
    "bool": "<?",
    "uint8": "<B",
    "int8": "<b",
    "int16": "<h",
    "int32": "<i",
    "int64": "<q",
    "float16": "<e",
    "float32": "<f",
    "float64": "<d",
}


def read_object(store: Store, file: str, layout: Span | Encoded, budget: ReadBudget | None = None) -> object:
    """Read an object that torch saved, as an archive or a pickle."""
    where = f"{store.url}/{file}, object at byte {layout.offset}"
    budget = ReadBudget(layout.nbytes) if budget is None else budget
    raw = _bytes(store, file, layout, where)
    if isinstance(layout, Encoded):
        budget.spend(_DECODED_COST * max(0, len(raw) - layout.nbytes))
    if raw.startswith(LOCAL_SIGNATURE):
        return _read_archive(raw, where, budget)
    if not raw.startswith(b"\x80"):
        raise FormatError("the object is neither a torch archive nor a pickle", where=where, found=raw[:8])
    value, at = pickle_reader.load_at(raw, 0, where=where, limits=_LIMITS, budget=budget)
    if value == _LEGACY_MAGIC:
        for _ in range(_LEGACY_PREFIX):
            value, at = pickle_reader.load_at(
                raw, at, where=where, persistent=_anonymous_storage, limits=_LIMITS, budget=budget
            )
    return _Plain({}).value(value)


def _bytes(store: Store, file: str, layout: Span | Encoded, where: str) -> bytes:
    require_small("the object", layout.nbytes, _MAX_OBJECT_BYTES, where)
    if isinstance(layout, Span):
        return read_bytes(store, file, layout.offset, layout.nbytes)
    most = min(_MAX_OBJECT_BYTES, _FREE_DECODED_BYTES + _DECODED_FACTOR * layout.nbytes)
    decoded = DecodedStream(store, file, layout).head(most + 1)
    if len(decoded) > most:
        raise UnsafeError("the object is compressed too far", where=where, expected=f"at most {most} bytes")
    return decoded


def _anonymous_storage(reference: object) -> object:
    """Return a stub for a legacy storage, whose bytes are not read."""
    return reference if isinstance(reference, tuple) else None


def _read_archive(raw: bytes, where: str, budget: ReadBudget) -> object:
    first = walk_front(raw, bool, where=where).name
    root = first.partition("/")[0]
    try:
        records = walk_front(raw, lambda name: name == f"{root}/version", where=where).contents
    except TruncatedError as error:
        raise FormatError("the object's torch archive has no version", where=where) from error
    if f"{root}/data.pkl" not in records:
        raise FormatError("the object's torch archive has no data.pkl", where=where, found=first)
    require_little(records.get(f"{root}/byteorder", b"little"), where)
    value = pickle_reader.load(
        records[f"{root}/data.pkl"], where=where, persistent=Storages(), limits=_LIMITS, budget=budget
    )
    storages = {name.rpartition("/")[2]: data for name, data in records.items() if name.startswith(f"{root}/data/")}
    return _Plain(storages).value(value)


class _Plain:
    """Turns a bytes stream into bytes and a one-element tensor into a number; other stubs stay. Shared values once."""

    def __init__(self, storages: dict[str, bytes]) -> None:
        self._storages = storages
        self._done: dict[int, tuple[object, object]] = {}

    def value(self, value: object) -> object:
        """Return a value's replacement."""
        if not isinstance(value, list | tuple | dict | InstanceStub | TensorStub):
            return value
        known = self._done.get(id(value))
        if known is None:
            known = self._done[id(value)] = (value, self._replace_value(value))
        return known[1]

    def _replace_value(self, value: object) -> object:
        if isinstance(value, TensorStub):
            return self._number(value)
        if isinstance(value, InstanceStub):
            is_stream = value.name in _STREAMS and isinstance(value.state, tuple) and len(value.state) > 0
            return value.state[0] if is_stream and isinstance(value.state, tuple) else value
        if isinstance(value, list):
            return [self.value(item) for item in value]
        if isinstance(value, tuple):
            return tuple(self.value(item) for item in value)
        assert isinstance(value, dict)
        pairs = {key: self.value(item) for key, item in value.items()}
        if not isinstance(value, Ordered):
            return pairs
        ordered = Ordered(pairs)
        ordered.attributes = value.attributes
        return ordered

    def _number(self, stub: TensorStub) -> object:
        storage = stub.storage
        form = _SCALARS.get(stub.dtype or storage.dtype) if isinstance(storage, StorageRef) else None
        if form is None or stub.bits or any(n != 1 for n in stub.shape):
            return stub
        assert isinstance(storage, StorageRef)
        data, at = self._storages.get(storage.key, b""), stub.offset * struct.calcsize(form)
        return struct.unpack_from(form, data, at)[0] if at + struct.calcsize(form) <= len(data) else stub
