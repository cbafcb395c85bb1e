"""Actors in a stream's history: publishers and receivers, which call the public API."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardckpt.boxes import Box, Shape
from shardckpt.checkpoint.save.handle import SaveHandle
from shardckpt.errors import PoisonedError, PublisherReplacedError, RankError, ShardckptError
from shardckpt.stream.format.stream_records import Version
from shardckpt.stream.publish.ledger import Anchors
from shardckpt.stream.publish.publisher import Publisher
from shardckpt.stream.receive.subscriber import Staged, Subscriber, SubscriberState
from tests.simulation.network import SimulatedRanks
from tests.simulation.scheduler import HistoryError, Scheduler
from tests.simulation.stream_auditor import StreamAuditor, find_content, require_typed
from tests.simulation.streamed_weights import Engine, build_weights, slice_rows

_LONGEST_PAUSE_S = 5.0
_LONGEST_STEP_S = 3.0  # of the training
_WORTHLESS = -1.0


def is_lost(error: BaseException | None) -> bool:
    """Return True if a rank is gone, not only its call failed: the others cannot continue without it."""
    return isinstance(error, RankError) and ("is gone or did not" in str(error) or "did not come" in str(error))


@dataclass
class PublisherJob:
    """A start of a publisher."""

    start: int  # number among all starts: makes the attempts of starts differ
    url: str
    first: int  # number of its first version
    versions: int
    max_chain: int = 2
    restored: int | None = None  # content of the weights with which it resumes; None without a resume
    is_sharded: bool = False
    has_waits: bool = True  # waits for each version
    repeats: bool = False  # publishes a number again if it failed
    keep_anchors: int | None = None
    errors: list[ShardckptError] = field(default_factory=list)
    found: list[int | None] = field(default_factory=list)  # what `resume` found
    published: list[int] = field(default_factory=list)  # contents


class PublisherRank:
    """One rank of a publisher."""

    def __init__(
        self, scheduler: Scheduler, auditor: StreamAuditor, job: PublisherJob, ranks: SimulatedRanks, rank: int
    ) -> None:
        self._scheduler, self._auditor, self._job = scheduler, auditor, job
        self._ranks, self._rank = ranks, rank
        self._pending: list[tuple[SaveHandle, int, int]] = []

    def run(self) -> None:
        """Resume, then publish version after version; end when a rank is lost or another publisher comes."""
        job, link = self._job, self._ranks.link(self._rank)
        group: Any = link
        try:
            anchors = Anchors(max_chain=job.max_chain, max_bytes=1e9, keep=job.keep_anchors)
            publisher = Publisher(job.url, anchors=anchors, process_group=group)
            if job.restored is not None:
                self._resume(publisher, job.restored)
            number = job.first
            for attempt in range(job.versions):
                self._scheduler.sleep(self._scheduler.random.random() * _LONGEST_STEP_S)
                if self._publish(publisher, number, find_content(job.start, attempt)) or not job.repeats:
                    number += 1
            self._settle()
        except ShardckptError as error:
            self._fail("publisher", error)
        finally:
            self._ranks.processes[self._rank].die()

    def _resume(self, publisher: Publisher, content: int) -> None:
        found = publisher.resume(self._build(content))
        self._auditor.check_resume(content, found)
        self._job.found.append(found)
        self._scheduler.record("resumed", f"attempt {content} is version {found}")

    def _publish(self, publisher: Publisher, number: int, content: int) -> bool:
        """Publish a version; return False if that failed and the publisher can continue."""
        self._auditor.start_publish(content, number)
        self._scheduler.record("publish", f"version {number} as attempt {content}")
        epoch, weights = self._scheduler.observe(lambda: self._auditor.last_epoch), self._build(content)
        try:
            handle = publisher.publish(number, weights)
            for value in weights.values():
                value.fill_(_WORTHLESS)  # the training writes them at once
            self._pending.append((handle, content, epoch))
            if self._job.has_waits:
                self._settle()
        except ShardckptError as error:
            if isinstance(error, PublisherReplacedError) or is_lost(error):
                raise
            self._fail(f"version {number}", error)
            return False
        return True

    def _settle(self) -> None:
        """Wait for the versions in the background."""
        pending, self._pending = self._pending, []
        failure: ShardckptError | None = None
        for handle, content, epoch in pending:
            try:
                handle.result()
            except ShardckptError as error:
                failure = failure or error
                continue
            # A publisher that another one replaces may be just before its commit.
            self._auditor.acknowledge(content, epoch if self._job.has_waits else 0)
            self._job.published.append(content)
            self._scheduler.record("published", f"attempt {content}")
        if failure is not None:
            raise failure

    def _build(self, content: int) -> dict[str, Any]:
        return {**build_weights(content, self._rank, len(self._ranks.processes), is_sharded=self._job.is_sharded)}

    def _fail(self, subject: str, error: ShardckptError) -> None:
        require_typed(error)
        self._job.errors.append(error)
        self._scheduler.record("failed", subject, f"{type(error).__name__}: {error}")


@dataclass
class ReceiverJob:
    """A start of a server."""

    name: str  # the same for all its starts
    start: int
    url: str
    mirror: str | None
    stages: int
    timeout_s: float = 0.0
    errors: list[ShardckptError] = field(default_factory=list)
    activated: list[Version] = field(default_factory=list)


class ReceiverWorker:
    """One worker of a server, with an engine in memory."""

    def __init__(
        self, scheduler: Scheduler, auditor: StreamAuditor, job: ReceiverJob, ranks: SimulatedRanks, rank: int
    ) -> None:
        self._scheduler, self._auditor, self._job = scheduler, auditor, job
        self._ranks, self._rank, self._size = ranks, rank, len(ranks.processes)
        self._engine = Engine(scheduler)

    def run(self) -> None:
        """Receive versions; end when a worker is lost."""
        job, group = self._job, self._ranks.link(self._rank)
        link: Any = group
        layout = partial(self._find_box, size=self._size)
        subscriber = Subscriber(job.url, mirror=job.mirror, layout=layout, process_group=link)
        try:
            for call in range(job.stages):
                self._scheduler.sleep(self._scheduler.random.random() * _LONGEST_PAUSE_S)
                staged = self._stage(subscriber)
                if staged is not None:
                    self._commit(subscriber, staged, call)
        except RankError as error:
            self._fail("server", error)
        finally:
            self._ranks.processes[self._rank].die()

    def _find_box(self, name: str, shape: Shape, size: int) -> Box:
        return slice_rows(name, shape, self._rank, size)

    def _stage(self, subscriber: Subscriber) -> Staged | None:
        """Stage the newest version; nothing that the server uses changes, whether this fails or not."""
        before, label, state = self._engine.copy(), subscriber.label, subscriber.state
        staged: Staged | None = None
        try:
            staged = subscriber.stage(timeout_s=self._job.timeout_s)
        except ShardckptError as error:
            self._fail("stage", error)
            if is_lost(error):
                raise
        finally:
            if self._engine.differs_from(before):
                raise HistoryError("stage() has changed the weights")
            if subscriber.label != label or (staged is None and subscriber.state is not state):
                raise HistoryError(f"stage() has changed the label {label} to {subscriber.label}")
        return staged

    def _commit(self, subscriber: Subscriber, staged: Staged, call: int) -> None:
        before, label = self._engine.copy(), subscriber.label
        try:
            version = staged.commit(self._engine)
        except PoisonedError as error:
            self._fail("commit", error)
            if subscriber.state is not SubscriberState.POISONED or not subscriber.label.startswith("poisoned:"):
                raise HistoryError(f"after a failed update the label is {subscriber.label}") from error
            if is_lost(error.__cause__):
                raise RankError(str(error)) from error
            return
        except ShardckptError as error:
            self._fail("commit", error)
            if self._engine.differs_from(before) or subscriber.label != label:
                raise HistoryError("a refused update has changed the weights or the label") from error
            if is_lost(error):
                raise
            return
        if subscriber.label != str(version.number) or subscriber.held != version:
            raise HistoryError(f"the label of version {version} is {subscriber.label}")
        key = self._job.start, call
        self._auditor.activate(self._job.name, key, version, self._engine, self._rank, self._size)
        self._job.activated.append(version)
        self._scheduler.record("activated", f"version {version}")

    def _fail(self, subject: str, error: ShardckptError) -> None:
        self._job.errors.append(error)
        self._scheduler.record("failed", subject, f"{type(error).__name__}: {error}")
