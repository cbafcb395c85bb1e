"""Writing the files of a target that are decided: payload, side by side; what stands beside it; what ends it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from shardckpt.format.reader import Reader
from shardckpt.offline.write.report import Meter, WrittenFile
from shardckpt.offline.write.stream import MemoryBudget, OutputFile, TensorStream
from shardckpt.storage.publication import Publication

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

    def write_rest(self, hashes: Hashes, publication: Publication) -> None:
        """Write all files but the payload, whose blocks have these hashes. Raises StorageError."""
        ending = self.ending.made(hashes) if self.ending else {}
        for name, content in (*self.small.items(), *ending.items()):
            with publication.create(name) as writer:
                writer.write(content)


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
        """
        writers = max(min(self.jobs, len(files)), 1)
        budget = MemoryBudget.share(self.max_memory, writers, is_local=self.reader.store.capabilities.is_local)
        stream = TensorStream(self.reader, budget, self.meter, allow_overflow=self.allow_overflow)

        def write(file: OutputFile) -> tuple[int, ...]:
            with publication.create(file.name) as writer:
                return file.encode(stream, writer)

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
