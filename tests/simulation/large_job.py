"""A simulated job with thousands of ranks: measure capture in memory, node loss and restore."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardckpt.checkpointer import Checkpointer
from shardckpt.native.commit import decode_commit
from shardckpt.native.manifest_json import decode_manifest
from shardckpt.native.reader import build_manifest, find_hashes
from shardckpt.plan.layout.coverage import require_complete
from shardckpt.tiers.peer_memory import PeerMemory
from shardckpt.tiers.peers import peer_exchange
from shardckpt.tiers.peers.node_files import Node
from tests.simulation.network import SimulatedRanks
from tests.simulation.scheduler import HistoryError, Process, Scheduler
from tests.simulation.seams import Machine, simulated
from tests.simulation.stores.bucket import SimulatedBucket, mount
from tests.simulation.stores.disk import Disk
from tests.simulation.stores.node_disks import NodeDisks
from tests.simulation.stores.node_memory import Janitors
from tests.simulation.stores.operating_system import OperatingSystem
from tests.simulation.trained_state import make_row_shard

_ROOT = "sim://bucket/run"
_ROOT_EVERY = 1000
_EVENT_S = 1e-7  # virtual seconds between events: a round of thousands of ranks must end within their timeout

_TIMEOUT_S = 600.0
_IDLE_S = 30.0
_MAX_EVENTS = 10_000_000
_MEMORY_BYTES = 1 << 30
_TENSORS, _COLUMNS = 3, 2
_SENT = re.compile(r"(\d+) -> (\d+), \w+ of (\d+) B")


@dataclass(frozen=True)
class PhaseCost:
    """Cost of one phase in a large job.

    Attributes:
        name: The phase.
        ranks: Number of ranks.
        events: Number of operations by all ranks.
        messages: Number of messages between ranks.
        message_bytes: Bytes in these messages.
        rank0_bytes: Bytes that rank 0 sent or received.
        rank0_s: Rank 0's processor seconds.
    """

    name: str
    ranks: int
    events: int
    messages: int
    message_bytes: int
    rank0_bytes: int
    rank0_s: float


def run_large_job(ranks: int, *, ranks_per_node: int = 8, lost: float = 0.01) -> list[PhaseCost]:
    """Capture a step on all ranks, lose nodes, and restore it on the remaining ones.

    Plans and messages are the product's own; tensors have a few elements per rank.

    Args:
        ranks: Number of ranks before the loss.
        ranks_per_node: Number of ranks on each node.
        lost: Fraction of nodes to lose; at least one node is lost.

    Returns:
        Costs for the capture with its copies, and for the restore.

    Raises:
        HistoryError: A rank restored other values than it captured.
        ShardckptError: The capture or the restore failed.
    """
    job = _LargeJob(ranks // ranks_per_node, ranks_per_node, lost)
    with job.simulated():
        job.scheduler.spawn(job.harness, "harness", job.direct)
        job.scheduler.run()
    return job.costs


class _SharedResults:
    """Results of pure functions, shared by all ranks but rank 0: memory is too small for thousands of copies."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._results: dict[tuple[object, ...], Any] = {}
        self.rank0: Process | None = None  # computes its own results, so its seconds are a real process's

    def share(self, act: Callable[..., Any], find_key: Callable[..., Hashable]) -> Callable[..., Any]:
        """Return a function that computes each result once."""

        def compute_once(*args: Any) -> Any:
            task = self._scheduler.current
            if task is None or task.process is self.rank0:
                return act(*args)
            key = (act, find_key(*args))
            if key not in self._results:
                self._results[key] = (act(*args), args)  # the arguments stay, since ids are part of keys
            return self._results[key][0]

        return compute_once


class _SharingMachine(Machine):
    """A machine on which ranks share equal results."""

    def __init__(self, shared: _SharedResults, *parts: Any) -> None:
        super().__init__(*parts)
        self._shared = shared

    def twins(self) -> list[tuple[object, object]]:
        """Return pairs: a value that modules refer to, and its simulated twin."""
        share = self._shared.share
        return [
            *super().twins(),
            (decode_commit, _drop_options(share(decode_commit, lambda data: data))),
            (decode_manifest, _drop_options(share(decode_manifest, lambda data: data))),
            (build_manifest, share(build_manifest, lambda store, contents, *_: (store.url, id(contents)))),
            (find_hashes, share(find_hashes, id)),
            (require_complete, share(require_complete, lambda manifest, entries, _: (id(manifest), *map(id, entries)))),
        ]


