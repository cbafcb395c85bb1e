"""Compare captures in the memory of several machines with the least that they have to do: paired ratios.

    python benchmarks/tiers.py [--bytes 256MiB] [--rounds 7] [--record]

Four forked ranks, each on a simulated machine of its own, capture a sharded tensor with one copy on another machine.
Each round measures on all ranks at once, and the slowest counts; of many rounds the least counts:

- the stall of a save against a copy of the rank's bytes in memory;
- the copies on other machines against a bare send of the same bytes over gloo, and against one of which the bytes are
  hashed and kept;
- a restore on three ranks against a bare exchange of the same boxes: the rank copies those of its own machine, and
  receives the others;
- the same restore from a local disk whose files are not in the page cache;
- steps beside the background work of a capture against steps without. The stall before them is not counted: it has its
  own row, the first, and lasts as long however many steps follow. A line shows both together.

CPU seconds are those of all ranks. The bytes in memory are counted: one part of the state for each capture and copy.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from ranks import run_ranks
from results import Lines, machine, record
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import shardckpt
from shardckpt.events import ReplicateEvent
from shardckpt.native.payload import GROUP_BYTES
from shardckpt.plan.layout.output_files import parse_size
from shardckpt.tiers.memory.run_folders import NODE

TITLE = "Captures in memory"
WORLD, SURVIVORS, COPIES = 4, 3, 1


STEP_S = 2.0
"""Seconds of the steps beside which a capture is copied, without it."""

TWELFTHS = ((3, 1, 1), (2, 2, 2), (1, 3, 0))
"""Of each rank of the restore: the part of the state that its machine has, the part that it lacks, in twelfths, and the
rank whose machine has that."""


class Timed(NamedTuple):
    """Duration of a call on one rank.

    Attributes:
        seconds: Wall time.
        cpu: CPU time of the process.
    """

    seconds: float
    cpu: float


@dataclass
class Series:
    """Durations of a rank in all rounds, of something and of the least that it has to do.

    Attributes:
        over: Durations of it.
        under: Durations of the least.
    """

    over: list[Timed] = field(default_factory=list)
    under: list[Timed] = field(default_factory=list)


@dataclass
class Capture:
    """Measurements of a rank over all rounds.

    Attributes:
        stall: A save, and a copy of the rank's bytes.
        copies: The copies on other machines, and a bare send and receive of the same bytes.
        steps: Steps beside the background work of a capture, and without.
        with_stall: The same steps with the save before them, and without.
        left: Waits for the background work after these steps.
        kept: Bare sends and receives of which the rank hashes and keeps the bytes, as a copy has to.
        copied_bytes: Bytes that the rank received for one capture.
    """

    stall: Series = field(default_factory=Series)
    copies: Series = field(default_factory=Series)
    steps: Series = field(default_factory=Series)
    with_stall: Series = field(default_factory=Series)
    left: list[Timed] = field(default_factory=list)
    kept: list[Timed] = field(default_factory=list)
    copied_bytes: int = 0


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


def measure(act: Callable[[], object]) -> Timed:
    """Return the duration of a call that all ranks begin together."""
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    act()
    return Timed(time.perf_counter() - start, time.process_time() - cpu)


def exchange(sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Send and receive tensors over gloo."""
    works = [dist.isend(tensor, peer) for tensor, peer in sends]
    works += [dist.irecv(tensor, peer) for tensor, peer in receives]
    for work in works:
        assert work is not None
        work.wait()


def exchange_and_keep(sent: torch.Tensor, received: torch.Tensor, peers: tuple[int, int], memory: int) -> None:
    """Send and receive a tensor, hash the received bytes, and write them into an empty file in memory."""
    exchange([(sent, peers[0])], [(received, peers[1])])
    data = memoryview(received.view(torch.uint8).numpy())  # type: ignore[arg-type]
    for at in range(0, len(data), GROUP_BYTES):
        xxhash.xxh3_64_digest(data[at : at + GROUP_BYTES])
        os.write(memory, data[at : at + GROUP_BYTES])


