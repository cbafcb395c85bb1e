"""Measure the work of Python before and after bytes are moved: start-up, planning, opening. Each row has a goal.

    python benchmarks/planning.py [--cases start,load,plan,open,inspect] [--rounds 11] [--record]

Figures are seconds of processor time, so that other work on the machine matters less. The start of a command is the
time of its process without that of an empty interpreter, and without that of the same call in a warm process. The
command is the installed script beside the interpreter; its modules are cached (`.pyc`) by a first run that does not
count, whatever PYTHONDONTWRITEBYTECODE is in the shell.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from goal_cases import Cases, Row, run_cases
from inputs import LISTED_TENSORS, make_listed
from save_load import time_planning
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardckpt
from shardckpt.readers.registry import open_checkpoint

RANKS, TENSORS = 64, 1200
COMMAND = str(Path(sys.executable).with_name("shardckpt"))
CACHED = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def measure(work: Callable[[], object]) -> float:
    """Return the processor seconds of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure_process(*words: str) -> float:
    """Return the processor seconds of a process that caches its modules, like an installed command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.run(words, check=True, env=CACHED, **quiet)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def start(folder: Path, rounds: int) -> Iterator[Row]:
    """Measure the start of `consolidate`."""
    source = Path(__file__).resolve().parents[1] / "tests" / "fixtures" / "dcp_fsdp2_llama_w2" / "ckpt"
    empty, command, call = [], [], []
    for number in range(rounds + 1):
        empty.append(measure_process(sys.executable, "-c", "pass"))
        command.append(measure_process(COMMAND, "consolidate", str(source), str(folder / f"a{number}")))
        call.append(measure(partial(shardckpt.consolidate, str(source), str(folder / f"b{number}"))))
    yield Row(
        "start-up", "start of `shardckpt consolidate`", median(command[1:]) - median(empty[1:]) - median(call[1:]), 0.15
    )


def load(folder: Path, rounds: int) -> Iterator[Row]:
    """Measure the first `load` of a process that has imported torch's DTensor, with and without modules it imports."""
    state = {"model": {f"w{number}": torch.zeros(64, 64) for number in range(100)}}
    shardckpt.save(state, str(folder / "step"))
    yield Row("start-up", "first `load` of a process, without the second", time_first_load(folder, rounds, True), 0.05)
    what = "first `load` of a process with its imports, without the second"
    yield Row("start-up", what, time_first_load(folder, rounds, False), 0.05)


def time_first_load(folder: Path, rounds: int, is_imported: bool) -> float:
    """Return the processor seconds of the first load of a process, without those of the second.

    Args:
        folder: Folder of the saved step.
        rounds: Measured processes.
        is_imported: Whether the modules that `load` needs are imported before.
    """
    program = (
        "import time, torch, torch.distributed.tensor, shardckpt\n"
        "state = {'model': {f'w{number}': torch.zeros(64, 64) for number in range(100)}}\n"
        f"{'shardckpt.load' if is_imported else ''}\n"
        "times = []\n"
        "for _ in range(3):\n"
        "    start = time.process_time()\n"
        f"    shardckpt.load(state, {str(folder / 'step')!r})\n"
        "    times.append(time.process_time() - start)\n"
        "print(times[0] - times[1])\n"
    )
    words = [sys.executable, "-c", program]
    runs = [subprocess.run(words, check=True, capture_output=True, text=True, env=CACHED) for _ in range(rounds + 1)]
    return median(float(run.stdout) for run in runs[1:])


def plan(folder: Path, rounds: int) -> Iterator[Row]:  # noqa: ARG001
    """Measure the plan of a first save on rank 0."""
    for world, arrays, flat in ((1024, 1000, True), (4096, 1000, False)):
        seconds, _ = time_planning(world, arrays, flat=flat)
        kind = "flat ranges" if flat else "rows"
        yield Row("planning", f"plan of {world:,} ranks x {arrays:,} tensors, {kind}", seconds, 5)


def write_rank_files(folder: Path) -> None:
    """Write the files that ranks with DTensors write with `torch.save`, one rank after another."""
    folder.mkdir()
    for rank in range(RANKS):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        mesh = DeviceMesh("cpu", list(range(RANKS)))
        state = {
            f"layers.{number // 12}.p{number % 12}.weight": DTensor.from_local(
                torch.full((1, 4), float(rank)), mesh, [Shard(0)], run_check=False
            )
            for number in range(TENSORS)
        }
        torch.save({"model": state, "step": 3}, folder / f"rank{rank}.pt")
        dist.destroy_process_group()


def open_(folder: Path, rounds: int) -> Iterator[Row]:
    """Measure the opening of rank files of DTensors."""
    write_rank_files(folder / "ranks")
    work = partial(open_checkpoint, str(folder / "ranks"))
    seconds = median(measure(work) for _ in range(min(rounds, 3)))
    yield Row("planning", f"opening {RANKS} rank files x {TENSORS:,} DTensors", seconds, 3)


def inspect(folder: Path, rounds: int) -> Iterator[Row]:
    """Measure `inspect` of many tensors."""
    make_listed(folder / "listed")
    seconds = median(measure(partial(shardckpt.inspect, str(folder / "listed"))) for _ in range(rounds))
    yield Row("planning", f"`inspect` of {LISTED_TENSORS:,} tensors", seconds, 1)
    command = median(measure_process(COMMAND, "inspect", str(folder / "listed")) for _ in range(rounds))
    yield Row("planning", f"`shardckpt inspect` of {LISTED_TENSORS:,} tensors, the process", command, 1)


CASES: Cases = {
    "start": start,
    "load": load,
    "plan": plan,
    "open": open_,
    "inspect": inspect,
}


def main() -> None:
    """Run the selected cases."""
    run_cases(__doc__, "Start-up, planning and opening", CASES, rounds=11)


if __name__ == "__main__":
    main()
