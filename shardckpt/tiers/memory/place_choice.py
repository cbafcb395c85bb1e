"""Choose the folder for a run's captures on this node: in `/dev/shm` if it is large enough."""

from __future__ import annotations

import os
from typing import NamedTuple

from shardckpt.native.step_copies import find_file_system, read_mounts
from shardckpt.storage.store import convert_os_errors
from shardckpt.tiers.memory import run_folders
from shardckpt.tiers.memory.memory_store import FREE_PART, MemoryPlace
from shardckpt.tiers.memory.run_folders import find_base, find_run_folder, find_temporary

__all__ = ["ChosenPlace", "choose_place"]

_IN_MEMORY = ("tmpfs", "ramfs")  # types of file systems
_LEAST_PART = 4  # without `max_bytes`, `/dev/shm` must have one of so many parts of the machine's memory


class ChosenPlace(NamedTuple):
    """A place for captures, and why it is another than `/dev/shm`."""

    place: MemoryPlace
    warning: str = ""  # empty for the place that was asked for


def choose_place(run: str, mount: str, max_bytes: int | None, memory_bytes: int) -> ChosenPlace:
    """Return a run's place: on a mount if one is given, else in `/dev/shm`, or on the disk for temporary files.

    Args:
        run: Run id.
        mount: Mount that the user chose; empty for `/dev/shm`.
        max_bytes: Maximum bytes that the user chose; None for the default.
        memory_bytes: The machine's memory.
    """
    if mount:
        return ChosenPlace(_describe(run, mount, max_bytes, memory_bytes))
    shared, least = run_folders.SHARED_MEMORY, memory_bytes // _LEAST_PART if max_bytes is None else max_bytes
    is_usable = run_folders.find_first_mount() == shared
    size = _read_size(shared) if is_usable else 0
    if is_usable and (find_run_folder(run, shared) or least <= _leave_part(size)):
        return ChosenPlace(_describe(run, shared, max_bytes, memory_bytes))
    place = _describe(run, find_temporary(), max_bytes, memory_bytes)
    return ChosenPlace(place, _describe_fallback(shared, size, least, place.folder))


def _describe(run: str, mount: str, max_bytes: int | None, memory_bytes: int) -> MemoryPlace:
    folder = find_run_folder(run, mount) or os.path.join(find_base(mount), run)
    limit = min(memory_bytes // 2, _leave_part(_read_size(mount))) if max_bytes is None else max_bytes
    is_memory = find_file_system(os.path.realpath(mount), read_mounts()) in _IN_MEMORY
    return MemoryPlace(folder, limit, is_memory)


def _read_size(mount: str) -> int:
    with convert_os_errors("cannot find the size of the mount for captures", mount):
        disk = os.statvfs(mount)
    return disk.f_blocks * disk.f_frsize


def _leave_part(size: int) -> int:
    return size - size // FREE_PART


def _describe_fallback(shared: str, size: int, least: int, folder: str) -> str:
    """Return the warning for a machine without enough shared memory."""
    found = f"{shared} has {size / 1e6:.0f} MB" if size else f"{shared} cannot be used"
    return (
        f"captures in memory need {least / 1e6:.0f} MB, and {found}, of which a tenth must stay free: they are in "
        f"{folder}, on the disk for temporary files, and are not synced. Enlarge {shared} (`docker run --shm-size`, or "
        f"`mount -o remount,size=`), lower `max_bytes`, or pass `path=` with another file system in memory"
    )
