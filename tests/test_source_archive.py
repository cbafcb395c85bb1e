"""The source archive has what contributors need: all that git has, except what is about commits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = {"LICENSE", "MANIFEST.in", "README.md", "cli", "pyproject.toml", "shardckpt"}
"""Content that setuptools adds by itself."""
OF_THE_REPOSITORY = {".ci", ".githooks", ".github"}
"""Content that is about commits, which an archive has none of."""


def test_the_source_archive_has_what_git_has() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()]
    archived = {name for verb, *names in lines if verb in ("include", "graft") for name in names}
    assert {path.partition("/")[0] for path in listed} - ALWAYS - OF_THE_REPOSITORY == archived
