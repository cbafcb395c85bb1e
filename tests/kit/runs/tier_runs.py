"""Runs with tiers for tests: their states, saves and restores, nodes that are simulated on one machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import shardckpt
from shardckpt import Checkpointer
from shardckpt.tiers.holder import holder_connection

NODES = "abcd"
VALUES = torch.arange(1_000_000.0).reshape(40, 25_000)
BLOCKS = 4 << 17
"""A few of the blocks that are read to verify small values, in bytes; the part of a rank has more."""

_DEADLINE_S = 30.0


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def make_state(value: float = 0.0) -> dict:
    return {"w": torch.full((300,), float(value)), "step": int(value)}


def save(ck: Checkpointer, *steps: int) -> None:
    for step in steps:
        ck.save(step, make_state(step))
    ck.wait()


def restore(ck: Checkpointer, **options: object) -> int | None:
    """Restore as a new process does, and return the step, whose values all have to be its own."""
    holder_connection._forget_connections()
    into = make_state(-1.0)
    step = ck.restore(into, **options)
    assert step is None or (into["step"] == step and torch.equal(into["w"], torch.full((300,), float(step))))
    return step


def enter(node: str) -> None:
    """Be a process of a node."""
    os.environ["SHARDCKPT_NODE"] = node
    holder_connection._forget_connections()


def holders(node: str) -> tuple:
    before = os.environ.get("SHARDCKPT_NODE", "")
    enter(node)
    found = shardckpt.list_tiers().holders
    enter(before)
    return found


def wait_for_checks() -> None:
    """Wait until it is known if the holders that did not answer hang."""
    checks = [each.check for each in holder_connection._CONNECTIONS.values() if each.check is not None]
    wait_for(lambda: not any(check.is_running for check in checks))


def kill_holder(node: str) -> None:
    for holder in holders(node):
        os.kill(holder.pid, signal.SIGKILL)
        wait_for(lambda pid=holder.pid: not is_alive(pid))


DAMAGES = {
    "no COMMIT": "this step was never committed",
    "no manifest": "missing or end early: .*manifest",
    "neither": "this step was never committed",
    "short data": "missing or end early: .*safetensors",
    "short COMMIT": "the commit mark ends early",
}
"""Damages of a step in a folder, each with the fault that a warning names."""


def damage_step(step: Path, damage: str) -> None:
    (manifest,), data = (
        step.glob("*.manifest.json"),
        max(step.glob("*.safetensors"), key=lambda file: file.stat().st_size),
    )
    if damage in ("no COMMIT", "neither"):
        (step / "COMMIT").unlink()
    if damage in ("no manifest", "neither"):
        manifest.unlink()
    if damage.startswith("short"):
        file = data if damage == "short data" else step / "COMMIT"
        os.truncate(file, file.stat().st_size // 2)


def sharded_state(world: int, step: int = 0) -> dict:
    mesh = init_device_mesh("cpu", (world,))
    return {
        "w": distribute_tensor(VALUES * step, mesh, [Shard(0)]),
        "bias": torch.full((5,), float(step)),
        "step": step,
    }


def is_step(state: dict, step: int) -> bool:
    """Return True if a sharded state is bit for bit that of a step. Collective."""
    return torch.equal(state["w"].full_tensor(), VALUES * step) and state["step"] == step
