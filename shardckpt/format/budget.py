"""What reading a file may cost: one budget for everything that is made of its bytes, and what a dict's keys may be.

Memory and time are counted together, in bytes: a container counts what Python takes for it, work without memory 64
bytes for each microsecond. Nothing is given back when a value is dropped, so that making and dropping it again and
again ends as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable

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


class Budget:
    """What may still be spent.

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

_KEY_PARTS = 64
"""Values in one tuple used as a key; the paths and names that writers use have a handful."""

_LARGEST_DISTINCT = 2**61 - 2
"""Whole numbers from 0 to here hash to themselves, so that no two are alike."""


class Keys:
    """Refuses keys that were chosen to have one hash: each would be compared with all before it.

    Python salts the hashes of text, and those of numbers and of tuples of them anybody can choose.

    Args:
        plain: Types besides numbers and tuples that may be keys: their hashes cannot be chosen.
    """

    __slots__ = ("_plain", "_seen")

    def __init__(self, plain: frozenset[type]) -> None:
        self._plain = plain
        self._seen: dict[tuple[int, int], int] = {}

    def check(self, key: object, container: object) -> None:
        """Refuse a key whose hash is undefined, costly, or that of many others.

        Args:
            key: The key.
            container: Where it will be put.

        Raises:
            FormatError: The type of the key cannot be hashed here.
            UnsafeError: Its size or its hash could exhaust this machine.
        """
        kind = type(key)
        if kind in self._plain or (kind is int and 0 <= key <= _LARGEST_DISTINCT):  # type: ignore[operator]
            return
        if kind is tuple:
            assert isinstance(key, tuple)
            self._check_parts(key, _KEY_PARTS)
        elif kind is not int and kind is not float:
            raise FormatError(f"the pickle uses a value of type {kind.__name__} as a key")
        place = id(container), hash(key)
        count = self._seen[place] = self._seen.get(place, 0) + 1
        if count > _MOST_ALIKE:
            raise _alike()

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


def check_hashes(keys: Iterable[Hashable], where: object = "") -> None:
    """Refuse keys of one dict, or values of one set, of which many were chosen to have one hash.

    Raises:
        UnsafeError: They were.
    """
    counts = Counter(map(hash, keys))
    if counts and max(counts.values()) > _MOST_ALIKE:
        raise _alike(where)


def check_paths(paths: Collection[Path], where: object = "") -> None:
    """Refuse paths of which many have one hash, or of whose keys many have.

    Raises:
        UnsafeError: They were chosen so.
    """
    check_hashes(paths, where)
    large = {f"{key:x}" for path in paths for key in path if type(key) is int and not 0 <= key <= _LARGEST_DISTINCT}
    check_hashes([int(digits, 16) for digits in large], where)


def _alike(where: object = "") -> UnsafeError:
    return UnsafeError(
        "very many keys have one hash",
        where=where,
        fix="They were chosen to take hours; do not trust where they came from.",
    )
