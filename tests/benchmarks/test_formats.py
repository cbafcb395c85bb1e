"""The benchmark still runs: other frameworks' files are written, and every output is compared with the truth."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.benchmark_scripts import exit_code, run_script


@pytest.mark.slow
def test_a_small_run_prints_a_row_for_every_tool_and_what_was_asked(tmp_path: Path) -> None:
    cases = "zero3,local,accelerate,jobs"
    options = ["--size", "1MB", "--rounds", "1", "--cases", cases, "--fsync", "neither", "--folder", str(tmp_path)]
    done = run_script("formats", *options)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|")]
    ours = {"shardckpt consolidate", "shardckpt consolidate --weights master"}
    assert {"cp", "accelerate merge_fsdp_weights", *ours} <= set(rows)
    assert any(row.endswith("--jobs 2") for row in rows)
    limits = [line for line in done.stdout.splitlines() if line.startswith("Limits: ")]
    assert len(limits) == len(cases.split(","))
    assert all("MB: met" in line for line in limits), "memory does not depend on how busy the machine is"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [("--cases", "no-such-case"), ("--size", "many")])
def test_what_cannot_be_run_is_refused(arguments: tuple[str, str]) -> None:
    assert exit_code("formats", *arguments) == 2
