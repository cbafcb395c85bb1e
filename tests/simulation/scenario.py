"""Scenarios: a history's actors and faults, chosen by a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from tests.simulation.faults import (
    BUCKET,
    COMMON,
    DISK,
    EMPTIED_ROOT,
    MEMORY,
    OWN_DISKS,
    REPLACED_COPY,
    SEVERAL_DISKS,
    SEVERAL_NODES,
    PlannedFault,
    plan_faults,
)

# "plain" is an object store without conditional requests.
StoreKind = Literal["disk", "bucket", "plain"]

_EMPTIED = 0.25  # probability that the root of a run with tiers is emptied
_ALONE = 0.6  # probability that the only fault is a kill before a copy is replaced
_HASTY = 0.3  # probability that a janitor removes captures after seconds: between two starts, or during a stall
_QUIET = 0.5  # probability that slow disks see no faults: then each capture must be promoted


@dataclass(frozen=True)
class Scenario:
    """The actors and faults in a history.

    Attributes:
        store: Kind of store: `plain` is a bucket without conditional requests.
        worlds: Number of ranks at each start of the job.
        saves: Number of saves in each start.
        keep_last: Number of newest steps to keep.
        dedup: Whether saves are incremental.
        background: Whether saves run in the background.
        is_sharded: Whether each rank has only some rows of some tensors.
        has_zombies: Whether the job may start again before the previous start has ended.
        memory_bytes: Maximum bytes in the memory tier; None for jobs without the tier.
        without_memory: Jobs without the memory tier, by their number in the history.
        nodes: Each node's machine, by number.
        places: Each rank's node at each start of the job; if empty, all ranks are on node 0.
        copies: Number of other machines that keep a copy of each capture.
        idle_s: Virtual seconds without a process after which captures in memory are removed.
        local_every: Multiples of this are saved on the nodes' disks too; None without this tier.
        root_every: With tiers, multiples of this are saved in the root.
        later_saves: Number of saves in the days after the last fault, which must remove what no step needs.
        readers: Number of restores while the job runs.
        prunes: Number of prunes while the job runs.
        faults: Planned faults.
        stay: Probability that a thread continues at a scheduling point.
        part_bytes: Bytes in one part of an upload.
        overwrite_every: Multiples of this are saved, then overwritten; None for no step.
        has_waits: Whether trainers wait for each save before the next, and ask what it survives.
        most_failed: Failures after a restore before `restore` skips the step; None for the default.
        bad_step: Step from the first start; every start but the last fails after it restores this step. 0 for none.
        fsync_s: Virtual seconds that a node's disk takes to sync a file.
    """

    store: StoreKind
    worlds: tuple[int, ...] = (2, 2)
    saves: int = 2
    keep_last: int = 2
    dedup: bool = True
    background: bool = False
    is_sharded: bool = False
    has_zombies: bool = False
    memory_bytes: int | None = None
    without_memory: frozenset[int] = frozenset()
    nodes: tuple[int, ...] = (0,)
    places: tuple[tuple[int, ...], ...] = ()
    copies: int = 0
    idle_s: float = 3600.0
    local_every: int | None = None
    root_every: int = 2
    later_saves: int = 0
    readers: int = 0
    prunes: int = 0
    faults: tuple[PlannedFault, ...] = ()
    stay: float = 0.8
    part_bytes: int = 16 << 20
    overwrite_every: int | None = None
    has_waits: bool = True
    most_failed: int | None = None
    bad_step: int = 0
    fsync_s: float = 0.0

    @classmethod
    def from_seed(cls, seed: int) -> Scenario:
        """Choose a scenario."""
        random = Random(f"scenario {seed}")
        scenario = cls(
            random.choice(("disk", "bucket")),
            worlds=tuple(random.choice((1, 2, 2, 3)) for _ in range(random.choice((1, 2, 2, 3)))),
            saves=random.choice((1, 2, 2, 3)),
            keep_last=random.choice((1, 2, 2, 3)),
            dedup=random.random() < 0.6,
            background=random.random() < 0.3,
            is_sharded=random.random() < 0.5,
            has_zombies=random.random() < 0.2,
            readers=random.choice((0, 0, 1, 2)),
            prunes=random.choice((0, 0, 1, 2)),
            stay=random.choice((0.5, 0.8, 0.95)),
            part_bytes=random.choice((16 << 20, 4096)),
        )
        if random.random() < 0.35:
            scenario = replace(
                scenario,
                memory_bytes=random.choice((1 << 30, 1 << 30, 12_000, 5_000)),
                without_memory=frozenset(at for at in range(1, 4) if random.random() < 0.3),
                background=False,
                has_zombies=False,
            )
            scenario = _choose_nodes(seed, scenario)
        if random.random() < 0.1:
            scenario = replace(scenario, later_saves=3)
        scenario = _choose_habits(seed, scenario)
        kinds = COMMON + (DISK if scenario.store == "disk" else BUCKET)
        kinds += DISK if scenario.store != "disk" and scenario.local_every is not None else ()
        kinds += MEMORY if scenario.memory_bytes is not None else ()
        kinds += SEVERAL_NODES if len(scenario.nodes) > 1 else ()
        if scenario.local_every is not None:
            kinds += OWN_DISKS + (SEVERAL_DISKS if len(scenario.nodes) > 1 else ())
        count = random.choice((0, 1, 1, 2, 2, 3, 5))
        if scenario.fsync_s and random.random() < _QUIET:
            return scenario
        return _add_rare_faults(seed, scenario, plan_faults(random, kinds, count, scenario.expected_events))

    @property
    def has_tiers(self) -> bool:
        """Whether jobs have tiers in front of the root."""
        return self.memory_bytes is not None or self.local_every is not None

    @property
    def expected_events(self) -> int:
        """Approximate number of events before the last fault."""
        each_save = 60 if self.store == "disk" else 30
        if len(self.nodes) > 1:
            each_save *= 3
        return sum(20 + 25 * world + self.saves * (each_save + 15 * world) for world in self.worlds)


def _choose_nodes(seed: int, scenario: Scenario) -> Scenario:
    """Place the ranks on several nodes or on one, in a scenario with captures in memory."""
    random = Random(f"nodes {seed}")
    count = random.choice((1, 2, 2, 3))
    if count == 1:
        memory = random.choice((scenario.memory_bytes, scenario.memory_bytes, None))
        every = random.choice((1, 1, 2) if memory is None else (None, 1, 1, 2))
        return replace(scenario, memory_bytes=memory, local_every=every, root_every=random.choice((2, 4)))
    machines = (0, 0, 1)[:count] if random.random() < 0.15 else tuple(range(count))
    worlds, places = [], []
    for _ in scenario.worlds:
        used = sorted(random.sample(range(count), random.choice((count, count, random.randint(1, count)))))
        world = random.choice((len(used), len(used) + 1))
        worlds.append(world)
        places.append(tuple(used[rank * len(used) // world] for rank in range(world)))
    scenario = replace(
        scenario,
        worlds=tuple(worlds),
        nodes=machines,
        places=tuple(places),
        copies=random.choice((0, 1, 1, 2)),
        memory_bytes=random.choice((1 << 30, 1 << 30, 1 << 30, 15_500, 12_000)),
        root_every=random.choice((2, 2, 4)),
    )
    if random.random() < 0.4:
        memory = random.choice((1 << 30, 1 << 30, scenario.memory_bytes, None))
        scenario = replace(scenario, local_every=random.choice((1, 1, 1, 2)), memory_bytes=memory)
    return scenario


def _choose_habits(seed: int, scenario: Scenario) -> Scenario:
    """Choose what only some users do or have."""
    random = Random(f"habits {seed}")
    if scenario.store == "bucket" and random.random() < 0.25:
        scenario = replace(scenario, store="plain")
    if random.random() < 0.15:
        scenario = replace(scenario, overwrite_every=random.choice((1, 2)))
    if random.random() < 0.1:
        return _let_starts_fail(random, scenario)
    if scenario.has_tiers and random.random() < 0.25:
        scenario = replace(scenario, has_waits=False, saves=random.choice((2, 3, 4)))
        if len(scenario.nodes) == 1:  # captures that may go before they are promoted
            fsync_s = random.choice((0.0, 0.02, 0.1))
            scenario = replace(scenario, memory_bytes=1 << 30, local_every=1, fsync_s=fsync_s)
    if scenario.has_tiers and random.random() < 0.15:
        scenario = replace(scenario, has_zombies=True)
    if scenario.memory_bytes is not None and random.random() < _HASTY:
        scenario = replace(scenario, idle_s=random.choice((1.0, 5.0, 30.0)))
    return scenario


def _add_rare_faults(seed: int, scenario: Scenario, faults: Sequence[PlannedFault]) -> Scenario:
    """Add faults that need certain runs with tiers."""
    random, planned = Random(f"rare faults {seed}"), [*faults]
    if scenario.has_tiers and random.random() < _EMPTIED:
        # a job without tiers could start again there, until captures from the old course seem to follow its steps
        scenario = replace(scenario, without_memory=frozenset())
        if not scenario.bad_step:  # captures that follow a step of the root
            scenario = replace(scenario, saves=random.choice((3, 5)))
        planned += plan_faults(random, EMPTIED_ROOT, random.choice((1, 1, 2)), scenario.expected_events)
    if scenario.overwrite_every is not None and scenario.has_tiers and len(scenario.nodes) == 1:
        scenario = replace(scenario, memory_bytes=1 << 30, local_every=1, without_memory=frozenset())
        replaced = plan_faults(random, REPLACED_COPY, 1, scenario.expected_events // 2)
        planned = replaced if random.random() < _ALONE else [*planned, *replaced]
    return replace(scenario, faults=tuple(sorted(planned, key=lambda fault: fault.at)))


def _let_starts_fail(random: Random, scenario: Scenario) -> Scenario:
    """Choose starts that fail after they restore a step, until it is skipped."""
    most_failed = random.choice((1, 2, 2, 3))
    starts, saves = most_failed + 2, random.choice((2, 3))
    return replace(
        scenario,
        worlds=(scenario.worlds * starts)[:starts],
        places=(scenario.places * starts)[:starts],
        saves=saves,
        keep_last=max(scenario.keep_last, 2),
        has_zombies=False,
        without_memory=frozenset(),
        most_failed=most_failed,
        bad_step=saves,
    )
