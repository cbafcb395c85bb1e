"""A published stream, and a copy of it for each test."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.kit.writers.stream_writer import Weights, publish


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Weights]]:
    url = tmp_path_factory.mktemp("published") / "stream"
    return url, publish(url)


@pytest.fixture
def stream(published: tuple[Path, dict[int, Weights]], tmp_path: Path) -> Path:
    """Return a copy of the stream, to damage."""
    shutil.copytree(published[0], tmp_path / "stream")
    return tmp_path / "stream"


@pytest.fixture(scope="session")
def versions(published: tuple[Path, dict[int, Weights]]) -> dict[int, Weights]:
    return published[1]
