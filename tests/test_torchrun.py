"""Facts about the machine of a process: its ranks as torchrun counts them, its cores, its id."""

from __future__ import annotations

import platform

import pytest

from shardckpt import torchrun
from shardckpt.torchrun import MACHINE_BYTES, count_cores, get_machine_id, has_second_core, local_world_size


@pytest.mark.parametrize(
    ("setting", "found"), [(None, None), ("", None), ("0", None), ("-2", None), ("two", None), ("²", None), ("8", 8)]
)
def test_only_a_positive_number_counts_as_ranks(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, found: int | None
) -> None:
    if setting is None:
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", setting)
    assert local_world_size() == found


def test_processes_of_one_machine_find_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    first = get_machine_id()
    assert len(first) == MACHINE_BYTES
    get_machine_id.cache_clear()
    assert get_machine_id() == first
    monkeypatch.setattr(platform, "node", lambda: "another")
    get_machine_id.cache_clear()
    assert get_machine_id() != first
    get_machine_id.cache_clear()


def test_a_process_has_a_core() -> None:
    assert count_cores() >= 1


@pytest.mark.parametrize(
    ("cores", "local", "ranks", "is_idle"),
    [(1, "", 1, False), (2, "", 1, True), (2, "", 2, False), (4, "2", 8, True), (4, "3", 1, False)],
)
def test_a_second_core_is_one_that_no_rank_of_the_machine_needs(
    monkeypatch: pytest.MonkeyPatch, cores: int, local: str, ranks: int, is_idle: bool
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setattr(torchrun, "count_cores", lambda: cores)
    assert has_second_core(ranks) == is_idle
