"""A stream loses old versions, and no reader notices."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.encodings.typed_json import dump
from shardckpt.errors import UsageError
from shardckpt.stream.format.stream_folder import StreamFolder
from shardckpt.stream.format.stream_records import Version
from shardckpt.stream.retention import prune_stream as pruning
from shardckpt.stream.retention.leases import (
    LEASES,
    REMOVALS,
    ReaderLease,
    Removal,
    list_doomed,
    list_live_leases,
)
from shardckpt.stream.retention.prune_stream import prune_stream


def publish(url: str, versions: range, keep: int | None = None) -> dict[str, torch.Tensor]:
    """Publish versions of which every second one has an anchor; return the last one's weights."""
    weights = {"w": torch.zeros(64, dtype=torch.bfloat16)}
    with shardckpt.Publisher(url, anchors=shardckpt.Anchors(max_chain=1, keep=keep)) as publisher:
        for version in versions:
            weights["w"][version] += 1
            publisher.publish(version, weights).result()
    return weights


def list_versions(url: str) -> list[int]:
    folder = StreamFolder(url)
    return [version.number for version in folder.list_folders() if folder.find_commit(version)]


def test_old_versions_go_and_the_newest_is_received(tmp_path: Path) -> None:
    url = str(tmp_path)
    weights = publish(url, range(1, 8))
    assert prune_stream(StreamFolder(url), keep_anchors=1, dry_run=True) == [Version(1, n) for n in range(1, 7)]
    assert list_versions(url) == [1, 2, 3, 4, 5, 6, 7]
    assert len(prune_stream(StreamFolder(url), keep_anchors=1)) == 6
    assert list_versions(url) == [7]
    into = {"w": torch.empty(64, dtype=torch.bfloat16)}
    assert shardckpt.Subscriber(url).stage().commit(into).number == 7
    assert torch.equal(into["w"], weights["w"])


def test_a_publisher_removes_old_versions_after_an_anchor(tmp_path: Path) -> None:
    publish(str(tmp_path), range(1, 10), keep=2)
    assert list_versions(str(tmp_path)) == [7, 8, 9]


def test_a_reader_between_stage_and_commit_keeps_its_versions(tmp_path: Path) -> None:
    url = str(tmp_path)
    publish(url, range(1, 4))
    into = {"w": torch.empty(64, dtype=torch.bfloat16)}
    reader = shardckpt.Subscriber(url)
    staged = reader.stage(2)
    publish(url, range(4, 9), keep=1)
    assert [n for n in list_versions(url) if n < 3] == [1, 2]
    staged.commit(into)
    assert reader.stage().commit(into).number == 8
    reader.close()
    assert not os.listdir(tmp_path / LEASES)
    prune_stream(StreamFolder(url), keep_anchors=1)
    assert list_versions(url) == [8]


def test_a_reader_that_comes_during_a_removal_takes_what_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path)
    weights = publish(url, range(1, 6))
    into = {"w": torch.empty(64, dtype=torch.bfloat16)}
    reader = shardckpt.Subscriber(url)
    reader.stage(1).commit(into)
    reader.close()
    late = shardckpt.Subscriber(url)
    seen = []

    def remove(folder: StreamFolder, version: Version) -> None:
        if not seen:
            seen.append(late.stage())
        original(folder, version)

    original = pruning._remove
    monkeypatch.setattr(pruning, "_remove", remove)
    prune_stream(StreamFolder(url), keep_anchors=1)
    seen[0].commit(into)
    assert torch.equal(into["w"], weights["w"])


def test_an_expired_lease_keeps_nothing_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path)
    publish(url, range(1, 6))
    folder = StreamFolder(url)
    ReaderLease(folder, 1.0).renew(None, [Version(1, 1)])
    assert len(list_live_leases(folder, time.time())) == 1
    assert list_live_leases(folder, time.time() + 3600) == []
    later = time.time() + 3600
    monkeypatch.setattr(pruning.time, "time", lambda: later)
    prune_stream(folder, keep_anchors=1, dry_run=True)
    assert len(os.listdir(tmp_path / LEASES)) == 1, "a dry run removes nothing"
    prune_stream(folder, keep_anchors=1)
    assert not os.listdir(tmp_path / LEASES)


