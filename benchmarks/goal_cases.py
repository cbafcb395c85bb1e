"""The rows of a benchmark whose cases each yield figures with goals, and its command line."""

from __future__ import annotations

import argparse
import datetime
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from options import add_selection
from results import RESULTS, Lines, machine, record, section_title


class Row(NamedTuple):
    """One figure: its area in the summary, its name, its value, the most that it may be, and the unit of both."""

    area: str
    name: str
    value: float
    goal: float
    unit: str = "s of CPU"


Cases = Mapping[str, Callable[[Path, int], Iterator[Row]]]
"""Functions that yield the rows of a case, given an empty folder and the number of rounds; by the name of the case."""


def run_cases(description: str | None, title: str, cases: Cases, *, rounds: int) -> None:
    """Measure the cases that the command line selects, and print each figure beside its goal.

    Args:
        description: Text of `--help`.
        title: Title of the section that `--record` writes.
        cases: All cases.
        rounds: Rounds of each case by default.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_selection(parser, "--cases", cases)
    parser.add_argument("--rounds", type=int, default=rounds, help="measured calls")
    parser.add_argument("--record", action="store_true", help=f"write the table into {RESULTS.name}")
    options = parser.parse_args()
    report = Lines()
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    report.say(f"{today}, {machine()}, torch {torch.__version__}; medians of {options.rounds} rounds.")
    for name in options.cases:
        with tempfile.TemporaryDirectory(prefix="shardckpt-bench-") as folder:
            for row in cases[name](Path(folder), options.rounds):
                goal = report.goal(*row)
                print(f"| {row.name} | {row.value:.3f} {row.unit} | {row.goal:g} | {goal.verdict} |", flush=True)
    if options.record:
        record(section_title(title, options.cases, cases), report.lines, report.goals)
