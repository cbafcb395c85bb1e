"""The memory that captures may still take: the least of the machine's and of those of the control groups around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardckpt.tiers.memory import free_memory
from shardckpt.tiers.memory.free_memory import read_available_bytes

MACHINE = 1000 << 10
NEEDED = 6_000


@pytest.fixture
def mount(tmp_path, monkeypatch) -> Path:
    """Folder of the control groups of a machine with `MACHINE` bytes available; no process is in one yet."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 1000 kB\n")
    monkeypatch.setattr(free_memory, "_MACHINE", str(tmp_path / "meminfo"))
    monkeypatch.setattr(free_memory, "_OWN_GROUPS", str(tmp_path / "own"))
    monkeypatch.setattr(free_memory, "_MOUNT", str(tmp_path / "groups"))
    return tmp_path / "groups"


def add_group(folder: Path, limit: int | str, used: int, stat: str, *, is_first: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_first else ("memory.max", "memory.current")
    for name, content in zip((*names, "memory.stat"), (f"{limit}\n", f"{used}\n", stat), strict=True):
        (folder / name).write_text(content)


def test_without_control_groups_the_memory_of_the_machine_counts(mount):
    assert read_available_bytes(NEEDED) == MACHINE


def test_the_least_of_the_limits_around_a_process_counts_and_files_can_be_freed(mount, tmp_path):
    (tmp_path / "own").write_text("0::/job/step\n")
    add_group(mount / "job", 50_000, 45_000, "anon 1\nactive_file 300\ninactive_file 400\nshmem 9000\n")
    add_group(mount / "job" / "step", "max", 44_000, "active_file 300\ninactive_file 400\n")
    assert read_available_bytes(NEEDED) == 5_700
    add_group(mount / "job" / "step", 44_500, 44_000, "active_file 300\ninactive_file 400\n")
    assert read_available_bytes(NEEDED) == 1_200
    add_group(mount / "job" / "step", 40_000, 44_000, "active_file 0\ninactive_file 0\n")
    assert read_available_bytes(NEEDED) == 0


def test_what_can_be_freed_is_not_looked_for_where_enough_is_unused(mount, tmp_path):
    (tmp_path / "own").write_text("0::/\n")
    add_group(mount, 20_000, 13_000, "active_file 5000\n")
    assert read_available_bytes(NEEDED) == 7_000
    assert read_available_bytes(7_001) == 12_000


def test_a_container_that_sees_its_own_group_alone_has_the_limit_of_that(mount, tmp_path):
    (tmp_path / "own").write_text("5:cpu:/docker/1\n4:memory:/docker/1\n0::/docker/1\n")
    stat = "active_file 1\ntotal_active_file 10\ntotal_inactive_file 20\n"
    add_group(mount / "memory", 5_000, 1_000, stat, is_first=True)
    assert read_available_bytes(NEEDED) == 4_030


def test_a_limit_above_the_memory_of_the_machine_does_not_count(mount, tmp_path):
    (tmp_path / "own").write_text("4:memory:/\n")
    add_group(mount / "memory", 9223372036854771712, 1_000, "", is_first=True)
    assert read_available_bytes(NEEDED) == MACHINE
