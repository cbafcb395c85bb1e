"""What every format offers: how it is recognized, and the reader that turns it into a manifest."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from shardckpt.boxes import Shape
from shardckpt.errors import TruncatedError, UsageError
from shardckpt.manifest import Manifest, ObjectEntry, Piece
from shardckpt.storage.store import Listed, Store, read_bytes

PathText = str | os.PathLike[str]
NamedBases = PathText | Sequence[PathText] | Mapping[str, PathText]
"""Folders of base steps that the caller names: the place of the one that is not beside the step. Or, for
several, the step's name of each to its place; `NAME=PATH` says that too, and `NAME` alone means that place."""


def require_bases(bases: object) -> None:
    """Check what a caller names as `base`. Raises UsageError if it is neither a place nor several."""
    path = (str, os.PathLike)
    places = bases.values() if isinstance(bases, Mapping) else [bases] if isinstance(bases, path) else bases
    if not isinstance(places, Collection) or not all(isinstance(place, path) for place in places):
        raise UsageError(
            "`base` must be a path or a URL, or a dict from what the checkpoint calls its bases to theirs",
            found=repr(bases),
        )


class Source:
    """What the user pointed at: a folder, or one file in it.

    Args:
        store: Rooted at the folder, or at the folder of the file.
        file: The file's name in `store`, or None for a folder.
        bases: Folders that the caller names of those that a step refers to.
    """

    def __init__(self, store: Store, file: str | None = None, bases: NamedBases = "") -> None:
        self.store = store
        self.file = file
        self.bases = bases
        self._heads: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        """As the user typed it."""
        return f"{self.store.url.rstrip('/')}/{self.file}" if self.file else self.store.url

    @cached_property
    def listing(self) -> dict[str, Listed]:
        """Entries directly in the folder, by name; only the file if a file was named."""
        if self.file is not None:
            return {self.file: Listed(self.file, self.store.size(self.file), False)}
        return {entry.name: entry for entry in self.store.list()}

    @property
    def files(self) -> list[str]:
        """Names of the files directly in the folder, sorted."""
        return sorted(name for name, entry in self.listing.items() if not entry.is_folder)

    @property
    def folders(self) -> list[str]:
        """Names of the folders directly in the folder, sorted."""
        return sorted(name for name, entry in self.listing.items() if entry.is_folder)

    def head(self, name: str, nbytes: int = 64) -> bytes:
        """Return the first bytes of a file, fewer where it is shorter; kept, so that each probe may ask."""
        known = self._heads.get(name)
        if known is None or len(known) < nbytes:
            entry = self.listing.get(name)
            size = entry.size if entry else self.store.size(name)
            known = self._heads[name] = read_bytes(self.store, name, 0, min(nbytes, size))
        return known[:nbytes]


class Evidence(IntEnum):
    """How sure a format is that a source is its own."""

    NONE = 0
    NAME = 1
    """File names alone: reading may yet fail, and then the checkpoint is at fault."""
    STRUCTURE = 2
    """Bytes that only this format has."""


class Checksum(NamedTuple):
    """A checksum that a format stores beside its bytes.

    Attributes:
        file: Name relative to the store.
        offset: First byte it covers.
        nbytes: Bytes it covers.
        algorithm: `crc32` or `xxh3-64`.
        value: As stored.
        label: How its format calls this range, for messages: `block 3, `; empty where it has no name.
    """

    file: str
    offset: int
    nbytes: int
    algorithm: str
    value: int
    label: str = ""


@dataclass(frozen=True, slots=True)
class ParamShapes:
    """Names and shapes of a model's parameters, from outside of the checkpoint.

    Attributes:
        shapes: Name to shape, in the order of the model where that is known.
        where: Their source, for messages.
        aliases: Further names of a parameter to its first.
        units: Flat parameters to their members in order, if known; else names decide.
        ids: Ids of an optimizer to names, if known.
        is_ordered: Whether `shapes` is in the order of the model.
        others: The same of further models; flat parameters are of the first one that fits them.
    """

    shapes: Mapping[str, Shape]
    where: str
    aliases: Mapping[str, str] = field(default_factory=dict)
    units: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ids: Mapping[int, str] = field(default_factory=dict)
    is_ordered: bool = True
    others: Sequence[ParamShapes] = ()


class Reader:
    """An open checkpoint: its manifest, and what is found out on demand.

    Args:
        store: Store of its files; every file name in the manifest is relative to it.
        manifest: What it holds.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest

    def resolve(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces with every `Lazy` layout replaced by the place of the elements, in the same order.

        All containers are opened in one batch, so that a remote store can merge the reads.

        Raises:
            CheckpointError: A container is damaged, or does not hold what the manifest says.
        """
        return list(pieces)

    def load_object(self, entry: ObjectEntry) -> object:
        """Return an object's value, read without executing anything.

        Raises:
            CheckpointError: It is damaged or refused.
        """
        return entry.value

    @property
    def is_flat(self) -> bool:
        """Whether there are flat parameters in it."""
        return False

    @property
    def needs_param_shapes(self) -> bool:
        """Whether there are flat parameters whose members are unknown."""
        return False

    def with_param_shapes(self, known: ParamShapes) -> Reader:  # noqa: ARG002  (most files store shapes)
        """Return a reader that knows the members of flat parameters.

        Raises:
            UsageError: The shapes do not fit what the files hold.
        """
        return self

    @property
    def raw_store(self) -> Store:
        """The files without checks; `store` checks them if the format stores hashes."""
        return self.store

    @property
    def unverified_store(self) -> Store:
        """The files for those who want no checks: only what nothing else vouches for is checked."""
        return self.raw_store

    def checksums(self) -> Iterator[Checksum]:
        """Yield the checksums that the format stores, in file order; none where it stores none."""
        return iter(())


@dataclass(frozen=True, slots=True)
class Format:
    """One format that can be read.

    Attributes:
        name: Short name, as in `Manifest.format`.
        title: What people call it.
        looks_for: Marks of a source, one phrase for messages.
        recognize: Returns how sure the format is; must not raise for foreign or hostile content.
        open: Opens a recognized source.
        names: Pattern of names of which a folder of this format has at least one; None if any folder may be.
    """

    name: str
    title: str
    looks_for: str
    recognize: Callable[[Source], Evidence]
    open: Callable[[Source], Reader]
    names: re.Pattern[str] | None = field(default=None, compare=False)

    def may_recognize(self, source: Source) -> bool:
        """Return True if the names in a folder allow this format; every file may be of any."""
        if source.file is not None:
            return True
        return self.names is None or any(map(self.names.fullmatch, source.listing))


def require_size(store: Store, name: str, size: int, needed: int) -> None:
    """Check that a file is long enough for what is about to be read from it.

    Raises:
        TruncatedError: It is not.
    """
    if size < needed:
        raise TruncatedError(
            "the file ends early",
            where=f"{store.url}/{name}",
            found=f"{size} bytes",
            expected=f"at least {needed}",
            fix="Copy the file again, or restore it from the training run.",
        )
