"""Run the test suite several times and say of each run how many tests passed and failed; nothing is retried.

    python tests/repeat.py [--runs N] [--busy] [-- ARGUMENTS OF PYTEST]

`--busy` keeps every core busy with a loop beside the tests, as other work on the machine would: what fails then
measures time. The exit code is 0 if all tests passed in every run.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class Counts(NamedTuple):
    """How one run ended: its tests by outcome, the names of those that failed, and pytest's exit code."""

    passed: int
    failed: list[str]
    skipped: int
    code: int


def run_suite(arguments: list[str]) -> Counts:
    """Run pytest once, with its output passed through, and count the outcomes."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={report}", *arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        return count_outcomes(report.read_text(encoding="utf-8") if report.exists() else "<testsuites/>", code)


def count_outcomes(report: str, code: int) -> Counts:
    """Count the outcomes in a report in the form of JUnit."""
    outcomes = list(read_outcomes(report))
    failed = [name for name, outcome in outcomes if outcome == "failed"]
    skipped = sum(outcome == "skipped" for _, outcome in outcomes)
    return Counts(len(outcomes) - len(failed) - skipped, failed, skipped, code)


def read_outcomes(report: str) -> Iterator[tuple[str, str]]:
    """Yield each test of a report with `passed`, `failed` (also of its fixtures) or `skipped`.

    A test that ran when pytest was interrupted has no name there, and no outcome.
    """
    for case in ElementTree.fromstring(report).iterfind(".//testcase[@name]"):
        name = f"{case.get('classname')}::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            yield name, "failed"
        else:
            yield name, "passed" if case.find("skipped") is None else "skipped"


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Keep each core of the machine busy with a loop of its own."""
    loops = [multiprocessing.Process(target=_loop, daemon=True) for _ in range(os.cpu_count() or 1)]
    for loop in loops:
        loop.start()
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()


def _loop() -> None:
    while True:
        pass


def main(argv: list[str]) -> int:
    """Run the suite as the arguments say, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("pytest", nargs="*")
    options = parser.parse_args(argv)
    lines, is_clean = [], True
    with busy_cores() if options.busy else contextlib.nullcontext():
        for number in range(1, options.runs + 1):
            start = time.monotonic()
            counts = run_suite(options.pytest)
            is_clean &= counts.code == 0
            told = f"{counts.passed} passed, {len(counts.failed)} failed, {counts.skipped} skipped"
            lines.append(f"run {number}: {told}, exit code {counts.code}, {time.monotonic() - start:.0f} s")
            lines.extend(f"  failed: {name}" for name in counts.failed)
            print("\n".join(lines), flush=True)
    return 0 if is_clean else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
