"""Saves and loads of a model on a device whose group cannot move tensors of the CPU, as under NCCL alone."""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.boxes import full_box
from shardckpt.checkpoint.planning import save_plan
from shardckpt.checkpoint.save import session
from shardckpt.checkpoint.save.session import ReplicaDigests, ReplicatedBox
from shardckpt.checkpoint.save.staging import BufferPool, StagingArea, make_buffer
from shardckpt.checkpoint.stateful.flatten import FlattenedState
from shardckpt.native.payload import PayloadChunk, arrange_files
from shardckpt.state.local.tensor_shards import LocalShard, get_tensor_shards
from tests.core.test_sim_training import build, kept, local, loss_of, offload_of, optimizer_of
from tests.kit.ranks import harness, sim


def trained(front_end: str, offloads: bool, step: int, device: str) -> tuple[Any, Any]:
    model = build(front_end, device, **(offload_of(front_end) if offloads else {}))
    optimizer = optimizer_of(model)
    go_on(model, optimizer, step, device)
    return model, optimizer


def go_on(model, optimizer, step: int, device: str) -> None:
    optimizer.zero_grad()
    loss_of(model, step, device).backward()
    optimizer.step()


def told(model, optimizer) -> Any:
    """Return this rank's shards and moments, as plain numbers."""
    moments = [
        {slot: local(value).cpu().tolist() for slot, value in optimizer.state[parameter].items()}
        for parameter in model.parameters()
        if parameter in optimizer.state
    ]
    return kept(model), moments


def save_and_load(rank: int, world: int, front_end: str, offloads: bool, folder: str) -> list[str]:
    """Save at once and in the background, train on meanwhile, and load into other models."""
    model, optimizer = trained(front_end, offloads, 0, "sim")
    state = {"model": model, "optim": optimizer}
    shardckpt.save(state, f"{folder}/at-once")
    pending = shardckpt.async_save(state, f"{folder}/background")
    before = told(model, optimizer)
    go_on(model, optimizer, 1, "sim")
    pending.result()
    wrong = []
    for name in ("at-once", "background"):
        other, again = trained(front_end, offloads, 5, "sim")
        shardckpt.load({"model": other, "optim": again}, f"{folder}/{name}")
        wrong += [] if told(other, again) == before else [name]
    return wrong


@pytest.mark.parametrize(
    ("front_end", "offloads"),
    [("flat", False), ("orig", True), ("in place", False), ("in place", True)],
    ids=["flat", "orig offloaded", "in place", "in place offloaded"],
)
def test_a_step_saved_at_once_or_in_the_background_is_loaded(tmp_path, front_end, offloads):
    assert sim.ranks(2, save_and_load, front_end, offloads, str(tmp_path)) == [[], []]


def save_behind_a_gate(rank: int, world: int, front_end: str, folder: str) -> Any:
    """Save in the background with a writer that waits; return whether it waited for copies, and what was right."""
    model = build(front_end, "sim")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)  # with replicated steps on the device
    go_on(model, optimizer, 0, "sim")
    state = {"model": model, "optim": optimizer}
    shardckpt.async_save(state, f"{folder}/first").result()
    before = told(model, optimizer)
    gate, blocks = threading.Event(), StagingArea.blocks

    def wait_and_write(area: StagingArea, payload: Any) -> Any:
        gate.wait()
        yield from blocks(area, payload)

    StagingArea.blocks = wait_and_write
    with sim.counted() as counts:
        pending = shardckpt.async_save(state, f"{folder}/second")
        copies, unfinished = counts(), sim.unfinished()
    gate.set()
    pending.result()
    StagingArea.blocks = blocks
    other, again = trained(front_end, False, 5, "sim")
    shardckpt.load({"model": other, "optim": again}, f"{folder}/second")
    return copies.waits, copies.pinned == unfinished > 0, told(other, again) == before


@pytest.mark.parametrize("front_end", ["flat", "in place"])
def test_a_save_in_the_background_waits_for_no_copy_and_writes_what_was_there(tmp_path, front_end):
    assert sim.ranks(2, save_behind_a_gate, front_end, str(tmp_path)) == [(0, True, True)] * 2


