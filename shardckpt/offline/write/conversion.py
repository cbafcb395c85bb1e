"""Run a planned conversion: publish, copy, finish, report. `consolidate`, `convert` and `reshard` all end here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shardckpt.format.reader import Reader
from shardckpt.offline.write.report import Meter, OnProgress, Report, Stopwatch
from shardckpt.offline.write.target_writer import Hashes, Layout, TargetWriter
from shardckpt.storage.publication import Publication
from shardckpt.storage.publish import begin, publish
from shardckpt.storage.replaceable import FolderKind, Kind
from shardckpt.storage.resolve_url import local_path
from shardckpt.storage.store import Store

_Publication = TypeVar("_Publication")


def keep_nothing(target: str) -> Collection[str]:  # noqa: ARG001  (other formats look at the target)
    """Return no names."""
    return ()


@dataclass(frozen=True, slots=True)
class PlannedFiles:
    """The files that a target makes of a conversion.

    Attributes:
        kind: What may be replaced at the target.
        last: File that makes the result loadable. It must be planned if the target is a folder of a remote store; on a
            disk all files appear at once.
        plan_layout: Returns the files, given a suffix for their names and the id of a native step. The suffix is empty
            unless files of the usual names may still be read. Ranks that share the files are given those of rank 0.
        nbytes: Bytes of tensor data that will be written.
        find_kept: Returns files of the target that something else refers to, given its path or URL.
        save_id: The id of the native step; empty for other formats.
    """

    kind: Kind
    last: str
    plan_layout: Callable[[str, str], Layout]
    nbytes: int
    find_kept: Callable[[str], Collection[str]] = keep_nothing
    save_id: str = ""


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """One planned conversion: the source is proven complete, the target is untouched.

    Attributes:
        reader: The open checkpoint.
        files: The files to write.
        report: The report, without files and times.
        max_memory: Bytes that the process may add to its start-up.
        overwrite: Replace a checkpoint of the same format.
        jobs: Files written side by side.
        allow_overflow: Accept finite values that become infinite in a cast.
        parallel: Share the files among the ranks of the job.
        copied: Name to size of files of `copied_from` that are copied unchanged.
        copied_from: Where they are.
    """

    reader: Reader
    files: PlannedFiles
    report: Report
    max_memory: int
    overwrite: bool = False
    jobs: int = 1
    allow_overflow: bool = False
    parallel: bool = False
    copied: Mapping[str, int] = field(default_factory=dict)
    copied_from: Store | None = None

    def publish_with(self, function: Callable[..., _Publication]) -> _Publication:
        """Call `publish` or `begin` of `storage.publish` for the target. Raises as they do."""
        files, target, kind = self.files, self.report.target, self.files.kind
        if isinstance(kind, FolderKind):
            kind = replace(kind, renewed=frozenset(self.copied))
        return function(
            target,
            kind,
            overwrite=self.overwrite,
            needed_bytes=files.nbytes + sum(self.copied.values()),
            last=files.last,
            keep=files.find_kept(target) if self.overwrite else (),
        )

    def plan_layout(self, unique_suffix: str, save_id: str) -> Layout:
        """Return the files of the target. Raises UsageError if they cannot be those of one checkpoint."""
        layout = self.files.plan_layout(unique_suffix, save_id)
        layout.check_names(self.files.last if local_path(self.report.target) is None else "")
        return layout

    def make_writer(self, on_progress: OnProgress | None) -> TargetWriter:
        """Return the writer of payload files."""
        meter = Meter(self.files.nbytes, on_progress)
        return TargetWriter(self.reader, self.max_memory, meter, self.jobs, self.allow_overflow)

    def finish(self, layout: Layout, hashes: Hashes, publication: Publication) -> None:
        """Write the files beside the payload, the last file last. Raises StorageError."""
        if self.copied_from is not None:
            for name, size in self.copied.items():
                if name not in layout.small:
                    with publication.create(name) as writer:
                        writer.copy_from(self.copied_from, name, 0, size)
        layout.write_rest(hashes, publication)


def run_conversion(plan: ConversionPlan, watch: Stopwatch, on_progress: OnProgress | None) -> Report:
    """Write the target, unless the report is of a dry run, and return the completed report.

    Raises:
        UsageError: The target exists and cannot be replaced.
        CheckpointError: The source's bytes cannot be read, or a cast overflows.
        StorageError: Reading or writing failed, or the target has no room.
    """
    watch.end_phase("plan")
    if plan.report.dry_run:
        layout = plan.plan_layout("", plan.files.save_id)
    else:
        layout = (_write_with_ranks if plan.parallel else _write)(plan, watch, on_progress)
    carried = tuple(dict.fromkeys((*plan.copied, *layout.others)))
    return replace(plan.report, files=layout.files, carried=carried, seconds=watch.seconds)


def _write(plan: ConversionPlan, watch: Stopwatch, on_progress: OnProgress | None) -> Layout:
    with plan.publish_with(publish) as publication:
        layout = plan.plan_layout(publication.unique_suffix, plan.files.save_id)
        hashes = plan.make_writer(on_progress).write(layout.payload, publication)
        watch.end_phase("copy")
        plan.finish(layout, hashes, publication)
    watch.end_phase("publish")
    return layout


def _write_with_ranks(plan: ConversionPlan, watch: Stopwatch, on_progress: OnProgress | None) -> Layout:
    """Write with all ranks of a job; rank 0 writes the small files."""
    from shardckpt.offline.write.parallel import publish_together, ranks  # noqa: PLC0415  (one process needs no torch)

    with ranks() as group:
        layout = publish_together(
            group,
            plan.files.save_id,
            begin=lambda: plan.publish_with(begin),
            plan_layout=plan.plan_layout,
            write=plan.make_writer(on_progress).write,
            finish=plan.finish,
        )
    watch.end_phase("copy")
    return layout
