"""A history's storage, on a disk or in a bucket, for the harness to check and damage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from random import Random

from tests.simulation.stores.bucket import SimulatedBucket, StoredObject
from tests.simulation.stores.disk import Disk

_VALUE_BYTES = 32


class RunStorage(ABC):
    """A run's storage."""

    root: str

    @property
    @abstractmethod
    def version(self) -> int:
        """Number of changes."""

    @abstractmethod
    def list_files(self) -> Mapping[str, object]:
        """Return the files below the run by relative name, each with a value that changes with its content."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a file's content, by its name in the run."""

    @abstractmethod
    def remove(self, names: Collection[str]) -> None:
        """Remove steps, and other files and folders, by their names in the run."""

    @abstractmethod
    def flip_bit(self, name: str, random: Random) -> None:
        """Damage a file below the run."""


class DiskStorage(RunStorage):
    """A run on a disk."""

    def __init__(self, disk: Disk, root: str) -> None:
        self._disk, self.root = disk, root

    @property
    def version(self) -> int:
        """Number of changes."""
        return self._disk.version

    def list_files(self) -> Mapping[str, object]:
        """Return each file's inode and version."""
        start = len(self.root) + 1
        return {path[start:]: (file.inode, file.version) for path, file in self._disk.walk(self.root)}

    def read(self, name: str) -> bytes:
        """Return a file's content."""
        return bytes(dict(self._disk.walk(self.root))[f"{self.root}/{name}"].data)

    def remove(self, names: Collection[str]) -> None:
        """Remove files and folders with all below them; a power failure does not restore them."""
        if names:
            self._disk.clear(self.root, names, 0.0)

    def flip_bit(self, name: str, random: Random) -> None:
        """Damage a file, including what survives a power failure."""
        file = dict(self._disk.walk(self.root))[f"{self.root}/{name}"]
        flipped = _flip(bytes(file.data), random)
        if file.synced == bytes(file.data):
            file.synced = flipped
        file.data = bytearray(flipped)
        file.version += 1
        self._disk.note_change()


class BucketStorage(RunStorage):
    """A run in a bucket."""

    def __init__(self, bucket: SimulatedBucket, root: str) -> None:
        self._bucket, self.root = bucket, root
        self._prefix = root.partition("://")[2] + "/"

    @property
    def version(self) -> int:
        """Number of changes."""
        return self._bucket.version

    def list_files(self) -> Mapping[str, object]:
        """Return the identity of each object's bytes."""
        start = len(self._prefix)
        return {key[start:]: each for key, each in self._bucket.objects.items() if key.startswith(self._prefix)}

    def read(self, name: str) -> bytes:
        """Return an object's content."""
        return self._bucket.objects[self._prefix + name].data

    def remove(self, names: Collection[str]) -> None:
        """Remove objects, and those below folders."""
        for key in list(self._bucket.objects):
            if key.startswith(self._prefix) and key[len(self._prefix) :].partition("/")[0] in names:
                del self._bucket.objects[key]
        self._bucket.note_change()

    def flip_bit(self, name: str, random: Random) -> None:
        """Damage an object, and keep its version."""
        stored = self._bucket.objects[self._prefix + name]
        self._bucket.objects[self._prefix + name] = StoredObject(
            _flip(stored.data, random), stored.etag, stored.written
        )
        self._bucket.note_change()


def _flip(data: bytes, random: Random) -> bytes:
    """Flip a bit, often among the last bytes: in a payload file those are tensor values, others are padding."""
    flipped = bytearray(data)
    if flipped:
        last = random.choice((len(flipped), min(len(flipped), _VALUE_BYTES)))
        flipped[-1 - random.randrange(last)] ^= 1 << random.randrange(8)
    return bytes(flipped)
