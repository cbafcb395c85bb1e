"""The door of the script: an interruption is one line and its exit code even while the command is being loaded."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Load the command and run it; until it takes signals itself they end the process, for there is nothing to undo."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    from shardckpt_cli.app import main as run

    run()


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    word = "interrupted" if number == signal.SIGINT else "terminated"
    os.write(2, f"shardckpt: {word}; nothing was written\n".encode())
    os._exit(128 + number)
