"""`PartFinder`: finder of the steps of a tier, of which each node may have only a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardckpt.checkpoint.peers.node_steps import read_commits
from shardckpt.checkpoint.run.step_finder import StepFinder


class PartFinder(StepFinder):
    """Finder of the steps of a tier, of which each node may have only a part."""

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

    def newest_branch(self) -> int:
        """Return the branch of the newest step on this node, which may have only a part of it. On rank 0."""
        return max((commit.branch for commit in read_commits(self.open_store()).values()), default=0)