def capture(rank: int, root: Path, nbytes: int, rounds: int) -> Capture:
    """Capture steps, and measure the least that each has to do beside it."""
    enter(rank)
    events: list[ReplicateEvent] = []
    keep = lambda event: events.append(event) if isinstance(event, ReplicateEvent) else None  # noqa: E731
    ck, state = make_checkpointer(root, keep), make_state(nbytes, 1.0)
    own = state["weight"].to_local()
    copy, received = torch.empty_like(own), torch.empty_like(own)
    peers = (rank + 1) % WORLD, (rank - 1) % WORLD
    found, count = Capture(), count_steps()
    for step in range(0, 2 * rounds + 2, 2):
        found.steps.under.append(measure(lambda: take_steps(count)))
        saved = measure(lambda step=step: ck.save(step, state))
        beside = measure(lambda: take_steps(count))
        found.left.append(measure(ck.wait))
        found.steps.over.append(beside)
        found.with_stall.over.append(Timed(*map(sum, zip(saved, beside, strict=True))))
        found.with_stall.under.append(found.steps.under[-1])
        found.stall.over.append(measure(lambda step=step: ck.save(step + 1, state)))
        behind = measure(ck.wait)
        found.copies.over.append(Timed(events[-1].seconds, behind.cpu))
        found.stall.under.append(measure(lambda: copy.copy_(own)))
        found.copies.under.append(measure(lambda: exchange([(own, peers[0])], [(received, peers[1])])))
        memory = os.memfd_create("copy")
        found.kept.append(measure(lambda memory=memory: exchange_and_keep(own, received, peers, memory)))
        os.close(memory)
    found.copied_bytes = events[-1].nbytes
    return found


def take_steps(count: int) -> None:
    """Compute as training does, on one core."""
    left = torch.ones(512, 512)
    for _ in range(count):
        left @ left


def count_steps() -> int:
    """Return how many steps take about `STEP_S` on all ranks."""
    seconds = measure(lambda: take_steps(20)).seconds
    counts = [torch.zeros(1) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, torch.tensor([20 * STEP_S / seconds]))
    return max(int(min(each.item() for each in counts)), 1)


