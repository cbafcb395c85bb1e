"""Measure the engine and checkpoint transfers on one GPU.

    python benchmarks/gpu.py [--parts steps,overlap,copies] [--layers 16] [--rounds 9] [--record]

Without a GPU it prints one line and exits with 0. `--device cpu` runs the same code on the CPU, to test the script; its
figures have no meaning.

**Steps.** Forward, backward and AdamW of a Llama in a fake process group of 8 ranks, where collectives take no time:
the engine's own cost. Our engines and torch's train in turn in one process. Ratios are medians of the ratios of the
rounds. Peak is the most memory that the allocator gave each engine alone, of three steps. The benchmark fails above
1.05 times the time or the memory of torch's counterpart, and if the allocator had to retry.

**Overlap.** The same model with `fully_shard` and a custom all-gather that sleeps on its stream. *Compute* is a step
without sleep, *communication* the sum of all sleeps. A step should take the greater of the two. The benchmark fails if
it takes more than halfway to their sum.

**Copies.** Bytes per second of a save, a load, and a save in the background, to a folder in memory, or
a temporary folder where `/dev/shm` is small, beside a plain copy of as many bytes between the GPU and one pinned
buffer. *Stall* is the time until `async_save` returns, of the second save.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
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
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardckpt
from shardckpt import core as ours

LIMIT = 1.05
WORLD = 8
SLEEP_CYCLES = 5_000_000
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
PARTS = ("steps", "overlap", "copies")


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

    def read_peak(self) -> tuple[int, int]:
        """Return the peak of allocated bytes, and how often the allocator retried."""
        if not self.is_gpu:
            return 1, 0
        stats = torch.cuda.memory_stats()
        return stats["allocated_bytes.all.peak"], stats["num_alloc_retries"]

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


def build_step(device: Device, engine: Engine, shape: Shape, ids: torch.Tensor) -> tuple[nn.Module, Callable[[], None]]:
    """Return an engine's module and a function that runs one step."""
    torch.manual_seed(0)
    with torch.device(device.name):
        module = engine.shard(Llama(shape), Block)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)

    def step() -> None:
        with torch.device(device.name):
            module(ids).backward()
        optimizer.step()
        optimizer.zero_grad()

    return module, step


def measure_step_seconds(
    device: Device, engines: Sequence[Engine], shape: Shape, ids: torch.Tensor, rounds: int
) -> list[list[float]]:
    """Return the seconds of each engine's rounds; the engines take turns."""
    steps = [build_step(device, engine, shape, ids)[1] for engine in engines]
    seconds: list[list[float]] = [[] for _ in engines]
    for number in range(-3, rounds):
        for index in range(len(steps)) if number % 2 else range(len(steps) - 1, -1, -1):
            took = measure_seconds(device, steps[index])
            if number >= 0:
                seconds[index].append(took)
    return seconds


def measure_peak(device: Device, engine: Engine, shape: Shape, ids: torch.Tensor) -> tuple[int, int]:
    """Return the peak memory of three steps of an engine alone, and how often the allocator retried."""
    device.reset_memory()
    _, step = build_step(device, engine, shape, ids)
    for _ in range(3):
        step()
    device.synchronize()
    return device.read_peak()


def report_steps(
    report: Lines, device: Device, rows: Sequence[Sequence[Engine]], shape: Shape, ids: torch.Tensor, rounds: int
) -> None:
    """Print the table of steps."""
    report.say("\n### Steps\n\n| | ms | x torch | peak MB | x torch | retries |\n|---|---|---|---|---|---|")
    for engines in rows:
        peaks = [measure_peak(device, engine, shape, ids) for engine in engines]
        device.reset_memory()
        seconds = measure_step_seconds(device, engines, shape, ids, rounds)
        ratios = median_ratio(seconds[0], seconds[1]), peaks[0][0] / peaks[1][0]
        for engine, times, (peak, retries) in zip(engines, seconds, peaks, strict=True):
            shown = (f"{ratios[0]:.3f}", f"{ratios[1]:.3f}") if engine is engines[0] else ("", "")
            row = f"| {engine.name} | {median(times) * 1e3:.1f} | {shown[0]} "
            report.say(f"{row}| {peak / 1e6:.0f} | {shown[1]} | {retries} |")
        check_steps(report, engines[0].name, *ratios, peaks[0][1])


