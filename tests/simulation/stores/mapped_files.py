"""Files that simulated processes map into memory: a receiver's mirror."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np

from shardckpt.stream.receive import mirror
from tests.simulation.scheduler import Scheduler
from tests.simulation.seams import Twin
from tests.simulation.stores.disk import File
from tests.simulation.stores.operating_system import OperatingSystem

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
else:
    Bytes = np.ndarray


class MappedBytes(Bytes):
    """The bytes of a file in memory: what is written to it is in the file at once, also if the process is killed."""

    filename = ""

    def __array_finalize__(self, source: Any) -> None:
        """Keep the name of the file in views."""
        self.filename = getattr(source, "filename", "")


class _NewFile(BytesIO):
    """A file that is being written, with the interface of `open(path, "wb")`."""

    def __init__(self, system: OperatingSystem, path: str) -> None:
        super().__init__()
        self._system = system
        self._fd = system.open(path, os.O_RDWR | os.O_CREAT)
        system.ftruncate(self._fd, 0)

    def write(self, data: Any) -> int:
        """Append bytes."""
        return self._system.write(self._fd, memoryview(data))

    def __exit__(self, *_: object) -> None:
        self._system.close(self._fd)


@contextmanager
def mapping(system: OperatingSystem, scheduler: Scheduler) -> Iterator[None]:
    """Map files of the simulated disk inside the context, instead of real ones."""

    def map_file(path: str, _dtype: object, _mode: str, shape: tuple[int, ...]) -> MappedBytes:
        file = system.find(system.resolve(path))
        assert isinstance(file, File)
        mapped = np.frombuffer(file.data, np.uint8)[: shape[0]].view(MappedBytes)
        mapped.filename = path
        return mapped

    def open_file(path: str, mode: str) -> BytesIO:
        return _NewFile(system, path) if mode == "wb" else system.open_stream(path, mode)

    def reserve(fd: int, _offset: int, nbytes: int) -> None:
        system.ftruncate(fd, nbytes)

    def apply(change: Any, values: Any) -> None:
        scheduler.step("store", "a part of the mirror")
        whole(change, values)

    space = vars(mirror)
    whole: Callable[[Any, Any], None] = space["write_elements"]
    kept = {name: space.get(name) for name in ("np", "open", "write_elements")}
    system.posix_fallocate = reserve  # type: ignore[attr-defined]
    space.update(np=Twin(np, memmap=map_file), open=open_file, write_elements=apply)
    try:
        yield
    finally:
        space.update(kept)
        del space["open"]
