"""Histories of a stream of weights: a seed gives publishers, receivers, faults and the event order."""

from __future__ import annotations

import logging
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from random import Random
from typing import Any, Literal

from numpy.typing import NDArray

from shardckpt.boxes import Box, Shape
from shardckpt.encodings.typed_json import load
from shardckpt.errors import PublisherReplacedError, ShardckptError, SourceNotFoundError
from shardckpt.storage import fsspec_writer
from shardckpt.stream.format.digest import Digest, digest_box
from shardckpt.tiers.peers.node_files import Node
from tests.simulation.faults import BUCKET, COMMON, DISK, LONGEST_STALL_S, FaultKind, Faults, PlannedFault, plan_faults
from tests.simulation.network import SimulatedRanks
from tests.simulation.scheduler import HistoryError, HistoryEvent, Process, Scheduler, Task
from tests.simulation.seams import Machine, Twin, simulated
from tests.simulation.simulated_history import collect_once
from tests.simulation.stores.bucket import SimulatedBucket, mount, unmount
from tests.simulation.stores.disk import Disk
from tests.simulation.stores.mapped_files import mapping
from tests.simulation.stores.node_disks import NodeDisks
from tests.simulation.stores.node_memory import Janitors
from tests.simulation.stores.operating_system import OperatingSystem
from tests.simulation.stores.run_storage import BucketStorage, DiskStorage, RunStorage
from tests.simulation.stream_actors import PublisherJob, PublisherRank, ReceiverJob, ReceiverWorker
from tests.simulation.stream_auditor import StreamAuditor, find_content
from tests.simulation.stream_retention import RETENTIONS, Retention, RetentionActor, RetentionJob
from tests.simulation.streamed_weights import BROKEN

_TIMEOUT_S = 20.0
_NODE = "node0"
_MIRRORS = "/mirror"
_LONGEST_HEAD_START_S = 5.0  # of a publisher, before another one comes
_FINAL_EVENTS = 6_000  # publishing and receiving must work again within so many events after the last fault
_EARLY = ("no stream of weights is here", "no version is published here")  # also within errors of other ranks
_APPLIES = frozenset({"apply"})
_MAX_LOADED = 64  # JSON files whose records are remembered: they are read again and again
STREAM_FAULTS = (
    FaultKind("engine fails", _APPLIES, BROKEN),
    FaultKind("kill while applying", _APPLIES),
    FaultKind("kill while the mirror is written", frozenset({"store"})),
    FaultKind("commit's answer lost", frozenset({"put"}), "answer lost", within="/COMMIT.json"),
    FaultKind("commit refused", frozenset({"put", "create", "link"}), "refused", within="/COMMIT.json"),
    FaultKind("kill before the commit", frozenset({"put", "link", "rename"}), within="/COMMIT.json"),
    FaultKind("stall before the commit", frozenset({"put", "link", "rename"}), within="/COMMIT.json"),
    FaultKind("mirror full", frozenset({"create", "write", "mkdir"}), "ENOSPC", lasts=True, within=_MIRRORS),
)


