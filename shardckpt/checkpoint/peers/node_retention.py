"""Remove steps on one node that no rule keeps, if each node has a part of every step."""

from __future__ import annotations

from collections.abc import Callable, Collection

from shardckpt.checkpoint.peers.node_steps import find_orders, read_commits, remove_old_steps, remove_older_files
from shardckpt.checkpoint.peers.promoted_steps import PromotedSteps
from shardckpt.format.apply_retention import StepClock
from shardckpt.format.native.run_directory import step_name
from shardckpt.plan.retention import Retention
from shardckpt.storage.store import Store


class NodeRetention:
    """Applies a tier's rules on one node."""

    def __init__(
        self, rules: Retention, open_own: Callable[[], Store], damaged: Collection[str], removed: dict[str, int]
    ) -> None:
        self._rules, self._open_own, self._damaged, self._removed = rules, open_own, damaged, removed
        self._clock, self.promoted = StepClock(), PromotedSteps()

    def apply(self, needed: Collection[int], copied: Collection[str], *, is_idle: bool) -> None:
        """Remove this node's steps that no rule keeps, and files of replaced saves."""
        uncounted = {step_name(step.number) for step in self.promoted.uncounted}
        own = self._open_own()
        for number, older in self.promoted.take_removable(needed):
            remove_older_files(own, step_name(number), older)
        commits = read_commits(own)
        saves = {name: (commits[name].save, number) for name, (_, number) in find_orders(commits).items()}
        numbers = {*needed, *self.promoted.list_protected([number for _, number in saves.values()])}
        protected = {*map(step_name, numbers), *copied}
        damaged = {*self._damaged, *(commits[name].save for name in uncounted & commits.keys())}

        def note(names: Collection[str]) -> None:
            self._removed.update(saves[name] for name in names if name in saves)

        remove_old_steps(own, self._rules, protected, damaged, is_idle=is_idle, on_removal=note, clock=self._clock)