def save_before_the_device_is_used(path: Any, folder: str) -> Any:
    """Make buffers before this process uses the device; return copies of later saves, and lines of pins."""
    lines: list[str] = []
    logger, handler = logging.getLogger("shardckpt"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    handler.addFilter(lambda record: "pins" in record.getMessage())  # each save is logged too
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    shardckpt.async_save({"t": torch.ones(9)}, f"{folder}/early").result()
    early = list(lines)
    sim.enter(path)
    waits = []
    for number in range(2):
        with sim.counted() as counts:
            shardckpt.async_save({"t": torch.ones(9, device="sim")}, f"{folder}/{number}").result()
            waits.append(counts().waits)
    return early, waits, lines


def test_buffers_made_before_the_first_use_of_the_device_are_pinned_anew_and_logged(tmp_path):
    path = sim.library()
    [(early, waits, lines)] = harness.run(1, lambda rank, world: save_before_the_device_is_used(path, str(tmp_path)))
    assert (early, waits) == ([], [0, 0])
    assert len(lines) == 1
    assert lines[0].startswith("async_save pins 67.1 MB more of this machine's memory on this rank, 67.1 MB in all")


def give_a_copy_up(rank: int, world: int) -> Any:
    """Return how many copies are under way: after a copy that nobody writes, beside another lane, in the next save."""
    arrays = {("t",): get_tensor_shards(torch.ones(9, device="sim"))}
    files = arrange_files((PayloadChunk(("t",), (9,), "float32", full_box((9,))),))
    pool = BufferPool(make_buffer)
    StagingArea(pool, None).fill(files, FlattenedState(arrays=arrays))
    given_up = sim.unfinished()
    StagingArea(BufferPool(make_buffer), None)  # as a save has beside a capture
    beside = sim.unfinished()
    StagingArea(pool, None)
    return given_up, beside, sim.unfinished()


def test_buffers_of_a_save_that_was_given_up_are_used_again_when_its_copies_are_done():
    assert sim.ranks(1, give_a_copy_up) == [(1, 1, 0)]


def save_unequal_replicas(rank: int, world: int, folder: str, least: int, mixed: bool) -> list[Any]:
    """Save replicas that differ in copies, in what does not fit there, and not at all; return what was found."""
    session.PINNED_BYTES, save_plan.LEAST_SUM_BYTES = 1 << 10, least
    device = "cpu" if mixed and rank else "sim"
    found = []
    for unequal in ("small", "large", "turned", ""):
        state = {"small": torch.ones(9), "large": torch.ones(900), "turned": torch.ones(4, 5).t()}
        state = {name: (value + rank if name == unequal else value).to(device) for name, value in state.items()}
        try:
            shardckpt.async_save(state, f"{folder}/{unequal}").result()
            found.append("saved")
        except shardckpt.errors.UsageError as error:
            found.append(f"`{unequal}` (tensor) differs between rank 0 and rank 1" in str(error))
    return found


@pytest.mark.parametrize("mixed", [False, True], ids=["on devices", "on one device"])
@pytest.mark.parametrize("least", [1, 1 << 10, 1 << 20])
def test_replicas_that_differ_are_found_whenever_and_wherever_they_are_compared(tmp_path, least, mixed):
    assert sim.ranks(2, save_unequal_replicas, str(tmp_path), least, mixed) == [[True, True, True, "saved"]] * 2


def save_large_replicas(rank: int, world: int, folder: str) -> list[int]:
    """Return how many copies of replicas the host has waited for when they are compared in two saves."""
    session.PINNED_BYTES, save_plan.LEAST_SUM_BYTES = 1 << 10, 1 << 10
    state = {str(number): torch.full((900,), float(number), device="sim") for number in range(4)}
    made, waited = ReplicaDigests.__init__, []

    def noted(*args: Any) -> None:
        with sim.counted() as counts:
            made(*args)
            waited.append(counts().pinned - sim.unfinished())

    ReplicaDigests.__init__ = noted
    for number in range(2):
        shardckpt.async_save(state, f"{folder}/{number}").result()
    return waited


def test_large_replicas_are_compared_without_a_wait_of_the_host(tmp_path):
    assert sim.ranks(2, save_large_replicas, str(tmp_path)) == [[0, 0]] * 2


def hash_replicas(rank: int, world: int, summed: bool = False) -> Any:
    """Return how many copies are under way before and after the digests are finished, and whether those are right."""
    tensors = [torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4).t(), torch.empty(0)]
    tensors = tensors[:2] if summed else tensors  # no plan compares what is empty
    groups = {7} if summed else set()

    def digests(device: str) -> ReplicaDigests:
        boxes = [LocalShard(full_box(tuple(each.shape)), each.to(device)) for each in tensors]
        return ReplicaDigests({7: [ReplicatedBox(("t",), box.box.size, box) for box in boxes]}, groups)

    on_device, on_host = digests("sim"), digests("cpu")
    unfinished = sim.unfinished()
    for each in (on_device, on_host):
        each.finish()
    return unfinished, sim.unfinished(), on_device.by_group() == on_host.by_group(), len(on_host.by_group()[7])


def test_digests_of_replicas_on_a_device_are_those_on_the_host_once_finished():
    assert sim.ranks(1, hash_replicas) == [(2, 0, True, 3)]
    assert sim.ranks(1, hash_replicas, True) == [(2, 0, True, 2)]
