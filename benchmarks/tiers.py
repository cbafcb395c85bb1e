"""Compare captures in the memory of several machines with the least that they have to do: paired ratios.

    python benchmarks/tiers.py [--mib 256] [--rounds 7] [--record]

Four forked ranks, each on a simulated machine of its own, capture a sharded tensor with one copy on another machine.
Each round measures, on the slowest rank:

- the stall of a save against a copy of the rank's bytes in memory;
- the copies on other machines against a bare send of the same bytes over gloo;
- a restore on three ranks against a bare exchange of the bytes that crossed the network.

The bytes that the holders keep are counted: one part of the state for each capture and copy.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import median_ratio, run_ranks
from results import Lines, machine, record
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import shardckpt
from shardckpt.events import ReplicateEvent
from shardckpt.storage.holder.holder_sockets import NODE

TITLE = "Captures in memory"
WORLD, SURVIVORS, COPIES = 4, 3, 1


@dataclass(frozen=True)
class Capture:
    """Measurements of a rank over all rounds.

    Attributes:
        stalls: Seconds of each save.
        memcpys: Seconds of a copy of the rank's bytes.
        replications: Seconds of the copies on other machines.
        sends: Seconds of a bare send and receive of the same bytes.
        copied_bytes: Bytes that the rank received for one capture.
    """

    stalls: list[float]
    memcpys: list[float]
    replications: list[float]
    sends: list[float]
    copied_bytes: int


def enter(rank: int) -> None:
    """Be a process of the rank's own machine."""
    os.environ[NODE] = f"node{rank}"


def make_checkpointer(root: Path, on_event: Callable[[Any], object] | None = None) -> shardckpt.Checkpointer:
    """Return the manager of a run whose captures have one copy."""
    return shardckpt.Checkpointer(
        root, save_every=10**6, tiers=[shardckpt.PeerMemory(copies=COPIES)], on_event=on_event
    )


def make_state(nbytes: int, value: float) -> dict[str, Any]:
    """Return a state of which each rank has an equal part."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"weight": distribute_tensor(torch.full((nbytes // 4,), value), mesh, [Shard(0)])}


def measure(act: Callable[[], object]) -> float:
    """Return the seconds of a call that all ranks begin together."""
    dist.barrier()
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


def exchange(sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Send and receive tensors over gloo."""
    works = [dist.isend(tensor, peer) for tensor, peer in sends]
    works += [dist.irecv(tensor, peer) for tensor, peer in receives]
    for work in works:
        assert work is not None
        work.wait()


def capture(rank: int, root: Path, nbytes: int, rounds: int) -> Capture:
    """Capture steps, and measure the least that each has to do beside it."""
    enter(rank)
    events: list[ReplicateEvent] = []
    keep = lambda event: events.append(event) if isinstance(event, ReplicateEvent) else None  # noqa: E731
    ck, state = make_checkpointer(root, keep), make_state(nbytes, 1.0)
    own = state["weight"].to_local()
    copy, received = torch.empty_like(own), torch.empty_like(own)
    peers = (rank + 1) % WORLD, (rank - 1) % WORLD
    stalls, memcpys, sends = [], [], []
    for step in range(rounds + 1):
        stalls.append(measure(lambda step=step: ck.save(step, state)))
        ck.wait()
        memcpys.append(measure(lambda: copy.copy_(own)))
        sends.append(measure(lambda: exchange([(own, peers[0])], [(received, peers[1])])))
    replications = [event.seconds for event in events]
    return Capture(stalls[1:], memcpys[1:], replications[1:], sends[1:], events[-1].nbytes)


def restore(rank: int, root: Path, nbytes: int, rounds: int) -> tuple[list[float], list[float]]:
    """Restore on fewer ranks, and exchange bare tensors of the bytes that each rank lacks."""
    enter(rank)
    seconds, bare = [], []
    state = make_state(nbytes, 0.0)
    lacking = max(nbytes // SURVIVORS - nbytes // WORLD, nbytes // SURVIVORS // 4) // 4
    own, received = torch.zeros(lacking), torch.empty(lacking)
    peers = (rank + 1) % SURVIVORS, (rank - 1) % SURVIVORS
    for _ in range(rounds + 1):
        seconds.append(measure(lambda: make_checkpointer(root).restore(state)))
        assert state["weight"].to_local().eq(1.0).all()
        bare.append(measure(lambda: exchange([(own, peers[0])], [(received, peers[1])])))
    return seconds[1:], bare[1:]


def count_held_bytes() -> list[int]:
    """Return the bytes of the holder of each machine, and end it."""
    held = []
    for rank in range(WORLD):
        enter(rank)
        held += [holder.nbytes for holder in shardckpt.tiers().holders]
        shardckpt.stop_tiers()
    return held


def slowest(columns: Sequence[Sequence[float]]) -> list[float]:
    """Return the seconds of the slowest rank in each round."""
    return [max(row) for row in zip(*columns, strict=True)]


def run(nbytes: int, rounds: int) -> Lines:
    """Measure everything; raise an AssertionError if a rank copied or a holder keeps other bytes than it should."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        root, part = Path(folder) / "run", nbytes // WORLD
        try:
            captures = run_ranks(lambda rank: capture(rank, root, nbytes, rounds), WORLD)
            restores = run_ranks(lambda rank: restore(rank, root, nbytes, rounds), SURVIVORS)
        finally:
            held = count_held_bytes()
    assert all(each.copied_bytes >= part for each in captures), "every rank receives the part of another"
    assert all((1 + COPIES) * part <= each <= (1 + COPIES) * part + (64 << 20) for each in held), held
    report = Lines()
    report.say(f"{WORLD} ranks on {WORLD} simulated machines, {nbytes >> 20} MiB in all, {rounds} rounds\n")
    for what, over, under, limit in (
        ("stall of a save, of a copy in memory", [c.stalls for c in captures], [c.memcpys for c in captures], 1.1),
        (
            "copies on other machines, of a bare send",
            [c.replications for c in captures],
            [c.sends for c in captures],
            1.2,
        ),
        ("restore on 3 ranks, of a bare exchange", [s for s, _ in restores], [b for _, b in restores], 1.3),
    ):
        seconds = slowest(over)
        goal = report.goal("background saves", what, median_ratio(seconds, slowest(under)), limit, "x")
        report.say(f"{what}: {goal.measured:.2f}x, goal {limit}x: {goal.verdict} ({min(seconds) * 1e3:.1f} ms at best)")
    report.say(f"held by a machine: {max(held) / part:.3f} parts of the state, of {1 + COPIES} that are kept")
    return report


def main() -> None:
    """Measure and print; with `--record`, write the section of RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=256, help="size of the state of all ranks, in MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    report = run(options.mib << 20, options.rounds)
    if options.record:
        record(TITLE, [machine(), "", *report.lines], report.goals)


if __name__ == "__main__":
    main()
