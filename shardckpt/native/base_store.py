"""Find and open the base folders of a step, and join them with it to one store."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from shardckpt.errors import CheckpointError, MissingFileError, ShardckptError, UsageError
from shardckpt.native.commit import COMMIT, read_commit
from shardckpt.native.records import Base, may_open, resolve_base, sibling
from shardckpt.reader import NamedBases, PathText
from shardckpt.storage.resolve_url import open_store
from shardckpt.storage.store import Capabilities, Read, Store, WrappedStore


class FilePlace(NamedTuple):
    """A file in a base folder."""

    store: Store  # store whose root is that folder
    name: str  # name in that store


class FoundBases(NamedTuple):
    """A step's existing bases."""

    places: Mapping[str, FilePlace]  # file name in the step's reader to its base folder and its name there
    # File name in the step's reader to the URL of its folder, whether the file exists or not.
    folders: Mapping[str, str]
    sizes: Mapping[str, int]  # sizes of the existing files, in bytes
    closed: Mapping[str, ShardckptError]  # folder that was not opened, to the error for reading its files
    changed: frozenset[str]  # names of files in folders that may have changed since the step was saved
    notes: tuple[str, ...]  # oddities, one sentence each


def find_bases(
    step: str, wanted: Mapping[str, Mapping[str, int]], named: NamedBases = "", known: Sequence[Base] = ()
) -> FoundBases:
    """Find a step's base folders; an unreadable folder is an error only when one of its files is read."""
    given = _map_named(step, list(wanted), named)
    recorded = {base.url: base for base in known}
    places: dict[str, FilePlace] = {}
    folders: dict[str, str] = {}
    sizes: dict[str, int] = {}
    closed: dict[str, ShardckptError] = {}
    changed: set[str] = set()
    notes: list[str] = []
    for url, files in wanted.items():
        where = given.get(url) or resolve_base(step, url)
        names = {f"{url}/{name}": name for name in files}
        folders.update(dict.fromkeys(names, where))
        if url not in given and not may_open(step, where):
            closed[where] = _unnamed_error(step, where)
            continue
        try:
            store = open_store(where)
            there = {entry.name: entry.size for entry in store.list() if not entry.is_folder}
        except ShardckptError as error:
            closed[where] = error
            continue
        places.update((place, FilePlace(store, name)) for place, name in names.items())
        sizes.update((place, there[name]) for place, name in names.items() if name in there)
        odd = _describe_change(store, there, recorded.get(url, Base(url)))
        if odd is not None:
            changed.update(names)
            notes += [odd] if odd else []
    notes += [f"a base was not opened: {error}" for error in closed.values()]
    return FoundBases(places, folders, sizes, closed, frozenset(changed), tuple(notes))


def _unnamed_error(step: str, folder: str) -> UsageError:
    return UsageError(
        "the checkpoint refers to a folder on another store than its own, which the caller has not named",
        where=step,
        found=folder,
        fix="If you trust it, name its place, or a copy's: base=PLACE (--base PLACE).",
    )


def _describe_change(store: Store, sizes: Mapping[str, int], base: Base) -> str | None:
    """Describe how a base differs from the folder that the step was saved against; None if it is the same."""
    # Empty for a folder without hashes, for a step that is kept only for its referenced files, and for a step that
    # another save replaced: the latter two keep the files.
    if not base.sha256 or COMMIT not in sizes:
        return ""
    try:
        commit = read_commit(store, sizes)
    except MissingFileError:  # another process has removed the step meanwhile, and keeps the files
        return ""
    except CheckpointError as error:
        return f"the base is damaged: {error}"
    if commit.manifest_sha256 == base.sha256:
        return None
    return f"the base {store.url} was changed since this was saved" if commit.save == base.save else ""


def select_bases(urls: Collection[str], others: Collection[str], named: NamedBases) -> NamedBases:
    """Return the caller's bases that belong to one of two checkpoints."""
    if isinstance(named, Mapping):
        return {url: place for url, place in named.items() if url in urls}
    has_elsewhere = any(sibling(url) is None for url in urls)
    return [text for text in _texts(named) if _find_url(text, urls) or (has_elsewhere and not _find_url(text, others))]


def _texts(named: PathText | Sequence[PathText]) -> list[str]:
    texts = [named] if isinstance(named, (str, os.PathLike)) else named
    return [os.fspath(text) for text in texts if text]


def _find_url(text: str, urls: Iterable[str]) -> str:
    """Return the reference that a text names; empty if it is only a path or URL."""
    return next((url for url in urls if f"{text}=".startswith(f"{url}=")), "")


def _map_named(step: str, urls: Sequence[str], named: NamedBases) -> Mapping[str, str]:
    """Map each base that the caller names to its folder."""
    if isinstance(named, Mapping):
        unknown = [url for url in named if url not in urls]
        if unknown:
            raise UsageError("the step has no such base", where=step, found=unknown[0], expected=", ".join(urls))
        return {url: os.fspath(place) for url, place in named.items()}
    found: dict[str, str] = {}
    for text in _texts(named):
        url = _find_url(text, urls)
        place = text[len(url) + 1 :] if url else text
        url = url or _only(step, [each for each in urls if each not in found], text)
        found[url] = place or resolve_base(step, url)
    return found


def _only(step: str, urls: Sequence[str], place: str) -> str:
    """Return the only reference for which a path or URL can be meant."""
    elsewhere = [url for url in urls if sibling(url) is None] or urls
    if not elsewhere:
        raise UsageError("the step has no base that this could be", where=step, found=place)
    if len(elsewhere) > 1:
        raise UsageError(
            "`base` could stand for several",
            where=step,
            found=", ".join(urls),
            fix="Pass a dict from the step's name of each base to its place (--base NAME=PATH for each).",
        )
    return elsewhere[0]


class BasedStore(WrappedStore):
    """A step's folder, and files from its bases under unique names, as one store."""

    def __init__(self, store: Store, places: Mapping[str, FilePlace]) -> None:
        super().__init__(store)
        self._places = places

    @property
    def capabilities(self) -> Capabilities:
        """The step store's capabilities; it is local if all folders are."""
        stores = {id(place.store): place.store for place in self._places.values()}
        own = self._store.capabilities
        return Capabilities(own.renames, own.is_local and all(store.capabilities.is_local for store in stores.values()))

    def size(self, name: str) -> int:
        """Return a file's size in bytes."""
        place = self._places.get(name)
        return self._store.size(name) if place is None else place.store.size(place.name)

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer, with one batch per folder. Raises the stores' errors."""
        batches: dict[int, tuple[Store, list[Read]]] = {}
        for read in reads:
            place = self._places.get(read.name)
            store = self._store if place is None else place.store
            name = read.name if place is None else place.name
            batches.setdefault(id(store), (store, []))[1].append(Read(name, read.offset, read.buffer))
        for store, batch in batches.values():
            store.read(batch)
