"""Of the ranks that torchrun starts the first alone runs a command whose result has one writer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.kit.runs.command import ENVIRONMENT, run

RANKS = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29998"}


@pytest.fixture
def src(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    save_file({"a.w": torch.arange(10.0)}, folder / "model.safetensors")
    return folder


def as_rank(rank: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command as torchrun starts it on a rank."""
    env = {**ENVIRONMENT, **RANKS, "RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "none"}
    command = [sys.executable, "-m", "shardckpt_cli", *map(str, arguments)]
    return subprocess.run(command, env=env, start_new_session=True, capture_output=True, text=True, check=False)


COMMANDS = {
    "reshard": ("{src}", "{out}", "--world-size", "2"),
    "merge-adapter": ("{src}", "{src}", "{out}"),
    "rekey": ("{src}", "{out}", "--nest"),
    "copy": ("{src}", "{out}"),
    "repair": ("{src}",),
    "prune": ("{src}", "--keep-last", "1"),
}


@pytest.mark.parametrize("verb", COMMANDS)
def test_another_rank_than_the_first_says_that_it_has_nothing_to_do(verb: str, src: Path, tmp_path: Path) -> None:
    arguments = [text.format(src=src, out=tmp_path / "out") for text in COMMANDS[verb]]
    done = as_rank(1, verb, *arguments)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr == "note: rank 0 does all the work; rank 1 has nothing to do\n"
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_the_first_rank_does_the_work_and_a_quiet_one_prints_nothing(src: Path, tmp_path: Path) -> None:
    first = as_rank(0, "reshard", src, tmp_path / "out", "--world-size", "2")
    assert first.returncode == 0, first.stderr
    assert "note: " not in first.stderr and (tmp_path / "out" / "COMMIT").exists()
    other = as_rank(1, "reshard", src, tmp_path / "out", "--world-size", "2", "--quiet")
    assert (other.returncode, other.stdout, other.stderr) == (0, "", "")


def test_a_command_that_a_rank_starts_does_the_work(src: Path, tmp_path: Path) -> None:
    done = run("reshard", src, tmp_path / "out", "--world-size", "2", env={**ENVIRONMENT, **RANKS, "RANK": "1"})
    assert done.code == 0, done.err
    assert (tmp_path / "out" / "COMMIT").exists()
