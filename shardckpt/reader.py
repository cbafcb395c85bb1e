"""Interface of formats: recognize a source, and read it as a manifest."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from shardckpt.boxes import Box, Shape
from shardckpt.encodings.value_stats import ValueStats
from shardckpt.errors import TruncatedError, UsageError
from shardckpt.manifest import Manifest, ObjectEntry, Path, Piece
from shardckpt.storage.store import Listed, Store, read_bytes

PathText = str | os.PathLike[str]

NESTED_STEP = "shardckpt"  # name of the step that `shardckpt.integrations.accelerate` writes into a folder
# Base folders that the caller names: the path or URL of the only base that is not next to the step; or, for several,
# the step's reference to each, to its path or URL. `NAME=PATH` is the same as text, `NAME` alone is a path or URL.
NamedBases = PathText | Sequence[PathText] | Mapping[str, PathText]


def require_bases(bases: object) -> None:
    """Check an argument `base`."""
    path = (str, os.PathLike)
    places = bases.values() if isinstance(bases, Mapping) else [bases] if isinstance(bases, path) else bases
    if not isinstance(places, Collection) or not all(isinstance(place, path) for place in places):
        raise UsageError(
            "`base` must be a path or a URL, or a dict from what the checkpoint calls its bases to theirs",
            found=repr(bases),
        )


class Source:
    """A folder, or one file in it, that the user named.

    Args:
        store: Store whose root is the folder, or the folder of the file.
        file: Name of the file in `store`; None for a folder.
        bases: Base folders that the caller names.
    """

    def __init__(self, store: Store, file: str | None = None, bases: NamedBases = "") -> None:
        self.store = store
        self.file = file
        self.bases = bases
        self._heads: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        """Path or URL, as the user typed it."""
        return f"{self.store.url.rstrip('/')}/{self.file}" if self.file else self.store.url

    @cached_property
    def listing(self) -> dict[str, Listed]:
        """Entries directly in the folder, by name; only the file if the source is a file."""
        if self.file is not None:
            return {self.file: Listed(self.file, self.store.size(self.file), False)}
        return {entry.name: entry for entry in self.store.list()}

    @property
    def files(self) -> list[str]:
        """Names of files directly in the folder, sorted."""
        return sorted(name for name, entry in self.listing.items() if not entry.is_folder)

    @property
    def folders(self) -> list[str]:
        """Names of folders directly in the folder, sorted."""
        return sorted(name for name, entry in self.listing.items() if entry.is_folder)

    def head(self, name: str, nbytes: int = 64) -> bytes:
        """Return a file's first bytes, fewer if it is shorter; cached for all formats."""
        known = self._heads.get(name)
        if known is None or len(known) < nbytes:
            entry = self.listing.get(name)
            size = entry.size if entry else self.store.size(name)
            known = self._heads[name] = read_bytes(self.store, name, 0, min(nbytes, size))
        return known[:nbytes]


class Evidence(IntEnum):
    """Confidence that a format recognizes a source."""

    NONE = 0
    NAME = 1
    """Based on file names: if reading fails later, the checkpoint is damaged."""
    STRUCTURE = 2
    """Based on bytes that only this format has."""


XXH3 = "xxh3-64"
XXH3_OF_BLOCKS = "xxh3-64 of the hashes of blocks of 128 KiB"


HashBlocks = Callable[[Iterable[memoryview]], int]


class Checksum(NamedTuple):
    """A checksum that a format stores."""

    file: str  # file name relative to the store
    offset: int  # offset of the first covered byte
    nbytes: int  # number of covered bytes
    # `crc32`, `XXH3`, `XXH3_OF_BLOCKS`, or one of `Reader.algorithms`.
    algorithm: str
    value: int
    label: str = ""  # label of the range in messages, such as `block 3, `; empty if it has none


@dataclass(frozen=True, slots=True)
class ParamShapes:
    """A model's parameter names and shapes, from outside the checkpoint."""

    shapes: Mapping[str, Shape]  # name to shape, in the order of the model if that is known
    where: str  # source of the shapes, for messages
    aliases: Mapping[str, str] = field(default_factory=dict)  # further names of a parameter to its first name
    # Flat parameter to its members in order, if known; otherwise names decide.
    units: Mapping[str, Sequence[str]] = field(default_factory=dict)
    ids: Mapping[int, str] = field(default_factory=dict)  # ids of an optimizer to names, if known
    is_ordered: bool = True  # whether `shapes` is in the order of the model
    # Shapes of further models; the first model that matches a flat parameter is used.
    others: Sequence[ParamShapes] = ()


