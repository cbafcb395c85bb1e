"""Where memory runs out, the error says so, and the next iteration is as if nothing had happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.core.test_sim_training import FRONTS, batch, build, local
from tests.kit.models.under_test import TORCH
from tests.kit.ranks import sim

if not TORCH:
    from shardckpt.core.comm.streams import FULL_BYTES

pytestmark = pytest.mark.skipif(TORCH, reason="how the engine itself recovers")


def gradients(model: Any, inputs: torch.Tensor) -> list[Any]:
    """Return this rank's gradients of an iteration."""
    model.zero_grad()
    model(inputs).square().mean().backward()
    return [None if each.grad is None else local(each.grad).tolist() for each in model.parameters()]


def recover(model: Any) -> None:
    """Do at once what the next iteration does first after one that failed."""
    unit = model._unit if hasattr(model, "_unit") else model._fsdp_state.unit
    unit.root.recover()


def fail_at_each_allocation(rank: int, world: int, front_end: str) -> tuple[set[str], set[int], int]:
    """Return the errors of iterations that have no memory from some allocation on, until they have recovered.

    Returns:
        Names of the errors; bytes that full parameters hold after them, but for those of the root between the passes;
        the number of wrong gradients after them.
    """
    model, inputs = build(front_end, "sim"), batch(0, "sim")
    before = FULL_BYTES.held
    loss = model(inputs)
    between = FULL_BYTES.held
    del loss
    expected = gradients(model, inputs)
    errors, kept, wrong = set(), set(), 0
    for number in range(1, sim.allocations(lambda: gradients(model, inputs)) + 1):
        with sim.refused(number, 1 << 40):
            try:
                gradients(model, inputs)
            except RuntimeError as error:
                errors.add(type(error).__name__ + ("" if "out of memory" in str(error) else str(error)))
            recover(model)
        kept |= {FULL_BYTES.held - before} - {between - before}
        wrong += gradients(model, inputs) != expected
    return errors, kept, wrong


@pytest.mark.shown_by("[in place]", "orig", "flat")
@FRONTS
def test_an_iteration_that_ran_out_of_memory_recovers_without_memory(front_end):
    for errors, kept, wrong in sim.ranks(2, fail_at_each_allocation, front_end):
        assert errors == {"OutOfMemoryError"}
        assert (kept, wrong) == ({0}, 0)