def test_versions_of_kept_steps_stay(tmp_path: Path) -> None:
    url = str(tmp_path)
    publish(url, range(1, 8))
    prune_stream(StreamFolder(url), keep_anchors=1, kept={4})
    assert list_versions(url) == [3, 4, 7]
    into = {"w": torch.empty(64, dtype=torch.bfloat16)}
    shardckpt.Subscriber(url).stage(4).commit(into)
    assert into["w"].sum() == 4


def test_an_abandoned_attempt_goes_after_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path)
    publish(url, range(1, 4))
    left = tmp_path / Version(1, 2).folder / "COMMIT.json"
    left.unlink()
    prune_stream(StreamFolder(url), keep_anchors=9)
    assert left.parent.is_dir()
    later = time.time() + 25 * 3600
    monkeypatch.setattr(pruning.time, "time", lambda: later)
    prune_stream(StreamFolder(url), keep_anchors=9)
    assert not left.parent.is_dir()


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "1"])
def test_a_wrong_number_of_anchors_is_refused(keep: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="keep_anchors"):
        shardckpt.Anchors(keep=keep)  # type: ignore[arg-type]


def test_a_damaged_lease_keeps_all_until_it_would_have_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = str(tmp_path)
    publish(url, range(1, 6))
    lease = tmp_path / LEASES / f"{'a' * 32}-1.json"
    lease.parent.mkdir()
    lease.write_text("{}")
    with pytest.warns(UserWarning, match="a damaged record counts until it would have expired: .*leases/aaaa"):
        assert prune_stream(StreamFolder(url), keep_anchors=1) == []
    assert list_versions(url) == [1, 2, 3, 4, 5] and lease.exists()
    later = time.time() + 2 * 3600
    monkeypatch.setattr(time, "time", lambda: later)
    with pytest.warns(UserWarning, match="leases/aaaa"):
        assert prune_stream(StreamFolder(url), keep_anchors=1)
    assert not lease.exists()


def test_a_damaged_announcement_stops_no_reader(tmp_path: Path) -> None:
    weights = publish(str(tmp_path), range(1, 3))
    (tmp_path / REMOVALS).mkdir()
    (tmp_path / REMOVALS / f"{'b' * 32}.json").write_text("{")
    into = {"w": torch.zeros_like(weights["w"])}
    with pytest.warns(UserWarning, match="removals/bbbb"):
        shardckpt.Subscriber(tmp_path).stage().commit(into)
    assert torch.equal(into["w"], weights["w"])


def test_a_lease_that_is_renewed_during_the_listing_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StreamFolder(str(tmp_path))
    lease = ReaderLease(folder, 100.0)
    lease.renew(None, [Version(1, 1)])
    find = folder.find

    def renew_first(kind: type[Any], name: str) -> Any:
        monkeypatch.setattr(folder, "find", find)
        lease.renew(Version(1, 1), [Version(1, 2)])
        return find(kind, name)

    monkeypatch.setattr(folder, "find", renew_first)
    assert [each.needs for each in list_live_leases(folder, time.time())] == [(Version(1, 2),)]


def test_a_removal_that_was_killed_is_forgotten_after_an_hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, version = StreamFolder(str(tmp_path)), Version(1, 1)
    with folder.store.create(f"{REMOVALS}/{'a' * 32}.json") as writer:
        writer.write(dump(Removal((version,), time.time())))
    assert list_doomed(folder) == {version}
    later = time.time() + 3700
    monkeypatch.setattr(pruning.time, "time", lambda: later)
    assert list_doomed(folder) == set()
    prune_stream(folder, keep_anchors=1)
    assert not os.listdir(tmp_path / REMOVALS)