class Reader:
    """An open checkpoint: its manifest, and methods that read further data on demand.

    Args:
        store: Store of the files; every file name in the manifest is relative to it.
        manifest: Manifest of the checkpoint.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.store = store
        self.manifest = manifest

    def resolve(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces in order, with every `Lazy` layout resolved.

        All containers are opened in one batch, so that a remote store can merge the reads.

        Raises:
            CheckpointError: A container is damaged, or contradicts the manifest.
        """
        return list(pieces)

    def load_object(self, entry: ObjectEntry) -> object:
        """Return an object's value without executing code.

        Raises:
            CheckpointError: The object is damaged or rejected.
        """
        return entry.value

    @property
    def is_flat(self) -> bool:
        """Whether the checkpoint contains flat parameters."""
        return False

    @property
    def needs_param_shapes(self) -> bool:
        """Whether the checkpoint contains flat parameters whose members are unknown."""
        return False

    def with_param_shapes(self, known: ParamShapes) -> Reader:  # noqa: ARG002  (most files store shapes)
        """Return a reader with the given members of flat parameters.

        Raises:
            UsageError: The shapes do not match the stored flat parameters.
        """
        return self

    @property
    def raw_store(self) -> Store:
        """The files without checks of hashes.

        `store` checks them if the format stores hashes.
        """
        return self.store

    @property
    def unverified_store(self) -> Store:
        """The files with as few checks as possible.

        Data that nothing else guarantees is still checked.
        """
        return self.raw_store

    def piece_stats(self, path: Path) -> Mapping[Box, ValueStats]:  # noqa: ARG002  (as of `value_stats`)
        """Return the stored statistics of each piece of a tensor; empty without them."""
        return {}

    def value_stats(self, path: Path) -> ValueStats | None:  # noqa: ARG002  (readers of other formats have none)
        """Return the statistics that the save stored for a tensor; None without them."""
        return None

    @property
    def model_files(self) -> Mapping[str, int]:
        """Sizes in bytes of config and tokenizer files that the checkpoint stores, by their names in `model_store`."""
        return {}

    @property
    def model_store(self) -> Store:
        """Store of the files in `model_files`."""
        return self.store

    @property
    def saved_sizes(self) -> Mapping[str, int]:
        """Sizes in bytes that the checkpoint says its files have, by name; empty if it stores none."""
        return {}

    @property
    def unverified_files(self) -> tuple[str, ...]:
        """Files that were read to open the checkpoint, are not in the manifest, and have no stored checksum."""
        return ()

    def checksums(self) -> Iterator[Checksum]:
        """Yield the stored checksums in file order; nothing if the format stores none."""
        return iter(())

    @property
    def algorithms(self) -> Mapping[str, HashBlocks]:
        """Functions for the checksums of this format alone, by name; each gets the covered bytes in parts."""
        return {}


@dataclass(frozen=True, slots=True)
class Format:
    """A format that can be read.

    Attributes:
        name: Short name, as in `Manifest.format`.
        title: Common name, for messages.
        looks_for: Phrase with the files by which a source is recognized, for messages.
        recognize: Returns the confidence for a source; must not raise for foreign or hostile content.
        open: Opens a recognized source.
        names: Pattern that matches at least one file name of each folder of this format; None if names may be any.
    """

    name: str
    title: str
    looks_for: str
    recognize: Callable[[Source], Evidence]
    open: Callable[[Source], Reader]
    names: re.Pattern[str] | None = field(default=None, compare=False)

    def may_recognize(self, source: Source) -> bool:
        """Return True if the names in a folder allow this format; always True for a file."""
        if source.file is not None:
            return True
        return self.names is None or any(map(self.names.fullmatch, source.listing))


def missing_shapes_error(reader: Reader, fix: str) -> UsageError:
    """Return the error for flat parameters with unknown members."""
    what = "these are FSDP1's flat parameters, and no file has their members' shapes"
    return UsageError(what, where=reader.store.url, fix=fix)


def require_size(store: Store, name: str, size: int, needed: int) -> None:
    """Require that a file is long enough for a planned read."""
    if size < needed:
        raise TruncatedError.from_size(f"{store.url}/{name}", size, needed)
