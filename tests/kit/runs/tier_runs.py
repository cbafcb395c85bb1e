"""Runs with tiers for tests: their states, saves and restores, nodes that are simulated on one machine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import shardckpt
from shardckpt import Checkpointer
from shardckpt.results import RunCaptures
from shardckpt.tiers.durability.tier_folder import find_run_id
from shardckpt.tiers.memory import lease, memory_store, run_folders

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


def wait_for(condition: Callable[[], object], limit_s: float = _DEADLINE_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def make_state(value: float = 0.0) -> dict:
    return {"w": torch.full((300,), float(value)), "step": int(value)}


def save(ck: Checkpointer, *steps: int) -> None:
    for step in steps:
        ck.save(step, make_state(step))
    ck.wait()


def forget_process() -> None:
    """Be a new process, which holds no lease."""
    lease._give_up_inherited()
    memory_store.PLACES.clear()


def restore(ck: Checkpointer, **options: object) -> int | None:
    """Restore as a new process does, and return the step, whose values all have to be its own."""
    forget_process()
    into = make_state(-1.0)
    step = ck.restore(into, **options)
    assert step is None or (into["step"] == step and torch.equal(into["w"], torch.full((300,), float(step))))
    return step


def enter(node: str) -> None:
    """Be a process of a node."""
    os.environ["SHARDCKPT_NODE"] = node
    forget_process()


def captures(node: str) -> tuple[RunCaptures, ...]:
    """Return the captures in memory of a node."""
    before = os.environ.get("SHARDCKPT_NODE", "")
    os.environ["SHARDCKPT_NODE"] = node
    found = shardckpt.list_tiers().runs
    os.environ["SHARDCKPT_NODE"] = before
    return found


def find_memory_folder(root: Path, node: str = "") -> Path:
    """Return the folder for a run's captures in memory of a node."""
    base = f"shardckpt-{os.geteuid()}-{node}" if node else f"shardckpt-{os.geteuid()}"
    return Path(run_folders.SHARED_MEMORY) / base / find_run_id(str(root))


def block_memory(root: Path, node: str = "") -> Path:
    """Lose the captures of a node, and put a file in the place of their folder; return its path."""
    empty_memory(node)
    folder = find_memory_folder(root, node)
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.touch()
    return folder


def empty_memory(node: str = "") -> None:
    """Lose the captures of a node, as with its memory."""
    for each in captures(node or os.environ.get("SHARDCKPT_NODE", "")):
        run_folders.remove_run_folder(each.path)


def end_janitor(base: Path) -> None:
    """Kill the janitor of a folder of captures, if one runs."""
    with suppress(OSError, ValueError):
        fd = os.open(base / ".janitor", os.O_RDWR)
        is_running = not lease.lock_unused(fd)
        pid = int(os.read(fd, 20))
        os.close(fd)
        if is_running:
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: not is_alive(pid))


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
