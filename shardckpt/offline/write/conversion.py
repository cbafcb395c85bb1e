"""A target's planned files, and their execution: publish, copy, report."""

from __future__ import annotations

import posixpath
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from contextlib import closing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

from shardckpt.encodings.safetensors_check import create_checked
from shardckpt.errors import UsageError
from shardckpt.events.progress import Meter, OnProgress
from shardckpt.offline.results.contents import Report, WrittenFile
from shardckpt.offline.write.stream import RESERVED_BYTES, CountingWriter, MemoryBudget, OutputFile, TensorStream
from shardckpt.offline.write.worker_pool import WorkerPool, count_threads, limit_threads, report_missing_threads
from shardckpt.plan.layout.output_files import OutputTensor
from shardckpt.reader import Reader
from shardckpt.storage.publication import Publication, keep_no_file
from shardckpt.storage.publish import publish
from shardckpt.storage.replaceable import FolderKind, Kind
from shardckpt.storage.resolve_url import local_path
from shardckpt.storage.store import Store
from shardckpt.storage.thread_pool import ThreadPool

_Publication = TypeVar("_Publication")

Hashes = Mapping[str, bytes]  # file name to the packed hashes of its blocks; empty if the format stores none


@dataclass(frozen=True, slots=True)
class FinalFiles:
    """Files that depend on payload hashes; they are written last."""

    names: tuple[str, ...]  # in writing order
    made: Callable[[Hashes], Mapping[str, bytes]]  # returns their content, after the payload is written


@dataclass(frozen=True, slots=True)
class Layout:
    """A target's files.

    Attributes:
        payload: Payload files in order, including their headers.
        small: Name to content: other files, which are written after the payload.
        ending: Files that are written last, if the format stores hashes.
    """

    payload: tuple[OutputFile, ...]
    small: Mapping[str, bytes]
    ending: FinalFiles | None = None

    @property
    def files(self) -> tuple[WrittenFile, ...]:
        """The payload files, for a report."""
        return tuple(WrittenFile(file.name, file.nbytes, file.count) for file in self.payload)

    @property
    def others(self) -> tuple[str, ...]:
        """Names of all files except the payload."""
        return (*self.small, *(self.ending.names if self.ending else ()))

    def check_names(self, last: str) -> None:
        """Check that file names are unique, and that the last file is planned.

        Args:
            last: Name of the file that makes the result loadable; empty if all files appear atomically.

        Raises:
            UsageError: The plan, usually of a plugin, violates this.
        """
        names = [posixpath.normpath(name) for name in (*(file.name for file in self.payload), *self.others)]
        fix = "This is a fault of the target, not of the checkpoint."
        if len(set(names)) < len(names):
            name = next(name for name in names if names.count(name) > 1)
            raise UsageError("the files of a target must have different names", found=f"{name} twice", fix=fix)
        if last and last not in names:
            raise UsageError("a target must plan its last file", found=", ".join(names[:5]), expected=last, fix=fix)

    def write_rest(self, hashes: Hashes, publication: Publication) -> None:
        """Write all files except the payload. Raises StorageError.

        `hashes` are for the payload's blocks.
        """
        ending = self.ending.made(hashes) if self.ending else {}
        for name, content in (*self.small.items(), *ending.items()):
            with publication.create(name) as writer:
                writer.write(content)


def keep_nothing(target: str) -> Collection[str]:  # noqa: ARG001  (other formats look at the target)
    """Return no names."""
    return ()


@dataclass(frozen=True, slots=True)
class PlannedFiles:
    """A conversion's planned files.

    Attributes:
        kind: Kind of checkpoint that may be replaced at the target.
        last: Name of the file that makes the result loadable. On a remote store it must be planned; on a disk all files
            appear atomically.
        plan_layout: Returns the files, given a suffix for their names and a native step's id. The suffix is empty
            unless readers may still read files with the usual names. All ranks that share the files get rank 0's.
        nbytes: Tensor data to write, in bytes.
        find_kept: Returns the target's files that other checkpoints refer to, given its path or URL.
        save_id: The native step's id; empty for other formats.
        written: Tensors as written, if the target chooses their dtypes; None for the selection's tensors.
        warnings: Content that the files lack, one sentence each.
    """

    kind: Kind
    last: str
    plan_layout: Callable[[str, str], Layout]
    nbytes: int
    find_kept: Callable[[str], Collection[str]] = keep_nothing
    save_id: str = ""
    written: tuple[OutputTensor, ...] | None = None
    warnings: tuple[str, ...] = ()


