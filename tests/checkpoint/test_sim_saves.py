"""Saves and loads of a model on a device whose group cannot move tensors of the CPU, as under NCCL alone."""

from __future__ import annotations

from typing import Any

import pytest
import sim
from test_sim_training import build, kept, local, loss_of, offload_of, optimizer_of

import shardckpt


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
