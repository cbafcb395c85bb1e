"""A store that counts what is read through it."""

from __future__ import annotations

from collections.abc import Sequence

from read_only import ReadOnlyStore

from shardckpt.format.reader import Reader, Source
from shardckpt.format.registry import detect
from shardckpt.storage.resolve_url import kind, open_store, split
from shardckpt.storage.store import Capabilities, Listed, Read, Store


class CountingStore(ReadOnlyStore):
    """Passes everything on, and remembers each range that was read.

    Args:
        inner: Where the files lie.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.ranges: list[tuple[str, int, int]] = []
        self.batches = 0

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self._inner.capabilities

    @property
    def nbytes(self) -> int:
        """Bytes read so far; a byte read twice counts twice."""
        return sum(n for _, _, n in self.ranges)

    def list(self, folder: str = "") -> list[Listed]:
        return self._inner.list(folder)

    def size(self, name: str) -> int:
        return self._inner.size(name)

    def read(self, reads: Sequence[Read]) -> None:
        self.batches += 1
        self.ranges += [(r.name, r.offset, len(r.buffer)) for r in reads]
        self._inner.read(reads)

    def changed_at(self, folder: str) -> float | None:
        return self._inner.changed_at(folder)


def open_counted(url: str) -> tuple[Reader, CountingStore]:
    """Open a checkpoint as `open_checkpoint` does, over a store that counts."""
    if kind(url) == "file":
        parent, name = split(url)
        store = CountingStore(open_store(parent))
        source = Source(store, name)
    else:
        store = CountingStore(open_store(url))
        source = Source(store)
    return detect(source).open(source), store
