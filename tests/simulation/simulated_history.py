"""Histories: a seed gives a run, its actors, its faults and the event order."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from shardckpt.checkpoint.run.lineage import MAX_FAILED
from shardckpt.native.step_copies import LOCAL, MEMORY, ROOT
from shardckpt.storage import fsspec_writer
from shardckpt.tiers.local_folder import Local
from shardckpt.tiers.memory import janitor, memory_store
from shardckpt.tiers.peer_memory import PeerMemory
from shardckpt.tiers.peers import peer_exchange
from shardckpt.tiers.peers.node_files import Node
from tests.simulation.actors import Job, Trainer, prune_repeatedly, read_repeatedly
from tests.simulation.auditor import Auditor, require_tidy
from tests.simulation.faults import CLOCK_JUMPS_S, LONGEST_STALL_S, FaultKind, Faults, PlannedFault
from tests.simulation.network import SimulatedRanks
from tests.simulation.scenario import Scenario
from tests.simulation.scheduler import HistoryError, HistoryEvent, Process, Scheduler, Task
from tests.simulation.seams import Machine, simulated
from tests.simulation.stores.bucket import SimulatedBucket, mount, unmount
from tests.simulation.stores.disk import Disk
from tests.simulation.stores.node_disks import MOUNT, NodeDisks
from tests.simulation.stores.node_memory import SHM, Janitors
from tests.simulation.stores.operating_system import OperatingSystem
from tests.simulation.stores.run_storage import BucketStorage, DiskStorage, RunStorage
from tests.simulation.tier_claims import Claims
from tests.simulation.trained_state import find_content

_TIMEOUT_S = 20.0
_DAYS_S = 3 * 86_400.0  # between later saves: makes files from killed saves old

_FIRST_NODE = "node0"

# Between rounds without requests: a shorter time adds many events in which nothing happens.
_IDLE_S = 1.0

_RESERVED_BYTES = 1 << 10  # files are small
_LOOKS = 12  # of a janitor in the idle time: saves may be days apart

_FINAL_EVENTS = 8_000  # saving must work again within so many events after the last fault


@dataclass
class SimulatedHistory:
    """A history that has ended.

    Attributes:
        seed: Its seed.
        scenario: Its actors and planned faults.
        events: Its events.
        fired: Faults that have shown.
        failure: The error that ended it; None if all invariants held.
    """

    seed: int
    scenario: Scenario
    events: list[HistoryEvent] = field(default_factory=list)
    fired: list[PlannedFault] = field(default_factory=list)
    failure: BaseException | None = None

    def __str__(self) -> str:
        """Return the history with one line per event."""
        lines = [
            f"seed {self.seed}: {replace(self.scenario, faults=())}",
            *(f"planned: {f}" for f in self.scenario.faults),
        ]
        lines += map(str, self.events)
        lines.append("all invariants hold" if self.failure is None else f"FAILED: {self.failure}")
        return "\n".join(lines)


def run_history(seed: int, scenario: Scenario | None = None) -> SimulatedHistory:
    """Run one history.

    The same seed and scenario give the same events.

    Args:
        seed: Seed for the scenario and all choices.
        scenario: Actors and faults; None lets the seed choose them.

    Returns:
        The history, whose `failure` is set if an invariant does not hold.
    """
    history = SimulatedHistory(seed, scenario or Scenario.from_seed(seed))
    with warnings.catch_warnings(), collect_once():
        warnings.simplefilter("ignore")
        _run(history)
    return history


def _run(history: SimulatedHistory) -> None:
    """Run a history. Leaves no reference to its parts."""
    run = _HistoryRun(history)
    try:
        run.run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001  (a result)
        history.failure = error
    finally:
        unmount()
    history.events, history.fired = run.scheduler.events, run.faults.fired


@contextmanager
def collect_once() -> Iterator[None]:
    """Collect once, at the end, and only young objects: a full collection, with torch's objects, takes longer."""
    was_collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.collect(0)  # objects in use now become old later, and nothing collects them
        if was_collecting:
            gc.enable()