@dataclass(frozen=True)
class StreamScenario:
    """The actors and faults in a stream's history.

    Attributes:
        store: Kind of store.
        worlds: Number of ranks at each start of the publisher.
        versions: Number of versions that each start publishes.
        max_chain: Versions after an anchor until the next one.
        is_sharded: Whether each rank has only some rows of some tensors.
        resumes: How each later start continues: with the newest weights, with older ones, or with new ones.
        has_zombies: Whether the publisher may start again before the previous start has ended.
        has_waits: Whether publishers wait for each version before the next.
        repeats: Whether publishers publish a number again if it failed.
        receivers: Number of workers of each server.
        mirrors: Whether each server has a mirror folder.
        starts: Number of starts of each server.
        stages: Number of versions that each start of a server stages.
        timeout_s: Virtual seconds that servers wait for a version.
        faults: Planned faults.
        stay: Probability that a thread continues at a scheduling point.
        part_bytes: Bytes in one part of an upload.
        retention: What removes versions: publishers after an anchor, a process that prunes, one that compacts, or all.
        keep_anchors: How many of the newest anchors stay.
        passes: Number of passes of each such process.
    """

    store: Literal["disk", "bucket"]
    worlds: tuple[int, ...] = (2,)
    versions: int = 3
    max_chain: int = 2
    is_sharded: bool = True
    resumes: Literal["newest", "older", "none"] = "newest"
    has_zombies: bool = False
    has_waits: bool = True
    repeats: bool = False
    receivers: tuple[int, ...] = (1,)
    mirrors: tuple[bool, ...] = (False,)
    starts: int = 1
    stages: int = 3
    timeout_s: float = 0.0
    faults: tuple[PlannedFault, ...] = ()
    stay: float = 0.8
    part_bytes: int = 16 << 20
    retention: Retention = "none"
    keep_anchors: int = 1
    passes: int = 8

    @classmethod
    def from_seed(cls, seed: int) -> StreamScenario:
        """Choose a scenario."""
        random = Random(f"stream {seed}")
        servers = random.choice((1, 1, 2))
        scenario = cls(
            random.choice(("disk", "bucket")),
            worlds=tuple(random.choice((1, 2, 2, 3)) for _ in range(random.choice((1, 2, 2, 3)))),
            versions=random.choice((1, 2, 3, 4)),
            max_chain=random.choice((1, 2, 2, 5)),
            is_sharded=random.random() < 0.7,
            resumes=random.choice(("newest", "newest", "older", "none")),
            has_zombies=random.random() < 0.3,
            has_waits=random.random() < 0.6,
            repeats=random.random() < 0.3,
            receivers=tuple(random.choice((1, 1, 2, 3)) for _ in range(servers)),
            mirrors=tuple(random.random() < 0.6 for _ in range(servers)),
            starts=random.choice((1, 2, 3)),
            stages=random.choice((1, 2, 4)),
            timeout_s=random.choice((0.0, 0.0, 5.0, 40.0)),
            stay=random.choice((0.5, 0.8, 0.95)),
            part_bytes=random.choice((16 << 20, 4096)),
        )
        kinds = COMMON + STREAM_FAULTS + (DISK if scenario.store == "disk" else BUCKET + DISK[-1:])
        count = random.choice((0, 1, 1, 2, 2, 3, 5))
        scenario = replace(scenario, faults=tuple(plan_faults(random, kinds, count, scenario.expected_events)))
        random = Random(f"stream retention {seed}")  # the rest stays what it was
        retention, keep_anchors, passes = random.choice(RETENTIONS), random.choice((1, 1, 2)), random.choice((4, 8, 16))
        return replace(scenario, retention=retention, keep_anchors=keep_anchors, passes=passes)

    @property
    def expected_events(self) -> int:
        """Approximate number of events before the last fault."""
        publishers = sum(30 + self.versions * (40 + 20 * world) for world in self.worlds)
        return publishers + sum(self.starts * self.stages * 40 * workers for workers in self.receivers)


@dataclass
class StreamHistory:
    """A stream's history that has ended.

    Attributes:
        seed: Its seed.
        scenario: Its actors and planned faults.
        events: Its events.
        fired: Faults that have shown.
        failure: The error that ended it; None if all claims held.
    """

    seed: int
    scenario: StreamScenario
    events: list[HistoryEvent] = field(default_factory=list)
    fired: list[PlannedFault] = field(default_factory=list)
    failure: BaseException | None = None

    def __str__(self) -> str:
        """Return the history with one line per event."""
        lines = [f"stream {self.seed}: {replace(self.scenario, faults=())}"]
        lines += [f"planned: {fault}" for fault in self.scenario.faults]
        lines += map(str, self.events)
        lines.append("all claims hold" if self.failure is None else f"FAILED: {self.failure}")
        return "\n".join(lines)


def run_stream_history(seed: int, scenario: StreamScenario | None = None) -> StreamHistory:
    """Run one history of a stream; the same seed and scenario give the same events.

    Args:
        seed: Seed for the scenario and all choices.
        scenario: Actors and faults; None lets the seed choose them.

    Returns:
        The history, whose `failure` is set if a claim does not hold.
    """
    history = StreamHistory(seed, scenario or StreamScenario.from_seed(seed))
    with warnings.catch_warnings(), collect_once():
        warnings.simplefilter("ignore")
        _run(history)
    return history


