"""Run benchmarks on forked gloo ranks, read their memory, and compare runs."""

from __future__ import annotations

import ctypes
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2
FORK = multiprocessing.get_context("fork")
LIBC = ctypes.CDLL(None)
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def run_ranks(body: Callable[[int], Any], world: int = RANKS) -> list[Any]:
    """Run `body(rank)` on forked gloo ranks, and return the result of each."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [FORK.Pipe(duplex=False) for _ in range(world)]
        ranks = [FORK.Process(target=run_rank, args=(r, world, folder, body, pipes[r][1])) for r in range(world)]
        for process in ranks:
            process.start()
        for _, sender in pipes:
            sender.close()
        results = []
        for (receiver, _), process in zip(pipes, ranks, strict=True):
            with closing(process), closing(receiver):
                with suppress(EOFError):
                    results.append(receiver.recv())
                process.join()
        if len(results) < world:
            raise SystemExit("a rank failed; see its output above")
        return results


def run_rank(rank: int, world: int, folder: str, body: Callable[[int], Any], sender: Connection) -> None:
    """Run one of the forked ranks."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    sender.send(body(rank))
    dist.barrier()
    dist.destroy_process_group()


def read_status(field: str) -> int:
    """Return a field of this process's status in bytes: VmRSS is the current memory, VmHWM the peak."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no field {field}")


def return_freed_memory() -> None:
    """Make malloc map larger blocks one by one, and unmap them when they are freed."""
    LIBC.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    LIBC.mallopt(M_TRIM_THRESHOLD, 1 << 16)
    LIBC.mallopt(M_TOP_PAD, 0)


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the ratios of the rounds."""
    return median(a / b for a, b in zip(over, under, strict=True))