class _HistoryRun:
    """A running history."""

    def __init__(self, history: SimulatedHistory) -> None:
        self.scenario = history.scenario
        self.scheduler = Scheduler(history.seed, history.scenario.stay)
        self.disk = Disk()
        self.bucket = SimulatedBucket(self.scheduler, self.disk.changes)
        machines = enumerate(self.scenario.nodes)
        self.nodes = {f"node{at}": Node(f"node{at}", f"machine{each}", f"rack{at // 2}") for at, each in machines}
        self.disks = NodeDisks(self.disk, self.nodes)
        self.system = OperatingSystem(self.scheduler, self.disks)
        self.faults = Faults(history.scenario.faults, self._act)
        self.storage: RunStorage
        for folder in ("/home", "/disk", MOUNT):
            self.disk.make_folder(folder, self.scheduler.clock)
        self.disk.sync(self.disk.root)
        if self.scenario.store == "disk":
            self.storage = DiskStorage(self.disk, "/disk/run")
        else:
            mount(self.bucket)
            scheme = "sim" if self.scenario.store == "bucket" else "plain"
            self.storage = BucketStorage(self.bucket, f"{scheme}://bucket/run")
        self.janitors = Janitors(self.scheduler, self._new_process)
        claims = Claims(self.nodes, {MEMORY: self.disks.memory, LOCAL: self.disks})
        self.auditor = Auditor(self.scheduler, self.storage, self.scenario.keep_last, claims, self.disk.changes)
        self.disks.memory.on_removal = claims.clear
        self._set_promises()
        self._clock_shifts = dict.fromkeys(self.nodes, 0.0)
        self._harness = self._new_process("harness", _FIRST_NODE)
        self._starts = 0
        self._jobs: list[Job] = []
        self._processes: list[Process] = []

    def _set_promises(self) -> None:
        """Set what the auditor requires: less holds for jobs that run at the same time."""
        scenario, auditor = self.scenario, self.auditor
        auditor.has_captures, auditor.is_alone = scenario.has_tiers, not scenario.has_zombies
        auditor.is_quiet = lambda: not (self.faults.fired or scenario.has_zombies)
        auditor.claims.has_rivals = scenario.has_zombies and scenario.has_tiers
        auditor.is_replaced_by_rivals = scenario.has_zombies and scenario.store == "plain"
        auditor.restores.most_failed = MAX_FAILED if scenario.most_failed is None else scenario.most_failed

    def run(self) -> None:
        """Run the history to its end. Raises the error that ends it."""
        machine = Machine(self.scheduler, self.system, self.janitors, self.nodes)
        log = logging.getLogger("shardckpt")
        part_bytes, was_disabled, idle_s = fsspec_writer.PART_BYTES, log.disabled, peer_exchange.IDLE_S
        reserved, looks = memory_store.RESERVED_BYTES, janitor.LOOKS
        with simulated(machine):
            fsspec_writer.PART_BYTES, log.disabled = self.scenario.part_bytes, True
            peer_exchange.IDLE_S, memory_store.RESERVED_BYTES, janitor.LOOKS = _IDLE_S, _RESERVED_BYTES, _LOOKS
            try:
                self.scheduler.before_event = self._show_faults
                self.scheduler.after_event = self.auditor.check
                self.scheduler.spawn(self._harness, "harness", self._direct)
                self.scheduler.run()
            finally:
                fsspec_writer.PART_BYTES, log.disabled = part_bytes, was_disabled
                peer_exchange.IDLE_S, memory_store.RESERVED_BYTES, janitor.LOOKS = idle_s, reserved, looks

    # The harness

    def _direct(self) -> None:
        """Start the actors, end the faults, then require that saving works."""
        scenario, random = self.scenario, self.scheduler.random
        beside: list[Task] = []
        if scenario.readers:
            ranks = self._make_ranks("reader", [_FIRST_NODE])
            beside += self._start(
                ranks,
                lambda _: read_repeatedly(
                    self.scheduler, self.auditor, "reader", ranks, self.storage.root, scenario.readers
                ),
            )
        if scenario.prunes:
            pruner = self._make_ranks("pruner", [_FIRST_NODE])
            beside += self._start(
                pruner,
                lambda _: prune_repeatedly(self.scheduler, self.storage.root, scenario.keep_last, scenario.prunes),
            )
        for placed in scenario.places or [(0,) * world for world in scenario.worlds]:
            tasks = self._start_job(f"job{self._starts}", placed, scenario.saves, background=scenario.background)[1]
            if scenario.has_zombies:
                self.scheduler.sleep(random.random() * 2)
            else:
                self._wait_for(tasks)
        self._wait_for(beside)
        self._finish()
        self.janitors.kill(self.nodes)  # the history ends with its last task

    def _finish(self) -> None:
        """End all faults and old processes. A new job must restore and save, and its step must be found."""
        self._require_reasons()
        self.faults.stop()
        for process in self._processes:
            process.die()
        self._shift_clocks(self.nodes, None)
        self.disk.is_full = False
        self.scheduler.record("calm", "no more faults")
        start = len(self.scheduler.events)
        least = self.auditor.newest()
        job = self._save_again()
        newest = self.auditor.newest()
        has_new = newest is not None and (least is None or newest.order > least.order)
        if not job.saved or not has_new:
            raise HistoryError("no new step after the last fault")
        if len(self.scheduler.events) - start > _FINAL_EVENTS:
            raise HistoryError(f"saving took {len(self.scheduler.events) - start} events after the last fault")
        ranks = self._make_ranks("last reader", [_FIRST_NODE])
        self._wait_for(
            self._start(
                ranks,
                lambda _: read_repeatedly(self.scheduler, self.auditor, "last reader", ranks, self.storage.root, 1),
            )
        )

        for _ in range(self.scenario.later_saves):
            self.scheduler.sleep(_DAYS_S)
            self._save_again()
        if self.scenario.later_saves:
            require_tidy(self.auditor)

    def _save_again(self) -> Job:
        """Run a job that must save a step, and return it. Raises HistoryError."""
        for _ in range(2):
            placed = (
                tuple(range(len(self.nodes))) if len(self.nodes) > 1 else self.scheduler.random.choice(((0,), (0, 0)))
            )
            job, tasks = self._start_job(f"final{self._starts}", placed, 1, background=False, is_last=True)
            self._wait_for(tasks)
            if job.errors:
                raise HistoryError(f"saving does not work after the last fault: {job.errors[0]}") from job.errors[0]
            if job.saved:
                break
        return job

    def _require_reasons(self) -> None:
        """Require a fault or another job for each failed operation. Raises HistoryError."""
        errors = [error for job in self._jobs for error in job.errors]
        lost = [error for job in self._jobs for error in job.lost_copies]
        if not self.auditor.is_quiet():
            return
        withdrawn = [tier for job in self._jobs for tier in job.withdrawals]
        if any(tier != ROOT or not self.scenario.prunes for tier in withdrawn):  # another process prunes the root
            raise HistoryError("a claim is withdrawn without a fault")
        if lost:
            raise HistoryError(f"a capture is not promoted without a fault: {lost[0]}")
        if errors:
            raise HistoryError(f"an operation failed without a fault: {errors[0]}") from errors[0]

    def _start_job(
        self, name: str, placed: Sequence[int], saves: int, *, background: bool, is_last: bool = False
    ) -> tuple[Job, list[Task]]:
        """Start a job's ranks on the numbered nodes."""
        scenario, world = self.scenario, len(placed)
        self._starts += 1
        self.auditor.start_job(self._starts)
        has_tiers = self._starts not in scenario.without_memory
        is_spared = self._starts == 1 or self._starts >= len(scenario.worlds) or not scenario.bad_step
        has_memory, local = scenario.memory_bytes is not None, scenario.local_every
        job = Job(
            name,
            self._starts,
            self.storage.root,
            scenario.keep_last,
            scenario.dedup,
            background,
            scenario.is_sharded,
            saves,
            is_last,
            self._build_memory() if has_tiers and has_memory else None,
            Local(self.disks.folder, local) if has_tiers and local is not None else None,
            tuple(self.nodes[f"node{at}"] for at in placed),
            scenario.root_every,
            None if is_last else scenario.overwrite_every,
            is_last or scenario.has_waits,
            scenario.most_failed,
            None if is_spared else find_content(1, scenario.bad_step),
        )
        self._jobs.append(job)
        ranks = self._make_ranks(name, [node.name for node in job.nodes])
        trainers = [Trainer(self.scheduler, self.auditor, job, ranks, rank) for rank in range(world)]
        return job, self._start(ranks, lambda rank: trainers[rank].run())

    def _build_memory(self) -> PeerMemory:
        scenario = self.scenario
        return PeerMemory(scenario.copies, max_bytes=scenario.memory_bytes, idle_s=scenario.idle_s)

    def _make_ranks(self, name: str, nodes: Sequence[str]) -> SimulatedRanks:
        names = [f"{name}.{rank}" if len(nodes) > 1 else name for rank in range(len(nodes))]
        processes = [self._new_process(each, node) for each, node in zip(names, nodes, strict=True)]
        self._processes += processes
        return SimulatedRanks(self.scheduler, processes, _TIMEOUT_S)

    def _new_process(self, name: str, node: str) -> Process:
        process = self.scheduler.new_process(name)
        process.node, process.clock_shift = node, self._clock_shifts[node]
        process.at_death.append(lambda: self.system.close_all(process))
        return process

    def _start(self, ranks: SimulatedRanks, act: Callable[[int], object]) -> list[Task]:
        return [
            self.scheduler.spawn(process, process.name, partial(act, rank))
            for rank, process in enumerate(ranks.processes)
        ]

    def _wait_for(self, tasks: Iterable[Task]) -> None:
        tasks = list(tasks)
        self.scheduler.wait(lambda: all(task.is_over for task in tasks), "all actors to end", None, tasks)

    # Faults

    def _show_faults(self, verb: str, subject: str) -> str:
        task = self.scheduler.current
        if task is None or task.process is self._harness:
            return ""
        if self.scenario.fsync_s and verb == "fsync" and subject.startswith(MOUNT):
            self.scheduler.sleep(self.scenario.fsync_s)
        fault = self.faults.show(len(self.scheduler.events), verb, subject)
        if fault == "EIO" and subject.startswith((MOUNT, SHM)):
            self.auditor.claims.clear(self.disks.find(subject, task.process.node))
        return fault

    def _act(self, kind: FaultKind) -> None:
        """Carry out a fault in the environment."""
        task, random = self.scheduler.current, self.scheduler.random
        assert task is not None
        if kind.name.startswith("kill"):
            task.process.die()
        elif kind.name.startswith("memory emptied"):
            self._empty_memory(random.sample(sorted(self.nodes), 1))
        elif kind.name == "janitor killed":
            self.janitors.kill(random.sample(sorted(self.nodes), 1))
        elif kind.name.startswith("stall"):
            self.scheduler.sleep(random.random() * LONGEST_STALL_S)
        elif kind.name == "clock jump":
            self._shift_clocks([task.process.node], random.choice(CLOCK_JUMPS_S))
        elif kind.name == "flip in memory":
            self.scheduler.record("flip", self.auditor.claims.flip(MEMORY, random))
        elif kind.name == "flip on a node's disk":
            self.scheduler.record("flip", self.auditor.claims.flip(LOCAL, random))
        elif kind.name.startswith("node power loss"):
            self._lose_power_of_node(task.process.node)
        elif kind.name.startswith("root emptied"):
            self.auditor.empty_root(has_hidden="hidden" in kind.name)
        elif kind.name.startswith("flip"):
            self.auditor.check()
            self.scheduler.record("flip", self.auditor.flip())
        elif kind.name.startswith("power loss"):
            self._lose_power()
        elif kind.name.startswith("node loss"):
            self._lose_node(task.process.node)
        elif kind.name.startswith("two nodes lost"):
            for node in random.sample(sorted(self.nodes), 2):
                self._lose_node(node)

    def _shift_clocks(self, nodes: Collection[str], seconds: float | None) -> None:
        """Shift the clocks on some nodes; None sets the correct time."""
        for node in nodes:
            self._clock_shifts[node] = 0.0 if seconds is None else self._clock_shifts[node] + seconds
        for process in self.scheduler.processes:
            process.clock_shift = self._clock_shifts.get(process.node, 0.0)

    def _lose_node(self, name: str) -> None:
        """Lose a node's machine; with a single node, its disk too."""
        if len(self.nodes) == 1:
            self._lose_power()
            return
        lost = self._find_machine(name)
        self._end_processes(lost)
        for disk in self.disks.list_apart(lost):
            self.auditor.claims.lose(disk)
        for node in lost:
            self.disks.replace(node)

    def _lose_power_of_node(self, name: str) -> None:
        """Switch a node's machine off and on: its disk stays."""
        lost = self._find_machine(name)
        self._end_processes(lost)
        for disk in self.disks.list_apart(lost):
            disk.lose_power(self.scheduler.random)

    def _find_machine(self, name: str) -> list[str]:
        """Return the names of all nodes on a node's machine."""
        return [node.name for node in self.nodes.values() if node.machine == self.nodes[name].machine]

    def _lose_power(self) -> None:
        """End all processes, and lose what disk and memory had not synced."""
        self.auditor.check()
        self._end_processes(self.nodes)
        for disk in (self.disk, *self.disks.list_apart(self.nodes)):
            disk.lose_power(self.scheduler.random)
        self.auditor.lose_power()

    def _end_processes(self, nodes: Collection[str]) -> None:
        """End the processes on some nodes; their peers cannot see it."""
        self.janitors.kill(nodes, silently=True)
        self._empty_memory(nodes)
        for process in self._processes:
            if process.node in nodes:
                process.die(silently=True)

    def _empty_memory(self, nodes: Iterable[str]) -> None:
        """Remove all captures from the memory of some nodes, as the loss of power or a user does."""
        for node in nodes:
            self.auditor.claims.lose(self.disks.memory.empty(node))
