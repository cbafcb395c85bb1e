"""A store that counts what is read through it."""

from __future__ import annotations

from collections.abc import Sequence

from shardckpt.reader import Reader, Source
from shardckpt.readers.registry import detect
from shardckpt.storage.resolve_url import kind, open_store, split
from shardckpt.storage.store import Read, Store, WrappedStore
from tests.kit.stores.read_only import ReadOnlyStore


class CountingStore(ReadOnlyStore, WrappedStore):
    """Passes everything on, and remembers each range that was read.

    Args:
        store: Where the files are.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.ranges: list[tuple[str, int, int]] = []
        self.batches = 0

    @property
    def nbytes(self) -> int:
        """Bytes read so far; a byte read twice counts twice."""
        return sum(n for _, _, n in self.ranges)

    def read(self, reads: Sequence[Read]) -> None:
        self.batches += 1
        self.ranges += [(r.name, r.offset, len(r.buffer)) for r in reads]
        super().read(reads)


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
