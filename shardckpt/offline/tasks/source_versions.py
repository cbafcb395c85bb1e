"""Versions of stored files: a text that changes when a file is replaced."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from functools import partial

from shardckpt.manifest import Manifest
from shardckpt.native.run_directory import is_step_name, step_number
from shardckpt.readers.step_paths import StepRange, resolve_range
from shardckpt.storage.replaceable import files_below
from shardckpt.storage.resolve_url import (
    kind,
    local_path,
    open_remote,
    open_store,
    read_version,
    split,
    split_step_suffix,
)
from shardckpt.storage.thread_pool import ThreadPool

_THREADS = 16  # requests at the same time on a remote store


def read_versions(url: str, names: Collection[str], *, lists: bool = True) -> dict[str, str]:
    """Return the version of each file of a source in a folder. Raises MissingFileError or StorageError.

    `lists` lists the folder first: one request for many files, where the client keeps what it listed.
    """
    read = partial(read_version, url, of_source=True)
    if local_path(url) is not None or len(names) < 2:
        return {name: read(name) for name in names}
    for folder in {name.rpartition("/")[0] for name in names} if lists else ():
        open_remote(url).list(folder)
    with ThreadPool(_THREADS) as pool:
        return dict(zip(names, pool.map(read, names), strict=True))


def read_source_versions(url: str, manifest: Manifest) -> dict[str, str]:
    """Return the version of each file of a checkpoint."""
    own = [name for name in manifest.files if name not in manifest.elsewhere]
    versions = read_versions(url, own) if kind(url) == "folder" else dict.fromkeys(own, "")
    others = {name: str(manifest.files[name]) for name in manifest.elsewhere if name in manifest.files}
    return {**others, **versions}


def digest_sources(versions: Mapping[str, str], paths: Iterable[str]) -> str:
    """Return a digest over a checkpoint's files, and over other files and folders that the work reads."""
    return _digest(versions, digest_paths(paths))


def digest_paths(paths: Iterable[str]) -> str:
    """Return a digest over files, and all files in folders; text that names neither counts as text."""
    rows: dict[str, str] = {}
    for path in paths:
        what, chosen = kind(path), StepRange(path)
        if what == "missing" and split_step_suffix(path) is not None:
            chosen = resolve_range(path)
            path, what = chosen.path, "folder"
        if what == "file":
            parent, name = split(path)
            rows[path] = read_version(parent, name, of_source=True)
        elif what == "folder":
            store = open_store(path)
            names = [name for name in files_below(store.list, "", path) if _is_chosen(name, chosen)]
            rows.update({f"{path}/{name}": version for name, version in read_versions(path, names).items()})
        else:
            rows[path] = ""
    return _digest(rows)


def _is_chosen(name: str, chosen: StepRange) -> bool:
    """Return True for a checkpoint's files; in a run, for files of the chosen steps."""
    folder = name.partition("/")[0]
    return chosen.is_all or (is_step_name(folder) and chosen.has_step(step_number(folder)))


def _digest(rows: Mapping[str, str], *more: str) -> str:
    text = "\n".join([*(f"{name}\0{version}" for name, version in sorted(rows.items())), *more])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
