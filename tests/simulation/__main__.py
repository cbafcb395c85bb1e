"""Run simulated histories: `--seed 7` replays one, `--from 0 --count 10000` runs a campaign.

`--ranks 256 1024` runs jobs of many ranks, and prints what they cost.
"""

from __future__ import annotations

import argparse
import sys
import time

from shardckpt.testing.simulation import run_history, run_large_job

_EVERY = 1000


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 1 if a history fails."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, nargs="+", help="print histories, with one line an event")
    parser.add_argument("--from", type=int, default=0, dest="first", help="first seed of a campaign")
    parser.add_argument("--count", type=int, default=1000, help="number of seeds of a campaign")
    parser.add_argument("--ranks", type=int, nargs="+", help="numbers of ranks of large jobs")
    chosen = parser.parse_args(arguments)
    if chosen.ranks is not None:
        for ranks in chosen.ranks:
            print_costs(ranks)
        return 0
    if chosen.seed is not None:
        histories = [run_history(seed) for seed in chosen.seed]
        print(*histories, sep="\n")
        return any(history.failure is not None for history in histories)
    return bool(run_campaign(chosen.first, chosen.count))


def print_costs(ranks: int) -> None:
    """Run a job of many ranks that loses nodes, and print the cost of each phase."""
    for cost in run_large_job(ranks):
        print(
            f"{cost.name} of {cost.ranks} ranks: {cost.events} events, {cost.messages} messages of"
            f" {cost.message_bytes / 1e6:.1f} MB, {cost.rank0_s:.2f} s of rank 0",
            flush=True,
        )


def run_campaign(first: int, count: int) -> list[int]:
    """Run histories; print the seeds that fail, and return them."""
    failed: list[int] = []
    events = faults = 0
    began = time.process_time()
    for done, seed in enumerate(range(first, first + count), 1):
        history = run_history(seed)
        events += len(history.events)
        faults += len(history.fired)
        if history.failure is not None:
            failed.append(seed)
            print(f"seed {seed}: {type(history.failure).__name__}: {str(history.failure)[:300]}", flush=True)
        if done % _EVERY == 0 or done == count:
            spent = time.process_time() - began
            print(
                f"{done} histories, {events} events, {faults} faults, {len(failed)} failed, {spent:.0f} s", flush=True
            )
    return failed


if __name__ == "__main__":
    sys.exit(main())
