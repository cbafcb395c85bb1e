"""`tests/gpu/run.sh` runs where only torch, pytest and the base dependencies are, and goes on behind what fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.gpu import run

MISSING = ("s3fs", "moto", "zstandard", "adlfs", "paramiko", "psutil")
"""Modules of the test environment that a machine with a GPU may lack."""


@pytest.mark.full
@pytest.mark.timeout(900)
def test_every_part_runs_on_the_cpu_without_a_network_or_the_test_environment(tmp_path):
    (tmp_path / "site" / "tests").mkdir(parents=True)
    (tmp_path / "site" / "tests" / "__init__.py").write_text("")  # some packages install theirs
    (tmp_path / "site" / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({MISSING}))\n")
    out = tmp_path / "out"
    environment = {"OUT": str(out), "PYTHON": sys.executable, "PYTHONPATH": str(tmp_path / "site")}
    command = ["sh", str(run.ROOT / "tests/gpu/run.sh"), "--device", "cpu"]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads((out / "summary.json").read_text())["parts"]
    names = [part.name for part in run.list_parts("cpu")]
    assert [part["name"] for part in parts] == names
    assert {part["status"] for part in parts} == {"passed"}, done.stdout
    assert sorted(path.name for path in out.iterdir()) == sorted([*(f"{name}.log" for name in names), "summary.json"])
    assert all(f"| {name} | passed" in done.stdout for name in names)


def test_all_parts_take_at_most_eight_minutes_and_leave_at_most_eight_files():
    parts = run.list_parts("cuda")
    assert sum(part.budget for part in parts) <= 480
    assert len(parts) + 1 <= 8


@pytest.mark.parametrize(
    ("script", "status", "detail"),
    [
        ("print('3 passed')", "passed", "3 passed"),
        ("print('| row |'); raise SystemExit('wrong')", "FAILED", "wrong"),
        ("raise SystemExit('refused: no such device')", "skipped", "refused"),
        ("import time; print('begun', flush=True); time.sleep(100)", "TIMED OUT", "begun"),
    ],
)
def test_a_part_ends_within_its_budget_and_tells_what_became_of_it(tmp_path, capsys, script, status, detail):
    part = run.Part("some", 2, ["-c", script], refusal="refused")
    found = run.run_part(part, tmp_path, os.environ)
    assert (found.status, detail in found.detail) == (status, True)
    assert (f"--- some: {status}" in capsys.readouterr().out) is (status not in run.GOOD)


def test_parts_run_behind_one_that_failed_and_the_script_fails(tmp_path, monkeypatch, capsys):
    parts = [
        run.Part("first", 9, ["-c", "raise SystemExit(3)"]),
        run.Part("second", 9, ["-c", "print('fine')"]),
        run.Part("third", 9, [], skipped="not installed"),
    ]
    monkeypatch.setattr(run, "list_parts", lambda device: parts)
    monkeypatch.setattr(sys, "argv", ["run.py", "--device", "cpu"])
    monkeypatch.setenv("OUT", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == 1
    assert [part["status"] for part in json.loads((tmp_path / "summary.json").read_text())["parts"]] == [
        "FAILED",
        "passed",
        "skipped",
    ]
    assert "| third | skipped | 0 | 9 | not installed |" in capsys.readouterr().out


def test_without_a_gpu_nothing_is_said_to_be_tested(monkeypatch):
    monkeypatch.setattr(run, "has_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["run.py"])
    with pytest.raises(SystemExit, match="nothing was tested"):
        run.main()
