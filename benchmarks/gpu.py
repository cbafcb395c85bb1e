"""Measure the engine and checkpoint transfers on one GPU.

    python benchmarks/gpu.py [--parts steps,overlap,saves,copies] [--layers 16] [--rounds 5] [--record]

Without a GPU it prints one line and exits with 0. `--device cpu` runs the same code on the CPU, to test the script; its
figures have no meaning, and no limits.

**Steps.** Forward, backward and AdamW of a Llama in a fake process group of 8 ranks, where collectives take no time:
the engine's own cost. Our engines and torch's train in turn in one process. A round is 10 steps without a wait between
them, so that an engine that waits on the host loses what the others hide. Matrix products use TF32, or bfloat16 in one
row. The large model keeps the GPU busy, the small one the host. Ratios are medians of the ratios of the rounds. Peaks
are the most memory that the allocator gave each engine alone, and took from the GPU, of three steps. The benchmark
fails above 1.05 times the time or the memory of torch's counterpart, and if the allocator had to retry.

**Overlap.** The same model with `fully_shard` and a custom all-gather that sleeps on its stream. *Compute* is a step
without sleep, *communication* the sum of all sleeps. A step should take the greater of the two. The benchmark fails if
ours takes more than halfway to their sum.

**Saves.** Ten steps of the large model on one rank, with a save in the background behind the third, and without. What
the save adds is the stall of the loop: of the host, of the GPU, and of what the writing threads take from both. The
first save also pins its buffers. With `overlap_staging` the next forward and backward run during the copies. Each save
is written before the next steps are measured.

**Copies.** Bytes per second of a save, a load, and a save in the background, to a folder in memory, or
a temporary folder where `/dev/shm` is small, beside a plain copy of as many bytes between the GPU and one pinned
buffer. *Call* is the time until `async_save` returns, of the second save.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from engine_step import ROWS, Engine, shard_in_place
from llama import Block, Llama, Shape
from options import add_selection, add_transformer_options
from ranks import median_ratio
from results import RESULTS, Lines, machine, record
from torch import nn
from torch.distributed import fsdp as theirs
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardckpt
from shardckpt import core as ours

LIMIT = 1.05
WORLD = 8
SLEEP_CYCLES = 5_000_000
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
PARTS = ("steps", "overlap", "saves", "copies")
SAVED_AT = 3  # the step of `saves` behind which it saves
SEGMENTS = 64 << 20  # bytes of reserved memory that the allocator's segments explain
LOW = (
    Engine("shardckpt fully_shard, bfloat16", partial(shard_in_place, ours, dtype=torch.bfloat16)),
    Engine("torch FSDP2, bfloat16", partial(shard_in_place, theirs, dtype=torch.bfloat16)),
)


@dataclass(frozen=True)
class Peak:
    """Memory at the peak of some steps.

    Attributes:
        allocated: Bytes of tensors.
        reserved: Bytes that the allocator took from the GPU.
        retries: How often it freed unused memory to go on.
    """

    allocated: int
    reserved: int
    retries: int


@dataclass(frozen=True)
class Workload:
    """A model and its inputs.

    Attributes:
        name: What the model keeps busy.
        shape: Its sizes.
        ids: Token ids of each step.
    """

    name: str
    shape: Shape
    ids: torch.Tensor


class Device:
    """A GPU, or the CPU in its place.

    Args:
        name: "cuda" or "cpu".
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_gpu = name == "cuda"

    def synchronize(self) -> None:
        """Wait until everything that is queued has run."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def sleep(self) -> None:
        """Queue a kernel of some milliseconds on the current stream."""
        if self.is_gpu:
            torch.cuda._sleep(SLEEP_CYCLES)

    def reset_memory(self) -> None:
        """Free unused memory, and begin to measure the peak."""
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_accumulated_memory_stats()

    def read_peak(self) -> Peak:
        """Return the peak since `reset_memory`."""
        if not self.is_gpu:
            return Peak(1, 1, 0)
        stats = torch.cuda.memory_stats()
        found = (stats[f"{kind}_bytes.all.peak"] for kind in ("allocated", "reserved"))
        return Peak(*found, stats["num_alloc_retries"])

    def describe(self) -> str:
        """Return the name of the device."""
        return torch.cuda.get_device_name(0) if self.is_gpu else "no GPU: figures without meaning"


def measure_seconds(device: Device, work: Callable[[], object]) -> float:
    """Return the seconds until some work is done, on the device too."""
    device.synchronize()
    start = time.perf_counter()
    work()
    device.synchronize()
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------------------- steps


@dataclass(frozen=True)
class Trainer:
    """What trains a model.

    Attributes:
        module: The engine's module.
        optimizer: Its optimizer.
        step: Runs one step.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]


