"""Completions as shells ask for them: through typer's own script and environment, in a process and in a real bash."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import select
import shutil
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from shardckpt_cli import completion
from shardckpt_cli.app import build_command

import shardckpt
from shardckpt.native.run_directory import step_name
from tests.kit.runs.command import ENVIRONMENT


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a run of the steps 100, 200 and 1000, and 5, which is not committed."""
    for number in (5, 100, 200, 1000):
        (tmp_path / "run" / step_name(number)).mkdir(parents=True)
        if number != 5:
            (tmp_path / "run" / step_name(number) / "COMMIT").touch()
    (tmp_path / "run" / "notes").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(*words: str, **settings: str) -> list[str]:
    """Ask as bash does, which passes its words by line; the last one is to be completed."""
    given = {
        "_SHARDCKPT_COMPLETE": "complete_bash",
        "COMP_WORDS": "\n".join(["shardckpt", *words]),
        "COMP_CWORD": f"{len(words)}",
        **settings,
    }
    shown = io.StringIO()
    with mock.patch.dict(os.environ, given), contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        completion.run_completion(lambda: build_command()([], prog_name="shardckpt", standalone_mode=False))
    return shown.getvalue().splitlines()


def test_options_complete_their_values(here: Path) -> None:
    assert ask("consolidate", "a", "b", "--to", "") == list(shardckpt.list_targets())
    assert ask("reshard", "a", "b", "--to", "") == list(shardckpt.list_targets(for_ranks=True))
    assert ask("convert", "a", "b", "--dtype", "f") == ["fp32", "fp16", "fp64"]
    assert ask("consolidate", "a", "b", "--part", "") == ["model", "optim", "all"]
    assert ask("consolidate", "a", "b", "--weights", "") == ["live", "master", "ema"]


def test_bash_splits_an_option_at_its_equals_sign(here: Path) -> None:
    assert ask("convert", "a", "b", "--dtype", "=", "b") == ["bf16"]
    assert ask("convert", "a", "b", "--dtype", "=") == ["fp32", "bf16", "fp16", "fp64", "q8_0"]


def test_steps_follow_the_at_of_a_run(here: Path) -> None:
    """Bash gives `run@1` in three words, and replaces what follows `run`."""
    assert ask("verify", "run", "@") == ["@latest", "@best", "@100", "@200", "@1000"]
    assert ask("verify", "run", "@", "1") == ["@100", "@1000"]
    assert ask("diff", "run", "@", "100", "run", "@", "b") == ["@best"]
    assert ask("ls", "run", "@", "200..") == ["@200..200", "@200..1000"]
    zsh = {"_SHARDCKPT_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "shardckpt verify run@2"}
    assert ask(**zsh) == ["_arguments '*: :((\"run@200\"))'"]


@pytest.mark.parametrize(
    "run", ["nope", "", "/dev/null", "a\0b", "s3://bucket/run", "x" * 5000, "run/" + step_name(100)]
)
def test_what_is_no_local_run_completes_nothing(here: Path, run: str) -> None:
    assert completion.complete_step(f"{run}@") == []
    assert completion.complete_step(run) == []


def test_a_folder_that_cannot_be_listed_completes_nothing(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert completion.complete_step("run@") == []


@pytest.mark.parametrize("cursor", ["", "x", "-1", "7", "9" * 30])
def test_words_that_no_bash_sends_are_left_alone(cursor: str) -> None:
    environment = {"COMP_WORDS": "shardckpt\nls", "COMP_CWORD": cursor}
    assert completion.rejoin_words(environment) == ""
    assert environment["COMP_WORDS"] == "shardckpt\nls"


def test_empty_words_stay_apart() -> None:
    environment = {"COMP_WORDS": "shardckpt\nverify\nrun\n@\n100\n", "COMP_CWORD": "5"}
    assert completion.rejoin_words(environment) == ""
    assert environment == {"COMP_WORDS": "shardckpt\nverify\nrun@100\n", "COMP_CWORD": "3"}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_real_bash_completes_a_step(here: Path) -> None:
    (here / "bin").mkdir()
    (here / "bin" / "shardckpt").write_text(
        f"#!{sys.executable}\nimport sys\nsys.argv[0] = 'shardckpt'\nfrom shardckpt_cli.app import main\nmain()\n"
    )
    (here / "bin" / "shardckpt").chmod(0o755)
    script = "source <(_SHARDCKPT_COMPLETE=source_bash shardckpt)\n"
    assert "run@latest " in type_into_bash(here, script, "shardckpt verify run@l\t")


def type_into_bash(here: Path, *lines: str) -> str:
    """Return what an interactive bash shows after some keys."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(ENVIRONMENT, PATH=f"{here / 'bin'}:{os.environ['PATH']}")
        os.execvp("bash", ["bash", "--norc", "--noprofile", "-i"])
    try:
        for line in lines:
            os.write(terminal, line.encode())
        shown, end = "", time.monotonic() + 60
        while "latest " not in shown and time.monotonic() < end:
            if select.select([terminal], [], [], 0.2)[0]:
                shown += os.read(terminal, 65536).decode(errors="replace")
        return shown
    finally:
        with contextlib.suppress(OSError):
            os.write(terminal, b"\x15exit\n")
        os.close(terminal)
        os.kill(child, 9)
        os.waitpid(child, 0)
