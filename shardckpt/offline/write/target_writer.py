"""Writing the files of a target that are decided: payload, side by side; what stands beside it; what ends it."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from shardckpt.errors import UsageError
from shardckpt.format.reader import Reader
from shardckpt.offline.write.report import Meter, WrittenFile
from shardckpt.offline.write.stream import MemoryBudget, OutputFile, TensorStream
from shardckpt.storage.publication import Publication
from shardckpt.storage.store import Store, Writer

Hashes = Mapping[str, tuple[int, ...]]
"""File to the hashes of its blocks."""


@dataclass(frozen=True, slots=True)
class FinalFiles:
    """Files with the hashes of the payload, written last.

    Attributes:
        names: In the order in which they are written.
        made: Their content, once the payload is written.
    """

    names: tuple[str, ...]
    made: Callable[[Hashes], Mapping[str, bytes]]


@dataclass(frozen=True, slots=True)
class Layout:
    """The files of a target.

    Attributes:
        payload: With their headers made, in order.
        small: Other files, name to content, written after the payload.
        ending: What is written last, where the format keeps hashes.
    """

    payload: tuple[OutputFile, ...]
    small: Mapping[str, bytes]
    ending: FinalFiles | None = None

    @property
    def files(self) -> tuple[WrittenFile, ...]:
        """The payload, for a report."""
        return tuple(WrittenFile(file.name, file.nbytes, file.count) for file in self.payload)

    @property
    def others(self) -> tuple[str, ...]:
        """Names of all other files."""
        return (*self.small, *(self.ending.names if self.ending else ()))

    def check_names(self, last: str) -> None:
        """Check that no file replaces another one, and that the last file is planned.

        Args:
            last: File that makes the result loadable; empty if all files appear at once.

        Raises:
            UsageError: The target, a plugin as a rule, planned something else.
        """
        names = [posixpath.normpath(name) for name in (*(file.name for file in self.payload), *self.others)]
        fix = "This is a fault of the target, not of the checkpoint."
        if len(set(names)) < len(names):
            name = next(name for name in names if names.count(name) > 1)
            raise UsageError("the files of a target must have different names", found=f"{name} twice", fix=fix)
        if last and last not in names:
            raise UsageError("a target must plan its last file", found=", ".join(names[:5]), expected=last, fix=fix)

    def write_rest(self, hashes: Hashes, publication: Publication) -> None:
        """Write all files but the payload, whose blocks have these hashes. Raises StorageError."""
        ending = self.ending.made(hashes) if self.ending else {}
        for name, content in (*self.small.items(), *ending.items()):
            with publication.create(name) as writer:
                writer.write(content)


class CountingWriter:
    """A writer that counts bytes, for the encoder of a file, which must not close it.

    Args:
        writer: The open file.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.nbytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append data. Raises StorageError."""
        self._writer.write(data)
        self.nbytes += memoryview(data).nbytes

    def copy_from(self, source: Store, name: str, offset: int, nbytes: int) -> None:
        """Append a range of a file of `source`. Raises as `Writer.copy_from` does."""
        self._writer.copy_from(source, name, offset, nbytes)
        self.nbytes += nbytes


@dataclass(frozen=True, slots=True)
class TargetWriter:
    """Writes payload files from one source.

    Attributes:
        reader: The open checkpoint.
        max_memory: Bytes that may be added to the process's start-up.
        meter: Counts written bytes.
        jobs: Files written side by side.
        allow_overflow: Accept finite values that become infinite in a cast.
    """

    reader: Reader
    max_memory: int
    meter: Meter
    jobs: int = 1
    allow_overflow: bool = False

    def write(self, files: Sequence[OutputFile], publication: Publication) -> Hashes:
        """Write payload files.

        Raises:
            CheckpointError: The source's bytes cannot be read, or a cast overflows.
            StorageError: Reading or writing failed.
            UsageError: A file has another size than planned.
        """
        writers = max(min(self.jobs, len(files)), 1)
        budget = MemoryBudget.share(self.max_memory, writers, is_local=self.reader.store.capabilities.is_local)
        stream = TensorStream(self.reader, budget, self.meter, allow_overflow=self.allow_overflow)

        def write(file: OutputFile) -> tuple[int, ...]:
            with publication.create(file.name) as writer:
                counting = CountingWriter(writer)
                hashes = file.encode(stream, counting)
                if counting.nbytes != file.nbytes:
                    raise UsageError(
                        "a target must write as many bytes as it plans",
                        where=file.name,
                        found=f"{counting.nbytes} bytes",
                        expected=f"{file.nbytes} bytes",
                        fix="This is a fault of the target, not of the checkpoint.",
                    )
                return hashes

        if writers == 1:
            return {file.name: write(file) for file in files}
        with ThreadPoolExecutor(writers) as pool:
            started = {pool.submit(write, file): file.name for file in files}
            try:
                return {started[done]: done.result() for done in as_completed(started)}
            except BaseException:
                self.meter.stop()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
