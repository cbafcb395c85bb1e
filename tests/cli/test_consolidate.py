"""A command that torchrun starts shares the work with other ranks; one that a rank starts does it alone, at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.kit.runs.command import ENVIRONMENT, finish, run, start
from tests.kit.stores.servers import free_port

RANK = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
OF_TORCHRUN = {**RANK, "MASTER_PORT": "29999", "TORCHELASTIC_RUN_ID": "none"}
ASK = [sys.executable, "-c", "from shardckpt_cli.consolidate import is_started_by_torchrun as ask; print(ask())"]
THROUGH = """
import os, shlex, subprocess, sys
command = sys.argv[2:]
os.environ["MASTER_PORT"] = sys.argv[1] or os.environ["MASTER_PORT"]
"""


def launch(command: list[str], **environment: str) -> str:
    """Start a command as torchrun starts a rank, and return what it prints."""
    env = {**ENVIRONMENT, **OF_TORCHRUN, **environment}
    return subprocess.run(
        command, env=env, start_new_session=True, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_what_torchrun_starts_is_a_rank() -> None:
    assert launch(ASK) == "True"


def test_what_another_launcher_starts_is_not_known_to_be_a_rank() -> None:
    assert launch(["env", "-u", "TORCHELASTIC_RUN_ID", *ASK]) == "False"


@pytest.mark.parametrize("port", ["", "29444"], ids=["same environment", "another port in it"])
@pytest.mark.parametrize("way", ["os.system(shlex.join(command))", "subprocess.run(command)"])
def test_what_a_rank_starts_is_no_rank(way: str, port: str) -> None:
    assert launch([sys.executable, "-c", THROUGH + way, port, *ASK]) == "False"


IN_A_SESSION = "subprocess.run(command, start_new_session=True)"


@pytest.mark.parametrize("way", ["subprocess.run(['sh', '-c', shlex.join(command) + '; true'])", IN_A_SESSION])
def test_a_shell_or_a_session_between_them_changes_nothing(way: str) -> None:
    assert launch([sys.executable, "-c", THROUGH + way, "", *ASK]) == "False"


def test_a_torchrun_that_a_rank_starts_starts_ranks() -> None:
    assert launch([sys.executable, "-c", THROUGH + IN_A_SESSION, "29444", *ASK]) == ("True")


@pytest.fixture
def src(tmp_path: Path) -> Path:
    folder = tmp_path / "src"
    folder.mkdir()
    save_file({f"{name}.w": torch.arange(1000.0) for name in "abc"}, folder / "model.safetensors")
    return folder


def rank_environment(rank: int, port: int = 29999) -> dict[str, str]:
    return {**ENVIRONMENT, **RANK, "RANK": str(rank), "MASTER_PORT": str(port)}


def test_a_command_in_the_environment_of_a_rank_does_all_of_the_work_and_says_so(src: Path, tmp_path: Path) -> None:
    done = run("consolidate", src, tmp_path / "out", env=rank_environment(1))
    assert done.code == 0
    assert "wrote 3 tensors" in done.out
    assert done.err.startswith("note: WORLD_SIZE is 2, but torchrun did not start this command itself")
    assert done.err.count("note: ") == 1


@pytest.mark.parametrize("option", ["--quiet", "--no-parallel"])
def test_the_note_is_left_out_on_request(option: str, src: Path, tmp_path: Path) -> None:
    done = run("convert", src, tmp_path / "out", option, env=rank_environment(0))
    assert done.code == 0
    assert "note: " not in done.err
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_ranks_share_the_work_on_request_whoever_started_them(src: Path, tmp_path: Path) -> None:
    arguments = ("consolidate", src, tmp_path / "together", "--max-shard-size", "4000")
    assert run(*arguments[:2], tmp_path / "alone", *arguments[3:]).code == 0
    port = free_port()
    ranks = [start(*arguments, "--parallel", env=rank_environment(rank, port)) for rank in range(2)]
    first, second = map(finish, ranks)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert "wrote 3 tensors, 12.0 kB, in 3 files" in first.out
    assert second.out == "", "the first rank alone tells"
    names = sorted(path.name for path in (tmp_path / "alone").iterdir())
    assert sorted(path.name for path in (tmp_path / "together").iterdir()) == names
    assert all((tmp_path / "alone" / n).read_bytes() == (tmp_path / "together" / n).read_bytes() for n in names)


SETTINGS = """
import shardckpt.ranks.meeting as meeting
meeting.{setting}
from shardckpt_cli.start import main
main()
"""


def start_alone(setting: str, rank: int, *arguments: object) -> subprocess.Popen[str]:
    """Start the command as a rank whose other rank does not come."""
    return subprocess.Popen(
        [sys.executable, "-c", SETTINGS.format(setting=setting), *map(str, arguments), "--parallel"],
        env=rank_environment(rank, free_port()),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  (this process has one thread)
    )


@pytest.mark.parametrize(
    ("rank", "number", "word"), [(0, signal.SIGTERM, "terminated"), (1, signal.SIGINT, "interrupted")]
)
def test_a_rank_that_waits_says_for_whom_and_ends_on_a_signal(
    rank: int, number: signal.Signals, word: str, src: Path, tmp_path: Path
) -> None:
    process = start_alone("NOTICE_S = 0.2", rank, "consolidate", src, tmp_path / "out")
    assert process.stderr is not None
    assert f"rank {rank} waits for rank {1 - rank} of 2" in process.stderr.readline()
    process.send_signal(number)
    done = finish(process)
    assert (done.code, done.err) == (128 + number, f"shardckpt: {word}; no unfinished result was left\n")
    assert os.listdir(tmp_path) == ["src"]


def test_a_rank_that_does_not_come_is_an_error_that_names_it(src: Path, tmp_path: Path) -> None:
    done = finish(start_alone("MEETING_S = 0.5", 0, "consolidate", src, tmp_path / "out"))
    assert done.code == 3
    assert "rank 1 of 2" in done.err
    assert "did not come within 0.5 s" in done.err
    assert "--no-parallel" in done.err
    assert os.listdir(tmp_path) == ["src"]
