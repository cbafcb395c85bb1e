"""A call ends in time, or is left alone."""

from __future__ import annotations

import threading

import pytest

from shardckpt.ranks.bounded_store import run_within


def test_work_that_ends_in_time_gives_its_value_or_raises_its_error() -> None:
    assert run_within(5.0, lambda: 7) == 7
    with pytest.raises(KeyError, match="no such"):
        run_within(5.0, lambda: {}["no such"])
    go = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer after 0\.05 s"):
        run_within(0.05, go.wait)
    go.set()
