"""A power failure keeps all that was synced, and any part of the rest."""

from __future__ import annotations

from random import Random

from tests.simulation.stores.disk import Disk, File


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


def list_paths(disk: Disk) -> list[str]:
    return [path for path, _ in disk.walk("/a")]


def has_file(disk: Disk, path: str) -> bool:
    try:
        disk.find(path)
    except FileNotFoundError:
        return False
    return True


def test_paths_that_were_looked_at_are_looked_for_again_after_each_change_of_names() -> None:
    disk = Disk()
    disk.make_folder("/a", 0.0)
    disk.sync(disk.root)
    assert list_paths(disk) == []
    disk.create("/a/x", 0.0)
    assert list_paths(disk) == ["/a/x"] and has_file(disk, "/a/x")
    disk.rename("/a/x", "/a/y", 0.0)
    assert list_paths(disk) == ["/a/y"] and not has_file(disk, "/a/x")
    disk.unlink("/a/y", 0.0)
    assert list_paths(disk) == [] and not has_file(disk, "/a/y")


def test_paths_that_were_looked_at_are_looked_for_again_after_a_power_failure() -> None:
    for seed in range(20):
        disk = Disk()
        disk.make_folder("/a", 0.0)
        disk.sync(disk.root)
        disk.create("/a/x", 0.0)
        assert list_paths(disk) == ["/a/x"] and has_file(disk, "/a/x")
        disk.lose_power(Random(seed))
        folder = disk.find_folder("/a")
        assert list_paths(disk) == [f"/a/{name}" for name in folder.names]
        assert has_file(disk, "/a/x") == ("x" in folder.names)
