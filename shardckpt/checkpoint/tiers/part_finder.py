"""`PartFinder`: finder of the steps of a tier, of which each node may have only a part."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from shardckpt.checkpoint.peers.node_steps import find_orders, read_commits
from shardckpt.checkpoint.run.step_finder import FoundStep, StepFinder, StepKey


class PartFinder(StepFinder):
    """Finder of the steps of a tier, of which each node may have only a part.

    Nodes that later ranks do not use may have the rest of a step. Steps that are saved without it are newer: they
    belong to the next branch.

    Attributes:
        logged: Fault of the tier that was logged last; empty without one.
    """

    logged: str = ""
    _least_branch = 0

    @contextmanager
    def at(self, root: str) -> Iterator[None]:
        """Find steps under another path or URL within the context, where the parts of all nodes are.

        Args:
            root: Path or URL of the steps, which are of this run.
        """
        own, self.root = self.root, root
        try:
            yield
        finally:
            self.root = own

    def find_on_rank0(
        self, wanted: int | None, passed: Collection[StepKey], avoided: Collection[tuple[int, int]] = ()
    ) -> FoundStep:
        """Return the newest step that can be loaded, and the newest of which the nodes have a part. On rank 0."""
        found = super().find_on_rank0(wanted, passed, avoided)
        newest = max([found.newest, *find_orders(read_commits(self.open_store())).values()])
        self._least_branch = max(newest[0], 0) + (newest > found.newest)
        return found._replace(newest=newest)

    def newest_branch(self) -> int:
        """Return the branch of the newest step on this node; the next one if its rest was not found. On rank 0."""
        held = read_commits(self.open_store()).values()
        return max([self._least_branch, *(commit.branch for commit in held)])
