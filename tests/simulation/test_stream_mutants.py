"""Faults that are put into a stream's protocol are found within the histories that `make test` runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from shardckpt.errors import ShardckptError
from shardckpt.stream.publish.ledger import Ledger
from shardckpt.stream.publish.publisher import Publisher
from shardckpt.stream.publish.snapshot import Snapshot
from shardckpt.stream.receive.subscriber import Subscriber, SubscriberState
from shardckpt.stream.retention import prune_stream
from tests.simulation import StreamScenario, run_stream_history
from tests.simulation.faults import PlannedFault
from tests.simulation.scheduler import HistoryError
from tests.simulation.stream_history import STREAM_FAULTS
from tests.simulation.test_stream_histories import FEW

HISTORIES = 40
Patch = pytest.MonkeyPatch


def snapshots_move_before_the_commit(patch: Patch) -> None:
    """A version whose commit failed counts as the base of the next one."""
    write = Publisher._write

    def write_early(self: Publisher, task: Any, plan: Any, ranks: Any, copied: Any) -> None:
        try:
            write(self, task, plan, ranks, copied)
        except Exception:
            if self._snapshot is not None:
                self._snapshot.promote()
            raise

    patch.setattr(Publisher, "_write", write_early)


def labels_stay_after_a_failed_half(patch: Patch) -> None:
    commit = Subscriber._commit

    def keep(self: Subscriber, staged: Any, into: Any) -> Any:
        applied = self._applied
        try:
            return commit(self, staged, into)
        except ShardckptError:
            self._state, self._failed, self._applied = SubscriberState.READY, None, applied
            raise

    patch.setattr(Subscriber, "_commit", keep)


def epochs_are_joined(patch: Patch) -> None:
    """A publisher that starts continues in the last epoch."""
    claim = Ledger._claim

    def join(self: Ledger) -> None:
        last = self.folder.find_last_epoch()
        if self._epoch or not last:
            claim(self)
        else:
            self._epoch = last

    patch.setattr(Ledger, "_claim", join)


def publishers_are_not_replaced(patch: Patch) -> None:
    claim = Ledger._claim
    patch.setattr(Ledger, "_claim", lambda self: None if self._epoch else claim(self))
    patch.setattr(Ledger, "_require_ours", lambda *_: None)


def snapshots_stay_behind(patch: Patch) -> None:
    """A published version does not become the base of the next one, but the commit says so."""
    patch.setattr(Snapshot, "promote", lambda self: None)


def chains_are_removed(patch: Patch) -> None:
    """A removal keeps the newest version alone."""
    patch.setattr(prune_stream, "plan_removal", lambda bases, *_: sorted(bases)[:-1])


MUTANTS: dict[Callable[[Patch], None], int] = {
    labels_stay_after_a_failed_half: 3,
    epochs_are_joined: 0,
    publishers_are_not_replaced: 11,
    snapshots_stay_behind: 0,
    chains_are_removed: 0,
}
"""Mutants, and a seed that finds each: the first 40 follow if the code changes and it does not any more."""


def test_each_mutant_is_found_by_a_seed_that_make_test_runs() -> None:
    assert max(MUTANTS.values()) < FEW


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_of_a_stream_is_found(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    first = MUTANTS[mutant]
    mutant(monkeypatch)
    failures = (run_stream_history(seed).failure for seed in (first, *range(HISTORIES)))
    found = next((failure for failure in failures if failure is not None), None)
    assert isinstance(found, HistoryError), "a claim finds it, not a call that does not fit the code any more"


def test_a_snapshot_that_moves_early_is_found_where_a_commit_is_refused(monkeypatch: Patch) -> None:
    refused = next(kind for kind in STREAM_FAULTS if kind.name == "commit refused")
    places = [PlannedFault(at, refused) for at in range(20, 120, 20)]
    scenarios = [StreamScenario("bucket", worlds=(2,), versions=5, max_chain=9, faults=(each,)) for each in places]
    assert [run_stream_history(1, each).failure for each in scenarios] == [None] * len(scenarios)
    assert any(run_stream_history(1, each).fired for each in scenarios)
    snapshots_move_before_the_commit(monkeypatch)
    assert any(isinstance(run_stream_history(1, each).failure, HistoryError) for each in scenarios)
