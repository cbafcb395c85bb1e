"""Limits on the cost that a file may have: budgets, checks of dict keys, collector pause.

Memory and time are counted together, in bytes: a container costs its Python object's memory, work without memory
costs 64 bytes per microsecond. A dropped value is not refunded, so that creating and dropping values in a loop ends.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from shardckpt.boxes import Shape
from shardckpt.errors import FormatError, UnsafeError
from shardckpt.manifest import Path

FREE_BYTES = 64 << 20  # cost, in bytes, that every file may have
FILE_FACTOR = 8  # additional allowed cost for each byte of a file

# Maximum allowed cost for each parsed byte: other bytes of a file may be sparse, which costs its author nothing.
HEADER_FACTOR = 32

ENTRY_BYTES = 160  # cost of a value with its own path in a manifest; the path's characters are added
TENSOR_BYTES = 640  # cost of a tensor in a manifest, with its piece and its box


CHUNK_BYTES = 384  # cost of each further box in a tensor


class ReadBudget:
    """Remaining cost that reading a file may have, in bytes."""

    __slots__ = ("_most", "_spent_on", "_where", "left")

    def __init__(self, file_bytes: int, header_bytes: int | None = None, *, where: object = "") -> None:
        header_bytes = file_bytes if header_bytes is None else header_bytes
        self._most = FREE_BYTES + min(FILE_FACTOR * file_bytes, HEADER_FACTOR * header_bytes)
        self._where = where
        self._spent_on: set[object] = set()
        # Remaining bytes. Code that counts very often subtracts from it directly and calls `exceeded`.
        self.left = self._most

    def spend(self, nbytes: int) -> None:
        """Subtract bytes."""
        self.left -= nbytes
        if self.left < 0:
            raise self.exceeded()

    def spend_once(self, key: object, nbytes: int) -> None:
        """Subtract bytes for `key`, only the first time."""
        if key not in self._spent_on:
            self._spent_on.add(key)
            self.spend(nbytes)

    def spend_entry(self, path_characters: int) -> None:
        """Subtract the cost for a value with its own path."""
        self.spend(ENTRY_BYTES + path_characters)

    def spend_tensor(self, path_characters: int) -> None:
        """Subtract the cost for a tensor with its own path."""
        self.spend(TENSOR_BYTES + path_characters)

    def exceeded(self) -> UnsafeError:
        """Return the error for a file that exceeds its budget."""
        return UnsafeError(
            "reading the file would cost more memory or time than any checkpoint of its size needs",
            where=self._where,
            expected=f"at most {self._most} bytes",
            fix="It looks made to exhaust this machine; do not trust where it came from.",
        )


# Maximum keys of one dict with equal hashes: up to 34 floats collide by accident; 1,000 keys take a second.
_MAX_ALIKE = 64

# Maximum occupied slots in the search for one key: powers of two meet up to 400; this many take 3 microseconds.
_MAX_MET = 1024

# Maximum occupied slots per key on average: honest keys meet 2, multiples of powers of two 20, powers of two 40.
_USUALLY_MET = 64

_FEW = 64  # keys in a container that are not checked, since they cost almost nothing

# Largest integer below which all integers from 0 have distinct hashes, equal to themselves.
_LARGEST_DISTINCT = 2**61 - 2

_WORD = 2**64 - 1

_KEY_PARTS = 64  # maximum values in a tuple that is a key; paths and names of real files have a few


class _Table:
    """Simulates CPython's hash tables of dicts and sets, to count collisions."""

    # Keys with equal hashes collide in every slot. Other keys collide if their hashes were chosen for it: the sequence
    # of probed slots depends only on the hash and the table's size.

    __slots__ = ("_allowed", "_hashes", "_is_set", "_taken")

    def __init__(self, is_set: bool) -> None:
        self._is_set = is_set
        self._hashes = array("Q")
        self._resize(8)

    def add(self, value: int, count: int) -> None:
        """Insert a new key's hash into the table."""
        size = len(self._taken)
        while (5 * (count - 1) >= 3 * (size - 1)) if self._is_set else (count > 2 * size // 3):
            size *= 2 if not self._is_set or count > 50_000 else 4
        if size != len(self._taken):
            self._resize(size)
        self._hashes.append(value & _WORD)
        self._place(value & _WORD)

    def _resize(self, size: int) -> None:
        self._taken = bytearray(size)
        self._allowed = _USUALLY_MET * _MAX_MET
        for value in self._hashes:
            self._place(value)

    def _place(self, value: int) -> None:
        taken, mask = self._taken, len(self._taken) - 1
        at, left, met = value & mask, value, 0
        while taken[at]:
            met += 1
            if self._is_set and at + _SET_RUN <= mask:
                free = taken.find(0, at, at + _SET_RUN + 1)
                if free >= 0:
                    at = free
                    break
            left >>= 5
            at = (5 * at + left + 1) & mask
        taken[at] = 1
        self._allowed += _USUALLY_MET - met
        if met > _MAX_MET or self._allowed < 0:
            raise _collision_error()


_SET_RUN = 9  # adjacent slots that a set probes before it jumps


class KeyGuard:
    """Rejects keys that were chosen to collide in a dict or a set."""

    # Python salts the hashes of text. An attacker can choose the hashes of numbers, and of tuples of numbers.

    __slots__ = ("_plain", "_seen", "_tables")

    def __init__(self, plain: frozenset[type]) -> None:
        self._plain = plain
        self._seen: dict[tuple[int, int], int] = {}
        self._tables: dict[int, tuple[object, _Table]] = {}  # the container is kept so that no other object gets its id

    def check(self, key: object, container: dict[Any, Any] | set[Any]) -> None:
        """Require that a new key's hash is defined, cheap, and collides with few others."""
        kind = type(key)
        if kind in self._plain:
            return
        if kind is not int:
            self._check_kind(key)
        if not (kind is int and 0 <= key <= _LARGEST_DISTINCT):  # type: ignore[operator]
            place = id(container), hash(key)
            self._seen[place] = self._seen.get(place, 0) + 1
            if self._seen[place] > _MAX_ALIKE:
                raise _collision_error()
        count = len(container)
        if count < _FEW:
            return
        known = self._tables.get(id(container))
        if known is None:
            if kind is int and 0 <= key <= count:  # type: ignore[operator]
                return  # each of these numbers has its own slot
            known = self._tables[id(container)] = container, _build_table(container, type(container) is set)
        if key not in container:
            known[1].add(hash(key), count + 1)

    def check_all(self, keys: Sequence[object]) -> None:
        """Check the keys for a container that is created from all keys at once."""
        for key in keys:
            if type(key) is not int and type(key) not in self._plain:
                self._check_kind(key)
        check_hashes([key for key in keys if type(key) not in self._plain])

    def _check_kind(self, key: object) -> None:
        if type(key) is tuple:
            assert isinstance(key, tuple)
            self._check_parts(key, _KEY_PARTS)
        elif type(key) is not float:
            raise FormatError(f"the pickle uses a value of type {type(key).__name__} as a key")

    def _check_parts(self, key: tuple[object, ...], left: int) -> int:
        """Check a tuple's parts; return how many values may follow."""
        for part in key:
            left -= 1
            if left <= 0:
                raise UnsafeError(
                    "the pickle uses a tuple of very many values as a key", expected=f"fewer than {_KEY_PARTS}"
                )
            if type(part) is tuple:
                left = self._check_parts(part, left)
            elif type(part) is not int and type(part) is not float and type(part) not in self._plain:
                raise FormatError(f"the pickle uses a tuple with a {type(part).__name__} as a key")
        return left


def _build_table(keys: Iterable[Hashable], is_set: bool) -> _Table:
    table = _Table(is_set)
    for count, key in enumerate(keys, 1):
        if type(key) is not str:  # hashes of text are salted
            table.add(hash(key), count)
    return table


def check_hashes(keys: Sequence[Hashable], where: object = "") -> None:
    """Require that a dict's keys, or a set's values, were not chosen to collide."""
    if len(keys) <= _FEW or all(type(key) is str or (type(key) is int and 0 <= key <= i) for i, key in enumerate(keys)):
        return
    try:
        _build_table(keys, is_set=False)
        _build_table(keys, is_set=True)
    except UnsafeError:
        raise _collision_error(where) from None
    hashes = sorted(hash(key) for key in keys if type(key) is not str)
    if any(hashes[i] == hashes[i - _MAX_ALIKE] for i in range(_MAX_ALIKE, len(hashes))):
        raise _collision_error(where)


def check_paths(paths: Collection[Path], where: object = "") -> None:
    """Require that neither the paths nor the keys in them were chosen to collide."""
    if all(type(key) is str for path in paths for key in path):
        return  # the hashes of text are salted, and so are tuples of text
    check_hashes(list(paths), where)
    large = {f"{key:x}" for path in paths for key in path if type(key) is int and not 0 <= key <= _LARGEST_DISTINCT}
    check_hashes([int(digits, 16) for digits in large], where)
    numbers: dict[Path, dict[str, None]] = {}
    for path in paths:
        for i, key in enumerate(path):
            if type(key) is int:
                numbers.setdefault(("in", *path[:i]), {})[f"{key:x}"] = None
    for known in numbers.values():
        check_hashes([int(digits, 16) for digits in known], where)


def require_small(what: str, nbytes: int, most: int, where: object) -> None:
    """Require that a file, or a part, is not larger than any real one."""
    if nbytes > most:
        raise UnsafeError(f"{what} is too large", where=where, found=f"{nbytes} bytes", expected=f"at most {most}")


def _collision_error(where: object = "") -> UnsafeError:
    return UnsafeError(
        "very many keys have one hash, or hashes that meet in one place",
        where=where,
        fix="They were chosen to take hours; do not trust where they came from.",
    )


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable the cyclic garbage collector; reference counting still frees objects."""
    # New objects trigger the collector again and again, over all objects of the process: up to half of the time to open
    # a large checkpoint.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


MAX_DIMENSIONS = 64
MAX_ELEMENTS = 1 << 60


def check_list(value: object, where: str = "") -> Sequence[object]:
    """Return a list or tuple."""
    if not isinstance(value, list | tuple):
        raise FormatError("a value must be a list", where=where, found=type(value).__name__)
    return value


def check_text(value: object, where: str = "") -> str:
    """Return a string."""
    if not isinstance(value, str):
        raise FormatError("a name must be text", where=where, found=type(value).__name__)
    return value


def check_count(value: object, most: int = MAX_ELEMENTS) -> int:
    """Return an integer from 0 to `most`."""
    if type(value) is not int or not 0 <= value <= most:
        raise FormatError("a number is not an integer, negative or too large", found=value)
    return value


def check_counts(value: object, most: int = MAX_ELEMENTS, where: str = "") -> Shape:
    """Return a list of integers from 0 to `most`."""
    counts: list[int] = []
    for n in check_list(value, where):
        if type(n) is not int or not 0 <= n <= most:
            raise FormatError("a number is not an integer, negative or too large", where=where, found=value)
        counts.append(n)
    return tuple(counts)


def is_shape(value: object) -> bool:
    """Return True for a shape of at most 64 dimensions and `MAX_ELEMENTS` elements."""
    return (
        isinstance(value, list | tuple)
        and len(value) <= MAX_DIMENSIONS
        and all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in value)
        and prod(value) <= MAX_ELEMENTS
    )


def check_shape(value: object, where: str = "") -> Shape:
    """Return a shape."""
    shape = check_counts(value, where=where)
    if len(shape) > MAX_DIMENSIONS or prod(shape) > MAX_ELEMENTS:
        raise FormatError("a tensor has more elements than any machine holds", where=where, found=shape)
    return shape
