"""Each wait of the host for a copy is needed: without it values on the simulated device are wrong."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest

from tests.checkpoint import test_sim_saves as saves
from tests.checkpoint import test_sim_transfers as transfers
from tests.core.test_sim_training import refill_inputs, train_offloaded, use_some
from tests.core.test_stream_mutants import CONTEXTS, EVENTS, EVENTS_FOUND, ON_THREADS, changed, sites, without
from tests.kit.models.under_test import TORCH
from tests.kit.ranks import harness, sim

pytestmark = pytest.mark.skipif(TORCH, reason="waits of the engine")

HOST_WAITS = frozenset({"synchronize"})
FOLDER = object()
"""In place of the folder of a test."""
Scenario = tuple[int, Callable[..., Any], tuple[Any, ...]]
"""Ranks, a scenario, and the arguments of that but the device."""

SAVES: Scenario = (1, saves.save_behind_a_gate, ("flat", FOLDER))
LOADS: Scenario = (1, transfers.save_and_load, (FOLDER, False))
LOADS_FOR_OTHERS: Scenario = (2, transfers.save_and_load, (FOLDER, True))
STREAMS: Scenario = (1, transfers.build_behind_an_upload, ())
REPLICAS: Scenario = (1, saves.hash_replicas, ())
SUMS: Scenario = (1, saves.hash_replicas, (True,))
GIVES_UP: Scenario = (1, saves.give_a_copy_up, ())
OFFLOADS: Scenario = (2, train_offloaded, ("in place", "sim"))
REFILLS: Scenario = (1, refill_inputs, ("flat", "sim"))

ELSEWHERE = {
    "core.comm.streams:RateLimiter.wait:synchronize": "limits memory: `test_streams` counts units",
    "integrations.vllm:Engine.update_weights:synchronize": "vLLM's own engines wait here; `make test-stream` has a CPU",
    "stream.publish.snapshot:Snapshot.capture:synchronize": "waits for the device: simulated devices have no such call",
}
FOUND: dict[str, Scenario] = {
    "checkpoint.load.uploads:UploadBuffers.take:synchronize": LOADS,
    "checkpoint.load.uploads:_wait:synchronize": LOADS_FOR_OTHERS,
    "checkpoint.save.session:ReplicaDigests.finish:synchronize": SUMS,
    "checkpoint.save.session:_PinnedCopies.wait:synchronize": REPLICAS,
    "checkpoint.save.staging:BufferPool.open:synchronize": GIVES_UP,
    "checkpoint.save.staging:StagingArea.blocks:synchronize": SAVES,
    "checkpoint.stateful.state_stream:build_stream:synchronize": STREAMS,
    "checkpoint.stateful.tensor_bytes:PinnedPieces._read_oldest:synchronize": LOADS,
    "core.params.gradient_reduction:PendingFlags.wait:synchronize": (2, use_some, ("in place", False, "sim")),
    "core.runtime.fsdp_unit:UnitReducer._wait_for_copies:synchronize": OFFLOADS,
    "core.runtime.fsdp_unit:FSDPUnit.finalize_forward:synchronize": REFILLS,
}
"""Each wait, and a scenario in which it is missed."""

EVENTS_ELSEWHERE = {
    **dict.fromkeys(EVENTS_FOUND, "`test_stream_mutants`"),
    "core.comm.streams:RateLimiter.record_free_event:record_event": "limits memory: `test_streams` counts units",
    "core.comm.streams:DeviceStreams.hold_gather_output:record_event": (
        "without it a gather waits for all that is queued"
    ),
    "core.params.gradient_reduction:GradientReducer._queue_rest:record_event": (
        "without it the computation waits for all reductions"
    ),
    "core.params.unsharded_params:UnshardedParams._keep_partial_shard:record_event": (
        "without it a gather waits for all that is queued"
    ),
}
EVENTS_WAITED_FOR: dict[str, Scenario] = {
    "checkpoint.load.uploads:UploadBuffers.take:record_events": LOADS,
    "checkpoint.load.uploads:copy_to_device:record_event": LOADS_FOR_OTHERS,
    "checkpoint.save.session:_PinnedCopies._copy:record_events": REPLICAS,
    "checkpoint.save.staging:StagingArea.fill:record_events": GIVES_UP,
    "checkpoint.stateful.state_stream:build_stream:record_event": STREAMS,
    "checkpoint.stateful.tensor_bytes:PinnedPieces._end_piece:record_event": LOADS,
    "core.runtime.mixed_precision:move_tensors:record_event": REFILLS,
    "devices:CurrentStreams.record_events:record_event": REPLICAS,
    "devices:copy_to_pinned:record_event": OFFLOADS,
}
"""Each event that the host waits for, and a scenario in which it is missed."""

THREADS: dict[str, Scenario] = {
    "checkpoint.dedup:chunk_digests:use": (1, transfers.compare_on_a_stream, (FOLDER,)),
    "checkpoint.load.uploads:UploadBuffers.take:use": (1, transfers.load_on_a_stream, (FOLDER,)),
    "devices:CurrentStreams.use:use_stream": (1, transfers.load_on_a_stream, (FOLDER,)),
}
"""Each stream that threads take over from their caller, and a scenario in which it is missed."""


def test_every_wait_of_the_host_is_known():
    assert {*FOUND, *ELSEWHERE} == set(sites(HOST_WAITS))
    assert {*EVENTS_WAITED_FOR, *EVENTS_ELSEWHERE} == set(sites(EVENTS))
    assert set(THREADS) == ON_THREADS


def outcome(scenario: Scenario, folder: str, mutant: Callable[[], Any] = contextlib.nullcontext) -> Any:
    """Return the values of a scenario on the simulated device, or that it failed."""
    world, body, args = scenario
    args = tuple(folder if each is FOLDER else each for each in args)

    def on_the_device(rank: int, world: int) -> Any:
        with mutant():
            return body(rank, world, *args)

    try:
        return sim.ranks(world, on_the_device)
    except harness.RanksError:
        return "failed"


ROWS = [
    *((site, HOST_WAITS, scenario) for site, scenario in FOUND.items()),
    *((site, EVENTS, scenario) for site, scenario in EVENTS_WAITED_FOR.items()),
    *((site, CONTEXTS, scenario) for site, scenario in THREADS.items()),
]


@pytest.mark.parametrize(("site", "names", "scenario"), ROWS, ids=[site for site, _, _ in ROWS])
def test_each_wait_of_the_host_is_missed_when_it_is_gone(tmp_path, site, names, scenario):
    expected = outcome(scenario, str(tmp_path / "with"))
    assert expected != "failed"
    assert outcome(scenario, str(tmp_path / "without"), functools.partial(without, site, names)) != expected


def test_an_event_that_is_recorded_before_a_copy_to_pinned_memory_is_missed():
    copy = "copied.copy_(tensor, non_blocking=True)"
    edits = ((copy, f"event = record_event(tensor.device); {copy}"), (", record_event(tensor.device)\n", ", event\n"))
    mutant = functools.partial(changed, "devices:copy_to_pinned", edits)
    assert outcome(OFFLOADS, "", mutant) != outcome(OFFLOADS, "") != "failed"
