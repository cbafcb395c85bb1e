"""Describe the machine, and write the sections of RESULTS.md and the table of goals that opens it.

A benchmark declares a goal where it has the figure: `report.goal("loads", "a verified load", 1.21, 1.3, "x raw read")`.
`record(title, report.lines, report.goals)` writes the section with its goals below it, and draws the opening table
anew: of every goal in any section, the one that was recorded last. `summary.py` prints that table.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isinf
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
HEAD = """# Results

The scripts in this folder write this file with `--record`. Their docstrings describe the measurements.
"""
AREAS = (
    "consolidate",
    "start-up",
    "loads",
    "saves",
    "planning",
    "background saves",
    "captures in memory",
    "memory of a step",
    "proof of a resume",
    "weight streams",
    "buckets",
    "shared work",
)
"""The areas of goals, in the order of the summary."""

TITLE, GOALS = "## Summary of goals", "### Goals"
COLUMNS = "| area | what | measured | goal | | date | machine |\n|---|---|---|---|---|---|---|"
NOT_MEASURED = "| {} | not measured | | | | | |"


@dataclass(frozen=True)
class Goal:
    """A figure and the most that it may be.

    Attributes:
        area: One of `AREAS`.
        what: Name of the measurement. A later figure of the same area and name replaces it in the summary.
        measured: The figure.
        limit: The most that it may be; infinity for a row of the summary without a goal.
        unit: The unit of both, such as `x cp` or `s of CPU`.
    """

    area: str
    what: str
    measured: float
    limit: float
    unit: str

    @property
    def is_met(self) -> bool:
        """Whether the figure is at most the limit."""
        return self.measured <= self.limit

    @property
    def verdict(self) -> str:
        """The word for a goal that is met or missed."""
        if isinf(self.limit):
            return "no goal"
        return "met" if self.is_met else "MISSED"

    @property
    def shown_limit(self) -> str:
        """The limit as text."""
        return "" if isinf(self.limit) else f"{self.limit:g}"


class Lines:
    """The printed lines of a benchmark, its goals, and the limits that it exceeded."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.goals: list[Goal] = []
        self.failed: list[str] = []

    def say(self, line: str = "") -> None:
        """Print a line and keep it for RESULTS.md."""
        print(line, flush=True)
        self.lines.append(line)

    def goal(self, area: str, what: str, measured: float, limit: float, unit: str) -> Goal:
        """Keep a figure and its goal for the summary; a missed goal is also one of `failed`."""
        if area not in AREAS:
            raise SystemExit(f"the area of a goal must be one of {', '.join(AREAS)}, got {area!r}")
        goal = Goal(area, what, measured, limit, unit)
        self.goals.append(goal)
        if not goal.is_met:
            self.failed.append(f"{what}: {measured:.2f} {unit}; the limit is {limit:g}")
        return goal


def machine() -> str:
    """Return a line about the machine and the Python version."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{cores()}, {memory:.0f} GiB, {system}"


def cores() -> str:
    """Return the number of cores and their model."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = next((line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")), "?")
    return f"{os.cpu_count()} cores ({model})"


def record(title: str, lines: Sequence[str], goals: Sequence[Goal] = ()) -> None:
    """Write a section of RESULTS.md, replacing the older one with the same title, and draw the summary anew."""
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else HEAD
    head, *sections = split_sections(text)
    sections = [part for part in sections if not part.startswith(f"## {title}\n")]
    body = "\n".join(lines).strip()
    sections.append(f"## {title}\n\n{body}\n\n{goal_table(goals)}" if goals else f"## {title}\n\n{body}")
    RESULTS.write_text(with_summary("\n\n".join([head, *sections])), encoding="utf-8")


def section_title(title: str, chosen: Iterable[str], every: Iterable[str]) -> str:
    """Return the title of a section; one of its own for a part of the cases, so that it replaces no others.

    Args:
        title: Title of the section with all cases.
        chosen: Names of the measured cases.
        every: Names of all cases.
    """
    names = list(every)
    measured = [name for name in names if name in set(chosen)]
    return title if measured == names else f"{title}: {','.join(measured)}"


def goal_table(goals: Sequence[Goal]) -> str:
    """Return the goals of a section, one a row."""
    rows = [
        f"| {goal.area} | {goal.what} | {goal.measured:.3f} {goal.unit} | {goal.shown_limit} | {goal.verdict} "
        f"| {datetime.datetime.now(tz=datetime.timezone.utc).date()} | {cores()} |"
        for goal in goals
    ]
    return "\n".join([f"{GOALS}\n", COLUMNS, *rows])


def split_sections(text: str) -> list[str]:
    """Return the parts of RESULTS.md: its head, then each section."""
    return [part.strip() for part in re.split(r"(?m)^(?=## )", text)]


def with_summary(text: str) -> str:
    """Return the text of RESULTS.md with the summary of its goals as its first section."""
    head, *sections = [part for part in split_sections(text) if not part.startswith(f"{TITLE}\n")]
    return "\n\n".join([head, f"{TITLE}\n\n{summarize(text)}", *sections]) + "\n"


def summarize(text: str) -> str:
    """Return the table of the goals in all sections, by area; of several rows with one name and unit, the newest."""
    rows: dict[tuple[str, str, str], str] = {}
    for section in split_sections(text)[1:]:
        _, _, table = section.partition(f"\n{GOALS}\n")
        for row in re.findall(r"(?m)^\| (?!area ).+$", table):
            area, what, measured = (cell.strip() for cell in row.split("|")[1:4])
            key = (area, what, measured.partition(" ")[2])
            if _read_date(row) >= _read_date(rows.get(key, row)):
                rows.pop(key, None)
                rows[key] = row
    lines = [
        line
        for area in AREAS
        for line in [row for key, row in rows.items() if key[0] == area] or [NOT_MEASURED.format(area)]
    ]
    return "\n".join([COLUMNS, *lines])


def _read_date(row: str) -> str:
    """Return the date of a row of goals, as text that sorts by time."""
    return row.split("|")[6].strip()
