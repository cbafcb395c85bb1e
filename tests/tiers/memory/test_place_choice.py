"""The folder for captures: in shared memory if that is large enough, else on the disk, with a warning."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardckpt import Checkpointer, PeerMemory
from shardckpt.errors import StorageError
from shardckpt.tiers.memory import place_choice, run_folders
from shardckpt.tiers.memory.place_choice import choose_place
from shardckpt.tiers.memory.run_folders import make_run_folder
from tests.kit.runs.tier_runs import restore, save

RUN = "0123456789abcdef"
MEMORY_BYTES = 8 << 30
USER = os.geteuid()


@pytest.fixture
def sizes(memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Sizes of file systems by path; the folder for temporary files is in the test's own folder."""
    found = {str(memory): MEMORY_BYTES // 2}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def read(path: str) -> SimpleNamespace:
        return SimpleNamespace(f_blocks=found.get(path, 100 << 30), f_frsize=1, f_bavail=found.get(path, 100 << 30))

    monkeypatch.setattr(place_choice.os, "statvfs", read)
    return found


def test_shared_memory_of_the_usual_size_takes_nine_tenths_of_it_at_most(memory, sizes):
    place, warning = choose_place(RUN, "", None, MEMORY_BYTES)
    assert place.folder == str(memory / f"shardckpt-{USER}" / RUN) and not warning
    assert place.max_bytes == sizes[str(memory)] - sizes[str(memory)] // 10
    sizes[str(memory)] = MEMORY_BYTES
    assert choose_place(RUN, "", None, MEMORY_BYTES).place.max_bytes == MEMORY_BYTES // 2
    assert choose_place(RUN, "", 1000, MEMORY_BYTES).place.max_bytes == 1000


@pytest.mark.parametrize("max_bytes", [None, 1 << 30])
def test_small_shared_memory_is_one_warning_with_its_size_and_how_to_raise_it(max_bytes, memory, sizes, tmp_path):
    sizes[str(memory)] = 64_000_000
    place, warning = choose_place(RUN, "", max_bytes, MEMORY_BYTES)
    assert Path(place.folder).parent.parent == tmp_path and not place.is_memory
    assert place.max_bytes == (max_bytes or MEMORY_BYTES // 2)
    for part in (f"{memory} has 64 MB", place.folder, "not synced", "--shm-size", "remount,size=", "`path=`"):
        assert part in warning
    assert not choose_place(RUN, "", 57_000_000, MEMORY_BYTES).warning, "enough is enough"


def test_shared_memory_that_cannot_be_used_is_named(sizes, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folders, "SHARED_MEMORY", str(tmp_path / "none"))
    assert f"{tmp_path / 'none'} cannot be used" in choose_place(RUN, "", 1000, MEMORY_BYTES).warning


def test_a_run_that_has_captures_in_shared_memory_stays_there(memory, sizes):
    folder = choose_place(RUN, "", 1000, MEMORY_BYTES).place.folder
    make_run_folder(folder)
    sizes[str(memory)] = 64_000_000
    assert choose_place(RUN, "", 1 << 30, MEMORY_BYTES).place.folder == folder


def test_a_given_mount_is_used_whatever_its_size_and_a_missing_one_is_an_error(tmp_path):
    other = tmp_path / "other"
    with pytest.raises(StorageError, match="cannot find the size of the mount"):
        choose_place(RUN, str(other), None, MEMORY_BYTES)
    other.mkdir()
    place, warning = choose_place(RUN, str(other), 1 << 60, MEMORY_BYTES)
    assert Path(place.folder).parent.parent == other and not warning


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_file_system_in_memory_is_known_by_its_type(kind, tmp_path, monkeypatch):
    mounts = f"1 0 0:1 / / rw - ext4 d rw\n2 1 0:2 / {os.path.realpath(tmp_path)} rw - {kind} t rw\n"
    monkeypatch.setattr(place_choice, "read_mounts", lambda: mounts)
    assert choose_place(RUN, str(tmp_path), None, MEMORY_BYTES).place.is_memory is (kind == "tmpfs")


def test_captures_beside_small_shared_memory_are_restored_after_one_warning(tmp_path, memory, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(place_choice, "_read_size", lambda mount: 64_000_000 if mount == str(memory) else 100 << 30)

    def make() -> Checkpointer:
        return Checkpointer(tmp_path / "run", save_every=100, tiers=[PeerMemory(max_bytes="1GB")])

    ck = make()
    with pytest.warns(UserWarning, match="captures in memory need 1000 MB") as warned:
        save(ck, 1, 2)
    assert len(warned) == 1 and ck.durability(2).survives == {"process"}
    assert [*(tmp_path / "temporary").glob("shardckpt-*/*/step-00000002/COMMIT")]
    assert restore(make()) == 2


def test_nothing_is_synced_in_memory_or_on_the_disk_in_its_place(tmp_path, memory, monkeypatch):
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    save(Checkpointer(tmp_path / "run", save_every=100, tiers=[PeerMemory()]), 1, 2)
    assert synced and not [path for path in synced if path.startswith(str(memory))]
