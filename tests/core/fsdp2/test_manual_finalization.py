"""Manual finalization of backward with offload and on a device, and with reductions that fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardckpt.errors import RankError
from tests.core.test_sim_training import batch, build, kept, local, loss_of, offload_of, on_both, optimizer_of
from tests.kit.models.under_test import TORCH, core
from tests.kit.ranks import harness, sim

pytestmark = pytest.mark.skipif(TORCH, reason="torch has it from 2.15 on")
if not TORCH:
    from shardckpt.core.runtime.root_state import GradientReductionHandle

ASYNC = pytest.mark.parametrize("async_op", [False, True], ids=["at once", "by a handle"])
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
OFFLOADS = pytest.mark.parametrize("offloads", [False, True], ids=["on the device", "offloaded"])


def made(device: str, offloads: bool = False) -> Any:
    """Return a model whose backward the user ends."""
    model = build("in place", device, **(offload_of("in place") if offloads else {}))
    model.set_manual_backward_finalization(True)
    return model


def finalize(model: Any, async_op: bool) -> None:
    handle = model.finalize_backward(async_op=async_op)
    if async_op:
        handle.wait()


def accumulate(model: Any, step: int, device: str) -> None:
    """Run two backwards, of which only the last one reduces."""
    for micro, is_last in ((0, False), (1, True)):
        model.set_requires_gradient_sync(is_last)
        loss_of(model, 2 * step + micro, device).backward()


def gradients(model: Any) -> list[Any]:
    return [None if each.grad is None else local(each.grad).tolist() for each in model.parameters()]


# -------------------------------------------------------------------------------------------- offload and devices


def train(rank: int, world: int, manual: bool, async_op: bool, offloads: bool, device: str) -> Any:
    """Return gradients and shards of some steps of two microbatches."""
    model = made(device, offloads)
    model.set_manual_backward_finalization(manual)
    optimizer, found = optimizer_of(model), []
    for step in range(3):
        accumulate(model, step, device)
        if manual:
            finalize(model, async_op)
        found.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return found, kept(model)


@OFFLOADS
@ASYNC
def test_gradients_are_those_of_automatic_finalization_on_the_cpu_and_on_a_device(async_op, offloads):
    expected = harness.run(2, train, False, False, offloads, "cpu")
    assert on_both(2, train, True, async_op, offloads) == (expected, expected)


def hold_and_finalize(rank: int, world: int, async_op: bool, offloads: bool, device: str) -> Any:
    """Return gradients of backwards that reduced nothing, until the user's call."""
    model = made(device, offloads)
    model.set_requires_gradient_sync(False)
    for step in range(2):
        loss_of(model, step, device).backward()
    before = [each.grad is None for each in model.parameters()]
    model.set_requires_gradient_sync(True)
    finalize(model, async_op)
    return before, gradients(model)


@OFFLOADS
@ASYNC
def test_gradients_that_waited_for_the_call_have_the_bits_of_the_cpu(async_op, offloads):
    found, expected = on_both(2, hold_and_finalize, async_op, offloads)
    assert found == expected
    assert all(all(before) and None not in after for before, after in expected)


def copies_of_a_step(rank: int, world: int, offloads: bool, device: str) -> tuple[int, int]:
    """Return how often the host waits for copies in a step, and the copies that nobody has waited for after it."""
    model = made(device, offloads)
    optimizer, batches = optimizer_of(model), [batch(step, device) for step in range(3)]
    for inputs in batches:
        with sim.counted() as counts:
            model(inputs).square().mean().backward()
            handle = model.finalize_backward(async_op=True)
            handle.wait()
            left = sim.unfinished()
            optimizer.step()
            optimizer.zero_grad()
            waits = counts().waits
    return waits, left


@OFFLOADS
def test_the_host_waits_for_copies_of_offloaded_gradients_alone_as_the_handle_does(offloads):
    assert sim.ranks(2, copies_of_a_step, offloads, "sim") == [(0, 0)] * 2


# ------------------------------------------------------------------------------------------------------- failures


