"""`COMMIT`, which makes a native step exist: write, read, check and replace it.

It contains a line of JSON and a line with the first line's SHA-256. The JSON contains the manifest's name and hash, and
the names of files that a later save may replace.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from shardckpt.encodings.budget import require_small
from shardckpt.encodings.safetensors import parse_json
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
from shardckpt.native import records
from shardckpt.native.manifest_json import ManifestContents, decode_manifest
from shardckpt.native.payload import HF_INDEX, VERSION, encode_canonical
from shardckpt.native.records import (
    MAX_BYTES,
    NEWER,
    FileRecord,
    field_error,
    group_files_by_base,
    plain_name,
    read_fields,
    read_fixed,
    read_integer,
    read_list,
    read_save,
    read_sha256,
    require_base_url,
    require_version,
)
from shardckpt.storage.replaceable import FolderKind
from shardckpt.storage.store import Store, SubfolderStore, as_copied, read_bytes

COMMIT = "COMMIT"
MANIFEST_SUFFIX = ".manifest.json"
# Names of files that only saves write.
WRITTEN = re.compile(rf"[0-9a-z]{{15}}(-[0-9]{{5,}}-[0-9]{{2,}}\.safetensors|{re.escape(MANIFEST_SUFFIX)})")

BRANCH = "run.branch"  # key in a manifest's `about` for the field `branch` of `COMMIT`
FEATURES: frozenset[str] = frozenset({records.FEATURE})  # features that this reader supports

MAX_COMMIT_BYTES = 1 << 26
MAX_MANIFEST_BYTES = 1 << 29
MAX_BASES = 4096  # maximum base folders of a step, each of which is looked up when the step is opened

_REPAIR = "Restore the step from another copy, or rebuild its marks with `shardckpt repair`."
_RESTORE = "Load the step before it, restore this one from another copy, or rebuild its marks with `shardckpt repair`."


@dataclass(frozen=True, slots=True)
class Commit:
    """Content of `COMMIT`."""

    save: str  # id of the save
    manifest: str  # file name of the manifest
    manifest_bytes: int  # size of the manifest in bytes
    manifest_sha256: str  # SHA-256 of the manifest, in hexadecimal digits
    files: Mapping[str, int]  # every other file's name to its size in bytes
    features: tuple[str, ...] = ()  # features that a reader must support
    # Reference to each base folder, to the names and sizes of the files there.
    bases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    branch: int = 0  # number of times that the run had returned to an older step before this save


def manifest_name(save: str) -> str:
    """Return the file name for a save's manifest."""
    return save + MANIFEST_SUFFIX


def is_of_save(name: str, save: str) -> bool:
    """Return True if a file's name is a save's manifest or payload file."""
    return name.startswith((f"{save}.", f"{save}-"))


def read_branch(about: Mapping[str, str]) -> int:
    """Return a step's branch in its run, from the manifest's `about`."""
    text = about.get(BRANCH, "")
    return int(text) if re.fullmatch("[0-9]{1,9}", text, re.ASCII) else 0


def encode_commit(save: str, manifest: bytes, files: Iterable[FileRecord], branch: int = 0) -> bytes:
    """Return the bytes for `COMMIT`."""
    files = list(files)
    bases = group_files_by_base(files)
    content = {
        "format": "shardckpt",
        "version": VERSION,
        "features": [records.FEATURE] if bases else [],
        "save": save,
        "manifest": [manifest_name(save), len(manifest), hashlib.sha256(manifest).hexdigest()],
        "files": [[f.name, f.nbytes] for f in files if not f.base],
        **({"bases": [[url, list(map(list, named.items()))] for url, named in bases.items()]} if bases else {}),
        **({"branch": branch} if branch else {}),
    }
    line = encode_canonical(content) + b"\n"
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
    raw = parse_json(data[: end - 1], where=str(where))
    if not isinstance(raw, dict) or raw.get("format") != "shardckpt":
        raise FormatError("this is not a shardckpt commit mark", where=where)
    require_version(raw.get("version"), where)
    raw = read_fields(raw, {"features": list, "save": str, "manifest": list, "files": list}, where)
    features = _features(raw["features"], where)
    name, size, digest = read_fixed(raw["manifest"], 3, "manifest", where)
    sha256 = read_sha256(digest, "the manifest's digest", where)
    sizes = _sizes(raw["files"], where)
    manifest_bytes = read_integer(size, "manifest", where, below=MAX_BYTES)
    require_small("the manifest", manifest_bytes, MAX_MANIFEST_BYTES, where)
    save = read_save(raw["save"], where)
    bases = _files_by_base(raw.get("bases", []), where)
    if bool(bases) != (records.FEATURE in features):
        raise FormatError("the commit mark's features do not fit its bases", where=where)
    branch = read_integer(raw.get("branch", 0), "branch", where, below=MAX_BYTES)
    return Commit(save, plain_name(name, where), manifest_bytes, sha256, sizes, features, bases, branch)


def _sizes(value: object, where: object) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for entry in read_list(value, "files", where):
        file, nbytes = read_fixed(entry, 2, "files", where)
        if plain_name(file, where) in sizes:
            raise field_error("a file is listed twice", file, "", where)
        sizes[file] = read_integer(nbytes, "files", where, below=MAX_BYTES)
    return sizes


def _files_by_base(value: object, where: object) -> dict[str, dict[str, int]]:
    bases: dict[str, dict[str, int]] = {}
    entries = read_list(value, "bases", where)
    if len(entries) > MAX_BASES:
        raise UnsafeError("too many bases", where=where, found=len(entries), expected=MAX_BASES)
    for entry in entries:
        url, files = read_fixed(entry, 2, "bases", where)
        if require_base_url(url, where) in bases:
            raise field_error("a base is listed twice", url, "", where)
        bases[url] = _sizes(files, where)
    return bases


def _features(value: object, where: object) -> tuple[str, ...]:
    features = read_list(value, "features", where)
    for name in features:
        if not isinstance(name, str):
            raise field_error("a feature has no name", name, "", where)
        if name not in FEATURES:
            raise UnsupportedError(
                f"this step needs the feature {name!r}, which this release does not know",
                where=where,
                fix=NEWER,
            )
    return tuple(features)


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