def _drop_options(act: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a function that takes the first argument only; the others are for messages."""
    return lambda first, **_options: act(first)


class _LargeJob:
    """A running job."""

    def __init__(self, count: int, ranks_per_node: int, lost: float) -> None:
        self._nodes = [Node(f"node{at}", f"machine{at}") for at in range(count)]
        self._ranks_per_node = ranks_per_node
        dead = max(round(count * lost), 1)
        self._lost = {node.name for node in self._nodes[:: count // dead][:dead]}  # no two have copies of one file
        self._rows = count * ranks_per_node
        self.scheduler = Scheduler(0, stay=1.0, event_s=_EVENT_S, most_events=_MAX_EVENTS, is_measured=True)
        self._disks = NodeDisks(Disk())
        self._system = OperatingSystem(self.scheduler, self._disks)
        self._janitors = Janitors(self.scheduler, self._new_process)
        self._shared = _SharedResults(self.scheduler)
        self.harness = self._new_process("harness", "")
        self.costs: list[PhaseCost] = []

    def _new_process(self, name: str, node: str) -> Process:
        process = self.scheduler.new_process(name)
        process.node = node
        process.at_death.append(lambda: self._system.close_all(process))
        return process

    @contextmanager
    def simulated(self) -> Iterator[None]:
        """Run all modules of shardckpt on a simulated machine inside the context."""
        mount(SimulatedBucket(self.scheduler))
        nodes = {node.name: node for node in self._nodes}
        log, idle_s = logging.getLogger("shardckpt"), peer_exchange.IDLE_S
        was_disabled = log.disabled
        machine = _SharingMachine(self._shared, self.scheduler, self._system, self._janitors, nodes)
        with simulated(machine):
            log.disabled, peer_exchange.IDLE_S = True, _IDLE_S
            was_collecting = gc.isenabled()
            gc.disable()  # a collection would visit the objects of all ranks on rank 0's time
            try:
                yield
            finally:
                log.disabled, peer_exchange.IDLE_S = was_disabled, idle_s
                if was_collecting:
                    gc.enable()

    def direct(self) -> None:
        """Capture, lose nodes, restore, and end the janitors."""
        self._run("capture", self._nodes, self._capture)
        self._janitors.kill(self._lost, silently=True)
        for node in self._lost:
            self._disks.memory.empty(node)
        self._run("restore", [node for node in self._nodes if node.name not in self._lost], self._restore)
        self._janitors.kill({node.name for node in self._nodes})

    def _run(self, name: str, nodes: Sequence[Node], act: Callable[[SimulatedRanks, int], object]) -> None:
        """Run all ranks to the end of a phase, and record its cost."""
        start = len(self.scheduler.events)
        places = [node.name for node in nodes for _ in range(self._ranks_per_node)]
        processes = [self._new_process(f"{name}.{rank}", node) for rank, node in enumerate(places)]
        self._shared.rank0 = processes[0]
        ranks = SimulatedRanks(self.scheduler, processes, _TIMEOUT_S)
        tasks = [
            self.scheduler.spawn(each, each.name, partial(act, ranks, rank)) for rank, each in enumerate(processes)
        ]
        self.scheduler.wait(lambda: all(task.is_over for task in tasks), "all ranks to end", None, tasks)
        for process in processes:
            process.die()
        events = self.scheduler.events[start:]
        sends = (_SENT.fullmatch(event.subject) for event in events if event.verb == "send")
        sent = [tuple(map(int, found.groups())) for found in sends if found]
        nbytes = sum(size for *_, size in sent), sum(size for src, dst, size in sent if 0 in (src, dst))
        self.costs.append(PhaseCost(name, len(places), len(events), len(sent), *nbytes, processes[0].work_s))

    def _open_run(self, ranks: SimulatedRanks, rank: int) -> Checkpointer:
        link: Any = ranks.link(rank)
        tier = PeerMemory(copies=1, max_bytes=_MEMORY_BYTES)
        return Checkpointer(_ROOT, save_every=_ROOT_EVERY, tiers=[tier], process_group=link)

    def _build_state(self, ranks: SimulatedRanks, rank: int, *, is_blank: bool = False) -> dict[str, Any]:
        """Return a rank's state: rows of sharded tensors, and replicated ones."""
        size, scale = len(ranks.processes), int(not is_blank)
        full = torch.arange(self._rows * _COLUMNS).reshape(self._rows, _COLUMNS)
        rows = {f"layer {at}": make_row_shard((full + at) * scale, rank, size) for at in range(_TENSORS)}
        return {**rows, "bias": torch.full((4,), float(scale)), "step": scale}

    def _capture(self, ranks: SimulatedRanks, rank: int) -> None:
        """Capture a step, and wait until it survives a node loss."""
        run = self._open_run(ranks, rank)
        run.save(1, self._build_state(ranks, rank))
        run.wait(1, survives="node")

    def _restore(self, ranks: SimulatedRanks, rank: int) -> None:
        """Restore the step on other ranks, and compare every element."""
        state, expected = self._build_state(ranks, rank, is_blank=True), self._build_state(ranks, rank)
        number = self._open_run(ranks, rank).restore(state)
        equal = [name for name in expected if bool(torch.as_tensor(state[name] == expected[name]).all())]
        if number != 1 or len(equal) != len(expected):
            raise HistoryError(f"rank {rank} restored step {number}, in which {len(equal)} values are equal")
