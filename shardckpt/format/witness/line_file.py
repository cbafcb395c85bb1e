"""Small files beside the steps of a run: a line of JSON, and a line with its SHA-256."""

from __future__ import annotations

import hashlib

from shardckpt.errors import ChecksumError, MissingFileError
from shardckpt.format.budget import require_small
from shardckpt.storage.store import Store, read_bytes


def write_line(store: Store, name: str, line: bytes) -> None:
    """Write a file, in place of an earlier one; it appears at once.

    Args:
        store: Store whose root is the run.
        name: Name of the file.
        line: JSON without a newline.

    Raises:
        StorageError: The store failed; the earlier file stays.
    """
    with store.create(name) as writer:
        writer.write(line + b"\n" + hashlib.sha256(line).hexdigest().encode("ascii") + b"\n")


def read_line(store: Store, name: str, what: str, most_bytes: int) -> bytes | None:
    """Return the JSON of a file; None if it does not exist.

    Args:
        store: Store whose root is the run.
        name: Name of the file.
        what: Kind of the file, for messages: "a witness record".
        most_bytes: Largest size of a file that is read.

    Raises:
        ChecksumError: The JSON does not match its SHA-256.
        UnsafeError: The file is too large.
        StorageError: The store failed.
    """
    try:
        size = store.size(name)
    except MissingFileError:
        return None
    where = line_url(store, name)
    require_small(what, size, most_bytes, where)
    line, _, rest = read_bytes(store, name, 0, size).partition(b"\n")
    digest = hashlib.sha256(line).hexdigest()
    if rest.strip() != digest.encode("ascii"):
        raise ChecksumError(f"{what} does not match its SHA-256", where=where, expected=digest)
    return line


def line_url(store: Store, name: str) -> str:
    """Return the path or URL of a file."""
    return f"{store.url.rstrip('/')}/{name}"
