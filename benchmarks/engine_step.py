"""Compare a training step of our engines with torch's: time, memory, and the cost of an FSDP unit.

    python benchmarks/engine_step.py [--rows flat,originals,composable] [--layers 8] [--rounds 9] [--record]

**Step.** Forward, backward and AdamW of a small Llama on two gloo ranks with one thread each. Each block is a unit, and
the other parameters are another. All engines run in the same two forked processes, in alternating order, so other work
on the machine affects all of them. The time of a step is that of its slower rank. Ratios are medians of the ratios of
the rounds. The benchmark fails above 1.05 times the time, or 1.0 times the peak of memory, of torch's counterpart. CPU
is the sum of both ranks and all threads. Its ratio is more reliable on a busy machine.

**Memory.** Each engine runs alone in two new processes. malloc returns every freed block of 64 KiB or more immediately.
The figure is the kernel's peak of resident memory over three steps, minus the memory after a step of a tiny model. It
includes parameters, gradients, AdamW's state, activations, and the buffers of gloo (a full unit during its all-gather,
and again during its reduction). *At rest* is the same figure between two steps.

**Unit.** Many tiny units (two vectors of 8). The figure is the time of an iteration (forward and backward) minus that
of the plain module, divided by the number of units. It includes three collectives for each unit. Their own time is in
the row "bare collectives".
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
import torch._dynamo  # optimizers import it at their first step; import it once, before the fork
import torch.distributed as dist
from llama import Block, Llama, Shape
from options import add_selection, add_transformer_options
from ranks import LIBC, RANKS, median_ratio, read_status, return_freed_memory, run_ranks
from results import RESULTS, Lines, machine, record, section_title
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TheirPolicy
from torch.nn.parallel import DistributedDataParallel

from shardckpt import core as ours
from shardckpt.core.wrap import ModuleWrapPolicy as OurPolicy

LIMIT = 1.05
"""Most seconds of a step, relative to torch's."""

MEMORY_LIMIT = 1.0
"""Most memory at the peak of a step, relative to torch's."""

TINY = 48


@dataclass(frozen=True)
class Engine:
    """A way to train a model on several ranks.

    Attributes:
        name: Printed name.
        shard: Shards a module; the second argument is the class of its units.
        peer: Name of the engine that it is compared with; empty for a baseline.
    """

    name: str
    shard: Callable[[nn.Module, type[nn.Module]], nn.Module]
    peer: str = ""


def wrap_module(kind: Any, policy: Any, originals: bool, module: nn.Module, unit: type[nn.Module]) -> nn.Module:
    """Wrap a module and its units."""
    device = next(module.parameters()).device
    wrapper: nn.Module = kind(module, auto_wrap_policy=policy({unit}), use_orig_params=originals, device_id=device)
    return wrapper


def shard_in_place(
    package: Any, module: nn.Module, unit: type[nn.Module], *, dtype: torch.dtype | None = None
) -> nn.Module:
    """Shard a module and its units in place; with a dtype they compute in it, and add gradients in float32."""
    policy = package.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32)
    for submodule in module.modules():
        if isinstance(submodule, unit):
            package.fully_shard(submodule, mp_policy=policy)
    package.fully_shard(module, mp_policy=policy)
    return module


def replicate(module: nn.Module, unit: type[nn.Module]) -> nn.Module:  # noqa: ARG001  (DDP has no units)
    """Replicate a module with DDP."""
    return DistributedDataParallel(module)


DDP = Engine("DDP", replicate)
PARTS = ("steps", "memory", "units")

