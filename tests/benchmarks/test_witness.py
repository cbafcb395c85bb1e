"""The benchmark still runs: every case prints its figures beside their goals."""

from __future__ import annotations

import pytest
from benchmark_scripts import exit_code, run_script


@pytest.mark.slow
def test_a_run_prints_each_figure_beside_its_goal() -> None:
    done = run_script("witness", "--rounds", "1", "--cases", "record,live")
    assert done.returncode == 0, done.stderr
    rows = [line.split("|") for line in done.stdout.splitlines() if line.startswith("| ")]
    assert len(rows) == 5
    assert all(0 < float(row[2].split()[0]) < 100 for row in rows)


def test_an_unknown_case_is_refused() -> None:
    assert exit_code("witness", "--cases", "no-such-case") == 2
