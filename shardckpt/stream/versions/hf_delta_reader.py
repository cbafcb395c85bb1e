"""Reader of versions that slime, miles, ModelExpress and `export_versions` write: a full version and its changes.

The full version has one model's tensors in safetensors. Each later folder has, for each changed tensor, a
zstd frame: the XOR with all bytes of the version before, or new bytes with their positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shardckpt.dtypes import UNKNOWN
from shardckpt.errors import CheckpointError, ChecksumError, FormatError, IncompleteError, UnsupportedError
from shardckpt.manifest import dotted
from shardckpt.native.payload import HF_INDEX
from shardckpt.reader import Checksum, HashBlocks, Reader, Source
from shardckpt.readers.huggingface.index_files import read_index
from shardckpt.readers.huggingface.reader import open_source as open_files
from shardckpt.storage.resolve_url import kind, open_store, split
from shardckpt.storage.store import Store
from shardckpt.stream.format.anchor import read_anchor
from shardckpt.stream.format.held_boxes import HeldBox
from shardckpt.stream.versions.hf_delta_changes import ENCODINGS, ChangedFolder, locate_bytes
from shardckpt.stream.versions.hf_delta_checksums import find_hasher, hash_bytes
from shardckpt.stream.versions.made_file import MADE_FILE, MadeReader, group_tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["FullVersionReader", "HfDeltaReader", "open_version"]


class _StoredChecksum(NamedTuple):
    """A tensor's checksum."""

    algorithm: str
    value: str  # as text

    def matches(self, blocks: Iterable[memoryview]) -> bool:
        """Return True if bytes have this checksum; raises if its kind is unknown."""
        hasher = find_hasher(self.algorithm)
        assert hasher is not None, "others were left out"
        return hash_bytes(hasher, blocks) == self.value


class _ChangedTensors:
    """Makes the tensors of a version: from a full version, and the changes after it in order."""

    def __init__(self, url: str, base: Reader, folders: Sequence[ChangedFolder], first: str) -> None:
        self.url, self._base, self._folders = url, base, folders
        known = base.manifest
        self.ties = {dotted(name): dotted(kept) for name, kept in known.aliases.items()}
        self._tensors = {dotted(path): entry for path, entry in known.tensors.items() if path not in known.aliases}
        _require_weights(base)
        found = list_checksums(base, first)
        for folder in folders:
            _require_known(folder, self._tensors)
            found |= dict.fromkeys(dotted(path) for path in folder.reader.manifest.tensors)
            found |= list_checksums(folder.reader, folder.algorithm)
        self.checksums = {name: each for name, each in found.items() if each is not None}

    @property
    def store(self) -> Store:
        """Store of the last folder."""
        return (self._folders[-1].reader if self._folders else self._base).store

    @cached_property
    def groups(self) -> Sequence[tuple[HeldBox, ...]]:
        """All tensors in full, in groups to read together."""
        return group_tensors((name, each.dtype, each.shape) for name, each in self._tensors.items())

    def read(self, boxes: Sequence[HeldBox]) -> NDArray[np.uint8]:
        """Return a buffer with full tensors. Raises CheckpointError, StorageError."""
        buffer = np.empty(max((each.start + each.nbytes for each in boxes), default=0), np.uint8)
        read_anchor(self._base, boxes, buffer)
        for folder in self._folders:
            folder.read(boxes, buffer)
        return buffer

    def check(self, boxes: Sequence[HeldBox], buffer: NDArray[np.uint8]) -> None:
        """Require that tensors have their checksums. Raises ChecksumError."""
        for box in boxes:
            expected = self.checksums.get(box.name)
            if expected and not expected.matches([buffer[box.start : box.start + box.nbytes].data]):
                raise ChecksumError(
                    f"a tensor differs from its checksum: {box.name}",
                    where=self.url,
                    expected=expected.value,
                    fix="Take a later full version.",
                )


