"""Every built-in format passes the suite that authors of plugins subclass, in each of its variants."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import shardckpt
from shardckpt.reader import Format
from shardckpt.readers.registry import BUILT_IN
from shardckpt.testing import ReaderSuite
from tests.kit.writers.samples import SAMPLES


def build_suite(form: Format) -> type[ReaderSuite]:
    """Return the suite of one format."""

    @pytest.fixture(params=list(SAMPLES[form.name]))
    def checkpoint(self: ReaderSuite, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
        return SAMPLES[form.name][request.param](tmp_path / "sample")

    own: dict[str, object] = {"form": form, "checkpoint": checkpoint}
    if form.name in ("stream", "hf-delta"):
        own["test_a_copy_elsewhere_is_the_same_checkpoint"] = assert_a_stream_can_move
    return type("Suite", (ReaderSuite,), own)


def assert_a_stream_can_move(_: ReaderSuite, checkpoint: Path, tmp_path: Path) -> None:
    """A version needs the versions before it, so all of them move."""
    shutil.copytree(checkpoint.parent, tmp_path / "copy")
    assert shardckpt.diff(checkpoint, tmp_path / "copy" / checkpoint.name).same


for each in (built_in.load() for built_in in BUILT_IN):
    globals()["Test" + each.name.title().replace("-", "")] = build_suite(each)


def test_every_format_has_samples() -> None:
    assert {form.load().name for form in BUILT_IN} == set(SAMPLES)