class WriteSettings(NamedTuple):
    """How payload files are written.

    Attributes:
        nbytes: Tensor data of the result, for the progress.
        max_memory: Maximum memory in bytes, in addition to the started process.
        jobs: Number of threads; None to choose.
        allow_overflow: Whether a cast may make finite values infinite.
        is_local: Whether the target is on a local disk.
    """

    nbytes: int
    max_memory: int
    jobs: int | None
    allow_overflow: bool
    is_local: bool

    def count_threads(self, files: Sequence[OutputFile], *, is_local: bool) -> int:
        """Return how many threads write some files from a store."""
        if self.jobs is not None:
            return limit_threads(self.jobs, self.max_memory - RESERVED_BYTES)
        nbytes = sum(file.nbytes for file in files)
        return count_threads(nbytes, self.max_memory, is_local=is_local and self.is_local)


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """A planned conversion; the source is complete, and nothing has been written."""

    reader: Reader
    files: PlannedFiles
    report: Report  # without files and times
    max_memory: int  # bytes, in addition to the started process
    overwrite: bool = False  # replace a checkpoint of the same format
    jobs: int | None = None  # threads; None to choose
    allow_overflow: bool = False  # accept finite values that become infinite in a cast
    copied: Mapping[str, int] = field(default_factory=dict)  # name to size: files to copy unchanged
    copied_from: Store | None = None

    def publish_with(self, function: Callable[..., _Publication]) -> _Publication:
        """Call `publish` or `start_publication` in `storage.publish` for the target."""
        files, target, kind = self.files, self.report.target, self.files.kind
        if isinstance(kind, FolderKind):
            kind = replace(kind, renewed=frozenset(self.copied))
        return function(
            target,
            kind,
            overwrite=self.overwrite,
            needed_bytes=files.nbytes + sum(self.copied.values()),
            last=files.last,
            find_kept=partial(files.find_kept, target) if self.overwrite else keep_no_file,
        )

    def plan_layout(self, unique_suffix: str, save_id: str) -> Layout:
        """Return the target's files."""
        layout = self.files.plan_layout(unique_suffix, save_id)
        layout.check_names(self.files.last if local_path(self.report.target) is None else "")
        return layout

    @property
    def settings(self) -> WriteSettings:
        """How payload files are written."""
        is_local = local_path(self.report.target) is not None
        return WriteSettings(self.files.nbytes, self.max_memory, self.jobs, self.allow_overflow, is_local)

    def write_payload(
        self, files: Sequence[OutputFile], publication: Publication, on_progress: OnProgress | None
    ) -> Hashes:
        """Write payload files concurrently, and return their block hashes."""
        return write_payload(self.reader, self.settings, files, publication, on_progress)

    def finish(self, layout: Layout, hashes: Hashes, publication: Publication) -> None:
        """Write all files except the payload, with the last file at the end."""
        if self.copied_from is not None:
            for name, size in self.copied.items():
                if name not in layout.small:
                    with publication.create(name) as writer:
                        writer.copy_from(self.copied_from, name, 0, size)
        layout.write_rest(hashes, publication)


def write_payload(
    reader: Reader,
    settings: WriteSettings,
    files: Sequence[OutputFile],
    publication: Publication,
    on_progress: OnProgress | None,
) -> Hashes:
    """Write payload files concurrently from an open checkpoint, and return their block hashes."""
    is_local = reader.store.capabilities.is_local
    threads = settings.count_threads(files, is_local=is_local)
    writers = max(min(threads, len(files)), 1)
    meter = Meter(settings.nbytes, on_progress) if writers > 1 or on_progress is not None else None
    budget = MemoryBudget.share(settings.max_memory, threads, is_local=is_local)
    with report_missing_threads(), closing(WorkerPool(threads, writers)) as pool:
        stream = TensorStream(reader, budget, meter, pool, allow_overflow=settings.allow_overflow)
        if writers == 1:
            return {file.name: _write_file(file, stream, publication) for file in files}
        return _write_files(files, writers, stream, publication)


def _write_files(files: Sequence[OutputFile], writers: int, stream: TensorStream, publication: Publication) -> Hashes:
    """Write files side by side; once one fails, the others stop."""
    with ThreadPool(writers) as pool:
        started = {pool.submit(_write_file, file, stream, publication): file.name for file in files}
        try:
            return {started[done]: done.result() for done in as_completed(started)}
        except BaseException:
            stream.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _write_file(file: OutputFile, stream: TensorStream, publication: Publication) -> bytes:
    with create_checked(publication, file.name) as writer:
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


class Stopwatch:
    """Seconds spent in consecutive phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}  # by phase, so far
        self._since = time.perf_counter()

    def end_phase(self, phase: str) -> None:
        """Add the time since the last phase to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._since
        self._since = now


def write_alone(plan: ConversionPlan, watch: Stopwatch, on_progress: OnProgress | None) -> Layout:
    """Write and publish all files from this process, and return them."""
    with plan.publish_with(publish) as publication:
        layout = plan.plan_layout(publication.unique_suffix, plan.files.save_id)
        hashes = plan.write_payload(layout.payload, publication, on_progress)
        watch.end_phase("copy")
        plan.finish(layout, hashes, publication)
    watch.end_phase("publish")
    return layout


Write: TypeAlias = Callable[[ConversionPlan, Stopwatch, "OnProgress | None"], Layout]  # of all files


_given: ContextVar[Write | None] = ContextVar("given", default=None)


@contextmanager
def write_by(write: Write) -> Iterator[None]:
    """Let conversions in this context write by the given function: a verb's call says what, not who writes it."""
    token = _given.set(write)
    try:
        yield
    finally:
        _given.reset(token)


def run_conversion(
    plan: ConversionPlan, watch: Stopwatch, on_progress: OnProgress | None, write: Write = write_alone
) -> Report:
    """Write the target, except in a dry run, and return the completed report."""
    watch.end_phase("plan")
    write = _given.get() or write
    layout = plan.plan_layout("", plan.files.save_id) if plan.report.dry_run else write(plan, watch, on_progress)
    carried = tuple(dict.fromkeys((*plan.copied, *layout.others)))
    return replace(plan.report, files=layout.files, carried=carried, seconds=watch.seconds)
