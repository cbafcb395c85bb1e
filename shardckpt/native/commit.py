"""`COMMIT`, which makes a native step exist: write, read, check and replace it.

It contains a line of JSON and a line with the first line's SHA-256. The JSON contains the manifest's name and hash, and
the names of files that a later save may replace.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

from shardckpt.encodings.budget import require_small
from shardckpt.encodings.typed_json import OMITTED, JsonForm, dump, load, must_be
from shardckpt.errors import (
    CheckpointError,
    ChecksumError,
    FormatError,
    IncompleteError,
    MissingFileError,
    TargetExistsError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)
from shardckpt.native.manifest_json import ManifestContents, decode_manifest
from shardckpt.native.payload import HF_INDEX, VERSION
from shardckpt.native.records import (
    FEATURE,
    NEWER,
    BaseUrl,
    Count,
    FileName,
    FileRecord,
    SaveId,
    Sha256,
    Version,
    group_files_by_base,
)
from shardckpt.plan.naming.model_files import MODEL_FILE
from shardckpt.storage.replaceable import FolderKind
from shardckpt.storage.store import Store, SubfolderStore, as_copied, read_bytes

COMMIT = "COMMIT"
MANIFEST_SUFFIX = ".manifest.json"
# Names of files that only saves write.
WRITTEN = re.compile(
    rf"[0-9a-z]{{15}}(-[0-9]{{5,}}-[0-9]{{2,}}\.safetensors|{re.escape(MANIFEST_SUFFIX)}|\.(?P<own>{MODEL_FILE.pattern}))"
)

# Keys in a manifest's `about` for the fields `branch` and `mark` of `COMMIT`.
BRANCH, MARK = "run.branch", "run.mark"
_ID = re.compile("[0-9a-f]{1,32}")
_MARK = re.compile(rf"({_ID.pattern})\.({_ID.pattern})\.([0-9]{{1,9}})", re.ASCII)
FEATURES: frozenset[str] = frozenset({FEATURE})  # features that this reader supports

MAX_COMMIT_BYTES = 1 << 26
MAX_MANIFEST_BYTES = 1 << 29
MAX_BASES = 4096  # maximum base folders of a step, each of which is looked up when the step is opened


def _read_feature(value: object) -> str:
    if not isinstance(value, str):
        raise must_be("text", value)
    if value not in FEATURES:
        raise UnsupportedError(f"this step needs the feature {value!r}, which this release does not know", fix=NEWER)
    return value


_REPAIR = "Restore the step from another copy, or rebuild its marks with `shardckpt repair`."
_RESTORE = "Load the step before it, restore this one from another copy, or rebuild its marks with `shardckpt repair`."


class SaveMark(NamedTuple):
    """Where a save belongs in its run; the copies that a `Checkpointer` makes at once have the same mark."""

    run: Annotated[str, _ID]  # id of the run, which its record has too
    start: Annotated[str, _ID]  # id of the process start that saved
    sequence: Count  # number of the save in that start

    def encode(self) -> str:
        """Return the mark as text, for a manifest's `about`."""
        return f"{self.run}.{self.start}.{self.sequence}"


class ManifestFile(NamedTuple):
    """The manifest as `COMMIT` names it."""

    name: FileName
    nbytes: Count
    sha256: Sha256


@dataclass(frozen=True, slots=True)
class Commit:
    """Content of `COMMIT`, in the JSON's order."""

    format: Literal["shardckpt"] = field(default="shardckpt", kw_only=True)
    version: Version = field(default=VERSION, kw_only=True)
    features: tuple[Annotated[str, JsonForm(_read_feature)], ...]  # features that a reader must support
    save: SaveId
    stored: Annotated[ManifestFile, "manifest"]
    files: Mapping[FileName, Count]  # every other file's name to its size in bytes
    # Reference to each base folder, to the names and sizes of the files there.
    bases: Annotated[Mapping[BaseUrl, Mapping[FileName, Count]], OMITTED] = field(default_factory=dict)
    # A step in a later branch is newer, whatever its number: the run had gone back, or started again with tiers.
    branch: Annotated[Count, OMITTED] = 0
    mark: Annotated[SaveMark | None, OMITTED] = None

    @property
    def manifest(self) -> str:
        """File name of the manifest."""
        return self.stored.name

    @property
    def manifest_bytes(self) -> int:
        """Size of the manifest in bytes."""
        return self.stored.nbytes

    @property
    def manifest_sha256(self) -> str:
        """SHA-256 of the manifest, in hexadecimal digits."""
        return self.stored.sha256