def list_checksums(reader: Reader, algorithm: str) -> dict[str, _StoredChecksum | None]:
    """Return the checksums in files of tensors, by name; nothing of a kind that cannot be computed here."""
    if find_hasher(algorithm) is None:
        return {}
    texts = reader.manifest.metadata
    names = (dotted(path) for path in reader.manifest.tensors)
    return {name: _StoredChecksum(algorithm, texts[name].lower()) for name in names if name in texts}


def _require_weights(base: Reader) -> None:
    """Require that a full version has tensors of one model, and all of its files."""
    missing = (*base.manifest.missing, *(name for name, size in base.manifest.files.items() if size < 0))
    if missing:
        raise IncompleteError("files of the full version are gone", where=base.store.url, found=", ".join(missing[:4]))
    other = next((path for path in base.manifest.tensors if len(path) != 1), None)
    if other is not None:
        raise CheckpointError(
            "the full version must have a model's tensors alone", where=base.store.url, found=dotted(other)
        )


def _require_known(folder: ChangedFolder, tensors: Mapping[str, object]) -> None:
    """Require that a folder is complete, and has changes of known tensors."""
    where = folder.reader.store.url
    for (name, *_), entry in folder.reader.manifest.tensors.items():
        if entry.dtype == UNKNOWN:
            raise IncompleteError("a file of changes is gone", where=where, found=entry.pieces[0].file)
        if name not in tensors:
            raise CheckpointError("a change is of a tensor that the full version lacks", where=where, found=name)
        if entry.dtype != "uint8" or len(entry.shape) != 1:
            raise FormatError("a change must be a row of bytes", where=where, found=f"{name}: {entry.dtype}")


class _Checked(Reader):
    """A reader with checksums of tensors.

    They are compared by `verify`, whatever reads the tensors otherwise.
    """

    @property
    def algorithms(self) -> Mapping[str, HashBlocks]:
        """Kinds of checksums in this dialect."""
        return {each: partial(_hash_number, each) for each in ("xxh3-128", "adler32", "blake3")}


def _hash_number(algorithm: str, blocks: Iterable[memoryview]) -> int:
    hasher = find_hasher(algorithm)
    assert hasher is not None, "others were left out"
    return int(hash_bytes(hasher, blocks), 16)


class HfDeltaReader(MadeReader, _Checked):
    """An open version with changes. Its tensors are checked against its checksums when they are read."""

    def __init__(self, made: _ChangedTensors, metadata: Mapping[str, str], warnings: tuple[str, ...]) -> None:
        self._checksums = made.checksums
        super().__init__(made, "hf-delta", made.ties, metadata, warnings=warnings)

    def checksums(self) -> Iterator[Checksum]:
        """Yield the tensors' checksums."""
        for start, box in self.iter_places():
            found = self._checksums.get(box.name)
            if found is not None:
                yield Checksum(MADE_FILE, start, box.nbytes, found.algorithm, _parse(found, box.name, self.store.url))


class FullVersionReader(_Checked):
    """An open full version with checksums, as ModelExpress writes it."""

    def __init__(self, files: Reader, algorithm: str) -> None:
        self._checksums = list_checksums(files, algorithm)
        super().__init__(files.store, files.manifest)

    def checksums(self) -> Iterator[Checksum]:
        """Yield the tensors' checksums."""
        for path, entry in self.manifest.tensors.items():
            found = self._checksums.get(dotted(path))
            if found is not None:
                yield Checksum(*locate_bytes(entry), found.algorithm, _parse(found, dotted(path), self.store.url))


def _parse(checksum: _StoredChecksum, name: str, where: str) -> int:
    try:
        return int(checksum.value, 16)
    except ValueError:
        raise FormatError(
            "a checksum must be hexadecimal", where=where, found=f"{name}: {checksum.value[:40]}"
        ) from None


