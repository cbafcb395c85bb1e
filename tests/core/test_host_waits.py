"""Each wait of the host for a copy of the engine is needed: without it values on the simulated device are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import harness
import pytest
import sim
from test_sim_training import refill_inputs, train_offloaded, use_some
from test_stream_mutants import sites, without
from under_test import TORCH

pytestmark = pytest.mark.skipif(TORCH, reason="waits of the engine")

HOST_WAITS = frozenset({"synchronize"})
NOT_FOR_VALUES = {
    "core.comm.streams:RateLimiter.wait:synchronize": "limits memory",
    "checkpoint.save.side_streams:wait_for_side_streams:synchronize": "of saves: after one that failed",
}
FOUND: dict[str, tuple[int, Callable[..., Any], tuple[Any, ...]]] = {
    "core.params.gradient_reduction:PendingFlags.wait:synchronize": (2, use_some, ("in place", False)),
    "core.runtime.fsdp_unit:UnitParams._wait_for_copies:synchronize": (2, train_offloaded, ("in place",)),
    "core.runtime.fsdp_unit:FSDPUnit.finalize_forward:synchronize": (1, refill_inputs, ("flat",)),
}
"""Each wait: ranks, a scenario in which it is missed, and the arguments of that."""


def test_every_wait_of_the_host_is_known():
    assert {*FOUND, *NOT_FOR_VALUES} == set(sites(HOST_WAITS))


def outcome(world: int, body: Callable[..., Any], args: tuple[Any, ...], site: str = "") -> Any:
    """Return the values of a scenario on the simulated device, or that it failed; without a wait if one is named."""

    def on_the_device(rank: int, world: int) -> Any:
        if not site:
            return body(rank, world, *args, "sim")
        with without(site, HOST_WAITS):
            return body(rank, world, *args, "sim")

    try:
        return sim.ranks(world, on_the_device)
    except harness.RanksError:
        return "failed"


@pytest.mark.parametrize("site", FOUND)
def test_each_wait_of_the_host_is_missed_when_it_is_gone(site):
    world, body, args = FOUND[site]
    expected = outcome(world, body, args)
    assert expected != "failed"
    assert outcome(world, body, args, site) != expected