def manifest_name(save: str) -> str:
    """Return the file name for a save's manifest."""
    return save + MANIFEST_SUFFIX


def name_model_file(save: str, name: str) -> str:
    """Return a model file's name in a step."""
    # A folder may have files of several saves: one replaces another, or later steps refer to files of a former one.
    return f"{save}.{name}"


def find_model_files(files: Iterable[FileRecord]) -> dict[str, FileRecord]:
    """Return a step's model files by their names for the model."""
    named = ((_read_model_file_name(file.name), file) for file in files)
    return {name: file for name, file in named if name}


def is_model_file_name(name: str) -> bool:
    """Return True if a file in a step has a model file's name."""
    return bool(_read_model_file_name(name))


def _read_model_file_name(stored: str) -> str:
    match = WRITTEN.fullmatch(stored)
    return "" if match is None else match["own"] or ""


def is_of_save(name: str, save: str) -> bool:
    """Return True if a file's name is a save's manifest or payload file."""
    return name.startswith((f"{save}.", f"{save}-"))


def read_branch(about: Mapping[str, str]) -> int:
    """Return a step's branch in its run, from the manifest's `about`."""
    text = about.get(BRANCH, "")
    return int(text) if re.fullmatch("[0-9]{1,18}", text, re.ASCII) else 0


def read_save_mark(about: Mapping[str, str]) -> SaveMark | None:
    """Return a step's mark, from the manifest's `about`; None without one."""
    match = _MARK.fullmatch(about.get(MARK, ""))
    return None if match is None else SaveMark(match[1], match[2], int(match[3]))


def encode_commit(
    save: str, manifest: bytes, files: Iterable[FileRecord], about: Mapping[str, str] = MappingProxyType({})
) -> bytes:
    """Return the bytes for `COMMIT`."""
    files = list(files)
    bases = group_files_by_base(files)
    stored = ManifestFile(manifest_name(save), len(manifest), hashlib.sha256(manifest).hexdigest())
    sizes = {f.name: f.nbytes for f in files if not f.base}
    place = read_branch(about), read_save_mark(about)
    line = dump(Commit((FEATURE,) if bases else (), save, stored, sizes, bases, *place)) + b"\n"
    return line + hashlib.sha256(line).hexdigest().encode("ascii") + b"\n"


def decode_commit(data: bytes, *, where: object = "") -> Commit:
    """Parse `COMMIT` and check every field."""
    end = data.find(b"\n") + 1
    stored = data[end:]
    if not end or len(stored) < 65:
        raise TruncatedError("the commit mark ends early", where=where, found=f"{len(data)} bytes", fix=_REPAIR)
    expected = hashlib.sha256(data[:end]).hexdigest()
    if stored != expected.encode("ascii") + b"\n":
        raise ChecksumError(
            "the commit mark does not match its own digest",
            where=where,
            found=expected,
            expected=stored[:80].decode("ascii", "replace").strip(),
            fix=_REPAIR,
        )
    commit = load(Commit, data[: end - 1], where=str(where), is_open=True)
    require_small("the manifest", commit.manifest_bytes, MAX_MANIFEST_BYTES, where)
    if len(commit.bases) > MAX_BASES:
        raise UnsafeError("too many bases", where=where, found=len(commit.bases), expected=MAX_BASES)
    if bool(commit.bases) != (FEATURE in commit.features):
        raise FormatError("the commit mark's features do not fit its bases", where=where)
    return commit


