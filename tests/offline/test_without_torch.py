"""Every offline verb over every fixture and format, and every target, do the same where torch cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.kit.runs import all_verbs
from tests.kit.runs.cases import NAMES, read_case
from tests.kit.writers.samples import SAMPLES

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "cli")])}
BLOCKED = "import sys; sys.modules['torch'] = None; "


def list_jobs(folder: Path, are_all: bool) -> dict[str, dict[str, Any]]:
    """Return the checkpoints: the fixtures, and a sample of every format in each of its variants.

    Args:
        folder: Folder for what has to be written.
        are_all: False for every fifth fixture, among them each third of the targets, and one variant of each format.
    """
    jobs: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(NAMES):
        if not are_all and number % 5 != 1:
            continue
        (folder / f"{name}-names").mkdir()
        case = read_case(FIXTURES, name, folder / f"{name}-names")
        base = FIXTURES / name / "base"
        jobs[name] = {
            "source": str(case.source),
            "options": dict(case.options),
            "base": str(base) if base.exists() else "",
            "targets": number % 3,
        }
    for form, variants in SAMPLES.items():
        for variant, write in list(variants.items())[: None if are_all else 1]:
            name = f"{form}-{variant}".replace(" ", "-")
            jobs[name] = {"source": str(write(folder / name)), "options": {}, "base": "", "targets": None}
    return jobs


def run_verbs(torch_is: str, jobs: Path, folder: Path) -> dict[str, Any]:
    """Return what `all_verbs` prints in a process of its own."""
    folder.mkdir()
    command = [sys.executable, all_verbs.__file__, torch_is, str(jobs)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Return what every verb does to every checkpoint, without torch (`blocked`) and with it (`imported`)."""
    folder = tmp_path_factory.mktemp("verbs")
    jobs = folder / "jobs.json"
    jobs.write_text(json.dumps(list_jobs(folder, request.param == "all")))
    ways = ("blocked", "imported")
    with ThreadPoolExecutor(len(ways)) as pool:
        found = list(pool.map(lambda way: run_verbs(way, jobs, folder / way), ways))
    assert [each["torch"] for each in found] == [False, True]
    return dict(zip(ways, (each["results"] for each in found), strict=True))


@pytest.mark.shown_by("[some]", "all")
@pytest.mark.long
@pytest.mark.parametrize("results", ["some", "all"], indirect=True)
@pytest.mark.timeout(600)  # two processes, each with thousands of files
def test_every_verb_does_the_same_without_torch(results: dict[str, dict[str, Any]]) -> None:
    without, with_torch = results["blocked"], results["imported"]
    assert list(without) == list(with_torch)
    assert {call: (without[call], with_torch[call]) for call in without if without[call] != with_torch[call]} == {}
    # Hundreds of files were compared, not one error with another.
    failed = [call for call, result in without.items() if isinstance(result, str)]
    assert {call.partition(": ")[2] for call in failed} <= {"consolidate --to deepspeed-universal", "rekey"}
    assert sum(len(result["files"]) for result in without.values() if isinstance(result, dict)) > 200


def run_blocked(code: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that cannot import torch."""
    command = [sys.executable, "-c", BLOCKED + code, *args]
    env = {**ENVIRONMENT, **environment}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


COMMAND = "from shardckpt_cli.start import main; main()"


def test_the_command_does_without_torch(tmp_path: Path) -> None:
    source, target = str(FIXTURES / "dcp_fsdp2_llama_w2" / "ckpt"), str(tmp_path / "out")
    assert run_blocked(COMMAND, "--help").returncode == 0
    done = run_blocked(COMMAND, "consolidate", source, target, "--part", "all")
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, f"{source}: dcp")
    assert run_blocked(COMMAND, "diff", source, target, "--part", "model").returncode == 0


def test_ranks_that_share_files_need_torch(tmp_path: Path) -> None:
    source, target = str(FIXTURES / "dcp_fsdp2_llama_w2" / "ckpt"), tmp_path / "out"
    done = run_blocked(COMMAND, "consolidate", source, str(target), "--parallel", WORLD_SIZE="2", RANK="0")
    what = "--parallel, or a start by torchrun: torch must be installed."
    assert (done.returncode, done.stderr) == (2, f"shardckpt: {what} Run pip install 'shardckpt[torch]'.\n")
    assert not target.exists()
