"""Find the base for an incremental save: a step that was read or written since the run was restored."""

from __future__ import annotations

from shardckpt.checkpoint.run.step_finder import NO_STEP, StepFinder
from shardckpt.format.native.run_directory import manifest_fault, read_run


class BaseFinder:
    """Finds the bases for a run's saves."""

    # After a restore, an older step that was not loaded cannot be a base: nothing has verified it, and a flipped bit
    # there would be in every save that refers to it.

    def __init__(self, finder: StepFinder) -> None:
        self._finder = finder
        self._restored, self._loaded = NO_STEP, ""

    def record_restore(self, position: tuple[int, int], loaded: str) -> None:
        """Record a restore."""
        self._restored, self._loaded = position, loaded

    def find_base(self, number: int) -> str | None:
        """Return the newest step that can be a save's base, while no other save runs. On rank 0."""
        finder = self._finder
        store = finder.open_store()
        for step in reversed(read_run(store).complete):
            is_known = step.save == self._loaded or (step.branch, step.number) > self._restored
            if is_known and step.number != number and finder.is_good(step) and not manifest_fault(store, step):
                return finder.path(step.name)
        return None
