"""What benchmarks of several ranks share: forked processes joined by gloo, their memory, and how runs are compared."""

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


def in_ranks(body: Callable[[int], Any], world: int = RANKS) -> list[Any]:
    """Run `body(rank)` in forked processes joined by gloo; return what each gave."""
    with tempfile.TemporaryDirectory() as folder:
        ends = [FORK.Pipe(duplex=False) for _ in range(world)]
        ranks = [FORK.Process(target=be_rank, args=(r, world, folder, body, ends[r][1])) for r in range(world)]
        for process in ranks:
            process.start()
        for _, out in ends:
            out.close()
        found = []
        for (end, _), process in zip(ends, ranks, strict=True):
            with closing(process), closing(end):
                with suppress(EOFError):
                    found.append(end.recv())
                process.join()
        if len(found) < world:
            raise SystemExit("a rank failed; what it said stands above")
        return found


def be_rank(rank: int, world: int, folder: str, body: Callable[[int], Any], out: Connection) -> None:
    """Be one rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(str(Path(folder) / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    out.send(body(rank))
    dist.barrier()
    dist.destroy_process_group()


def resident(field: str) -> int:
    """Return a field of this process's status, in bytes: VmRSS for now, VmHWM for the peak."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"this system does not tell {field}")


def give_back_freed_memory() -> None:
    """Let malloc map larger blocks one by one, and unmap them when they are freed."""
    LIBC.mallopt(M_MMAP_THRESHOLD, 1 << 16)
    LIBC.mallopt(M_TRIM_THRESHOLD, 1 << 16)
    LIBC.mallopt(M_TOP_PAD, 0)


def ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Return the median of the rounds' own ratios."""
    return median(a / b for a, b in zip(over, under, strict=True))
