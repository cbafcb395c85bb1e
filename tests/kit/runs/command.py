"""The command as a person runs it: in a process of its own, or quickly in this one."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from shardckpt_cli.app import build_command
from shardckpt_cli.exits import run_main

_COMMAND = build_command()
_ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "cli")])}


@dataclass(frozen=True)
class Outcome:
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str


def _heed_interrupts() -> None:
    """A job in the background of a shell ignores Ctrl-C, and what it starts does too; here it must count."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*args: object, **options: object) -> subprocess.Popen[str]:
    """Start the command in a process of its own."""
    settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENVIRONMENT, **options}
    settings.setdefault("preexec_fn", _heed_interrupts)
    return subprocess.Popen([sys.executable, "-m", "shardckpt_cli", *map(str, args)], **settings)  # type: ignore[call-overload,no-any-return]


def start_slow(*args: object) -> subprocess.Popen[str]:
    """Start the command so that it pauses after every step of a copy."""
    code = (
        "import sys, time\n"
        "from shardckpt.events.progress import Meter\n"
        "add = Meter.add\n"
        "Meter.add = lambda self, n: (add(self, n), time.sleep(0.3))\n"
        "from shardckpt_cli.app import main\n"
        "main()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        preexec_fn=_heed_interrupts,  # noqa: PLW1509  (this process has one thread here)
    )


def finish(process: subprocess.Popen[str]) -> Outcome:
    out, err = process.communicate(timeout=60)
    return Outcome(process.returncode, out or "", err or "")


def run(*args: object, **options: object) -> Outcome:
    """Run the command in a process of its own."""
    return finish(start(*args, **options))


def run_on_terminal(*args: object, **environment: str) -> tuple[int, str]:
    """Run the command on a terminal of 80 columns; return its exit code and all that reached the terminal."""
    ours, theirs = pty.openpty()
    process = start(*args, stdout=theirs, stderr=theirs, env={**ENVIRONMENT, "TERM": "xterm", **environment})
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # what Linux answers once nobody has the other end
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    return process.wait(60), shown.decode()


def run_here(*args: object) -> Outcome:
    """Run the command in this process: for suites of many calls."""
    out, err = io.StringIO(), io.StringIO()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            run_main(lambda: _COMMAND(list(map(str, args)), standalone_mode=False))
    except SystemExit as end:
        return Outcome(int(end.code or 0), out.getvalue(), err.getvalue())
    finally:
        signal.signal(signal.SIGTERM, before)
    raise AssertionError("a command always ends with an exit code")
