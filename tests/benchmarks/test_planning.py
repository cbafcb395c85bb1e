"""The benchmark still runs: every case prints its figures beside their goals."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "planning.py"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_run_prints_each_figure_beside_its_goal() -> None:
    done = bench("--rounds", "1", "--cases", "start,load,open,inspect")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 5
    assert all(float(row[2]) < 100 and float(row[3]) > 0 for row in rows)


def test_an_unknown_case_is_refused() -> None:
    assert bench("--cases", "no-such-case").returncode == 2
