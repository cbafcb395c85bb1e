"""Actors in a history: trainers, readers and a pruner, which call the public API."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shardckpt.checkpointer import Checkpointer
from shardckpt.errors import NoCompleteCheckpoint, RankError, ShardckptError
from shardckpt.offline.prune import prune
from shardckpt.tiers.local_folder import Local
from shardckpt.tiers.peer_memory import PeerMemory
from shardckpt.tiers.peers.node_files import Node
from tests.simulation.auditor import Auditor
from tests.simulation.network import SimulatedRanks
from tests.simulation.scheduler import Scheduler
from tests.simulation.trained_state import build_state, find_content

_STAGING_BYTES = 1 << 20
_LONGEST_PAUSE_S = 5.0
_STEPS_OF_A_START = 100
_WITHDRAWAL, _PROMOTION = "WithdrawalEvent", "PromotionEvent"
_FAILS_AFTER_S = 5.0


@dataclass
class Job:
    """A training job: one start, with its ranks."""

    name: str
    start: int  # starts of all jobs before this one: makes the attempts of jobs differ
    root: str
    keep_last: int
    dedup: bool  # saves incrementally
    background: bool
    is_sharded: bool  # each rank has only some rows of some tensors
    saves: int
    is_last: bool = False  # starts again if no step can be loaded, with unused step numbers
    memory: PeerMemory | None = None
    local: Local | None = None
    nodes: tuple[Node, ...] = ()
    root_every: int = 2  # with tiers, multiples of this are saved in the root
    overwrite_every: int | None = None  # multiples of this are saved, then overwritten
    has_waits: bool = True  # ranks wait for each save and ask what it survives
    most_failed: int | None = None  # failures after a restore before `restore` skips the step
    bad_content: int | None = None  # the job fails after it restores this attempt

    def __post_init__(self) -> None:
        self.errors: list[ShardckptError] = []
        self.lost_copies: list[BaseException] = []
        self.withdrawals: list[str] = []  # tiers of withdrawn claims
        self.saved: list[int] = []

    @property
    def save_every(self) -> int:
        """Multiples of this are saved in the root."""
        return self.root_every if self.has_tiers and not self.is_last else 1

    @property
    def has_tiers(self) -> bool:
        """Whether it has tiers in front of the root."""
        return self.memory is not None or self.local is not None

    @property
    def counts_restores(self) -> bool:
        """Whether it counts restores in the root until a further step is completed."""
        return self.has_tiers if self.most_failed is None else self.most_failed > 0

    @property
    def node_names(self) -> frozenset[str]:
        """Names of its ranks' nodes."""
        return frozenset(node.name for node in self.nodes)

    def find_reported_node(self, rank: int) -> str | None:
        """Return the node whose files a rank reports: the node's lowest rank does, others return None."""
        return None if self.nodes[rank] in self.nodes[:rank] else self.nodes[rank].name

    def build_tiers(self, rank: int) -> list[PeerMemory | Local]:
        """Return the tiers in front of the root, with the settings for a rank's node."""
        memory = None if self.memory is None else replace(self.memory, rack=self.nodes[rank].rack)
        return [tier for tier in (memory, self.local) if tier is not None]


