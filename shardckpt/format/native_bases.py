"""Bases of a step: folders beside it or elsewhere in which some of its bytes lie, and one store over all of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardckpt.errors import ShardckptError, UnsafeError, UsageError
from shardckpt.storage.open_store import local_path, open_store
from shardckpt.storage.store import Listed, Read, Store, Traits, Writer

FEATURE = "bases"
"""What `COMMIT` asks of a reader where files of the step lie in other folders."""

_SIBLING = re.compile(r"\.\./([^/\0]+)")
_ABSOLUTE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.\-]*(://|::)")
_LONGEST = 4096


class Base(NamedTuple):
    """A folder that a step refers to.

    Attributes:
        url: `../NAME` for one beside the step, so that both can be moved together; else absolute.
        save: Id of the save that wrote it; empty where it is a checkpoint of another format.
        sha256: Of its manifest; empty as `save` is.
    """

    url: str
    save: str = ""
    sha256: str = ""


def is_base_url(url: object) -> bool:
    """Tell whether a step may refer to a folder in these words."""
    if not isinstance(url, str) or not url or len(url) > _LONGEST or "\0" in url:
        return False
    return sibling(url) is not None or _ABSOLUTE.match(url) is not None


def sibling(url: str) -> str | None:
    """Return the name of a folder beside the step; None for one that lies elsewhere."""
    match = _SIBLING.fullmatch(url)
    return match[1] if match and match[1] not in {".", ".."} else None


def _parent(url: str) -> tuple[str, str]:
    """Return the folder that a folder lies in, links resolved, and its name there."""
    path = local_path(url)
    if path is not None:
        return os.path.split(os.path.realpath(path))
    parent, _, name = url.rstrip("/").rpartition("/")
    return parent, name


def resolved(step: str, url: str) -> str:
    """Return where a base lies.

    Args:
        step: Where the step lies.
        url: As the step refers to it.

    Raises:
        UnsafeError: It is no such reference.
    """
    if not is_base_url(url):
        raise UnsafeError("this is no reference to a base", where=step, found=url, expected="../NAME, or absolute")
    name = sibling(url)
    return url if name is None else f"{_parent(step)[0].rstrip('/')}/{name}"


def reference(step: str, base: str) -> str:
    """Return how a step refers to a base.

    Args:
        step: Where the step will lie.
        base: Where the base lies.

    Raises:
        UsageError: They are the same folder.
    """
    here, there = _parent(step), _parent(base)
    if here == there:
        raise UsageError("a step cannot be its own base", where=step, fix="Save to another folder.")
    if here[0] == there[0] and there[1]:
        return f"../{there[1]}"
    return base if local_path(base) is None else os.path.join(*there)


def is_same_folder(one: str, other: str) -> bool:
    """Tell whether two URLs name one folder."""
    return bool(one and other) and _parent(one) == _parent(other)


class Place(NamedTuple):
    """A file in a folder that a step refers to.

    Attributes:
        store: Rooted at that folder.
        name: There.
    """

    store: Store
    name: str


class Found(NamedTuple):
    """What of a step's bases is there.

    Attributes:
        places: Where each file lies, by the name that the step's reader has for it.
        folders: In which each lies, or would.
        sizes: Of those that are there, in bytes.
        notes: What is odd, one sentence each.
    """

    places: Mapping[str, Place]
    folders: Mapping[str, str]
    sizes: Mapping[str, int]
    notes: tuple[str, ...]


def find_bases(step: str, wanted: Mapping[str, Mapping[str, int]], moved: str | Mapping[str, str] = "") -> Found:
    """Look into the folders that a step refers to; one that is not there is no error until something in it is wanted.

    Args:
        step: Where the step lies.
        wanted: Base, as the step refers to it, to its files.
        moved: Where bases lie now: by what the step calls them, or one place for the one that lies elsewhere.

    Raises:
        UnsafeError: A reference is none.
        UsageError: It is not clear which base was moved.
    """
    now = _moved(step, list(wanted), moved)
    places: dict[str, Place] = {}
    folders: dict[str, str] = {}
    sizes: dict[str, int] = {}
    notes = []
    for url, files in wanted.items():
        where = now.get(url) or resolved(step, url)
        folders.update((f"{url}/{name}", where) for name in files)
        try:
            store = open_store(where)
            there = {entry.name: entry.size for entry in store.list() if not entry.is_folder}
        except ShardckptError as error:
            notes.append(f"the base cannot be looked at: {error}")
            continue
        for name in files:
            places[f"{url}/{name}"] = Place(store, name)
            if name in there:
                sizes[f"{url}/{name}"] = there[name]
    return Found(places, folders, sizes, tuple(notes))


def _moved(step: str, urls: Sequence[str], moved: str | Mapping[str, str]) -> Mapping[str, str]:
    if isinstance(moved, str):
        if not moved:
            return {}
        elsewhere = [url for url in urls if sibling(url) is None] or urls
        if len(elsewhere) != 1:
            raise UsageError(
                "`base` could stand for any of several" if elsewhere else "this step has no base",
                where=step,
                found=", ".join(urls),
                fix="Pass a dict from what the step calls each base to where it lies." if elsewhere else "",
            )
        return {elsewhere[0]: moved}
    unknown = [url for url in moved if url not in urls]
    if unknown:
        raise UsageError("the step has no such base", where=step, found=unknown[0], expected=", ".join(urls))
    return moved


class BasedStore:
    """A step's folder, and files of its bases under names of their own, as one store.

    Args:
        store: Rooted at the step.
        places: Where files of bases lie, by name.
    """

    def __init__(self, store: Store, places: Mapping[str, Place]) -> None:
        self._store, self._places = store, places

    @property
    def url(self) -> str:
        """The root, as a person would type it."""
        return self._store.url

    @property
    def traits(self) -> Traits:
        """Those of the step's store; it is local where all folders are."""
        stores = {id(place.store): place.store for place in self._places.values()}
        own = self._store.traits
        return Traits(own.renames, own.is_local and all(store.traits.is_local for store in stores.values()))

    def list(self, folder: str = "") -> list[Listed]:
        """As the step's store."""
        return self._store.list(folder)

    def size(self, name: str) -> int:
        """Return a file's size in bytes. Raises MissingFileError, UnsafeError or StorageError."""
        place = self._places.get(name)
        return self._store.size(name) if place is None else place.store.size(place.name)

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer, a batch for each folder. Raises as the stores do."""
        batches: dict[int, tuple[Store, list[Read]]] = {}
        for read in reads:
            place = self._places.get(read.name)
            store = self._store if place is None else place.store
            name = read.name if place is None else place.name
            batches.setdefault(id(store), (store, []))[1].append(Read(name, read.offset, read.buffer))
        for store, batch in batches.values():
            store.read(batch)

    def create(self, name: str) -> Writer:
        """As the step's store."""
        return self._store.create(name)

    def delete(self, name: str) -> None:
        """As the step's store."""
        self._store.delete(name)

    def delete_folder(self, folder: str) -> None:
        """As the step's store."""
        self._store.delete_folder(folder)

    def changed_at(self, folder: str) -> float | None:
        """As the step's store."""
        return self._store.changed_at(folder)

    def rename(self, source: str, target: str) -> None:
        """As the step's store."""
        self._store.rename(source, target)
