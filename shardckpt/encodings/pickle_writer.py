"""Write pickles by opcode: plain values, and calls of globals by name.

Protocol 2 (PEP 307, and the notes in CPython's `pickletools`), which `torch.load(weights_only=True)` reads. The reader
resolves the names.
"""

from __future__ import annotations

import io
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from struct import pack
from typing import Any, NamedTuple

from shardckpt.errors import UnsupportedError
from shardckpt.manifest import Path, dotted

_MAX_DEPTH = 120
_MAX_LONG_BYTES = 255
# Longer strings rarely occur twice, so they are written each time instead of entering the memo.
_REMEMBERED_CHARACTERS = 200

_BATCH = 1000  # items between marks, as in CPython; limits the reader's stack

_NO_STATE = object()


class GlobalName(NamedTuple):
    """A global that the reader imports."""

    module: str
    name: str


class GlobalCall(NamedTuple):
    """A value that the reader creates by calling a global."""

    function: GlobalName
    args: tuple[object, ...] = ()
    state: object = _NO_STATE  # argument for `__setstate__`, or values that update `__dict__`
    is_new: bool = False  # create with `function.__new__`, without `__init__`
    items: Mapping[Any, object] | None = None  # inserted as into a dict
    is_shared: bool = False  # later uses refer to the first instead of creating another value


class Pairs(NamedTuple):
    """A dict whose keys the reader creates by calls."""

    pairs: Sequence[tuple[object, object]]


class PersistentId(NamedTuple):
    """A reference to data outside the pickle."""

    key: tuple[object, ...]


class _SharedCall(NamedTuple):
    """Memo key for a call that several places share; it lives as long as the encoded value."""

    number: int


# Returns the replacement for a value without a plain type, or the value itself.
Special = Callable[[object, Path], object]


def _as_it_is(value: object, _path: Path) -> object:
    return value


def encode_pickle(value: object, special: Special = _as_it_is) -> bytes:
    """Encode a value as a pickle."""
    writer = _Writer(special)
    writer.value(value, ())
    return b"".join((b"\x80\x02", *writer.parts, b"."))


