"""One training step of our engine beside torch's: what a step costs, what it needs, what a unit costs.

    python benchmarks/engine_step.py [--rows flat,originals,composable] [--layers 8] [--rounds 9] [--record]

**Step.** Forward, backward and AdamW of a small Llama, a unit a block and one for the rest, on two gloo ranks of one
thread each. All engines live in one pair of forked processes and take turns, in alternating order, so that whatever
else the machine does hits neighbours alike; a step takes as long as its slower rank. Ratios are medians of the rounds'
own ratios: beyond 1.05 times torch's counterpart the benchmark fails, in memory too. CPU is that of both ranks, all
threads; where the machine does other things as well, its ratio says more.

**Memory.** Each engine alone in a fresh pair of processes, with a malloc that gives every freed block of 64 KiB and
more back at once: the kernel's own peak of resident memory over three steps, less what the process had before the model
was built. So it counts everything: parameters, gradients, AdamW's state, activations, and what gloo takes for itself
(the size of a whole unit while it gathers one, and again while it reduces one). *At rest* is the same between two
steps.

**Unit.** Many tiny units (two vectors of 8): what an iteration (forward and backward) takes longer than that of
the bare module, divided by the number of units; three collectives a unit are in it, and their bare cost stands below.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step: once here, not in every rank
import torch.distributed as dist
from llama import Block, Llama, Shape
from ranks import LIBC, RANKS, median_ratio, read_status, return_freed_memory, run_ranks
from results import RESULTS, machine, record
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TheirPolicy
from torch.nn.parallel import DistributedDataParallel

from shardckpt import core as ours
from shardckpt.core.wrap import ModuleWrapPolicy as OurPolicy

LIMIT = 1.05
TINY = 48


@dataclass(frozen=True)
class Engine:
    """Something that trains a model on several ranks.

    Attributes:
        name: As printed.
        shard: Makes the module to call from a module and the class of its units.
        beside: Name of the engine that it is compared with; empty for a yardstick.
    """

    name: str
    shard: Callable[[nn.Module, type[nn.Module]], nn.Module]
    beside: str = ""


def wrapped(kind: Any, policy: Any, originals: bool, module: nn.Module, unit: type[nn.Module]) -> nn.Module:
    """Wrap a module and the units below."""
    made: nn.Module = kind(
        module, auto_wrap_policy=policy({unit}), use_orig_params=originals, device_id=torch.device("cpu")
    )
    return made


def in_place(package: Any, module: nn.Module, unit: type[nn.Module]) -> nn.Module:
    """Shard a module and the units below in place."""
    for each in module.modules():
        if isinstance(each, unit):
            package.fully_shard(each)
    package.fully_shard(module)
    return module


def replicated(module: nn.Module, unit: type[nn.Module]) -> nn.Module:  # noqa: ARG001  (it has no units)
    """Replicate a module."""
    return DistributedDataParallel(module)


DDP = Engine("DDP", replicated)
ROWS = {
    "flat": (
        Engine(
            "shardckpt wrapper, flat", partial(wrapped, ours.FullyShardedDataParallel, OurPolicy, False), "torch FSDP1"
        ),
        Engine("torch FSDP1", partial(wrapped, theirs.FullyShardedDataParallel, TheirPolicy, False)),
    ),
    "originals": (
        Engine(
            "shardckpt wrapper, use_orig_params",
            partial(wrapped, ours.FullyShardedDataParallel, OurPolicy, True),
            "torch FSDP1, use_orig_params",
        ),
        Engine("torch FSDP1, use_orig_params", partial(wrapped, theirs.FullyShardedDataParallel, TheirPolicy, True)),
    ),
    "composable": (
        Engine("shardckpt fully_shard", partial(in_place, ours), "torch FSDP2"),
        Engine("torch FSDP2", partial(in_place, theirs)),
    ),
}


@dataclass(frozen=True)
class Given:
    """What is trained.

    Attributes:
        shape: Of the model.
        batch: Sequences and tokens a sequence, of each rank.
        rounds: Measured steps of each engine.
    """

    shape: Shape
    batch: tuple[int, int]
    rounds: int


@dataclass(frozen=True)
class Step:
    """One measured step.

    Attributes:
        seconds: Of the slower rank.
        cpu: Of all ranks, all threads.
    """

    seconds: float
    cpu: float


# ------------------------------------------------------------------------------------------------------------- ranks


def trained(engine: Engine, given: Given) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """Return an engine's module and what does one step with it and returns the loss."""
    torch.manual_seed(0)
    module = engine.shard(Llama(given.shape), Block)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return module, step


def batch(given: Given, rank: int, number: int) -> torch.Tensor:
    """Return the token ids of a rank's step."""
    seeded = torch.Generator().manual_seed(number * RANKS + rank)
    return torch.randint(given.shape.words, given.batch, generator=seeded)


# -------------------------------------------------------------------------------------------------------------- time


