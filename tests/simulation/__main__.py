"""Run simulated histories: `--seed 7` replays one, `--from 0 --count 10000 --jobs 2` runs a campaign.

With `--stream` histories have publishers and receivers of a stream of weights. `--ranks 256 1024` runs
jobs of many ranks, and prints what they cost.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any, NamedTuple

from tests.simulation import run_history, run_large_job, run_stream_history

_PART = 25
"""Histories that a process runs before it takes others."""

_TOLD = 1000
"""Histories after which a campaign says how far it is."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 1 if a history fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", help="print histories, with one line an event")
    parser.add_argument("--from", type=int, default=0, dest="first", help="first seed of a campaign")
    parser.add_argument("--count", type=int, default=1000, help="number of seeds of a campaign")
    parser.add_argument("--jobs", type=int, default=1, help="number of processes of a campaign")
    parser.add_argument("--stream", action="store_true", help="run histories of a stream of weights")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks of large jobs")
    chosen = parser.parse_args(arguments)
    if chosen.ranks is not None:
        for ranks in chosen.ranks:
            print_costs(ranks)
        return 0
    if chosen.seed is not None:
        run: Callable[[int], Any] = run_stream_history if chosen.stream else run_history
        histories = [run(seed) for seed in chosen.seed]
        print(*histories, sep="\n")
        return any(history.failure is not None for history in histories)
    return run_campaign(chosen.first, chosen.count, chosen.jobs, is_stream=chosen.stream)


def print_costs(ranks: int) -> None:
    """Run a job of many ranks that loses nodes, and print the cost of each phase."""
    for cost in run_large_job(ranks):
        print(
            f"{cost.name} of {cost.ranks} ranks: {cost.events} events, {cost.messages} messages of"
            f" {cost.message_bytes / 1e6:.1f} MB; {cost.rank0_s:.2f} s and {cost.rank0_bytes / 1e6:.1f} MB of rank 0",
            flush=True,
        )


class PartResult(NamedTuple):
    """What some histories had in all.

    Attributes:
        histories: Number of histories.
        events: Number of events.
        faults: Number of faults that showed.
        failed: Number of histories that failed.
        cpu_s: Seconds of processors.
    """

    histories: int = 0
    events: int = 0
    faults: int = 0
    failed: int = 0
    cpu_s: float = 0.0

    def plus(self, other: PartResult) -> PartResult:
        """Return the sums."""
        return PartResult(*map(sum, zip(self, other, strict=True)))

    def describe(self, began: float) -> str:
        """Return the sums as text.

        Args:
            began: Value of the monotonic clock when the first history began.
        """
        return (
            f"{self.histories} histories, {self.events} events, {self.faults} faults, {self.failed} failed,"
            f" {time.monotonic() - began:.0f} s, {self.cpu_s:.0f} s of processors"
        )


def run_campaign(first: int, count: int, jobs: int = 1, *, is_stream: bool = False) -> int:
    """Run histories; print a line for each that fails, and the sums at the end. Return 1 if one failed.

    Standard error gets a line after each thousand. An interrupt or SIGTERM ends it: the last line says from which seed
    it can go on.
    """
    end, began, result = first + count, time.monotonic(), PartResult()
    is_interrupted = False
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        parts = [range(at, min(at + _PART, end)) for at in range(first, end, _PART)]
        for part in _run_parts(parts, jobs, partial(run_part, is_stream=is_stream)):
            result = result.plus(part)
            if not result.histories % _TOLD:
                print(f"{result.describe(began)}, of {count} histories", file=sys.stderr, flush=True)
    except (KeyboardInterrupt, BrokenProcessPool):
        is_interrupted = True
    finally:
        signal.signal(signal.SIGTERM, previous)
    print(result.describe(began))
    if is_interrupted:
        print(
            f"interrupted: go on with --from {first + result.histories} --count {count - result.histories}", flush=True
        )
    return int(is_interrupted or result.failed > 0)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _run_parts(parts: list[range], jobs: int, run: Callable[[range], PartResult]) -> Iterator[PartResult]:
    """Run the histories of ranges of seeds, in processes forked from this one; yield the results in order."""
    if jobs == 1:
        yield from map(run, parts)
        return
    gc.freeze()  # the forked processes need not look at the objects of this one
    pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("fork"), _ignore_interrupts)
    try:
        yield from pool.map(run, parts)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _ignore_interrupts() -> None:
    """Leave the interrupt of a terminal, which all processes get, to the first one: the others end their part."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_part(seeds: range, *, is_stream: bool = False) -> PartResult:
    """Run histories, and print a line for each that fails."""
    run: Callable[[int], Any] = run_stream_history if is_stream else run_history
    events = faults = failed = 0
    began = time.process_time()
    for seed in seeds:
        history = run(seed)
        events += len(history.events)
        faults += len(history.fired)
        if history.failure is not None:
            failed += 1
            reason = " ".join(str(history.failure).split())
            print(f"seed {seed}: {type(history.failure).__name__}: {reason[:300]}\n", end="", flush=True)
    return PartResult(len(seeds), events, faults, failed, time.process_time() - began)


if __name__ == "__main__":
    sys.exit(main())
