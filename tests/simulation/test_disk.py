"""A power failure keeps all that was synced, and any part of the rest."""

from __future__ import annotations

from random import Random

from shardckpt.testing.simulation.stores.disk import Disk, File


def survivors(*, sync_file: bool, sync_folder: bool) -> set[bytes | None]:
    """Return the contents that a power failure may leave of a file of 10 pages; None if its name is gone."""
    found: set[bytes | None] = set()
    for seed in range(60):
        disk = Disk()
        file = disk.create("/f", 0.0)
        disk.write(file, 0, b"x" * 40_960, 0.0)
        if sync_file:
            disk.sync(file)
        if sync_folder:
            disk.sync(disk.root)
        disk.lose_power(Random(seed))
        node = disk.root.names.get("f")
        found.add(bytes(node.data) if isinstance(node, File) else None)
    return found


def test_a_file_survives_if_it_and_its_folder_were_synced() -> None:
    assert survivors(sync_file=True, sync_folder=True) == {b"x" * 40_960}


def test_a_name_may_be_lost_until_the_folder_is_synced() -> None:
    assert survivors(sync_file=True, sync_folder=False) == {b"x" * 40_960, None}


def test_bytes_may_be_lost_or_torn_until_the_file_is_synced() -> None:
    found = survivors(sync_file=False, sync_folder=True)
    assert b"" in found and None not in found
    assert any(b"x" in data and b"\0" in data for data in found if data is not None)


def test_a_rename_is_kept_or_undone_as_one() -> None:
    for seed in range(40):
        disk = Disk()
        file = disk.create("/old", 0.0)
        disk.sync(file)
        disk.sync(disk.root)
        disk.rename("/old", "/new", 0.0)
        disk.lose_power(Random(seed))
        assert [*disk.root.names] in (["old"], ["new"])
