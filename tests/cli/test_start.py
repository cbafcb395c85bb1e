"""The door of the script: interruptions that arrive before there is anything to undo."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_command_is_loaded_is_one_line_and_its_code(number: signal.Signals, code: int) -> None:
    """Loading `app` sends the signal, as if it had arrived right then."""
    program = (
        "import os, sys, types\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        name == 'shardckpt_cli.app' and os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from shardckpt_cli.start import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("shardckpt: ")