def read_mark(store: Store, sizes: Mapping[str, int]) -> bytes:
    """Return the bytes in `COMMIT`."""
    if COMMIT not in sizes:
        raise IncompleteError(
            "this step was never committed",
            where=store.url,
            found=f"{len(sizes)} files",
            expected=f"a file {COMMIT}",
            fix="The save was interrupted: load the step before it, or try `shardckpt repair`.",
        )
    require_small("the commit mark", sizes[COMMIT], MAX_COMMIT_BYTES, f"{store.url}/{COMMIT}")
    return read_bytes(store, COMMIT, 0, sizes[COMMIT])


def read_commit(store: Store, sizes: Mapping[str, int]) -> Commit:
    """Read and check `COMMIT`, from the first copy that is not damaged."""
    while True:
        data = read_mark(store, sizes)
        try:
            return decode_commit(data, where=f"{store.url}/{COMMIT}")
        except (ChecksumError, TruncatedError):
            copied = as_copied(store)
            if copied is None or not copied.reject(COMMIT, 0, len(data)):
                raise


def find_save(store: Store, step: str) -> str | None:
    """Return the id of the save that wrote a step, even if a store has only a part; None without a valid `COMMIT`."""
    inside = SubfolderStore(store, step)
    try:
        return read_commit(inside, {entry.name: entry.size for entry in inside.list()}).save
    except (CheckpointError, MissingFileError):
        return None


def read_contents(store: Store, sizes: Mapping[str, int], commit: Commit) -> ManifestContents:
    """Read the manifest that `COMMIT` names, and compare it with the hash there."""
    where = f"{store.url}/{commit.manifest}"
    if commit.manifest not in sizes:
        raise IncompleteError("the step's manifest is not there", where=where, fix=_RESTORE)
    if sizes[commit.manifest] != commit.manifest_bytes:
        raise TruncatedError(
            "the manifest has another size than was committed",
            where=where,
            found=f"{sizes[commit.manifest]} bytes",
            expected=commit.manifest_bytes,
            fix=_RESTORE,
        )
    contents = decode_manifest(_read_manifest(store, commit), where=where)
    listed = {file.name: file.nbytes for file in contents.files if not file.base}
    if contents.save != commit.save or listed != commit.files or group_files_by_base(contents.files) != commit.bases:
        raise FormatError("the manifest and the commit mark disagree", where=where, found=contents.save)
    return contents


def _read_manifest(store: Store, commit: Commit) -> bytes:
    """Return the manifest's bytes, from the first copy that has the committed hash. Raises ChecksumError."""
    while True:
        data = read_bytes(store, commit.manifest, 0, commit.manifest_bytes)
        digest = hashlib.sha256(data).hexdigest()
        if digest == commit.manifest_sha256:
            return data
        copied = as_copied(store)
        if copied is None or not copied.reject(commit.manifest, 0, len(data)):
            path = f"{store.url}/{commit.manifest}"
            raise ChecksumError(
                "the manifest is not the one that was committed",
                where=path if copied is None else copied.locate(commit.manifest, 0, len(data)),
                found=digest,
                expected=commit.manifest_sha256,
                fix=_RESTORE,
            )


def _committed_names(store: Store, sizes: Mapping[str, int]) -> Collection[str]:
    """Return the names in the step's `COMMIT`; none if it is damaged."""
    if COMMIT not in sizes:
        return ()
    try:
        commit = read_commit(store, sizes)
    except UnsupportedError as error:
        raise TargetExistsError(
            "this version cannot read the step that is here, so it does not replace it",
            where=store.url,
            found=error,
            fix="Update shardckpt, choose another target, or remove the step yourself.",
        ) from error
    except (CheckpointError, MissingFileError):  # missing: another process is replacing the step
        return ()
    return (*commit.files, commit.manifest)


# Checkpoint that `save`, and all other writers of this format, may replace.
STEP = FolderKind(
    "one shardckpt checkpoint",
    payload=WRITTEN,
    other_names=re.compile(f"{re.escape(COMMIT)}|{re.escape(HF_INDEX)}"),
    members=_committed_names,
)
