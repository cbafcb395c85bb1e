"""Time that passes for tests, on this machine alone or on its disks too."""

from __future__ import annotations

import time

import pytest

from shardckpt.storage import orphans
from shardckpt.storage.node_folder import SharedFolder

DAY = 24 * 3600.0


def days_pass(monkeypatch: pytest.MonkeyPatch, days: float = 2.0) -> None:
    """Let days pass: the clocks of this machine and its disks show it, and times of new files."""
    start, written_at = time.time(), SharedFolder.written_at
    time.sleep(0.02)  # the clock of a disk is coarse

    def later(self: SharedFolder, name: str) -> float:
        written = written_at(self, name)
        return written + days * DAY * (written > start + 0.005)

    clock_jumps(monkeypatch, days)
    monkeypatch.setattr(SharedFolder, "written_at", later)
    monkeypatch.setattr(orphans, "_read_clock", lambda _: time.time())


def clock_jumps(monkeypatch: pytest.MonkeyPatch, days: float = 2.0) -> None:
    """Set the clock of this machine alone ahead."""
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() + days * DAY)
