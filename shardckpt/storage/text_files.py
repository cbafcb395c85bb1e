"""Read small text files that users write, such as rules."""

from __future__ import annotations

from shardckpt.errors import UsageError
from shardckpt.storage.resolve_url import kind, open_store, split
from shardckpt.storage.store import read_bytes

MAX_BYTES = 1 << 22


def read_text(url: str) -> str | None:
    """Return a file's text; None if it does not exist."""
    if kind(url) != "file":
        return None
    parent, name = split(url)
    store = open_store(parent)
    size = store.size(name)
    if size > MAX_BYTES:
        raise UsageError("too large for such a file", where=url, found=f"{size} bytes", expected=f"at most {MAX_BYTES}")
    try:
        return read_bytes(store, name, 0, size).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError("no UTF-8", where=url) from error