def _run(history: StreamHistory) -> None:
    """Run a history. Leaves no reference to its parts."""
    run = _StreamRun(history)
    try:
        run.run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (a result)
        history.failure = error
    finally:
        unmount()
    history.events, history.fired = run.scheduler.events, run.faults.fired


class _StreamMachine(Machine):
    """A machine on which the seed gives ids, too, and which remembers the results of pure functions."""

    def twins(self) -> list[tuple[object, object]]:
        """Return pairs: a value that modules refer to, and its simulated twin."""
        chance = self.scheduler.random
        return [
            *super().twins(),
            (uuid, Twin(uuid, uuid4=lambda: uuid.UUID(bytes=chance.randbytes(16)))),
            (digest_box, _remember_digests()),
            (load, _remember_records()),
        ]


def _remember_digests() -> Callable[..., Digest]:
    """Return a caching `digest_box`: the same small boxes are digested again and again."""
    known: dict[object, Digest] = {}

    def digest(values: NDArray[Any], shape: Shape, box: Box) -> Digest:
        key = values.tobytes(), values.dtype, values.size, shape, box
        found = known.get(key)
        if found is None:
            found = known[key] = digest_box(values, shape, box)
        return found

    return digest


def _remember_records() -> Callable[..., Any]:
    """Return a caching `load`."""
    remembered = lru_cache(_MAX_LOADED)(load)
    return lambda kind, data, **options: remembered(kind, bytes(data), **options)


