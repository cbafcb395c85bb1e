"""A script that is resumed at other sizes is compared by what its runs left; one that fails shows why, and ends."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import shardckpt
from shardckpt.errors import UsageError
from shardckpt.testing import ScriptError, prove_resume_across, resume_across
from tests.kit.runs.faults import SAVED_AT, Job

TRAINING = Path(__file__).with_name("elastic_training.py")

COPY = """
import pathlib, shutil, sys
root, saved, resumed = map(pathlib.Path, sys.argv[1:])
shutil.copytree(resumed if any(root.iterdir()) else saved, root, dirs_exist_ok=True)
"""
"""Script that leaves the files of a run, or of a resume of it, without training."""


@pytest.fixture
def without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run scripts as they are: torchrun imports torch, which takes seconds."""
    monkeypatch.setattr(resume_across, "_build_command", lambda world, logs: [sys.executable])


def write(folder: Path, text: str) -> Path:
    script = folder / "script.py"
    script.write_text(text, encoding="utf-8")
    return script


def train(root: Path, *, has_fault: bool = False, steps: int = SAVED_AT + 2) -> Path:
    """Train, save and resume in two folders; return the one of the resume."""
    Job("plain", 0, 1, 1, root / "saved").train(saved_at=SAVED_AT)
    resumed = root / "resumed"
    shardckpt.copy(root / "saved", resumed)
    again = Job("plain", 0, 1, 2, resumed)
    again.restore(*(["data"] if has_fault else []))
    if has_fault:
        with pytest.raises(shardckpt.errors.ResumeDivergence):
            again.train(steps)
    else:
        again.train(steps)
    return resumed


def prove(folder: Path, resumed: Path, text: str = COPY, **options: Any) -> resume_across.ResumeAcrossReport:
    arguments = ("{root}", str(folder / "saved"), str(resumed))
    return prove_resume_across(write(folder, text), (1, 1), arguments=arguments, **options)


@pytest.mark.usefixtures("without_torchrun")
def test_a_resume_that_was_compared_to_the_end_is_proven(tmp_path: Path) -> None:
    report = prove(tmp_path, train(tmp_path))
    assert report.ok
    assert str(report) == "the resume of step 3 is proven: saved on 1 ranks, resumed on 1"


@pytest.mark.usefixtures("without_torchrun")
def test_a_divergence_is_in_the_report_though_the_script_failed_by_it(tmp_path: Path) -> None:
    report = prove(
        tmp_path, train(tmp_path, has_fault=True), COPY + "sys.exit(len(sys.argv) and 'saved' not in str(root))"
    )
    assert not report.ok
    assert report.divergence is not None
    assert (report.divergence.cause, report.divergence.name) == ("batch", "repeated")
    assert "on 1 ranks diverges" in str(report)


@pytest.mark.usefixtures("without_torchrun")
def test_a_resume_that_ended_early_is_not_proven(tmp_path: Path) -> None:
    report = prove(tmp_path, train(tmp_path, steps=SAVED_AT + 1))
    assert not report.ok
    assert "1 of 2 recorded steps were compared" in str(report)


@pytest.mark.usefixtures("without_torchrun")
def test_a_script_that_compares_nothing_is_refused(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(UsageError, match="did not compare a resume of step 3"):
        prove(tmp_path, tmp_path / "saved")
    with pytest.raises(UsageError, match="no step with recorded training steps"):
        prove_resume_across(write(tmp_path, ""), (1, 1))


@pytest.mark.usefixtures("without_torchrun")
def test_the_output_of_a_script_that_fails_is_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ScriptError, match=r"failed on 1 ranks[\s\S]*no such data"):
        prove_resume_across(write(tmp_path, "raise OSError('no such data')"), (1, 1))


@pytest.mark.usefixtures("without_torchrun")
def test_a_script_that_hangs_ends_with_its_children_after_the_time(tmp_path: Path) -> None:
    hanging = """
import os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""
    script, noted = write(tmp_path, hanging), tmp_path / "pid"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ScriptError, match="did not end within 1 s"):
        patch.setattr(resume_across, "_GRACE", 0.1)
        prove_resume_across(script, (1, 1), arguments=(str(noted),), timeout=1.0)
    assert has_ended(int(noted.read_text()))


def has_ended(process: int) -> bool:
    for _ in range(100):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return True
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("arguments", [{"worlds": (2,)}, {"worlds": (2, 0)}, {"worlds": (2, True)}, {"timeout": 0}])
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        prove_resume_across(TRAINING, **arguments)
    with pytest.raises(UsageError, match="file"):
        prove_resume_across("missing.py")


@pytest.mark.slow
def test_a_script_is_resumed_under_torchrun_at_other_sizes() -> None:
    report = prove_resume_across(TRAINING, (2, 3, 1, 2))
    assert report.ok, report
    assert [resume.rank_count for resume in report.resumes] == [3, 1, 2]
    assert [resume.has_equal_layout for resume in report.resumes] == [False, False, True]


@pytest.mark.slow
def test_a_fault_at_another_size_is_named() -> None:
    report = prove_resume_across(TRAINING, (2, 3), arguments=("{root}", "--fault"))
    assert report.divergence is not None
    assert (report.divergence.cause, report.divergence.name) == ("batch", "repeated")


@pytest.mark.slow
def test_the_output_of_the_rank_that_failed_is_in_the_error(tmp_path: Path) -> None:
    script = write(tmp_path, "import os\nif os.environ['RANK'] == '1': raise OSError('no such data')")
    with pytest.raises(ScriptError, match=r"failed on 2 ranks[\s\S]*rank 1: [\s\S]*no such data"):
        prove_resume_across(script, (2, 1))
