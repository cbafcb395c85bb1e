"""The benchmark of captures copies and keeps exactly the bytes that it says, and compares each with the least."""

from __future__ import annotations

import importlib
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_each_machine_copies_one_part_and_keeps_two(monkeypatch, capsys, tmp_path):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("SHARDCKPT_NODE", "")
    tiers = importlib.import_module("tiers")
    monkeypatch.setattr(tiers, "STEP_S", 0.01)
    report = tiers.run(48 << 15, rounds=1)  # raises if other bytes were copied or kept
    assert [goal.limit for goal in report.goals] == [1.1, 1.2, 1.3, 1.0, 1.05]
    assert "of 2 that are kept" in capsys.readouterr().out
