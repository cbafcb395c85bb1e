"""Whatever ends a command, a person sees one line and a script the right exit code."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RAISING = """
import sys, shardckpt

def inspect(src, **options):
    raise {raised}

shardckpt.inspect = inspect
sys.argv = ["shardckpt", "inspect", "anything"]
from shardckpt_cli.app import main
main()
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        ("shardckpt.errors.TruncatedError('short')", 1),
        ("shardckpt.errors.UnsafeError('runs code')", 1),
        ("shardckpt.errors.SourceNotFoundError('nothing')", 2),
        ("shardckpt.errors.NoSpaceError('full')", 3),
        ("OSError(5, 'disk')", 3),
        ("MemoryError()", 3),
        ("EOFError()", 1),
        ("ZeroDivisionError('a fault of ours')", 1),
        ("KeyboardInterrupt()", 130),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(raised: str, code: int) -> None:
    done = run("-c", RAISING.format(raised=raised))
    assert done.returncode == code
    assert done.stderr.startswith("shardckpt: ")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_truncated_file_is_the_checkpoints_fault_and_no_ctrl_c(tmp_path: Path) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    done = run("-m", "shardckpt_cli", "consolidate", str(tmp_path / "model.safetensors"), str(tmp_path / "out"))
    assert done.returncode == 1
    assert "model.safetensors" in done.stderr
    assert not (tmp_path / "out").exists()


def write_one(folder: Path, name: str) -> str:
    """Write a file of one tensor without elements, and return its path."""
    header = json.dumps({name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return str(folder / "model.safetensors")


def test_characters_that_the_output_lacks_are_escaped(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shardckpt_cli", "inspect", write_one(tmp_path, "h\xe9.w \U0001f600")]
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ascii_only)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"h\xe9.w \U0001f600" in done.stdout


@pytest.mark.parametrize(("name", "closed", "code"), [("model.safetensors", ">&-", 0), ("missing", "2>&-", 2)])
def test_a_closed_stream_gets_nothing(name: str, closed: str, code: int, tmp_path: Path) -> None:
    write_one(tmp_path, "w")
    command = f"{sys.executable} -m shardckpt_cli inspect {tmp_path / name} {closed}"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_a_suggestion_ends_with_one_mark() -> None:
    done = run("-m", "shardckpt_cli", "consolidat")
    assert done.stderr.rstrip().endswith("Did you mean 'consolidate'? See `shardckpt --help`")


def test_ctrl_c_while_the_command_line_is_parsed_is_one_line() -> None:
    interrupted = "def parse(*_): raise KeyboardInterrupt"
    code = f"import sys; from shardckpt_cli import app, commands\n{interrupted}\ncommands.Command.parse_args = parse\n"
    done = run("-c", f"{code}sys.argv = ['shardckpt', 'ls', 'x']\napp.main()")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "shardckpt: interrupted; no unfinished result was left\n"


def test_ctrl_c_after_the_result_is_in_place_does_not_deny_it(tmp_path: Path) -> None:
    source, target = write_one(tmp_path, "w"), tmp_path / "out.safetensors"
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(1 << 12))
    os.set_blocking(writer, True)
    command = [sys.executable, "-m", "shardckpt_cli", "consolidate", source, str(target)]
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c) as process:  # noqa: PLW1509  (one thread)
        while not target.exists():
            time.sleep(0.01)
        time.sleep(0.3)  # it waits for the pipe
        process.send_signal(signal.SIGINT)
        _, shown = process.communicate()
    os.close(reader)
    os.close(writer)
    assert (process.returncode, shown) == (130, "shardckpt: interrupted; no unfinished result was left\n")
    assert target.stat().st_size > 0


def heed_ctrl_c() -> None:
    """Let Ctrl-C count: jobs in the background of a shell ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("consolidate", "a"), "shardckpt consolidate --help"),
        (("diff", "--no"), "shardckpt diff --help"),
        (("rekey", "a", "b"), "shardckpt rekey --help"),
        (("no-such-command",), "shardckpt --help"),
        (("--no",), "shardckpt --help"),
    ],
)
def test_a_call_that_cannot_be_parsed_names_the_help_of_its_verb(arguments: tuple[str, ...], shown: str) -> None:
    assert run("-m", "shardckpt_cli", *arguments).stderr.endswith(f" See `{shown}`\n")


@pytest.mark.parametrize("arguments", [("consolidate",), ("inspect", "a", "b"), ("no-such-command",), ("diff", "--no")])
def test_a_call_that_cannot_be_parsed_is_one_line_and_exit_2(arguments: tuple[str, ...]) -> None:
    done = run("-m", "shardckpt_cli", *arguments)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