def check_steps(report: Lines, name: str, step_ratio: float, peak_ratio: float, retries: int) -> None:
    """Note what exceeds a limit."""
    if step_ratio > LIMIT:
        report.failed.append(f"{name}: a step takes {step_ratio:.3f} times as long as torch's, the limit is {LIMIT}")
    if peak_ratio > LIMIT:
        report.failed.append(f"{name}: a step needs {peak_ratio:.3f} times torch's memory, the limit is {LIMIT}")
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


def report_overlap(report: Lines, device: Device, shape: Shape, ids: torch.Tensor, rounds: int) -> None:
    """Print the table of overlap."""
    module, step = build_step(device, Engine("ours", partial(shard_in_place, ours)), shape, ids)
    gather = SleepingAllGather(device)
    for submodule in module.modules():
        if isinstance(submodule, ours.FSDPModule):
            submodule.set_custom_all_gather(gather)
    for _ in range(3):
        step()
    gather.calls = 0
    compute = median(measure_seconds(device, step) for _ in range(rounds))
    calls = gather.calls // rounds
    sleep = measure_seconds(device, lambda: [device.sleep() for _ in range(calls)])
    gather.sleeps = True
    both = median(measure_seconds(device, step) for _ in range(rounds))
    report.say("\n### Overlap\n\n| compute ms | communication ms | step ms | x the greater |\n|---|---|---|---|")
    greater = max(compute, sleep)
    report.say(f"| {compute * 1e3:.1f} | {sleep * 1e3:.1f} | {both * 1e3:.1f} | {both / greater:.2f} |")
    check_overlap(report, compute, sleep, both)


def check_overlap(report: Lines, compute: float, communication: float, step: float) -> None:
    """Note a step that is closer to the sum than to the greater part."""
    limit = (max(compute, communication) + compute + communication) / 2
    if step > limit:
        report.failed.append(f"overlap: a step takes {step * 1e3:.1f} ms, the limit is {limit * 1e3:.1f} ms")


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
    seconds["async_save, stall"] = stalls[1:]
    report.say(f"\n### Copies\n\n{nbytes / 1e9:.2f} GB.\n\n| | ms | GB/s | x the copy |\n|---|---|---|---|")
    for name, times in seconds.items():
        raw = seconds[f"copy {'from' if name == 'load' or ' from ' in name else 'to'} a pinned buffer"]
        took = median(times)
        report.say(f"| {name} | {took * 1e3:.1f} | {nbytes / took / 1e9:.2f} | {took / median(raw):.2f} |")


# ------------------------------------------------------------------------------------------------------------ report


def run(options: argparse.Namespace, device: Device) -> Lines:
    """Run the parts and print their tables."""
    report, parts = Lines(), options.parts
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    report.say(f"{today}, {device.describe()}, {machine()}, torch {torch.__version__}.")
    shape = Shape(layers=options.layers, hidden=options.hidden, inner=options.hidden * 43 // 16 // 16 * 16)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    ids = torch.randint(shape.words, (options.batch, options.tokens)).to(device.name)
    if "steps" in parts:
        report_steps(report, device, list(ROWS.values()), shape, ids, options.rounds)
    if "overlap" in parts:
        report_overlap(report, device, shape, ids, options.rounds)
    dist.destroy_process_group()
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
    parser.add_argument("--megabytes", type=int, default=4096, help="size of the state that is saved")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--record", action="store_true", help=f"write the tables into {RESULTS.name}")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no GPU: nothing was measured")
        return
    report = run(options, Device(options.device))
    if options.record:
        record("GPU", report.lines)
    for line in report.failed:
        print(f"FAILED: {line}", file=sys.stderr)
    sys.exit(bool(report.failed))


if __name__ == "__main__":
    main()