def take_turns(engines: Sequence[Engine], given: Given, rank: int) -> list[list[tuple[float, float]]]:
    """Train with every engine in turn; return seconds and CPU seconds of each engine's rounds.

    Raises:
        SystemExit: The losses of two engines differ.
    """
    steps = [trained(engine, given)[1] for engine in engines]
    taken: list[list[tuple[float, float]]] = [[] for _ in engines]
    for number in range(-2, given.rounds):
        ids = batch(given, rank, number + 2)
        losses = [0.0] * len(engines)
        order = range(len(engines)) if number % 2 else range(len(engines) - 1, -1, -1)
        for index in order:
            gc.collect()
            dist.barrier()
            begun = time.perf_counter(), time.process_time()
            losses[index] = steps[index](ids).item()
            ended = time.perf_counter(), time.process_time()
            dist.barrier()
            if number >= 0:
                taken[index].append((ended[0] - begun[0], ended[1] - begun[1]))
        if max(losses) - min(losses) > 1e-4 * max(losses):
            raise SystemExit(f"the engines train different models: losses {losses}")
    return taken


def measure_steps(engines: Sequence[Engine], given: Given) -> dict[str, list[Step]]:
    """Return the steps of every engine."""
    found = run_ranks(partial(take_turns, engines, given))
    return {
        engine.name: [
            Step(max(rank[index][i][0] for rank in found), sum(rank[index][i][1] for rank in found))
            for i in range(given.rounds)
        ]
        for index, engine in enumerate(engines)
    }


# ------------------------------------------------------------------------------------------------------------ memory


def peak_of(engine: Engine, given: Given, rank: int) -> tuple[int, int]:
    """Return the bytes that three steps need at their peak, and those held after them."""
    return_freed_memory()
    dist.barrier()
    gc.collect()
    LIBC.malloc_trim(0)
    before = read_status("VmRSS")
    _, step = trained(engine, given)
    for number in range(2):
        step(batch(given, rank, number))
    gc.collect()
    LIBC.malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    for number in range(3):
        step(batch(given, rank, number))
    peak = read_status("VmHWM") - before
    gc.collect()
    LIBC.malloc_trim(0)
    return peak, read_status("VmRSS") - before


def measure_memory(engines: Sequence[Engine], given: Given) -> dict[str, tuple[int, int]]:
    """Return the bytes of every engine: peak and at rest, of the rank that needs most."""
    found = {engine.name: run_ranks(partial(peak_of, engine, given)) for engine in engines}
    return {name: (max(p for p, _ in each), max(r for _, r in each)) for name, each in found.items()}


# -------------------------------------------------------------------------------------------------------------- unit


