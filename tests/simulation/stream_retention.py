"""Actors that remove versions of a simulated stream, or write anchors, while it is published and received."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardckpt.errors import ShardckptError
from shardckpt.offline.streams.compact_versions import compact_versions
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.retention.prune_stream import prune_stream
from tests.simulation.scheduler import Process, Scheduler
from tests.simulation.stream_auditor import require_typed

_LONGEST_PAUSE_S = 6.0

Retention = Literal["none", "publisher", "pruner", "compactor", "all"]
RETENTIONS: tuple[Retention, ...] = ("none", "none", "publisher", "pruner", "compactor", "all")


@dataclass
class RetentionJob:
    """A start of a pruner or compactor."""

    url: str
    keep_anchors: int
    passes: int
    writes_anchors: bool  # a compactor does
    errors: list[ShardckptError] = field(default_factory=list)


class RetentionActor:
    """A process that calls `prune_stream` or `compact_versions` again and again."""

    def __init__(self, scheduler: Scheduler, job: RetentionJob, process: Process) -> None:
        self._scheduler, self._job, self._process = scheduler, job, process

    def run(self) -> None:
        """Make all passes; an error ends one."""
        try:
            for _ in range(self._job.passes):
                self._scheduler.sleep(self._scheduler.random.random() * _LONGEST_PAUSE_S)
                self._remove()
        finally:
            self._process.die()

    def _remove(self) -> None:
        job = self._job
        try:
            if job.writes_anchors:
                removed = compact_versions(job.url, keep_anchors=job.keep_anchors).removed
            else:
                folder = StreamFolder(job.url)
                folder.require_record()
                removed = tuple(each.number for each in prune_stream(folder, keep_anchors=job.keep_anchors))
        except ShardckptError as error:
            require_typed(error)
            job.errors.append(error)
            self._scheduler.record("failed", "retention", f"{type(error).__name__}: {error}")
        else:
            self._scheduler.record("removed", f"versions {removed}")
