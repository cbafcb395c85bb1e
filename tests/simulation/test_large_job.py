"""The cost of a capture, the loss of nodes and a restore grows with the ranks at most linearly."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.simulation import PhaseCost, run_large_job


def require_linear_growth(small: Sequence[PhaseCost], large: Sequence[PhaseCost]) -> None:
    """Require that a rank of the large job has about as many events, messages and bytes as one of the small job.

    A rank may take part in one round more of the exchange of files, which has two messages. In a capture each node of 8
    ranks gets the manifest, in which each rank has up to 48 bytes; no node sends it to more than four. In a restore
    more of the files of a small job are on the own node.
    """
    for before, after in zip(small, large, strict=True):
        assert after.name == before.name
        assert after.messages / after.ranks < before.messages / before.ranks + 2.5, (before, after)
        assert after.events / after.ranks < 1.1 * before.events / before.ranks, (before, after)
        assert after.rank0_bytes / after.ranks < 1.1 * before.rank0_bytes / before.ranks, (before, after)
        manifests, factor = (6.0 * (after.ranks - before.ranks), 1.05) if after.name == "capture" else (0.0, 1.25)
        limit = factor * before.message_bytes / before.ranks + manifests
        assert after.message_bytes / after.ranks < limit, (before, after)


def test_events_messages_and_bytes_of_a_rank_do_not_grow_with_the_number_of_ranks() -> None:
    small, large = run_large_job(64), run_large_job(192)
    assert [(cost.name, cost.ranks) for cost in large] == [("capture", 192), ("restore", 184)]
    assert all(cost.messages > 0 and cost.rank0_s > 0 for cost in large)
    require_linear_growth(small, large)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_ranks_restore_after_they_lost_a_node() -> None:
    small, large = run_large_job(256), run_large_job(1024)
    assert [restored.ranks for _, restored in (small, large)] == [248, 1016]
    require_linear_growth(small, large)
