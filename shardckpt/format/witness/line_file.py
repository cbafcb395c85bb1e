"""Small files next to a run's steps: a line of JSON, and a line with its SHA-256."""

from __future__ import annotations

import hashlib

from shardckpt.errors import ChecksumError, MissingFileError
from shardckpt.format.budget import require_small
from shardckpt.storage.store import Store, read_bytes


def write_line(store: Store, name: str, line: bytes) -> None:
    """Write a file atomically over an earlier one, which stays if the store fails."""
    with store.create(name) as writer:
        writer.write(line + b"\n" + hashlib.sha256(line).hexdigest().encode("ascii") + b"\n")


def read_line(store: Store, name: str, what: str, most_bytes: int) -> bytes | None:
    """Return a file's JSON; None if it does not exist."""
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
    """Return a file's path or URL."""
    return f"{store.url.rstrip('/')}/{name}"