class FailingOnce(core.ReduceScatter if not TORCH else object):
    """A reduce-scatter that fails on all ranks, once: when it is started, or when it is awaited."""

    def __init__(self, at_start: bool) -> None:
        self.at_start = at_start
        self.is_armed = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output: torch.Tensor, full: torch.Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        is_failing, self.is_armed = self.is_armed, False
        if is_failing and self.at_start:
            raise RuntimeError("the network is gone")
        work = REDUCE_SCATTER(output, full, op=op, group=group, async_op=async_op)
        return FailingWork(work) if is_failing else work


class FailingWork:
    """The result of a collective that fails."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        if self._work is not None:  # on a device it is queued
            self._work.wait()
        raise RuntimeError("the network is gone")


def held(model: Any, device: str) -> None:
    """Leave all gradients for the user's call."""
    model.zero_grad()
    model.set_requires_gradient_sync(False)
    loss_of(model, 0, device).backward()
    model.set_requires_gradient_sync(True)


def error_of(call: Any) -> str:
    """Return the type and text of the error of a call; empty without one."""
    try:
        call()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fail_and_recover(rank: int, world: int, at_start: bool, offloads: bool, device: str) -> Any:
    """Return errors of a call that fails and of its handle; gradients of the next call, and those of another model."""
    model, other = made(device, offloads), made(device, offloads)
    failing = FailingOnce(at_start)
    model.blocks[1].set_custom_reduce_scatter(failing)
    model.set_reduce_scatter_max_input_buffers(8)  # without streams the handle has something to wait for
    held(model, device)
    failing.is_armed = True
    handles: list[Any] = []
    errors = [error_of(lambda: handles.append(model.finalize_backward(async_op=True)))]
    errors += [error_of(handle.wait) for handle in 2 * handles]
    found = []
    for each in (model, other):
        held(each, device)
        each.finalize_backward()
        found.append(gradients(each))
    return errors, *found


def assert_recovered(gradients: list[Any], expected: list[Any]) -> None:
    assert None not in expected
    assert gradients == expected


@pytest.mark.parametrize("device", ["cpu", "sim"])
@OFFLOADS
def test_a_reduction_that_fails_to_start_names_its_unit_and_leaves_no_handle(offloads, device):
    runs = harness.run if device == "cpu" else sim.ranks
    for errors, *found in runs(2, fail_and_recover, True, offloads, device):
        assert ["RankError" in each and "reduce blocks.1: the network is gone" in each for each in errors] == [True]
        assert_recovered(*found)


@OFFLOADS
def test_a_reduction_on_a_device_that_fails_where_it_is_queued_leaves_no_handle(offloads):
    """With streams its stream waits at once, and the host does not."""
    for errors, *found in sim.ranks(2, fail_and_recover, False, offloads, "sim"):
        assert ["reduce blocks.1: the network is gone" in each for each in errors] == [True]
        assert_recovered(*found)


@OFFLOADS
def test_a_second_wait_for_a_reduction_that_failed_raises_too(offloads):
    for errors, *found in harness.run(2, fail_and_recover, False, offloads, "cpu"):
        assert errors[0] == ""
        assert "reduce blocks.1: the network is gone" in errors[1]
        assert errors[2].startswith("StateError: the handle of this gradient reduction was invalidated")
        assert_recovered(*found)


def test_a_handle_whose_end_failed_raises_again():
    def fail() -> None:
        raise ValueError

    handle = GradientReductionHandle(fail)
    with pytest.raises(ValueError):
        handle.wait()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="invalidated"):
            handle.wait()


@pytest.mark.parametrize("waits", [False, True], ids=["before it starts", "while it is awaited"])
def test_a_rank_that_does_not_finalize_is_an_error_of_the_others_that_names_the_unit(waits):
    """A later step raises a clear error too: gloo has closed the connections."""

    def body(rank, world):
        model = made("cpu")
        held(model, "cpu")
        if rank == 1:
            if not waits:
                dist.destroy_process_group()
            return None
        with pytest.raises(RankError, match=r"could not reduce (blocks\.\d|first|last|\(root\)|)"):
            model.finalize_backward(async_op=True).wait()
        with pytest.raises(RankError, match="could not gather"):
            loss_of(model, 1, "cpu")
        with pytest.raises(RankError, match="could not gather"):
            loss_of(model, 1, "cpu")
        return "told"

    # Collectives of gloo of torch 2.6 keep the timeout that their group was made with: that of joining.
    assert harness.run(2, body, timeout=harness.JOIN_TIMEOUT + 30.0, group_timeout=1.0) == ["told", None]