class _StreamRun:
    """A running history of a stream."""

    def __init__(self, history: StreamHistory) -> None:
        self.scenario = history.scenario
        self.scheduler = Scheduler(history.seed, history.scenario.stay)
        self.disk = Disk()
        self._nodes = {_NODE: Node(_NODE, "machine0", "rack0")}
        self.system = OperatingSystem(self.scheduler, NodeDisks(self.disk, self._nodes))
        self.faults = Faults(history.scenario.faults, self._act)
        for folder in ("/home", "/disk", _MIRRORS):
            self.disk.make_folder(folder, self.scheduler.clock)
        self.disk.sync(self.disk.root)
        bucket = SimulatedBucket(self.scheduler, self.disk.changes)
        mount(bucket)
        self.storage: RunStorage = DiskStorage(self.disk, "/disk/stream")
        if self.scenario.store == "bucket":
            self.storage = BucketStorage(bucket, "sim://bucket/stream")
        self.auditor = StreamAuditor(self.scheduler, self.storage)
        self.auditor.is_quiet = lambda: not self.faults.fired
        self._harness = self._new_process("harness")
        self._processes: list[Process] = []
        self._publishers: list[PublisherJob] = []
        self._receivers: list[ReceiverJob] = []
        self._retention: list[RetentionJob] = []

    def run(self) -> None:
        """Run the history to its end. Raises the error that ends it."""
        janitors = Janitors(self.scheduler, lambda name, _node: self._new_process(name))
        machine = _StreamMachine(self.scheduler, self.system, janitors, self._nodes)
        log = logging.getLogger("shardckpt")
        part_bytes, was_disabled = fsspec_writer.PART_BYTES, log.disabled
        with simulated(machine), mapping(self.system, self.scheduler):
            fsspec_writer.PART_BYTES, log.disabled = self.scenario.part_bytes, True
            try:
                self.scheduler.before_event = self._show_faults
                self.scheduler.after_event = self.auditor.check
                self.scheduler.spawn(self._harness, "harness", self._direct)
                self.scheduler.run()
            finally:
                fsspec_writer.PART_BYTES, log.disabled = part_bytes, was_disabled

    # The harness

    def _direct(self) -> None:
        """Start the actors, end the faults, then require that publishing and receiving works."""
        scenario = self.scenario
        servers = [
            self.scheduler.spawn(self._harness, f"starter {at}", partial(self._serve, at))
            for at in range(len(scenario.receivers))
        ]
        for name in ("pruner", "compactor"):
            if scenario.retention in {name, "all"}:
                self._start_retention(name)
        for world in scenario.worlds:
            tasks = self._start_publisher(world, self._choose_restored())[1]
            if scenario.has_zombies:
                self.scheduler.sleep(self.scheduler.random.random() * _LONGEST_HEAD_START_S)
            else:
                self._wait_for(tasks)
        self._wait_for(servers)
        self._wait_for_publishers()
        self._finish()

    def _serve(self, at: int) -> None:
        """Start a server again and again; the first start may be late."""
        self.scheduler.sleep(self.scheduler.random.random() * 3)
        for _ in range(self.scenario.starts):
            self._wait_for(self._start_receiver(at, self.scenario.stages)[1])

    def _choose_restored(self) -> int | None:
        """Choose the weights of a publisher's start; None without a resume."""
        made = sorted(self.auditor.attempts)
        if self.scenario.resumes == "none" or not made:
            return None
        if self.scenario.resumes == "newest":
            newest = self.auditor.newest
            return made[-1] if newest is None else self.auditor.versions[newest].content
        return self.scheduler.random.choice((*made, find_content(900, 0)))

    def _finish(self) -> None:
        """End all faults and processes. New publishers must publish, and all servers receive it bit for bit."""
        self._require_reasons()
        self.faults.stop()
        for process in self._processes:
            process.die()
        self.disk.is_full = False
        self.scheduler.record("calm", "no more faults")
        start = len(self.scheduler.events)
        self._publish_last(None)
        newest = self.auditor.newest
        assert newest is not None
        self._publish_last(self.auditor.versions[newest].content)
        last = self.auditor.newest
        if last is None or self.auditor.versions[last].base != newest:
            raise HistoryError(f"a publisher with the weights of version {newest} did not continue after it")
        if len(self.scheduler.events) - start > _FINAL_EVENTS:
            raise HistoryError(f"publishing took {len(self.scheduler.events) - start} events after the last fault")

    def _publish_last(self, restored: int | None) -> None:
        """Publish a version and receive it everywhere. Raises HistoryError."""
        job, tasks = self._start_publisher(self.scheduler.random.choice((1, 2)), restored, 1)
        self._wait_for(tasks)
        if job.errors or not job.published:
            raise HistoryError(f"publishing does not work after the last fault: {job.errors}") from job.errors[0]
        newest = self.auditor.newest
        if newest is None or self.auditor.versions[newest].content not in job.published:
            raise HistoryError(f"the last version is not the newest one, but {newest}")
        for at in range(len(self.scenario.receivers)):
            receiver, tasks = self._start_receiver(at, 1)
            self._wait_for(tasks)
            if receiver.errors or set(receiver.activated) != {newest}:
                raise HistoryError(
                    f"{receiver.name} has {receiver.activated} and not version {newest}: {receiver.errors}"
                )

    def _require_reasons(self) -> None:
        """Require that without a fault only early receivers and replaced publishers fail. Raises HistoryError."""
        if not self.auditor.is_quiet():
            return
        for job in self._publishers:
            for error in job.errors:
                if not (self.scenario.has_zombies and isinstance(error, PublisherReplacedError)):
                    raise HistoryError(f"publishing failed without a fault: {error}") from error
        if all(job.errors for job in self._publishers):
            raise HistoryError("each of several publishers was replaced")
        errors = [error for each in self._receivers for error in each.errors]
        errors += [error for each in self._retention for error in each.errors]
        for error in errors:
            if not _is_early(error):
                raise HistoryError(f"receiving or removing failed without a fault: {error}") from error

    def _start_publisher(
        self, world: int, restored: int | None, versions: int | None = None
    ) -> tuple[PublisherJob, list[Task]]:
        start = len(self._publishers) + 1
        scenario, number = self.scenario, self.auditor.attempts.get(restored or 0, 0)
        job = PublisherJob(
            start,
            self.storage.root,
            number + 1,
            scenario.versions if versions is None else versions,
            scenario.max_chain,
            restored,
            scenario.is_sharded,
            scenario.has_waits or versions is not None,
            scenario.repeats,
            scenario.keep_anchors if scenario.retention in {"publisher", "all"} else None,
        )
        self._publishers.append(job)
        ranks = self._make_ranks(f"publisher{start}", world)
        actors = [PublisherRank(self.scheduler, self.auditor, job, ranks, rank) for rank in range(world)]
        return job, self._start(ranks, [actor.run for actor in actors])

    def _start_receiver(self, at: int, stages: int) -> tuple[ReceiverJob, list[Task]]:
        name, scenario = f"server{at}", self.scenario
        mirror = f"{_MIRRORS}/{name}" if scenario.mirrors[at] else None
        start = len(self._receivers)
        job = ReceiverJob(name, start, self.storage.root, mirror, stages, scenario.timeout_s)
        self._receivers.append(job)
        ranks = self._make_ranks(f"{name}-{start}", scenario.receivers[at])
        workers = [
            ReceiverWorker(self.scheduler, self.auditor, job, ranks, rank) for rank in range(scenario.receivers[at])
        ]
        return job, self._start(ranks, [worker.run for worker in workers])

    def _start_retention(self, name: str) -> list[Task]:
        scenario = self.scenario
        job = RetentionJob(self.storage.root, scenario.keep_anchors, scenario.passes, name == "compactor")
        self._retention.append(job)
        ranks = self._make_ranks(name, 1)
        return self._start(ranks, [RetentionActor(self.scheduler, job, ranks.processes[0]).run])

    def _make_ranks(self, name: str, count: int) -> SimulatedRanks:
        names = [f"{name}.{rank}" if count > 1 else name for rank in range(count)]
        processes = [self._new_process(each) for each in names]
        self._processes += processes
        return SimulatedRanks(self.scheduler, processes, _TIMEOUT_S)

    def _new_process(self, name: str) -> Process:
        process = self.scheduler.new_process(name)
        process.node = _NODE
        process.at_death.append(lambda: self.system.close_all(process))
        return process

    def _start(self, ranks: SimulatedRanks, acts: Sequence[Callable[[], object]]) -> list[Task]:
        pairs = zip(ranks.processes, acts, strict=True)
        return [self.scheduler.spawn(process, process.name, act) for process, act in pairs]

    def _wait_for(self, tasks: Iterable[Task]) -> None:
        tasks = list(tasks)
        self.scheduler.wait(lambda: all(task.is_over for task in tasks), "all actors to end", None, tasks)

    def _wait_for_publishers(self) -> None:
        self.scheduler.wait(lambda: all(each.is_dead for each in self._processes), "all to end", None, self._processes)

    # Faults

    def _show_faults(self, verb: str, subject: str) -> str:
        task = self.scheduler.current
        if task is None or task.process is self._harness:
            return ""
        return self.faults.show(len(self.scheduler.events), verb, subject)

    def _act(self, kind: FaultKind) -> None:
        """Carry out a fault in the environment."""
        task, random = self.scheduler.current, self.scheduler.random
        assert task is not None
        if kind.name.startswith("kill"):
            task.process.die()
        elif kind.name.startswith("stall"):
            self.scheduler.sleep(random.random() * LONGEST_STALL_S)
        elif kind.name == "clock jump":
            task.process.clock_shift += random.choice((-3_600.0, 30.0, 172_800.0))
        elif kind.name.startswith("flip"):
            self.auditor.check()
            self.scheduler.record("flip", self.auditor.flip())
        elif kind.name.startswith("power loss"):
            self.auditor.check()
            self._end_processes(self._processes)
            self.disk.lose_power(random)
            self.auditor.lose_power()

    def _end_processes(self, processes: Collection[Process]) -> None:
        for process in processes:
            process.die(silently=True)


def _is_early(error: ShardckptError) -> bool:
    """Return True for an error of a receiver that comes before the publisher."""
    text: Any = str(error)
    return isinstance(error, SourceNotFoundError) or any(each in text for each in _EARLY)
