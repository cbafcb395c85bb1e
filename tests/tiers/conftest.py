"""Every test of tiers has a memory folder of its own, whose janitors are ended after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shardckpt.tiers.memory import run_folders
from tests.kit.runs.tier_runs import end_janitor, forget_process


@pytest.fixture(autouse=True)
def memory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder in place of `/dev/shm` for one test."""
    mount = tmp_path_factory.mktemp("shm")
    monkeypatch.setattr(run_folders, "SHARED_MEMORY", str(mount))
    yield mount
    forget_process()
    for base in mount.iterdir():
        end_janitor(base)
