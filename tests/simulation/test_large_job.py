"""The cost of a capture, the loss of nodes and a restore grows with the ranks at most linearly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shardckpt.testing.simulation import PhaseCost, run_large_job


def require_linear_growth(small: Sequence[PhaseCost], large: Sequence[PhaseCost]) -> None:
    """Require that a rank of the large job has about as many events and messages as one of the small job.

    A rank may take part in one round more of the exchange of files, which has two messages.
    """
    for before, after in zip(small, large, strict=True):
        assert after.name == before.name
        assert after.messages / after.ranks < before.messages / before.ranks + 2.5, (before, after)
        assert after.events / after.ranks < 1.1 * before.events / before.ranks, (before, after)


def test_events_and_messages_of_a_rank_do_not_grow_with_the_number_of_ranks() -> None:
    small, large = run_large_job(48), run_large_job(96)
    assert [(cost.name, cost.ranks) for cost in large] == [("capture", 96), ("restore", 88)]
    assert all(cost.messages > 0 and cost.rank0_s > 0 for cost in large)
    require_linear_growth(small, large)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_ranks_restore_after_they_lost_a_node() -> None:
    small, large = run_large_job(256), run_large_job(1024)
    assert [restored.ranks for _, restored in (small, large)] == [248, 1016]
    require_linear_growth(small, large)
