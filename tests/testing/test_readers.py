"""Every built-in format passes the suite that authors of plugins subclass, in each of its variants."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardckpt.reader import Format
from shardckpt.readers.registry import load_formats
from shardckpt.testing import ReaderSuite
from tests.kit.writers.samples import SAMPLES


def build_suite(form: Format) -> type[ReaderSuite]:
    """Return the suite of one format."""

    @pytest.fixture(params=list(SAMPLES[form.name]))
    def checkpoint(self: ReaderSuite, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        return SAMPLES[form.name][request.param](tmp_path / "sample")

    return type("Suite", (ReaderSuite,), {"form": form, "checkpoint": checkpoint})


for each in load_formats():
    globals()["Test" + each.name.title().replace("-", "")] = build_suite(each)


def test_every_format_has_samples() -> None:
    assert {form.name for form in load_formats()} == set(SAMPLES)