class Trainer:
    """One rank in a training job: it restores, then trains and saves."""

    def __init__(self, scheduler: Scheduler, auditor: Auditor, job: Job, ranks: SimulatedRanks, rank: int) -> None:
        self._scheduler, self._auditor, self._job = scheduler, auditor, job
        self._ranks, self._rank = ranks, rank
        self._calls = 0
        self._unsettled: list[tuple[int, int]] = []

    def run(self) -> None:
        """Restore, then save step after step; end when a rank is lost."""
        job = self._job
        link: Any = self._ranks.link(self._rank)
        checkpointer = Checkpointer(
            job.root,
            save_every=job.save_every,
            tiers=job.build_tiers(self._rank),
            keep_last=job.keep_last,
            dedup=job.dedup,
            max_failed_restores=job.most_failed,
            process_group=link,
            on_event=self._watch,
        )
        try:
            step, content = self._restore(checkpointer)
            if content == job.bad_content:
                self._scheduler.sleep(_FAILS_AFTER_S)  # all ranks end the restore
                self._scheduler.record("fails", f"after step {step}")
                return
            self._train(checkpointer, step)
        except ShardckptError as error:
            self._fail("job", error)
        finally:
            self._ranks.processes[self._rank].die()

    def _restore(self, checkpointer: Checkpointer) -> tuple[int, int]:
        """Restore, and return step and attempt; zeros for a new run."""
        self._calls += 1
        least, state = self._auditor.newest(), self._build_state(0)
        nodes = self._job.node_names
        claim = self._auditor.claims.newest(nodes) if self._job.has_tiers else None
        is_counted = self._job.counts_restores and not self._rank
        if is_counted:
            self._auditor.restores.start()
        try:
            number = checkpointer.restore(state)
        except NoCompleteCheckpoint:
            if least is not None or claim is not None or not self._job.is_last:
                raise
            return 0, 0
        content = self._auditor.accept((self._job.name, self._calls), number, state, least, claim, nodes)
        if is_counted and content:
            self._auditor.end_restore(content)
        self._scheduler.record("restored", f"step {number}")
        if number is not None and self._job.has_tiers:
            self._claim_restored(checkpointer, number, content)
        return number or 0, content

    def _claim_restored(self, checkpointer: Checkpointer, number: int, content: int) -> None:
        """Ask what the restored step survives: copies from another attempt to save it do not count."""
        try:
            self._claim(checkpointer, number, content, "has")
        except RankError:
            raise
        except ShardckptError as error:
            self._fail(f"claims of step {number}", error)

    def _train(self, checkpointer: Checkpointer, step: int) -> None:
        """Save the steps after a restored one."""
        job = self._job
        if job.is_last:  # steps that the run has left for an older one may have the next numbers
            step = max(step, job.start * _STEPS_OF_A_START)
        for number in range(step + 1, step + 1 + job.saves):
            self._save(checkpointer, number)
            if job.overwrite_every is not None and not number % job.overwrite_every:
                self._save(checkpointer, number, is_overwrite=True)
        if self._unsettled:
            self._settle(checkpointer)

    def _save(self, checkpointer: Checkpointer, number: int, *, is_overwrite: bool = False) -> None:
        self._calls += 1
        content = find_content(self._job.start, number, is_overwrite=is_overwrite)
        self._auditor.start_save(content, number, is_overwrite=is_overwrite)
        self._auditor.claims.give_up(self._job.node_names if self._job.has_tiers else None)
        self._scheduler.record("save", f"step {number} as attempt {content}")
        try:
            self._write(checkpointer, number, content, is_overwrite=is_overwrite)
            if self._job.has_tiers and self._job.has_waits:
                if not number % 2:
                    checkpointer.durability(number - 1)  # a copy that is lost, other than by retention, is withdrawn
                self._claim(checkpointer, number, content)
        except RankError:
            raise
        except ShardckptError as error:
            self._unsettled.clear()
            self._fail(f"step {number}", error)
            return
        if self._job.has_waits:
            self._confirm(number, content)
        else:
            self._unsettled.append((number, content))

    def _write(self, checkpointer: Checkpointer, number: int, content: int, *, is_overwrite: bool) -> None:
        state = self._build_state(content)
        if self._job.background:
            handle = checkpointer.async_save(number, state, max_staging_bytes=_STAGING_BYTES, overwrite=is_overwrite)
            self._scheduler.sleep(0.01)
            handle.result()
            return
        checkpointer.save(number, state, overwrite=is_overwrite)
        if self._job.has_waits:
            checkpointer.wait()

    def _settle(self, checkpointer: Checkpointer) -> None:
        """Wait for background saves, then confirm all of them."""
        self._calls += 1
        try:
            checkpointer.wait()
            number, content = self._unsettled[-1]
            if self._job.has_tiers:  # without, the copy in the root counts whoever has saved it
                if not number % 2:
                    checkpointer.durability(number - 1)
                self._claim(checkpointer, number, content)
        except RankError:
            raise
        except ShardckptError as error:
            self._fail("saves in the background", error)
            return
        for number, content in self._unsettled:
            self._confirm(number, content)

    def _confirm(self, number: int, content: int) -> None:
        """Record that a step was saved."""
        if not number % self._job.save_every:
            self._auditor.acknowledge(content)
            self._job.saved.append(number)
        if self._job.counts_restores and not self._rank:
            self._auditor.complete_step()
        self._scheduler.record("saved", f"step {number}")

    def _claim(self, checkpointer: Checkpointer, number: int, content: int, verb: str = "claims") -> None:
        """Ask what a saved or restored step survives; all ranks get the same answer."""
        call, nodes = (f"{self._job.name} claims", self._calls), self._job.node_names
        self._auditor.start_claim(call, number, nodes, self._job.find_reported_node(self._rank))
        durability = checkpointer.durability(number)
        self._auditor.agree(call, durability)
        self._auditor.claim(call, content, durability, nodes)
        places = ", ".join(f"{copy.tier} ({copy.survives[-1]})" for copy in durability.copies)
        self._scheduler.record(verb, f"step {number} in {places or 'no place'}")

    def _watch(self, event: Any) -> None:
        """Record a withdrawn claim or a failed promotion."""
        kind = type(event).__name__
        if kind == _WITHDRAWAL:
            self._job.withdrawals.append(event.tier)
            self._scheduler.record("withdrawn", f"step {event.step} in {event.tier}")
        elif kind == _PROMOTION and event.error is not None:
            self._job.lost_copies.append(event.error)
            self._scheduler.record("failed", f"copy of step {event.step}", str(event.error))

    def _build_state(self, content: int) -> dict[str, Any]:
        ranks = self._ranks.processes
        return build_state(content, self._rank, len(ranks), is_sharded=self._job.is_sharded)

    def _fail(self, subject: str, error: ShardckptError) -> None:
        self._job.errors.append(error)
        self._scheduler.record("failed", subject, f"{type(error).__name__}: {error}")


def read_repeatedly(
    scheduler: Scheduler, auditor: Auditor, name: str, ranks: SimulatedRanks, root: str, times: int
) -> None:
    """Restore the newest step repeatedly, as a job with one rank."""
    for call in range(times):
        scheduler.sleep(scheduler.random.random() * _LONGEST_PAUSE_S)
        least, state = auditor.newest(), build_state(0)
        link: Any = ranks.link(0)
        try:
            number = Checkpointer(root, process_group=link).restore(state)
        except ShardckptError as error:
            scheduler.record("failed", "restore", f"{type(error).__name__}: {error}")
            continue
        auditor.accept((name, call), number, state, least)
        scheduler.record("restored", f"step {number}")
    ranks.processes[0].die()


def prune_repeatedly(scheduler: Scheduler, root: str, keep_last: int, times: int) -> None:
    """Prune the run repeatedly."""
    for _ in range(times):
        scheduler.sleep(scheduler.random.random() * _LONGEST_PAUSE_S)
        try:
            pruned = prune(root, keep_last=keep_last)
        except ShardckptError as error:
            scheduler.record("failed", "prune", f"{type(error).__name__}: {error}")
            continue
        scheduler.record("pruned", " ".join(str(step.number) for step in pruned.removed))
    task = scheduler.current
    if task is not None:
        task.process.die()
