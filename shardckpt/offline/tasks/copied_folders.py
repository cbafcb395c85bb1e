"""Remove the steps that tasks copied, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardckpt.errors import CheckpointError
from shardckpt.native.commit import COMMIT, decode_commit, read_mark
from shardckpt.native.run_directory import read_referred_files
from shardckpt.offline.copy import CopiedFolder
from shardckpt.storage.resolve_url import open_place, split
from shardckpt.storage.store import Store, check_name

__all__ = ["CopiedFolder", "remove_copies"]


def remove_copies(arguments: Mapping[str, Any], copied: Iterable[CopiedFolder]) -> None:
    """Remove copied folders, except steps of other saves and files that other steps refer to. Raises StorageError."""
    # A step goes before the folders that it refers to, as they were copied the other way around.
    for folder in reversed([*copied]):
        if folder.place:
            check_name(folder.place, arguments["dst"])
        url = f"{arguments['dst'].rstrip('/')}/{folder.place}" if folder.place else arguments["dst"]
        store = open_place(url)
        if _find_save(store, url) in (folder.save, ""):  # empty after a discard that was killed
            store.delete(COMMIT)
            parent, name = split(url)
            open_place(parent).delete_files(name, {*folder.files} - read_referred_files(url))


def _find_save(store: Store, url: str) -> str | None:
    """Return the id of a step's save; empty without a `COMMIT`, None if it cannot be read."""
    sizes = {entry.name: entry.size for entry in store.list() if not entry.is_folder}
    if COMMIT not in sizes:
        return ""
    try:
        return decode_commit(read_mark(store, sizes), where=url).save
    except CheckpointError:
        return None
