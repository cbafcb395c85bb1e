"""Versions are listed from their commits, and each one is verified from its anchor."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import shardckpt
from shardckpt.errors import SourceNotFoundError
from tests.kit.writers.stream_writer import ANCHORS, NUMBERS, Weights, delta_of, flip, folder_of


def test_all_versions_are_listed_in_order(stream: Path, versions: dict[int, Weights]) -> None:
    found = shardckpt.list_versions(stream)
    assert [each.number for each in found.versions] == list(NUMBERS)
    assert {each.epoch for each in found.versions} == {1}
    assert [each.base for each in found.versions] == [None, *NUMBERS[:-1]]
    assert tuple(each.number for each in found.versions if each.has_anchor) == ANCHORS
    assert found.full_bytes == sum(value.nbytes for value in versions[10].values())
    assert (found.source, found.ok, found.is_verified) == (str(stream), True, False)


def test_a_version_says_what_changed_and_when(stream: Path, versions: dict[int, Weights]) -> None:
    [found] = shardckpt.list_versions(f"{stream}@12").versions
    changed = sum(int((versions[12][name] != value).sum()) for name, value in versions[11].items())
    assert found.changed == changed
    assert found.share == changed / sum(value.numel() for value in versions[12].values())
    assert found.nbytes == delta_of(stream, 12).stat().st_size
    assert found.published_at is not None
    assert 0 <= time.time() - found.published_at < 3600


def test_a_stream_without_versions_is_an_empty_list(stream: Path) -> None:
    for number in NUMBERS:
        shutil.rmtree(folder_of(stream, number))
    assert shardckpt.list_versions(stream).versions == ()
    with pytest.raises(SourceNotFoundError, match="no stream of weights is here"):
        shardckpt.list_versions(stream.parent)


def test_an_undamaged_stream_is_verified(stream: Path) -> None:
    found = shardckpt.verify_versions(stream)
    assert (found.ok, found.is_verified, len(found.versions)) == (True, True, len(NUMBERS))


@pytest.mark.parametrize(
    ("damage", "faulty"),
    [
        (lambda stream: flip(delta_of(stream, 11), -1), [11, 12]),
        (lambda stream: flip(delta_of(stream, 13), -1), [13]),
        (lambda stream: delta_of(stream, 14).unlink(), [14, 15]),
        (lambda stream: flip(next((folder_of(stream, 13) / "anchor").glob("*.safetensors")), -1), [13, 14, 15]),
        (lambda stream: flip(folder_of(stream, 10) / "anchor" / "COMMIT", 40), [10, 11, 12]),
    ],
    ids=["change", "change of an anchor", "gone", "anchor", "anchor's commit"],
)
def test_each_version_that_damage_reaches_has_a_problem(
    stream: Path, damage: Callable[[Path], object], faulty: list[int]
) -> None:
    damage(stream)
    found = shardckpt.verify_versions(stream)
    assert [each.number for each in found.versions if each.problem] == faulty
    assert not found.ok
    assert not shardckpt.verify_versions(f"{stream}@{faulty[0]}").ok


def test_a_missing_file_is_named(stream: Path) -> None:
    file = delta_of(stream, 14)
    file.unlink()
    problems = [each.problem for each in shardckpt.verify_versions(stream).versions if each.problem]
    assert len(problems) == 2
    assert all("files of changes are gone" in each and file.name in each for each in problems)
