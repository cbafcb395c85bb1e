"""The script's entry point, which handles interruptions while loading."""

from __future__ import annotations

import gc
import os
import signal
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Load the command and run it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # until the command handles them, nothing needs undoing
        signal.signal(number, _leave)
    # modules, and the million small objects for 100,000 tensors, live until exit: collecting garbage is wasted time
    gc.set_threshold(2_000_000, 50, 100)
    from shardckpt_cli.app import main as run

    run()


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    word = "interrupted" if number == signal.SIGINT else "terminated"
    os.write(2, f"shardckpt: {word}; nothing was written\n".encode())
    os._exit(128 + number)
