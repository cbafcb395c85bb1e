"""The benchmark still runs: every case prints its figures beside their goals."""

from __future__ import annotations

import pytest
from benchmark_scripts import exit_code, run_script


@pytest.mark.slow
def test_a_run_prints_each_figure_beside_its_goal() -> None:
    done = run_script("planning", "--rounds", "1", "--cases", "start,load,open,inspect")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 5
    assert all(float(row[2]) < 100 and float(row[3]) > 0 for row in rows)


def test_an_unknown_case_is_refused() -> None:
    assert exit_code("planning", "--cases", "no-such-case") == 2