def build_trainer(device: Device, engine: Engine, work: Workload) -> Trainer:
    """Return what trains a model with an engine."""
    torch.manual_seed(0)
    with torch.device(device.name):
        module = engine.shard(Llama(work.shape), Block)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> None:
        with torch.device(device.name):
            module(work.ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(module, optimizer, step)


def repeat(step: Callable[[], None], count: int) -> None:
    """Run steps without a wait between them."""
    for _ in range(count):
        step()


def measure_step_seconds(
    device: Device, engines: Sequence[Engine], work: Workload, steps: int, rounds: int
) -> list[list[float]]:
    """Return the seconds of a step in each engine's rounds; the engines take turns."""
    works = [partial(repeat, build_trainer(device, engine, work).step, steps) for engine in engines]
    seconds: list[list[float]] = [[] for _ in engines]
    for number in range(-1, rounds):
        for index in range(len(works)) if number % 2 else range(len(works) - 1, -1, -1):
            took = measure_seconds(device, works[index])
            if number >= 0:
                seconds[index].append(took / steps)
    return seconds


def measure_peak(device: Device, engine: Engine, work: Workload) -> Peak:
    """Return the peak of three steps of an engine alone."""
    device.reset_memory()
    repeat(build_trainer(device, engine, work).step, 3)
    device.synchronize()
    return device.read_peak()


def report_steps(report: Lines, device: Device, work: Workload, steps: int, rounds: int) -> None:
    """Print the table of steps."""
    report.say(f"\n### Steps, {work.name}: {work.shape.layers} layers of {work.shape.hidden}\n")
    report.say("| | ms | x torch | allocated MB | x torch | reserved MB | x torch | retries |")
    report.say("|---|---|---|---|---|---|---|---|")
    for engines in (*ROWS.values(), LOW):
        mine, other = (measure_peak(device, engine, work) for engine in engines)
        device.reset_memory()
        seconds = measure_step_seconds(device, engines, work, steps, rounds)
        ratios = {
            "time": median_ratio(*seconds),
            "allocated memory": mine.allocated / other.allocated,
            "reserved memory": mine.reserved / other.reserved,
        }
        for engine, times, peak in zip(engines, seconds, (mine, other), strict=True):
            shown = [f"{ratio:.3f}" if peak is mine else "" for ratio in ratios.values()]
            figures = f"{median(times) * 1e3:.1f}", f"{peak.allocated / 1e6:.0f}", f"{peak.reserved / 1e6:.0f}"
            cells = [cell for pair in zip(figures, shown, strict=True) for cell in pair]
            report.say(f"| {engine.name} | {' | '.join(cells)} | {peak.retries} |")
        ratios["reserved memory"] = (mine.reserved - SEGMENTS) / other.reserved
        check_steps(report, f"{engines[0].name}, {work.name}", ratios, mine.retries)


def check_steps(report: Lines, name: str, ratios: Mapping[str, float], retries: int) -> None:
    """Note what exceeds a limit."""
    for what, ratio in ratios.items():
        if ratio > LIMIT:
            report.failed.append(f"{name}: a step needs {ratio:.3f} times torch's {what}, the limit is {LIMIT}")
    if retries:
        report.failed.append(f"{name}: the allocator retried {retries} times")


# ----------------------------------------------------------------------------------------------------------- overlap


class SleepingAllGather(ours.AllGather):
    """A custom all-gather that sleeps on its stream.

    Attributes:
        calls: Number of all-gathers.
        sleeps: Whether they sleep.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.calls = 0
        self.sleeps = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the buffer of a collective."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        """Gather late."""
        self.calls += 1
        if self.sleeps:
            self._device.sleep()
        return ALL_GATHER(output_tensor, input_tensor, group=group, async_op=async_op)


def measure_overlap(device: Device, engine: Engine, work: Workload, rounds: int) -> tuple[float, float, float] | None:
    """Return the seconds of computation, of all sleeps, and of a step with both; None without custom all-gathers."""
    trainer = build_trainer(device, engine, work)
    step, gather = trainer.step, SleepingAllGather(device)
    for submodule in trainer.module.modules():
        if hasattr(submodule, "set_custom_all_gather"):
            submodule.set_custom_all_gather(gather)
    repeat(step, 3)
    gather.calls = 0
    compute = median(measure_seconds(device, step) for _ in range(rounds))
    calls = gather.calls // rounds
    if not calls:
        return None
    sleep = measure_seconds(device, lambda: [device.sleep() for _ in range(calls)])
    gather.sleeps = True
    return compute, sleep, median(measure_seconds(device, step) for _ in range(rounds))


def report_overlap(report: Lines, device: Device, work: Workload, rounds: int) -> None:
    """Print the table of overlap."""
    report.say("\n### Overlap\n\n| | compute ms | communication ms | step ms | x the greater |\n|---|---|---|---|---|")
    mine, other = ROWS["composable"]
    for engine in (mine, other):
        device.reset_memory()
        found = measure_overlap(device, engine, work, rounds)
        if found is None:
            report.say(f"| {engine.name}: no custom all-gather | | | | |")
            continue
        compute, sleep, both = found
        row = " | ".join(f"{seconds * 1e3:.1f}" for seconds in found)
        report.say(f"| {engine.name} | {row} | {both / max(compute, sleep):.2f} |")
        if engine is mine:
            check_overlap(report, compute, sleep, both)


def check_overlap(report: Lines, compute: float, communication: float, step: float) -> None:
    """Note a step that is closer to the sum than to the greater part."""
    limit = (max(compute, communication) + compute + communication) / 2
    if step > limit:
        report.failed.append(f"overlap: a step takes {step * 1e3:.1f} ms, the limit is {limit * 1e3:.1f} ms")


# ------------------------------------------------------------------------------------------------------------- saves


def measure_steps_with_save(
    device: Device, trainer: Trainer, steps: int, folder: str, *, overlaps: bool
) -> tuple[float, float]:
    """Return the seconds of some steps with a save behind one of them, and those of the call; wait for the save."""
    calls: list[float] = []
    handles = []

    def work() -> None:
        repeat(trainer.step, SAVED_AT)
        start = time.perf_counter()
        state = {"model": trainer.module, "optim": trainer.optimizer}
        handles.append(shardckpt.async_save(state, folder, overwrite=True, overlap_staging=overlaps))
        calls.append(time.perf_counter() - start)
        repeat(trainer.step, steps - SAVED_AT)

    took = measure_seconds(device, work)
    handles[0].result()
    return took, calls[0]


def report_saves(report: Lines, device: Device, work: Workload, steps: int, rounds: int) -> None:
    """Print what a save in the background adds to the time of some steps."""
    trainer = build_trainer(device, Engine("one rank", lambda module, _: module), work)
    repeat(trainer.step, 3)
    plain = median(measure_seconds(device, partial(repeat, trainer.step, steps)) for _ in range(rounds))
    nbytes = 3 * sum(parameter.nbytes for parameter in trainer.module.parameters())
    folder = tempfile.mkdtemp(dir=find_memory_folder(3 * nbytes))
    try:
        measure = partial(measure_steps_with_save, device, trainer, steps, f"{folder}/a")
        first = measure(overlaps=False)
        found = [(measure(overlaps=False), measure(overlaps=True)) for _ in range(rounds)]
    finally:
        shutil.rmtree(folder)
    report.say(f"\n### Saves\n\n{nbytes / 1e9:.2f} GB, {steps} steps.\n")
    report.say("| | ms | more than without a save, ms | call, ms |\n|---|---|---|---|")
    report.say(f"| without a save | {plain * 1e3:.1f} | | |")
    later, overlapped = ([median(column) for column in zip(*rows, strict=True)] for rows in zip(*found, strict=True))
    saves = {"the first save": first, "a later save": later, "`overlap_staging`": overlapped}
    for name, (took, call) in saves.items():
        report.say(f"| with {name} | {took * 1e3:.1f} | {(took - plain) * 1e3:.1f} | {call * 1e3:.1f} |")


# ------------------------------------------------------------------------------------------------------------ copies


def find_memory_folder(nbytes: int) -> str | None:
    """Return a folder in memory with enough space; None if there is none, as in a container with its 64 MB."""
    folder = Path("/dev/shm")
    return str(folder) if folder.is_dir() and shutil.disk_usage(folder).free >= nbytes else None


def report_copies(report: Lines, device: Device, nbytes: int, rounds: int) -> None:
    """Print the table of copies."""
    parts = 16
    state = {f"w{n}": torch.ones(nbytes // parts // 4, device=device.name) for n in range(parts)}
    buffer = torch.empty(nbytes // parts // 4, pin_memory=device.is_gpu)
    folder = tempfile.mkdtemp(dir=find_memory_folder(4 * nbytes))
    stalls: list[float] = []

    def copy_out() -> None:
        for tensor in state.values():
            buffer.copy_(tensor, non_blocking=True)

    def copy_in() -> None:
        for tensor in state.values():
            tensor.copy_(buffer, non_blocking=True)

    def save_in_background() -> None:
        start = time.perf_counter()
        handle = shardckpt.async_save(state, f"{folder}/b", overwrite=True)
        stalls.append(time.perf_counter() - start)
        handle.result()

    works: dict[str, Callable[[], None]] = {
        "copy to a pinned buffer": copy_out,
        "copy from a pinned buffer": copy_in,
        "save": lambda: shardckpt.save(state, f"{folder}/a", overwrite=True),
        "load": lambda: shardckpt.load(state, f"{folder}/a"),
        "async_save, until it is written": save_in_background,
    }
    try:
        seconds = {name: [measure_seconds(device, work) for _ in range(rounds + 1)][1:] for name, work in works.items()}
    finally:
        shutil.rmtree(folder)
    seconds["async_save, call"] = stalls[1:]
    report.say(f"\n### Copies\n\n{nbytes / 1e9:.2f} GB.\n\n| | ms | GB/s | x the copy |\n|---|---|---|---|")
    for name, times in seconds.items():
        raw = seconds[f"copy {'from' if name == 'load' or ' from ' in name else 'to'} a pinned buffer"]
        took = median(times)
        report.say(f"| {name} | {took * 1e3:.1f} | {nbytes / took / 1e9:.2f} | {took / median(raw):.2f} |")


# ------------------------------------------------------------------------------------------------------------ report


def build_workloads(options: argparse.Namespace, device: Device) -> tuple[Workload, Workload]:
    """Return a large model, and one whose kernels are so small that the host decides."""
    small = max(options.hidden // 8, 64)
    sizes = {
        "busy GPU": (options.hidden, options.batch, options.tokens),
        "busy host": (small, 1, max(options.tokens // 8, 2)),
    }
    works = []
    for name, (hidden, batch, tokens) in sizes.items():
        shape = Shape(layers=options.layers, hidden=hidden, inner=hidden * 43 // 16 // 16 * 16)
        works.append(Workload(name, shape, torch.randint(shape.words, (batch, tokens)).to(device.name)))
    return works[0], works[1]


def run(options: argparse.Namespace, device: Device) -> Lines:
    """Run the parts and print their tables."""
    report, parts = Lines(), options.parts
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    report.say(f"{today}, {device.describe()}, {machine()}, torch {torch.__version__}.")
    torch.backends.cuda.matmul.allow_tf32 = True
    large, small = build_workloads(options, device)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    if "steps" in parts:
        for work in (large, small):
            report_steps(report, device, work, options.steps, options.rounds)
    if "overlap" in parts:
        report_overlap(report, device, large, options.rounds)
    dist.destroy_process_group()
    device.reset_memory()
    if "saves" in parts:
        report_saves(report, device, large, options.steps, options.rounds)
        device.reset_memory()
    if "copies" in parts:
        report_copies(report, device, options.megabytes << 20, options.rounds)
    return report


def main() -> None:
    """Run the selected parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    add_selection(parser, "--parts", PARTS)
    add_transformer_options(parser, layers=16, hidden=2048, batch=4, tokens=512)
    parser.add_argument("--megabytes", type=int, default=4096, help="size of the state that is copied")
    parser.add_argument("--steps", type=int, default=10, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help=f"write the tables into {RESULTS.name}")
    options = parser.parse_args()
    if options.steps <= SAVED_AT:
        parser.error(f"--steps must be more than {SAVED_AT}, the step that is saved, got {options.steps}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: nothing was measured")
        return
    device = Device(options.device)
    report = run(options, device)
    if options.record:
        record("GPU", report.lines)
    if not device.is_gpu:
        print("\nno limits on the CPU")
        return
    print("" if report.failed else "\nevery limit is met")
    for line in report.failed:
        print(f"FAILED: {line}", file=sys.stderr)
    sys.exit(bool(report.failed))


if __name__ == "__main__":
    main()
