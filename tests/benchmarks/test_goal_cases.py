"""The benchmarks of cases still run: every case prints its figures beside their goals."""

from __future__ import annotations

import pytest

from tests.benchmarks.benchmark_scripts import exit_code, run_script


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "cases", "figures"), [("planning", "start,load,open,inspect", 6), ("witness", "record,live", 5)]
)
def test_a_run_prints_each_figure_beside_its_goal(script: str, cases: str, figures: int) -> None:
    done = run_script(script, "--rounds", "1", "--cases", cases)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == figures
    assert all(float(row[2].split()[0]) < 100 and float(row[3]) > 0 for row in rows)


@pytest.mark.parametrize("script", ["planning", "witness"])
def test_an_unknown_case_is_refused(script: str) -> None:
    assert exit_code(script, "--cases", "no-such-case") == 2
