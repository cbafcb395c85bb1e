"""The benchmark of weight streams still runs, and names each ratio."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.benchmark_scripts import run_script, script_fixture

stream = script_fixture("stream")


@pytest.mark.slow
def test_a_small_run_prints_every_row(tmp_path: Path) -> None:
    done = run_script("stream", "--parts", "versions", "--millions", "1", "--rounds", "3", "--folder", str(tmp_path))
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr
    rows = [line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("|")]
    assert rows[2:] == [
        "publish a version",
        "stall of the trainer",
        "apply a version",
        "anchor",
        "join late, three versions after an anchor",
    ]
    assert not list(tmp_path.iterdir())


def test_a_change_touches_one_percent_of_each_tensor(stream) -> None:
    weights = stream.build_weights(1)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    stream.change(weights, 1)
    for name, tensor in weights.items():
        assert 0 < (tensor != before[name]).sum() <= max(tensor.numel() // 100, 1)