class _Writer:
    """Writes the opcodes of a pickle."""

    def __init__(self, special: Special) -> None:
        self.parts: list[bytes] = []
        self._special = special
        self._memo: dict[object, int] = {}
        self._plain: dict[type, Callable[[Any, Path], None]] = {
            bool: lambda v, _: self.parts.append(b"\x88" if v else b"\x89"),
            bytes: self._bytes,
            bytearray: self._bytes,
            GlobalCall: self._call,
            complex: lambda v, p: self._call(GlobalCall(GlobalName("__builtin__", "complex"), (v.real, v.imag)), p),
            Counter: lambda v, p: self._call(GlobalCall(GlobalName("collections", "Counter"), (dict(v),)), p),
            dict: self._dict,
            io.BytesIO: self._stream,
            float: lambda v, _: self.parts.append(pack(">cd", b"G", v)),
            GlobalName: lambda v, _: self._global(v),
            int: self._int,
            list: self._list,
            OrderedDict: lambda v, p: self._call(GlobalCall(GlobalName("collections", "OrderedDict"), items=v), p),
            Pairs: self._pairs,
            PersistentId: self._persistent,
            set: lambda v, p: self._call(GlobalCall(GlobalName("__builtin__", "set"), (list(v),)), p),
            str: self._text,
            tuple: self._tuple,
            type(None): lambda _v, _p: self.parts.append(b"N"),
        }

    def value(self, value: object, path: Path) -> None:
        if len(path) > _MAX_DEPTH:
            raise UnsupportedError("nested too deep to be pickled", where=dotted(path[:8]))
        write = self._plain.get(type(value))
        if write is None:
            value = self._special(value, path)
            write = self._plain.get(type(value))
        if write is None:
            raise UnsupportedError(
                f"a value of type {type(value).__name__} cannot be written", where=dotted(path), found=value
            )
        write(value, path)

    def _int(self, value: int, path: Path) -> None:
        if 0 <= value < 256:
            self.parts.append(bytes((ord("K"), value)))
        elif 0 <= value < 1 << 16:
            self.parts.append(pack("<cH", b"M", value))
        elif -(1 << 31) <= value < 1 << 31:
            self.parts.append(pack("<ci", b"J", value))
        else:
            nbytes = value.bit_length() // 8 + 1
            if nbytes > _MAX_LONG_BYTES:
                raise UnsupportedError(f"an integer of {8 * nbytes} bits cannot be written", where=dotted(path))
            self.parts.append(pack("<cB", b"\x8a", nbytes) + value.to_bytes(nbytes, "little", signed=True))

    def _text(self, value: str, _path: Path) -> None:
        if self._write_memo(value):
            return
        raw = value.encode("utf-8", "surrogatepass")
        self.parts.append(pack("<cI", b"X", len(raw)) + raw)
        if len(value) <= _REMEMBERED_CHARACTERS:
            self._remember(value)

    def _bytes(self, value: bytes | bytearray, path: Path) -> None:
        """Write bytes as text, one character for each, which the reader encodes: protocol 2 has no bytes."""
        self._call(GlobalCall(GlobalName("_codecs", "encode"), (bytes(value).decode("latin-1"), "latin1")), path)

    def _stream(self, value: io.BytesIO, path: Path) -> None:
        state = (value.getvalue(), value.seek(0, io.SEEK_CUR), None)  # the last one would be its `__dict__`
        self._call(GlobalCall(GlobalName("_io", "BytesIO"), state=state), path)

    def _global(self, value: GlobalName) -> None:
        if not self._write_memo(value):
            self.parts.append(f"c{value.module}\n{value.name}\n".encode())
            self._remember(value)

    def _write_memo(self, value: object) -> bool:
        index = self._memo.get(value)
        if index is None:
            return False
        self.parts.append(pack("<cB", b"h", index) if index < 256 else pack("<cI", b"j", index))
        return True

    def _remember(self, value: object) -> None:
        index = self._memo[value] = len(self._memo)
        self.parts.append(pack("<cB", b"q", index) if index < 256 else pack("<cI", b"r", index))

    def _list(self, value: Sequence[object], path: Path) -> None:
        self.parts.append(b"]")
        for start in range(0, len(value), _BATCH):
            self.parts.append(b"(")
            for i, each in enumerate(value[start : start + _BATCH], start):
                self.value(each, (*path, i))
            self.parts.append(b"e")

    def _tuple(self, value: tuple[object, ...], path: Path) -> None:
        short = (b")", b"\x85", b"\x86", b"\x87")
        if len(value) > 3:
            self.parts.append(b"(")
        for i, each in enumerate(value):
            self.value(each, (*path, i))
        self.parts.append(short[len(value)] if len(value) <= 3 else b"t")

    def _dict(self, value: Mapping[object, object], path: Path) -> None:
        self.parts.append(b"}")
        self._items(value, path)

    def _pairs(self, value: Pairs, path: Path) -> None:
        self.parts.append(b"}")
        self._write_pairs(value.pairs, path)

    def _items(self, value: Mapping[Any, object], path: Path) -> None:
        self._write_pairs(list(value.items()), path)

    def _write_pairs(self, pairs: Sequence[tuple[Any, object]], path: Path) -> None:
        for start in range(0, len(pairs), _BATCH):
            self.parts.append(b"(")
            for key, each in pairs[start : start + _BATCH]:
                self.value(key, (*path, "(key)"))
                self.value(each, (*path, key if type(key) in (str, int) else str(key)))
            self.parts.append(b"u")

    def _persistent(self, value: PersistentId, path: Path) -> None:
        self._tuple(value.key, path)
        self.parts.append(b"Q")

    def _call(self, value: GlobalCall, path: Path) -> None:
        key = _SharedCall(id(value))
        if value.is_shared and self._write_memo(key):
            return
        self._global(value.function)
        self._tuple(value.args, path)
        self.parts.append(b"\x81" if value.is_new else b"R")
        if value.items is not None:
            self._items(value.items, path)
        if value.state is not _NO_STATE:
            self.value(value.state, path)
            self.parts.append(b"b")
        if value.is_shared:
            self._remember(key)
