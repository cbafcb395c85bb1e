"""Remove the steps that tasks copied, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from shardckpt.errors import CheckpointError, MissingFileError
from shardckpt.native.commit import COMMIT, decode_commit, read_mark
from shardckpt.native.run_directory import read_referred_files
from shardckpt.offline.copy import CopiedFolder
from shardckpt.storage.resolve_url import open_place, read_version, split
from shardckpt.storage.store import Store, check_name

__all__ = ["CopiedFolder", "find_copies", "remove_copies"]


def find_copies(arguments: Mapping[str, Any], copied: Iterable[CopiedFolder]) -> tuple[CopiedFolder, ...]:
    """Return the copied folders that are there; not another save's, and no later copy. Raises StorageError."""
    return tuple(folder for folder in copied if _is_there(folder, _get_url(arguments, folder)))


def remove_copies(arguments: Mapping[str, Any], copied: Iterable[CopiedFolder]) -> None:
    """Remove copied folders that are there, except files that other steps refer to. Raises StorageError."""
    # A step goes before the folders that it refers to, as they were copied the other way around.
    for folder in reversed([*copied]):
        url = _get_url(arguments, folder)
        if _is_there(folder, url):
            open_place(url).delete(COMMIT)
            parent, name = split(url)
            names = {*folder.files} - read_referred_files(url)
            for some in (names - {folder.file}, names & {folder.file}):  # if killed, the next discard knows the folder
                open_place(parent).delete_files(name, some)


def _get_url(arguments: Mapping[str, Any], folder: CopiedFolder) -> str:
    if not folder.place:
        return str(arguments["dst"])
    check_name(folder.place, arguments["dst"])
    return f"{arguments['dst'].rstrip('/')}/{folder.place}"


def _is_there(folder: CopiedFolder, url: str) -> bool:
    """Return True for the folder itself, or what a discard that was killed has left of it."""
    with suppress(MissingFileError):
        is_same = not folder.file or read_version(url, folder.file) == folder.version
        return is_same and _find_save(open_place(url), url) in (folder.save, "")
    return False


def _find_save(store: Store, url: str) -> str | None:
    """Return the id of a step's save; empty without a `COMMIT`, None if it cannot be read."""
    sizes = {entry.name: entry.size for entry in store.list() if not entry.is_folder}
    if COMMIT not in sizes:
        return ""
    try:
        return decode_commit(read_mark(store, sizes), where=url).save
    except CheckpointError:
        return None