ROWS = {
    "flat": (
        Engine(
            "shardckpt wrapper, flat",
            partial(wrap_module, ours.FullyShardedDataParallel, OurPolicy, False),
            "torch FSDP1",
        ),
        Engine("torch FSDP1", partial(wrap_module, theirs.FullyShardedDataParallel, TheirPolicy, False)),
    ),
    "originals": (
        Engine(
            "shardckpt wrapper, use_orig_params",
            partial(wrap_module, ours.FullyShardedDataParallel, OurPolicy, True),
            "torch FSDP1, use_orig_params",
        ),
        Engine(
            "torch FSDP1, use_orig_params", partial(wrap_module, theirs.FullyShardedDataParallel, TheirPolicy, True)
        ),
    ),
    "composable": (
        Engine("shardckpt fully_shard", partial(shard_in_place, ours), "torch FSDP2"),
        Engine("torch FSDP2", partial(shard_in_place, theirs)),
    ),
}


@dataclass(frozen=True)
class Workload:
    """The model, the data and the number of rounds.

    Attributes:
        shape: Sizes of the model.
        batch: Number of sequences, and tokens per sequence, of each rank.
        rounds: Measured steps of each engine.
    """

    shape: Shape
    batch: tuple[int, int]
    rounds: int


@dataclass(frozen=True)
class Step:
    """One measured step.

    Attributes:
        seconds: Time of the slower rank.
        cpu: CPU seconds of all ranks and threads.
    """

    seconds: float
    cpu: float


# ------------------------------------------------------------------------------------------------------------- ranks


