"""`PartFinder`: find a tier's steps, although each node may have only a part."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from shardckpt.checkpoint.run.step_finder import FoundStep, StepFault, StepFinder, StepKey
from shardckpt.native.run_directory import RunDirectory
from shardckpt.tiers.peers.node_steps import find_orders, read_commits
from shardckpt.tiers.peers.open_peers import NodeFault


class TierFault(NamedTuple):
    """A step in a tier that cannot be loaded from there, or not from one node."""

    number: int
    text: str  # tier, node, path and what is wrong
    is_of_node: bool = False  # other nodes may have what this one lacks
    has_only_begun: bool = False  # the step was never complete


def select_faults(
    faults: Mapping[str, Sequence[TierFault]], found: FoundStep, tier: str, wanted: int | None
) -> list[StepFault]:
    """Return the faults of steps in tiers that the load passed over, also if it found no step."""
    places = [*faults]
    at = places.index(tier) if tier in faults else len(places)

    def is_passed_over(place: str, fault: TierFault) -> bool:
        if wanted not in (None, fault.number):
            return False
        if found.save is None:
            return wanted is not None or not fault.has_only_begun  # a first save that was killed
        is_nearer = places.index(place) < at or (fault.is_of_node and place == tier)
        return fault.number > found.number or (fault.number == found.number and is_nearer)

    return [
        StepFault(fault.number, fault.text)
        for place, each in faults.items()
        for fault in each
        if is_passed_over(place, fault)
    ]


class PartFinder(StepFinder):
    """Finds a tier's steps, although each node may have only a part."""

    logged: str = ""  # last logged fault of the tier

    @contextmanager
    def at(self, root: str) -> Iterator[None]:
        """Within the context, find steps under another path or URL, where all nodes' parts are."""
        own, self.root = self.root, root
        try:
            yield
        finally:
            self.root = own

    def find_on_rank0(
        self, wanted: int | None, passed: Collection[StepKey], avoided: Collection[tuple[int, int]] = ()
    ) -> FoundStep:
        """Return the newest step that can be loaded, and the newest with a part on any node. On rank 0."""
        found = super().find_on_rank0(wanted, passed, avoided)
        # Nodes that this job does not use may have the rest of a step.
        return found._replace(newest=max([found.newest, *find_orders(read_commits(self.open_store())).values()]))

    def list_faults(self, run: RunDirectory, node_faults: Sequence[NodeFault]) -> list[TierFault]:
        """Return faults in this tier's steps. On rank 0."""
        steps = {step.name: step for step in run.steps if not (step.is_base or step.is_foreign)}
        of_nodes = [each for each in node_faults if each.tier == self.tier]
        started = {name for name, step in steps.items() if step.has_only_begun}
        faults = [
            TierFault(
                int(each.folder.partition("-")[2]),
                f"{self.tier} tier on the node of rank {each.rank}, {each.fault}",
                True,
                each.folder in started,
            )
            for each in of_nodes
        ]
        known = {each.folder for each in of_nodes}
        others = [step for name, step in steps.items() if not step.is_complete and name not in known]
        return [*faults, *(TierFault(each.number, f"{self.tier} tier: {each.fault}") for each in others)]

    def newest_branch(self) -> int:
        """Return the newest step's branch on this node. On rank 0."""
        return max((commit.branch for commit in read_commits(self.open_store()).values()), default=0)
