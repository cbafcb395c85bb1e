"""The weights that a receiver holds, in the stream's dtype: boxes in memory, or in a file that outlives the process."""

from __future__ import annotations

import fcntl
import hashlib
import os
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardckpt.encodings.typed_json import dump, load
from shardckpt.errors import CheckpointError, NoMemoryError, UsageError
from shardckpt.native.records import FileName
from shardckpt.storage.store import convert_os_errors
from shardckpt.stream.format.digest import Digest
from shardckpt.stream.format.held_boxes import HeldBox, NewElements, sum_digests, write_elements
from shardckpt.stream.format.stream_records import Hex32, Version

__all__ = ["Mirror"]

_HELD, _LOCK = "HELD.json", "LOCK"


@dataclass(frozen=True, slots=True)
class _HeldRecord:
    """What a mirror's file has."""

    stream: Hex32
    version: Version
    layout: Hex32
    file: FileName
    digests: Mapping[str, Hex32]  # of this worker's boxes


class Mirror:
    """A worker's boxes of one version.

    Attributes:
        version: The version; None before the first one.
        digests: This worker's part of each tensor's digest.
    """

    def __init__(self, boxes: Sequence[HeldBox], stream: str, folder: str | None) -> None:
        self.boxes = tuple(boxes)
        self.version: Version | None = None
        self.digests: Mapping[str, Digest] = {}
        self._stream, self._folder = stream, folder
        self._buffer = np.empty(0, np.uint8)
        self._file = ""
        self._nbytes = max((each.start + each.nbytes for each in boxes), default=0)
        layout = repr([each[:4] for each in boxes]).encode()
        self._layout = hashlib.blake2b(layout, digest_size=16).hexdigest()
        self._release: Callable[[], object] = lambda: None
        if folder is not None:
            self._open(folder)

    def view(self, box: HeldBox) -> NDArray[Any]:
        """Return a box's elements, flat, as unsigned integers; do not write."""
        return box.view(self._buffer)

    def allocate(self) -> NDArray[np.uint8]:
        """Return a buffer for another version of all boxes; `replace` takes it."""
        if self._folder is None:
            try:
                return np.empty(self._nbytes, np.uint8)
            except (MemoryError, ValueError, OverflowError) as error:
                raise NoMemoryError.from_array(
                    "the mirror", self._nbytes, "uint8", (self._nbytes,), "Pass mirror=FOLDER."
                ) from error
        path = os.path.join(self._folder, f"weights-{uuid.uuid4().hex}.bin")
        with convert_os_errors("cannot write the mirror", path, is_target=True):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, max(self._nbytes, 1))  # a full disk is found now, not at a write to memory
            except BaseException:
                os.unlink(path)
                raise
            finally:
                os.close(fd)
        return np.memmap(path, np.uint8, "r+", shape=(max(self._nbytes, 1),))[: self._nbytes]

    def discard(self, buffer: NDArray[np.uint8]) -> None:
        """Drop a buffer that `allocate` returned."""
        path = getattr(buffer, "filename", None)
        if path is not None:
            with suppress(OSError):
                os.unlink(path)

    def digest_held(self, names: Collection[str]) -> dict[str, Digest]:
        """Return this worker's part of the digests of tensors, as the buffer has them now."""
        return sum_digests([box for box in self.boxes if box.name in names], lambda box: box.digest(self._buffer))

    def replace(self, buffer: NDArray[np.uint8], version: Version, digests: Mapping[str, Digest]) -> None:
        """Hold another version in another buffer."""
        old = self._buffer
        self._buffer, self.version, self.digests = buffer, version, dict(digests)
        self._file = os.path.basename(str(getattr(buffer, "filename", "")))
        try:
            self._write_held()
        finally:
            self.discard(old)

    def apply(self, changes: Mapping[HeldBox, NewElements], version: Version, digests: Mapping[str, Digest]) -> None:
        """Change the boxes in place."""
        # If the process is killed here, the next one finds digests that differ, and takes an anchor.
        for box, change in changes.items():
            write_elements(change, box.view(self._buffer))
        self.version, self.digests = version, {**self.digests, **digests}
        self._write_held()

    def forget(self) -> None:
        """Hold nothing: the buffer may be damaged."""
        self.discard(self._buffer)
        self._buffer, self.version, self.digests, self._file = np.empty(0, np.uint8), None, {}, ""
        if self._folder is not None:
            with suppress(OSError):
                os.unlink(os.path.join(self._folder, _HELD))

    def close(self) -> None:
        """Release the folder."""
        self._buffer = np.empty(0, np.uint8)
        self._release()

    def _open(self, folder: str) -> None:
        """Lock the folder, and take what it holds if that is undamaged."""
        with convert_os_errors("cannot open the mirror", folder, is_target=True):
            os.makedirs(folder, exist_ok=True)
            lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._release = weakref.finalize(self, os.close, lock)  # also if nobody closes the mirror
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self.close()
                raise UsageError(
                    "another process uses this mirror", where=folder, fix="Give each server a folder of its own."
                ) from error
        record = self._read_held(folder)
        kept = "" if record is None else record.file
        for name in os.listdir(folder):
            if name.startswith("weights-") and name != kept:
                with suppress(OSError):
                    os.unlink(os.path.join(folder, name))

    def _read_held(self, folder: str) -> _HeldRecord | None:
        path = os.path.join(folder, _HELD)
        try:
            with open(path, "rb") as file:
                record = load(_HeldRecord, file.read(), where=path)
            weights = os.path.join(folder, os.path.basename(record.file))
            if (record.stream, record.layout) != (self._stream, self._layout):
                return None
            if os.path.getsize(weights) != max(self._nbytes, 1):
                return None
            buffer = np.memmap(weights, np.uint8, "r+", shape=(max(self._nbytes, 1),))[: self._nbytes]
        except (OSError, ValueError, CheckpointError):
            return None
        digests = sum_digests(self.boxes, lambda box: box.digest(buffer))
        if {name: digest.hex() for name, digest in digests.items()} != dict(record.digests):
            return None
        self._buffer, self.version, self.digests, self._file = buffer, record.version, digests, record.file
        return record

    def _write_held(self) -> None:
        if self._folder is None or self.version is None:
            return
        digests = {name: digest.hex() for name, digest in self.digests.items()}
        data = dump(_HeldRecord(self._stream, self.version, self._layout, self._file, digests))
        path = os.path.join(self._folder, _HELD)
        with convert_os_errors("cannot write the mirror", path, is_target=True):
            with open(f"{path}.new", "wb") as file:
                file.write(data)
            os.replace(f"{path}.new", path)
