"""A step refers to folders beside it or in full words, and only some of these are opened without being named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardckpt.errors import UnsafeError, UsageError
from shardckpt.native.records import is_base_url, may_open, refer_to, resolve_base

NONE = ["", "..", "../", "../..", "../../etc", "../a/b", "../a/../..", "one", "./one", "../a\0b", 7, None]
"""What is no reference."""

OPENED = [
    ("/runs/a/step", "/models/base"),
    ("runs/a/step", "/models/base"),
    ("file:///runs/a/step", "/models/base"),
    ("/runs/a/step", "file:///models/base"),
    ("s3://bucket/runs/step", "s3://bucket/models/base"),
    ("hf://me/run/step", "hf://me/base"),
    ("memory://runs/step", "memory://runs/base"),
    ("sftp://host:22/runs/step", "sftp://host:22/models/base"),
    ("simplecache::s3://bucket/runs/step", "simplecache::s3://bucket/base"),
]
"""Step, and a folder that it may choose."""

CLOSED = [
    ("s3://bucket/runs/step", "/etc"),
    ("s3://bucket/runs/step", "file:///etc"),
    ("s3://bucket/runs/step", "local:///etc"),
    ("/runs/step", "https://elsewhere.example/x"),
    ("/runs/step", "s3://bucket/x"),
    ("s3://bucket/runs/step", "s3://other/x"),
    ("s3://bucket/runs/step", "s3://bucket.other/x"),
    ("s3://bucket/runs/step", "s3a://bucket/x"),
    ("https://host/step", "https://host@elsewhere.example/x"),
    ("https://host/step", "https://host:8080/x"),
    ("s3://bucket/runs/step", "simplecache::s3://bucket/x"),
    ("s3://bucket/runs/step", "s3://bucket/x::file:///etc"),
    ("s3://bucket/runs/step", "zip://x::file:///etc/archive.zip"),
    ("s3://bucket/runs/step", "s3://bucket/x\n::file:///etc"),
    ("zip://step::s3://bucket/a.zip", "zip://base::s3://bucket/a.zip"),
    ("simplecache::file:///runs/step", "file::///etc"),
]
"""Step, and a folder that the caller has to name."""


def test_references_are_relative_beside_and_absolute_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refer_to("run/two", "run/one/") == "../one"
    assert refer_to(str(tmp_path / "run" / "two"), "run/one") == "../one"
    assert refer_to("run/two", "other/one") == str(tmp_path / "other" / "one")
    assert refer_to("s3://b/run/two", "s3://b/run/one") == "../one"
    assert refer_to("s3://b/run/two", "s3://b/one") == "s3://b/one"
    assert refer_to("s3://b/run/two", str(tmp_path / "one")) == str(tmp_path / "one")
    assert resolve_base("s3://b/run/two/", "../one") == "s3://b/run/one"
    assert resolve_base("run/two", "../one") == str(tmp_path / "run" / "one")
    assert resolve_base("run/two", "gs://b/one") == "gs://b/one"
    with pytest.raises(UsageError, match="its own base"):
        refer_to("run/two", str(tmp_path / "run" / "two"))


@pytest.mark.parametrize("url", NONE, ids=range(len(NONE)))
def test_nothing_else_is_a_reference(url: object) -> None:
    assert not is_base_url(url)
    if isinstance(url, str):
        with pytest.raises(UnsafeError, match="not a reference to a base"):
            resolve_base("/runs/step", url)


@pytest.mark.parametrize(("step", "folder"), OPENED)
def test_a_folder_of_the_same_store_is_opened(step: str, folder: str) -> None:
    assert may_open(step, folder)


@pytest.mark.parametrize(("step", "folder"), CLOSED, ids=range(len(CLOSED)))
def test_a_folder_of_any_other_is_not(step: str, folder: str) -> None:
    assert not may_open(step, folder)


@pytest.mark.parametrize("step", ["s3://bucket", "s3://bucket/", "https://host"])
def test_nothing_lies_beside_the_root_of_a_store(step: str) -> None:
    """Or `../other` would be another bucket, another host."""
    assert not may_open(step, resolve_base(step, "../other"))


@pytest.mark.parametrize("name", ["one", "a::b", "::file:", "x::file:" + "\\", "a b", "%2e%2e", "@host"])
def test_a_name_beside_the_step_never_leaves_its_folder(name: str) -> None:
    where = resolve_base("s3://bucket/runs/step", f"../{name}")
    assert re.fullmatch(r"s3://bucket/runs/[^/]+", where)
    assert may_open("s3://bucket/runs/step", where) == ("::" not in name)
