"""Checksums of tensors in the folder dialect of slime, miles and ModelExpress."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any

import xxhash

__all__ = ["HASHERS", "find_hasher", "hash_bytes"]


class _Adler32:
    """Adler-32 with the methods of `hashlib`'s objects."""

    def __init__(self) -> None:
        self._value = 1

    def update(self, data: memoryview) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


HASHERS: Mapping[str, Callable[[], Any]] = {"xxh3-128": xxhash.xxh3_128, "adler32": _Adler32}
"""Kinds of checksums that need no further package."""


def find_hasher(kind: str) -> Callable[[], Any] | None:
    """Return what makes a hash object of a kind; None for an unknown kind, or without the package for it."""
    if kind != "blake3":
        return HASHERS.get(kind)
    try:
        made: Callable[[], Any] = import_module("blake3").blake3
    except ImportError:
        return None
    return made


def hash_bytes(hasher: Callable[[], Any], blocks: Iterable[memoryview]) -> str:
    """Return a checksum of bytes as text."""
    made = hasher()
    for block in blocks:
        made.update(block)
    return str(made.hexdigest())
