"""The benchmark of a GPU runs on the CPU too, says so where it has none, and fails where it has to."""

from __future__ import annotations

import sys

import pytest
import torch

from tests.benchmarks.benchmark_scripts import run_script, script_fixture
from tests.kit.models.torch_limits import needs_torch_fully_shard_on_cpu

SMALL = [
    "--layers",
    "1",
    "--hidden",
    "32",
    "--tokens",
    "8",
    "--batch",
    "1",
    "--megabytes",
    "1",
    "--rounds",
    "1",
    "--steps",
    "4",
]


gpu = script_fixture("gpu")


@pytest.mark.shown_by("::test_limits_of_a_step")
@needs_torch_fully_shard_on_cpu
def test_a_small_run_on_the_cpu_prints_every_table():
    done = run_script("gpu", "--device", "cpu", *SMALL)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|")]
    for row in (
        "shardckpt fully_shard",
        "torch FSDP1",
        "torch FSDP2, bfloat16",
        "save",
        "load",
        "async_save, call",
        "with a later save",
        "with `overlap_staging`",
    ):
        assert row in rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_that_nothing_was_measured(gpu, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    gpu.main()
    assert capsys.readouterr().out == "no GPU: nothing was measured\n"


@pytest.mark.parametrize(
    ("step", "peak", "retries", "failures"), [(1.04, 1.04, 0, 0), (1.06, 1.0, 0, 1), (1.06, 1.06, 2, 3)]
)
def test_limits_of_a_step(gpu, step, peak, retries, failures):
    report = gpu.Lines()
    gpu.check_steps(report, "ours", {"time": step, "allocated memory": peak}, retries)
    assert len(report.failed) == failures


@pytest.mark.parametrize(("step", "failures"), [(3.0, 0), (3.9, 0), (4.1, 1)])
def test_a_step_takes_the_greater_of_computation_and_communication(gpu, step, failures):
    report = gpu.Lines()
    gpu.check_overlap(report, 3.0, 2.0, step)
    assert len(report.failed) == failures
