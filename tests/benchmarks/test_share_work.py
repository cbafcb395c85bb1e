"""The benchmark of shared work measures a small checkpoint like the large one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.benchmark_scripts import script_fixture

share_work = script_fixture("share_work")


@pytest.mark.slow
def test_each_case_yields_its_rows(share_work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TENSORS": 8, "ROWS": 500_000, "FILES": 30, "FILE_BYTES": 10 << 20, "TASKS": 4}.items():
        monkeypatch.setattr(share_work, name, value)
    monkeypatch.setattr(share_work, "OPTIONS", ["--dtype", "bf16", "--max-shard-size", "2MB", "--quiet"])
    for name, rows in {"pair": 1, "large": 4}.items():
        (tmp_path / name).mkdir()
        found = list(share_work.CASES[name](tmp_path / name, 1))
        assert len(found) == rows and all(row.value > 0 and row.area == "shared work" for row in found)
