"""A stream is compacted while others publish and remove versions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.errors import SourceNotFoundError
from shardckpt.offline.streams import compact_versions as compaction
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.retention.leases import LEASES


def publish(url: str, numbers: range, keep: int | None = None) -> None:
    """Publish versions in a new epoch, which starts with an anchor; remove others after it, if `keep` is given."""
    with shardckpt.Publisher(url, anchors=shardckpt.Anchors(max_bytes=99.0, keep=keep)) as publisher:
        for number in numbers:
            publisher.publish(number, {"w": torch.arange(64.0) + torch.eye(64)[number]}).result()


def test_a_version_stays_while_its_anchor_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path)
    publish(url, range(1, 4))
    write_all = compaction.write_all

    def write_late(*args: Any) -> Any:
        publish(url, range(7, 8), keep=1)  # these do not build on version 3
        return write_all(*args)

    monkeypatch.setattr(compaction, "write_all", write_late)
    assert {version.number for version in shardckpt.compact_versions(url).versions} == {1, 2, 3, 7}
    assert not os.listdir(tmp_path / LEASES)
    monkeypatch.undo()
    assert shardckpt.compact_versions(url, keep_anchors=1).removed == (1, 2, 3)


def test_a_version_that_is_removed_before_its_anchor_is_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = str(tmp_path)
    publish(url, range(1, 4))
    has_anchor = StreamFolder.has_anchor

    def look(folder: StreamFolder, version: Any) -> bool:
        found = has_anchor(folder, version)
        monkeypatch.undo()
        publish(url, range(7, 8), keep=1)
        return found

    monkeypatch.setattr(StreamFolder, "has_anchor", look)
    with pytest.raises(SourceNotFoundError, match="removed meanwhile"):
        shardckpt.compact_versions(url)
    assert not os.listdir(tmp_path / LEASES)