class Scale(nn.Module):
    """The least that can be a unit: a vector to multiply with and one to add."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(8))
        self.plus = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by + self.plus


def bare_collectives(rank: int) -> Callable[[], None]:  # noqa: ARG001
    """Return what does the collectives of so many tiny units, and nothing else."""
    whole, part = torch.zeros(16), torch.zeros(8)

    def iteration() -> None:
        for _ in range(TINY):
            dist.all_gather_single(whole, part)
            dist.all_gather_single(whole, part)
            dist.reduce_scatter_single(part, whole)

    return iteration


def iteration_of(engine: Engine | None) -> Callable[[], None]:
    """Return what does a forward and a backward of many tiny units; of the bare module without an engine."""
    units: nn.Module = nn.Sequential(*(Scale() for _ in range(TINY)))
    module = engine.shard(units, Scale) if engine else units
    x = torch.ones(4, 8)

    def iteration() -> None:
        module(x).sum().backward()
        module.zero_grad()

    return iteration


def tiny_units(engines: Sequence[Engine], rounds: int, rank: int) -> list[list[tuple[float, float]]]:
    """Return seconds and CPU seconds of iterations: bare module, bare collectives, every engine."""
    bodies = [iteration_of(None), bare_collectives(rank), *(iteration_of(engine) for engine in engines)]
    taken: list[list[tuple[float, float]]] = [[] for _ in bodies]
    for number in range(-3, rounds):
        order = range(len(bodies)) if number % 2 else range(len(bodies) - 1, -1, -1)
        for index in order:
            dist.barrier()
            begun = time.perf_counter(), time.process_time()
            bodies[index]()
            ended = time.perf_counter(), time.process_time()
            if number >= 0:
                taken[index].append((ended[0] - begun[0], ended[1] - begun[1]))
    return taken


def measure_units(engines: Sequence[Engine], rounds: int) -> dict[str, tuple[float, float]]:
    """Return microseconds a unit, wall and CPU of one rank, without those of the bare module."""
    first = run_ranks(partial(tiny_units, engines, rounds))[0]
    medians = [[median(column) for column in zip(*each, strict=True)] for each in first]
    names = ["bare collectives", *(engine.name for engine in engines)]
    bare = medians[0]
    return {
        name: ((wall - bare[0] * (i > 0)) / TINY * 1e6, (cpu - bare[1] * (i > 0)) / TINY * 1e6)
        for i, (name, (wall, cpu)) in enumerate(zip(names, medians[1:], strict=True))
    }


# ------------------------------------------------------------------------------------------------------------ report


class Report:
    """What is printed, kept for the record, and failed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failed: list[str] = []

    def say(self, line: str = "") -> None:
        """Print a line and keep it."""
        print(line, flush=True)
        self.lines.append(line)

    def steps(self, engines: Sequence[Engine], found: dict[str, list[Step]]) -> None:
        """Print what steps took."""
        self.say(
            "\n### Step\n\n| | ms (least - most) | CPU ms | x DDP | x torch | x torch, CPU |\n|---|---|---|---|---|---|"
        )
        yardstick = [step.seconds for step in found[DDP.name]]
        for engine in engines:
            wall, cpu = ([getattr(step, what) for step in found[engine.name]] for what in ("seconds", "cpu"))
            row = f"| {engine.name} | {median(wall) * 1e3:.0f} ({min(wall) * 1e3:.0f} - {max(wall) * 1e3:.0f}) "
            row += f"| {median(cpu) * 1e3:.0f} | {median_ratio(wall, yardstick):.3f} "
            if not engine.beside:
                self.say(row + "| | |")
                continue
            beside = found[engine.beside]
            measured = median_ratio(wall, [step.seconds for step in beside])
            self.say(row + f"| **{measured:.3f}** | {median_ratio(cpu, [step.cpu for step in beside]):.3f} |")
            if measured > LIMIT:
                self.failed.append(f"a step of {engine.name} takes {measured:.3f} times that of {engine.beside}")

    def memory(self, engines: Sequence[Engine], found: dict[str, tuple[int, int]]) -> None:
        """Print what was needed."""
        self.say("\n### Memory of one rank\n\n| | peak MB | at rest MB | peak x torch |\n|---|---|---|---|")
        for engine in engines:
            peak, rest = found[engine.name]
            share = f"{peak / found[engine.beside][0]:.3f}" if engine.beside else ""
            self.say(f"| {engine.name} | {peak / 1e6:.1f} | {rest / 1e6:.1f} | {share} |")
            if engine.beside and peak > LIMIT * found[engine.beside][0]:
                self.failed.append(f"{engine.name} needs {share} times the memory of {engine.beside}")

    def units(self, engines: Sequence[Engine], found: dict[str, tuple[float, float]]) -> None:
        """Print what units cost."""
        self.say(f"\n### Unit\n\n{TINY} tiny units.\n\n| | us a unit | CPU us a unit | x torch |\n|---|---|---|---|")
        beside = {engine.name: engine.beside for engine in engines}
        for name, (wall, cpu) in found.items():
            peer = found.get(beside.get(name, ""))
            self.say(f"| {name} | {wall:.0f} | {cpu:.0f} | {f'{wall / peer[0]:.2f}' if peer else ''} |")


def available(row: str) -> bool:
    """Tell whether both engines of a row exist."""
    return row != "composable" or (hasattr(ours, "fully_shard") and hasattr(theirs, "fully_shard"))


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(filter(available, ROWS)), help="some of: %(default)s")
    parser.add_argument("--parts", default="steps,memory,units", help="some of: %(default)s")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2, help="sequences of each rank")
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--rounds", type=int, default=9, help="measured steps of each engine")
    parser.add_argument("--record", action="store_true", help=f"write the tables into {RESULTS.name}")
    given = parser.parse_args()
    rows, parts = given.rows.split(","), given.parts.split(",")
    if unknown := (set(rows) - set(ROWS)) | (set(parts) - {"steps", "memory", "units"}):
        parser.error(f"no such row or part: {', '.join(sorted(unknown))}")
    shape = Shape(layers=given.layers, hidden=given.hidden, inner=given.hidden * 43 // 16 // 16 * 16)
    work = Given(shape, (given.batch, given.tokens), given.rounds)
    report = run(work, [engine for row in rows for engine in ROWS[row]], parts)
    if given.record:
        record(f"Engine, {given.layers} layers of {given.hidden}", report.lines)
    for line in report.failed:
        print(f"FAILED: {line}", file=sys.stderr)
    sys.exit(bool(report.failed))


def run(given: Given, engines: Sequence[Engine], parts: Sequence[str]) -> Report:
    """Measure and print."""
    report = Report()
    numel = sum(parameter.numel() for parameter in Llama(given.shape).parameters())
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    report.say(f"{today}, {machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}.")
    report.say(
        f"{given.shape.layers} layers of {given.shape.hidden}, {numel / 1e6:.1f} million float32 parameters, "
        f"{given.batch[0]} x {given.batch[1]} tokens a rank, {RANKS} gloo ranks, {given.rounds} rounds."
    )
    if "steps" in parts:
        report.steps([*engines, DDP], measure_steps([*engines, DDP], given))
    if "memory" in parts:
        report.memory([*engines, DDP], measure_memory([*engines, DDP], given))
    if "units" in parts:
        report.units(engines, measure_units(engines, 5 * given.rounds))
    return report


if __name__ == "__main__":
    main()
