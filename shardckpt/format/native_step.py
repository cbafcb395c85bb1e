"""A step's folder as it was committed: `COMMIT` and the manifest that it names, read and held against each other."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from shardckpt.errors import ChecksumError, FormatError, IncompleteError, TruncatedError, UnsafeError
from shardckpt.format.native_commit import COMMIT, MAX_COMMIT_BYTES, Commit, decode_commit
from shardckpt.format.native_manifest import Contents, decode_manifest
from shardckpt.format.native_records import files_of_bases
from shardckpt.storage.store import Store, read_bytes

_REPAIR = "Load the step before it, restore this one from another copy, or rebuild its marks with `shardckpt repair`."


def read_commit(store: Store, sizes: Mapping[str, int]) -> Commit:
    """Read and check the mark that makes a step exist.

    Args:
        store: Rooted at the step.
        sizes: Of the files in the folder.

    Raises:
        IncompleteError: There is none.
        CheckpointError: It is damaged, or of a newer format.
        StorageError: The store failed.
    """
    if COMMIT not in sizes:
        raise IncompleteError(
            "this step was never committed",
            where=store.url,
            found=f"{len(sizes)} files",
            expected=f"a file {COMMIT}",
            fix="The save was interrupted: load the step before it, or try `shardckpt repair`.",
        )
    where = f"{store.url}/{COMMIT}"
    if sizes[COMMIT] > MAX_COMMIT_BYTES:
        raise UnsafeError("the commit mark is too large", where=where, found=sizes[COMMIT], expected=MAX_COMMIT_BYTES)
    return decode_commit(read_bytes(store, COMMIT, 0, sizes[COMMIT]), where=where)


def read_contents(store: Store, sizes: Mapping[str, int], commit: Commit) -> Contents:
    """Read the manifest that a commit mark names, and check it against that mark.

    Raises:
        IncompleteError: It is not there.
        CheckpointError: It is not the one that was committed, or does not follow the format.
        StorageError: The store failed.
    """
    where = f"{store.url}/{commit.manifest}"
    if commit.manifest not in sizes:
        raise IncompleteError("the step's manifest is not there", where=where, fix=_REPAIR)
    if sizes[commit.manifest] != commit.manifest_bytes:
        raise TruncatedError(
            "the manifest has another size than was committed",
            where=where,
            found=f"{sizes[commit.manifest]} bytes",
            expected=commit.manifest_bytes,
            fix=_REPAIR,
        )
    data = read_bytes(store, commit.manifest, 0, commit.manifest_bytes)
    digest = hashlib.sha256(data).hexdigest()
    if digest != commit.manifest_sha256:
        raise ChecksumError(
            "the manifest is not the one that was committed",
            where=where,
            found=digest,
            expected=commit.manifest_sha256,
            fix=_REPAIR,
        )
    contents = decode_manifest(data, where=where)
    listed = {file.name: file.nbytes for file in contents.files if not file.base}
    if contents.save != commit.save or listed != commit.files or files_of_bases(contents.files) != commit.bases:
        raise FormatError("the manifest and the commit mark disagree", where=where, found=contents.save)
    return contents