def restore(rank: int, root: Path, folder: Path, nbytes: int, rounds: int) -> tuple[Series, list[Timed]]:
    """Restore on fewer ranks; exchange bare tensors of the same boxes, and load the same from a cold disk."""
    enter(rank)
    series, disk = Series(), list[Timed]()
    state = make_state(nbytes, 0.0)
    own, _, source = TWELFTHS[rank]
    held, sizes = torch.ones(nbytes // 16), [nbytes // 4 * each[1] // 12 for each in TWELFTHS]
    into, received = torch.zeros(nbytes // 4 * own // 12), torch.zeros(sizes[rank])
    (taker,) = (each for each in range(SURVIVORS) if TWELFTHS[each][2] == rank)

    def exchange_boxes() -> None:
        into.copy_(held[: into.numel()])
        exchange([(held[: sizes[taker]], taker)], [(received, source)])

    for _ in range(rounds + 1):
        series.over.append(measure(lambda: make_checkpointer(root).restore(state)))
        assert state["weight"].to_local().eq(1.0).all()
        series.under.append(measure(exchange_boxes))
        drop_from_cache(folder)
        disk.append(measure(lambda: shardckpt.load(state, folder)))
    return series, disk


def save_to_disk(rank: int, folder: Path, nbytes: int) -> None:
    """Save the state to a local disk."""
    enter(rank)
    shardckpt.save(make_state(nbytes, 1.0), folder)


def drop_from_cache(folder: Path) -> None:
    """Drop the files of a folder from the page cache, as far as the system does so."""
    for path in folder.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def count_held_bytes() -> list[int]:
    """Return the bytes in the memory of each machine, and remove them."""
    held = []
    for rank in range(WORLD):
        enter(rank)
        runs = [each for each in shardckpt.list_tiers().runs if each.nbytes]
        held += [each.nbytes for each in runs]
        for each in runs:
            shardckpt.stop_tiers(each.run)
    return held


def find_least(columns: Sequence[Sequence[Timed]]) -> Timed:
    """Return the least of all rounds but the first: the seconds of the slowest rank, the CPU seconds of all ranks."""
    rounds = [*zip(*columns, strict=True)][1:]
    seconds = min(max(timed.seconds for timed in each) for each in rounds)
    return Timed(seconds, min(sum(timed.cpu for timed in each) for each in rounds))


def say(report: Lines, what: str, series: Sequence[Series], limit: float) -> None:
    """Print a ratio, and keep it as a goal."""
    ratio, shown = compare(series)
    goal = report.goal("captures in memory", what, ratio, limit, "x")
    report.say(f"{what}: {goal.measured:.2f}x, goal {limit}x: {goal.verdict} ({shown})")


def note(report: Lines, what: str, series: Sequence[Series]) -> None:
    """Print a ratio that has no goal."""
    ratio, shown = compare(series)
    report.say(f"{what}: {ratio:.2f}x ({shown})")


def compare(series: Sequence[Series]) -> tuple[float, str]:
    """Return the ratio of something on all ranks to the least that it has to do, and both as text."""
    over, under = (find_least(columns) for columns in ([s.over for s in series], [s.under for s in series]))
    shown = f"{over.seconds * 1e3:.1f} of {under.seconds * 1e3:.1f} ms, CPU {over.cpu:.3f} of {under.cpu:.3f} s"
    return over.seconds / under.seconds, shown


def run(nbytes: int, rounds: int) -> Lines:
    """Measure everything; raise an AssertionError if a rank copied or a machine keeps other bytes than it should.

    Args:
        nbytes: Bytes of the state of each of the four ranks; a multiple of 48.
        rounds: Number of measurements of each kind.
    """
    with tempfile.TemporaryDirectory() as name:
        root, disk, total = Path(name) / "run", Path(name) / "disk", WORLD * nbytes
        try:
            captures = run_ranks(lambda rank: capture(rank, root, total, rounds), WORLD)
            run_ranks(lambda rank: save_to_disk(rank, disk, total), WORLD)
            restores = run_ranks(lambda rank: restore(rank, root, disk, total, rounds), SURVIVORS)
        finally:
            held = count_held_bytes()
    assert all(each.copied_bytes >= nbytes for each in captures), "every rank receives the part of another"
    assert all((1 + COPIES) * nbytes <= each <= (1 + COPIES) * nbytes + (64 << 20) for each in held), held
    report = Lines()
    report.say(f"{WORLD} ranks on {WORLD} simulated machines, {nbytes / 2**20:.0f} MiB each, {rounds} rounds\n")
    say(report, "stall of a save, of a copy in memory", [each.stall for each in captures], 1.1)
    say(report, "copies on other machines, of a bare send", [each.copies for each in captures], 1.2)
    kept = [Series(each.copies.over, each.kept) for each in captures]
    note(report, "copies on other machines, of a bare send, hash and write into new memory", kept)
    say(report, "restore on 3 ranks, of a bare exchange", [series for series, _ in restores], 1.3)
    cold = [Series(series.over, disk) for series, disk in restores]
    say(report, "restore on 3 ranks, of a load from a cold disk", cold, 1.0)
    say(report, "steps beside the copies of a capture, of steps without", [each.steps for each in captures], 1.05)
    note(report, "the same with the save before them", [each.with_stall for each in captures])
    left = find_least([each.left for each in captures]).seconds
    report.say(f"the copies ended {left:.2f} s after these steps")
    report.say(f"held by a machine: {max(held) / nbytes:.3f} parts of the state, of {1 + COPIES} that are kept")
    return report


def main() -> None:
    """Measure and print; with `--record`, write the section of RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--bytes", default="256MiB", help="size of the state of each rank, such as 256MiB")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    nbytes = parse_size(options.bytes)
    report = run(nbytes - nbytes % 48, options.rounds)
    if options.record:
        found = [f"- {line.strip()}" for line in report.lines]
        record(f"{TITLE}, {options.bytes} a rank", [machine(), "", *found], report.goals)


if __name__ == "__main__":
    main()
