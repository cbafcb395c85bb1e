"""What reading a file may cost: one budget for everything that is made of its bytes, and what a dict's keys may be.

Memory and time are counted together, in bytes: a container counts what Python takes for it, work without memory 64
bytes for each microsecond. Nothing is given back when a value is dropped, so that making and dropping it again and
again ends as well.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

from shardckpt.errors import FormatError, UnsafeError
from shardckpt.manifest import Path

FREE_BYTES = 64 << 20
"""What the smallest file may cost."""

FILE_FACTOR = 8
"""What each byte of a file adds to that."""

HEADER_FACTOR = 32
"""What each byte that is parsed adds at the most: the rest of a file may be sparse, and cost its author nothing."""

ENTRY_BYTES = 160
"""What a value costs that gets a path of its own in a manifest; the characters of its path come on top."""

TENSOR_BYTES = 640
"""What a tensor costs there, with its piece and its box."""


CHUNK_BYTES = 384
"""What each further box of a tensor costs."""


class ReadBudget:
    """The memory that reading a file may still cost.

    Attributes:
        left: Bytes that are left; code that counts very often takes from it by itself, and calls `exceeded`.

    Args:
        file_bytes: Bytes of the file, or of all files of the checkpoint.
        header_bytes: Bytes of what is parsed; all of the file where None.
        where: The file, for messages.
    """

    __slots__ = ("_most", "_spent_on", "_where", "left")

    def __init__(self, file_bytes: int, header_bytes: int | None = None, *, where: object = "") -> None:
        header_bytes = file_bytes if header_bytes is None else header_bytes
        self._most = FREE_BYTES + min(FILE_FACTOR * file_bytes, HEADER_FACTOR * header_bytes)
        self._where = where
        self._spent_on: set[object] = set()
        self.left = self._most

    def spend(self, nbytes: int) -> None:
        """Count bytes.

        Raises:
            UnsafeError: More than the file may cost.
        """
        self.left -= nbytes
        if self.left < 0:
            raise self.exceeded()

    def spend_once(self, key: object, nbytes: int) -> None:
        """Count bytes of what is read again and again only the first time."""
        if key not in self._spent_on:
            self._spent_on.add(key)
            self.spend(nbytes)

    def spend_entry(self, path_characters: int) -> None:
        """Count a value that gets a path of its own."""
        self.spend(ENTRY_BYTES + path_characters)

    def spend_tensor(self, path_characters: int) -> None:
        """Count a tensor that gets a path of its own."""
        self.spend(TENSOR_BYTES + path_characters)

    def exceeded(self) -> UnsafeError:
        """Return the error for a file that costs more."""
        return UnsafeError(
            "reading the file would cost more memory or time than any checkpoint of its size needs",
            where=self._where,
            expected=f"at most {self._most} bytes",
            fix="It looks made to exhaust this machine; do not trust where it came from.",
        )


_MOST_ALIKE = 64
"""Keys of one dict that may have one hash: of floats up to 34 can by accident, and a chosen thousand costs a second."""

_MOST_MET = 1024
"""Taken places where one key is looked for: powers of two meet up to 400, and this many take three microseconds."""

_USUALLY_MET = 64
"""The same for the keys of one table on average: honest ones meet 2, multiples of powers of two 20, these powers 40."""

_FEW = 64
"""Keys of a container that are not counted: those cost next to nothing."""

_LARGEST_DISTINCT = 2**61 - 2
"""Integers from 0 to this one hash to themselves, so that all hashes differ."""

_WORD = 2**64 - 1

_KEY_PARTS = 64
"""Values in one tuple used as a key; the paths and names that writers use have a handful."""


class _Table:
    """Follows where CPython puts keys in the table of a dict or of a set, and counts the taken places that they meet.

    Keys of one hash meet in every place. Others meet where their hashes were chosen so: the places that are tried
    one after another depend on the hash and the size of the table alone.

    Args:
        is_set: Whether the table is that of a set, which tries several places beside each other.
    """

    __slots__ = ("_allowed", "_hashes", "_is_set", "_taken")

    def __init__(self, is_set: bool) -> None:
        self._is_set = is_set
        self._hashes = array("Q")
        self._resize(8)

    def add(self, value: int, count: int) -> None:
        """Put the hash of a new key into the table.

        Args:
            value: The hash.
            count: Keys in the container with this one; those whose hashes cannot be chosen need not have been added.

        Raises:
            UnsafeError: It meets very many others.
        """
        size = len(self._taken)
        while (5 * (count - 1) >= 3 * (size - 1)) if self._is_set else (count > 2 * size // 3):
            size *= 2 if not self._is_set or count > 50_000 else 4
        if size != len(self._taken):
            self._resize(size)
        self._hashes.append(value & _WORD)
        self._place(value & _WORD)

    def _resize(self, size: int) -> None:
        self._taken = bytearray(size)
        self._allowed = _USUALLY_MET * _MOST_MET
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
        if met > _MOST_MET or self._allowed < 0:
            raise _collision_error()


_SET_RUN = 9
"""Places behind the first that a set tries before it jumps."""


class KeyGuard:
    """Refuses keys that were chosen to collide in a dict or a set.

    Python salts the hashes of text, and those of numbers and of tuples of them anybody can choose.

    Args:
        plain: Types besides numbers and tuples that may be keys: their hashes cannot be chosen.
    """

    __slots__ = ("_plain", "_seen", "_tables")

    def __init__(self, plain: frozenset[type]) -> None:
        self._plain = plain
        self._seen: dict[tuple[int, int], int] = {}
        self._tables: dict[int, tuple[object, _Table]] = {}  # the container is kept, so that its id stays its own

    def check(self, key: object, container: dict[Any, Any] | set[Any]) -> None:
        """Refuse a key whose hash is undefined, costly, or chosen to meet many others; it is put there at once.

        Args:
            key: The key.
            container: Where it will be put.

        Raises:
            FormatError: The type of the key cannot be hashed here.
            UnsafeError: Its size or its hash could exhaust this machine.
        """
        kind = type(key)
        if kind in self._plain:
            return
        if kind is not int:
            self._check_kind(key)
        if not (kind is int and 0 <= key <= _LARGEST_DISTINCT):  # type: ignore[operator]
            place = id(container), hash(key)
            self._seen[place] = self._seen.get(place, 0) + 1
            if self._seen[place] > _MOST_ALIKE:
                raise _collision_error()
        count = len(container)
        if count < _FEW:
            return
        known = self._tables.get(id(container))
        if known is None:
            if kind is int and 0 <= key <= count:  # type: ignore[operator]
                return  # such numbers alone have a place each
            known = self._tables[id(container)] = container, _build_table(container, type(container) is set)
        if key not in container:
            known[1].add(hash(key), count + 1)

    def check_all(self, keys: Sequence[object]) -> None:
        """Refuse keys of a container that is made of them at once, as `check` does."""
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
        """Return how many more values the tuple around may hold."""
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
        if type(key) is not str:  # their hashes are salted
            table.add(hash(key), count)
    return table


def check_hashes(keys: Sequence[Hashable], where: object = "") -> None:
    """Refuse keys of one dict, or values of one set, that were chosen to meet in one place of it.

    Raises:
        UnsafeError: They were.
    """
    if len(keys) <= _FEW or all(type(key) is str or (type(key) is int and 0 <= key <= i) for i, key in enumerate(keys)):
        return
    try:
        _build_table(keys, is_set=False)
        _build_table(keys, is_set=True)
    except UnsafeError:
        raise _collision_error(where) from None
    hashes = sorted(hash(key) for key in keys if type(key) is not str)
    if any(hashes[i] == hashes[i - _MOST_ALIKE] for i in range(_MOST_ALIKE, len(hashes))):
        raise _collision_error(where)


def check_paths(paths: Collection[Path], where: object = "") -> None:
    """Refuse paths that were chosen to meet, or of whose keys many were.

    Raises:
        UnsafeError: They were.
    """
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
    """Refuse a file, or a part of one, that is larger than any that is needed.

    Raises:
        UnsafeError: It is.
    """
    if nbytes > most:
        raise UnsafeError(f"{what} is too large", where=where, found=f"{nbytes} bytes", expected=f"at most {most}")


def _collision_error(where: object = "") -> UnsafeError:
    return UnsafeError(
        "very many keys have one hash, or hashes that meet in one place",
        where=where,
        fix="They were chosen to take hours; do not trust where they came from.",
    )
