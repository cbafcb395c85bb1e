"""`tests/repeat.py`: each run is counted, failures stop nothing, and the exit code says whether all runs passed."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("repeat.py")
OUTCOMES = """
import pathlib

import pytest

def test_passes(): pass
def test_fails_in_the_first_run():
    marks = pathlib.Path(__file__).with_suffix(".runs")
    marks.write_text((marks.read_text() if marks.exists() else "") + "x")
    assert marks.read_text() != "x"
@pytest.mark.skip
def test_is_skipped(): pass
"""


def test_a_failed_run_is_counted_and_the_next_one_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "test_outcomes.py").write_text(OUTCOMES)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    arguments = ["--runs", "2", "--busy", "--", "-p", "no:cacheprovider", "-c", str(tmp_path / "pytest.ini")]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, str(tmp_path)], capture_output=True, text=True, check=False
    )
    runs = [line.rpartition(",")[0] for line in done.stdout.splitlines() if line.startswith("run ")][-2:]
    assert runs == [
        "run 1: 1 passed, 1 failed, 1 skipped, exit code 1",
        "run 2: 2 passed, 0 failed, 1 skipped, exit code 0",
    ]
    assert "failed: test_outcomes::test_fails_in_the_first_run" in done.stdout
    assert done.returncode == 1
