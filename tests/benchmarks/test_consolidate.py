"""The benchmark still runs: its inputs are written, its peers start, and every output is compared with the truth."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.benchmark_scripts import FOLDER, exit_code, run_script


@pytest.mark.slow
def test_a_small_run_prints_a_row_for_every_tool(tmp_path: Path) -> None:
    options = ["--size", "1MB", "--rounds", "1", "--cases", "hf,help", "--fsync", "neither", "--folder", str(tmp_path)]
    done = run_script("consolidate", *options)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|")]
    assert {"cp", "shardckpt consolidate", "torch HF consolidation", "`shardckpt --help`"} <= set(rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_pairs_with_cp_print_ratios_in_process_and_of_processes(tmp_path: Path) -> None:
    done = run_script("consolidate", "--pairs", "1", "--size", "1MB", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if line.startswith("| DCP")]
    assert len(rows) == 5
    assert all(float(row[1].split()[0]) > 0 and float(row[3].split()[0]) > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_pairs_are_those_of_the_chosen_cases(tmp_path: Path) -> None:
    done = run_script("consolidate", "--pairs", "1", "--cases", "bf16", "--size", "1MB", "--folder", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")]
    assert rows[1:] == ["DCP in bfloat16"]


@pytest.mark.parametrize(
    "arguments", [("--cases", "no-such-case"), ("--size", "many"), ("--pairs", "1", "--cases", "help")]
)
def test_what_cannot_be_run_is_refused(arguments: tuple[str, ...]) -> None:
    assert exit_code("consolidate", *arguments) == 2


@pytest.mark.shown_by("::test_what_cannot_be_run_is_refused")
def test_a_wrong_output_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    inputs = FOLDER / "inputs.py"
    command = [sys.executable, str(inputs), "check", "hf", str(tmp_path), "1000000", "float32"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "missing" in done.stderr