def build_step(engine: Engine, workload: Workload) -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """Return an engine's module and a function that runs one step and returns the loss."""
    torch.manual_seed(0)
    module = engine.shard(Llama(workload.shape), Block)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step(ids: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = module(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return module, step


def make_batch(workload: Workload, rank: int, number: int) -> torch.Tensor:
    """Return the token ids of a step on a rank."""
    generator = torch.Generator().manual_seed(number * RANKS + rank)
    return torch.randint(workload.shape.words, workload.batch, generator=generator)


# -------------------------------------------------------------------------------------------------------------- time


def take_turns(engines: Sequence[Engine], workload: Workload, rank: int) -> list[list[tuple[float, float]]]:
    """Train with the engines in turn; return seconds and CPU seconds of each engine's rounds.

    Raises:
        SystemExit: The losses of two engines differ.
    """
    steps = [build_step(engine, workload)[1] for engine in engines]
    times: list[list[tuple[float, float]]] = [[] for _ in engines]
    for number in range(-2, workload.rounds):
        ids = make_batch(workload, rank, number + 2)
        losses = [0.0] * len(engines)
        order = range(len(engines)) if number % 2 else range(len(engines) - 1, -1, -1)
        for index in order:
            gc.collect()
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            losses[index] = steps[index](ids).item()
            end = time.perf_counter(), time.process_time()
            dist.barrier()
            if number >= 0:
                times[index].append((end[0] - start[0], end[1] - start[1]))
        if max(losses) - min(losses) > 1e-4 * max(losses):
            raise SystemExit(f"the engines train different models: losses {losses}")
    return times


def measure_steps(engines: Sequence[Engine], workload: Workload) -> dict[str, list[Step]]:
    """Return the steps of every engine."""
    results = run_ranks(partial(take_turns, engines, workload))
    return {
        engine.name: [
            Step(max(times[index][i][0] for times in results), sum(times[index][i][1] for times in results))
            for i in range(workload.rounds)
        ]
        for index, engine in enumerate(engines)
    }


# ------------------------------------------------------------------------------------------------------------ memory


def measure_peak(engine: Engine, workload: Workload, rank: int) -> tuple[int, int]:
    """Return the peak memory of three steps, and the memory after them, in bytes."""
    return_freed_memory()
    tiny = Workload(Shape(layers=1, hidden=64, inner=64, words=64), (1, 8), rounds=1)
    build_step(engine, tiny)[1](make_batch(tiny, rank, 0))  # imports modules, connects ranks
    dist.barrier()
    gc.collect()
    LIBC.malloc_trim(0)
    before = read_status("VmRSS")
    _, step = build_step(engine, workload)
    for number in range(2):
        step(make_batch(workload, rank, number))
    gc.collect()
    LIBC.malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    for number in range(3):
        step(make_batch(workload, rank, number))
    peak = read_status("VmHWM") - before
    gc.collect()
    LIBC.malloc_trim(0)
    return peak, read_status("VmRSS") - before


def measure_memory(engines: Sequence[Engine], workload: Workload) -> dict[str, tuple[int, int]]:
    """Return the bytes of every engine, peak and at rest, of the rank that needs most."""
    results = {engine.name: run_ranks(partial(measure_peak, engine, workload)) for engine in engines}
    return {name: (max(p for p, _ in ranks), max(r for _, r in ranks)) for name, ranks in results.items()}


# -------------------------------------------------------------------------------------------------------------- unit


class Scale(nn.Module):
    """A tiny unit: a vector to multiply with and one to add."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(8))
        self.plus = nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by + self.plus


def bare_collectives(rank: int) -> Callable[[], None]:  # noqa: ARG001
    """Return a function that runs only the collectives of the tiny units."""
    full, shard = torch.zeros(16), torch.zeros(8)

    def iteration() -> None:
        for _ in range(TINY):
            dist.all_gather_single(full, shard)
            dist.all_gather_single(full, shard)
            dist.reduce_scatter_single(shard, full)

    return iteration


def build_iteration(engine: Engine | None) -> Callable[[], None]:
    """Return a function that runs forward and backward of the tiny units; None is the plain module."""
    units: nn.Module = nn.Sequential(*(Scale() for _ in range(TINY)))
    module = engine.shard(units, Scale) if engine else units
    x = torch.ones(4, 8)

    def iteration() -> None:
        module(x).sum().backward()
        module.zero_grad()

    return iteration


def time_tiny_units(engines: Sequence[Engine], rounds: int, rank: int) -> list[list[tuple[float, float]]]:
    """Return seconds and CPU seconds of iterations: plain module, bare collectives, every engine."""
    bodies = [build_iteration(None), bare_collectives(rank), *(build_iteration(engine) for engine in engines)]
    times: list[list[tuple[float, float]]] = [[] for _ in bodies]
    for number in range(-3, rounds):
        order = range(len(bodies)) if number % 2 else range(len(bodies) - 1, -1, -1)
        for index in order:
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            bodies[index]()
            end = time.perf_counter(), time.process_time()
            if number >= 0:
                times[index].append((end[0] - start[0], end[1] - start[1]))
    return times


def measure_units(engines: Sequence[Engine], rounds: int) -> dict[str, tuple[float, float]]:
    """Return microseconds per unit, wall and CPU of one rank, minus those of the plain module."""
    first = run_ranks(partial(time_tiny_units, engines, rounds))[0]
    medians = [[median(column) for column in zip(*times, strict=True)] for times in first]
    names = ["bare collectives", *(engine.name for engine in engines)]
    bare = medians[0]
    return {
        name: ((wall - bare[0] * (i > 0)) / TINY * 1e6, (cpu - bare[1] * (i > 0)) / TINY * 1e6)
        for i, (name, (wall, cpu)) in enumerate(zip(names, medians[1:], strict=True))
    }


# ------------------------------------------------------------------------------------------------------------ report


class Report(Lines):
    """The tables of steps, memory and units."""

    def steps(self, engines: Sequence[Engine], results: dict[str, list[Step]]) -> None:
        """Print the table of step times."""
        self.say(
            "\n### Step\n\n| | ms (least - most) | CPU ms | x DDP | x torch | x torch, CPU |\n|---|---|---|---|---|---|"
        )
        baseline = [step.seconds for step in results[DDP.name]]
        for engine in engines:
            wall, cpu = ([getattr(step, field) for step in results[engine.name]] for field in ("seconds", "cpu"))
            row = f"| {engine.name} | {median(wall) * 1e3:.0f} ({min(wall) * 1e3:.0f} - {max(wall) * 1e3:.0f}) "
            row += f"| {median(cpu) * 1e3:.0f} | {median_ratio(wall, baseline):.3f} "
            if not engine.peer:
                self.say(row + "| | |")
                continue
            peer = results[engine.peer]
            measured = median_ratio(wall, [step.seconds for step in peer])
            self.say(row + f"| **{measured:.3f}** | {median_ratio(cpu, [step.cpu for step in peer]):.3f} |")
            if measured > LIMIT:
                self.failed.append(f"a step of {engine.name} takes {measured:.3f} times the time of {engine.peer}")

    def memory(self, engines: Sequence[Engine], results: dict[str, tuple[int, int]]) -> None:
        """Print the table of memory."""
        self.say("\n### Memory of one rank\n\n| | peak MB | at rest MB | peak x torch |\n|---|---|---|---|")
        for engine in engines:
            peak, rest = results[engine.name]
            to_peer = peak / results[engine.peer][0] if engine.peer else None
            shown = f"{to_peer:.3f}" if to_peer else ""
            self.say(f"| {engine.name} | {peak / 1e6:.1f} | {rest / 1e6:.1f} | {shown} |")
            if to_peer:
                self.goal("memory of a step", f"{engine.name}, peak", to_peer, MEMORY_LIMIT, f"x {engine.peer}")

    def units(self, engines: Sequence[Engine], results: dict[str, tuple[float, float]]) -> None:
        """Print the table of units."""
        self.say(
            f"\n### Unit\n\n{TINY} tiny units.\n\n| | us per unit | CPU us per unit | x torch |\n|---|---|---|---|"
        )
        peers = {engine.name: engine.peer for engine in engines}
        for name, (wall, cpu) in results.items():
            peer = results.get(peers.get(name, ""))
            self.say(f"| {name} | {wall:.0f} | {cpu:.0f} | {f'{wall / peer[0]:.2f}' if peer else ''} |")


def is_available(row: str) -> bool:
    """Return True if both engines of a row exist."""
    return row != "composable" or (hasattr(ours, "fully_shard") and hasattr(theirs, "fully_shard"))


def main() -> None:
    """Run the selected rows and parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_selection(parser, "--rows", ROWS, filter(is_available, ROWS))
    add_selection(parser, "--parts", PARTS)
    add_transformer_options(parser, layers=8, hidden=512, batch=2, tokens=128)
    parser.add_argument("--rounds", type=int, default=9, help="measured steps of each engine")
    parser.add_argument("--record", action="store_true", help=f"write the tables into {RESULTS.name}")
    options = parser.parse_args()
    rows, parts = options.rows, options.parts
    shape = Shape(layers=options.layers, hidden=options.hidden, inner=options.hidden * 43 // 16 // 16 * 16)
    workload = Workload(shape, (options.batch, options.tokens), options.rounds)
    report = run(workload, [engine for row in rows for engine in ROWS[row]], parts)
    if options.record:
        title = f"Engine, {options.layers} layers of {options.hidden}"
        every = (*filter(is_available, ROWS), *PARTS)
        record(section_title(title, [*rows, *parts], every), report.lines, report.goals)
    for line in report.failed:
        print(f"FAILED: {line}", file=sys.stderr)
    sys.exit(bool(report.failed))


def run(workload: Workload, engines: Sequence[Engine], parts: Sequence[str]) -> Report:
    """Run the parts and print their tables."""
    report = Report()
    numel = sum(parameter.numel() for parameter in Llama(workload.shape).parameters())
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    report.say(f"{today}, {machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}.")
    report.say(
        f"{workload.shape.layers} layers of {workload.shape.hidden}, {numel / 1e6:.1f} million float32 parameters, "
        f"{workload.batch[0]} x {workload.batch[1]} tokens per rank, {RANKS} gloo ranks, {workload.rounds} rounds."
    )
    if "steps" in parts:
        report.steps([*engines, DDP], measure_steps([*engines, DDP], workload))
    if "memory" in parts:
        report.memory([*engines, DDP], measure_memory([*engines, DDP], workload))
    if "units" in parts:
        report.units(engines, measure_units(engines, 5 * workload.rounds))
    return report


if __name__ == "__main__":
    main()