def open_version(source: Source) -> Reader:
    """Open a version with changes, or a full one with checksums."""
    folders: list[ChangedFolder] = []
    seen: set[str] = set()
    now, metadata = source, _read_metadata(source)
    first = metadata
    while "delta_encoding" in metadata:
        version, base = _require_lineage(now.store.url, metadata)
        seen.add(version)
        folders.append(_open_changes(now, metadata))
        if base in seen:
            raise FormatError("the versions' bases are a cycle", where=now.url, found=f"{version} after {base}")
        now = _find_base(now.store.url, version, base)
        metadata = _read_metadata(now) if HF_INDEX in now.files else {}
        if metadata.get("version", base) != base:
            raise CheckpointError(
                "the base is another version", where=now.url, found=metadata["version"], expected=base
            )
    algorithm = metadata.get("checksum_format", "")
    if not folders:
        return FullVersionReader(open_files(source), algorithm)
    made = _ChangedTensors(source.store.url, open_files(now), folders[::-1], algorithm)
    shown = {"version": first["version"], "base_version": first["base_version"], "full_version": now.store.url}
    return HfDeltaReader(made, shown, tuple(_list_warnings(made, {algorithm, *(each.algorithm for each in folders)})))


def _read_metadata(source: Source) -> Mapping[str, str]:
    """Return the text in an index's metadata, verified."""
    if HF_INDEX not in source.files:
        raise IncompleteError(
            "the index of this version is missing: its writer has not ended",
            where=source.store.url,
            found=f"no {HF_INDEX}",
        )
    _, fields = read_index(source.store, HF_INDEX)
    found = {name: value for name, value in fields.items() if isinstance(value, str)}
    odd = next((name for name in _KEYS if name in fields and name not in found), None)
    if odd is not None:
        raise FormatError("the index's metadata must be text", where=f"{source.store.url}/{HF_INDEX}", found=odd)
    return found


_KEYS = ("version", "base_version", "delta_encoding", "compression_format", "checksum_format")


def _require_lineage(url: str, metadata: Mapping[str, str]) -> tuple[str, str]:
    """Return a version and its base; the folder must be named by the version."""
    version, base = metadata.get("version", ""), metadata.get("base_version", "")
    where = f"{url}/{HF_INDEX}"
    for name, value in (("version", version), ("base_version", base)):
        if not value or "/" in value or "\\" in value or "\0" in value or value in {".", ".."}:
            raise FormatError(f"the index must have a `{name}` that can name a folder", where=where, found=value[:40])
    if not url.rstrip("/").endswith(version):
        fix = f"Rename the folder to the name that its writer gave it, which ends with {version}."
        raise CheckpointError("the folder has another version than its name says", where=url, found=version, fix=fix)
    return version, base


def _open_changes(source: Source, metadata: Mapping[str, str]) -> ChangedFolder:
    encoding, codec = metadata["delta_encoding"], metadata.get("compression_format", "")
    if encoding not in ENCODINGS or codec != "zstd":
        raise UnsupportedError(
            "changes in an unknown encoding",
            where=source.url,
            found=f"{encoding}, {codec}"[:80],
            expected=f"{' or '.join(ENCODINGS)}, zstd",
        )
    return ChangedFolder(source.url, encoding, open_files(source), metadata.get("checksum_format", ""))


def _find_base(url: str, version: str, base: str) -> Source:
    """Return the folder of a version's base, next to it. Raises IncompleteError without it."""
    parent, name = split(url)
    place = f"{parent}/{name.removesuffix(version)}{base}"
    if kind(place) != "folder":
        raise IncompleteError(
            f"version {version} needs version {base}, which is not here",
            where=place,
            fix="If the base is the model that the server started with, copy or link its folder to this name.",
        )
    return Source(open_store(place))


def _list_warnings(made: _ChangedTensors, algorithms: set[str]) -> Iterator[str]:
    """Yield what is not compared."""
    unknown = sorted(each for each in algorithms if each and find_hasher(each) is None)
    for each in unknown:
        fix = "; install the package blake3 for it" if each == "blake3" else ""
        yield f"checksums of kind {each[:40]!r} are not compared{fix}"
    without = sum(box.name not in made.checksums for boxes in made.groups for box in boxes)
    if without and not unknown:
        yield f"{without} tensors have no checksum: no version since the full one has changed them"
