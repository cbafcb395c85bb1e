"""Every test of tiers has a folder of sockets of its own, whose holders are ended after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import shardckpt
from shardckpt.tiers.holder import holder_connection, holders
from tests.kit.runs.tier_runs import NODES, is_alive, wait_for


@pytest.fixture(autouse=True)
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of sockets for one test; the holders of all nodes are ended after it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield
    pids, sockets = [], []
    for node in ("", *NODES):
        folder = tmp_path / (f"shardckpt-{node}" if node else "shardckpt")
        if [*folder.glob("*.sock")]:
            monkeypatch.setenv("SHARDCKPT_NODE", node)
            found = shardckpt.list_tiers().holders
            pids += [holder.pid for holder in found]
            sockets += [folder / f"{holder.run}.sock" for holder in found]
            shardckpt.stop_tiers()
    wait_for(lambda: not any(is_alive(pid) for pid in pids))
    assert not any(socket.exists() for socket in sockets)


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait only a second for the answer of a holder, in a save half of one."""
    for module in (holder_connection, holders):
        monkeypatch.setattr(module, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(holders, "STALL_S", 0.5)
