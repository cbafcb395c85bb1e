"""A step's references to its base folders, and which of them may be opened."""

from __future__ import annotations

import os
import re
import reprlib
from typing import NamedTuple

from shardckpt.errors import UnsafeError, UsageError
from shardckpt.storage.resolve_url import local_path

FEATURE = "bases"  # feature in `COMMIT` that a reader needs if files of the step are in other folders

_SIBLING = re.compile(r"\.\./([^/\0]+)")
_ABSOLUTE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.\-]*(://|::)")
_HOST = re.compile(r"((?:[A-Za-z][A-Za-z0-9+.\-]*::)*[A-Za-z][A-Za-z0-9+.\-]*://[^/]*)(?!.*::)", re.DOTALL)
_LONGEST = 4096


class Base(NamedTuple):
    """A folder that a step refers to."""

    # `../NAME` for a folder next to the step, so that both can be moved together; else absolute.
    url: str
    save: str = ""  # id of the save that wrote the folder; empty for a checkpoint of another format
    sha256: str = ""  # SHA-256 of its manifest, in hexadecimal digits; empty if `save` is


def is_base_url(url: object) -> bool:
    """Return True if a text is a valid reference to a base folder."""
    if not isinstance(url, str) or not url or len(url) > _LONGEST or "\0" in url:
        return False
    return sibling(url) is not None or _ABSOLUTE.match(url) is not None


def sibling(url: str) -> str | None:
    """Return the name if a folder is next to the step; None for any other folder."""
    match = _SIBLING.fullmatch(url)
    return match[1] if match and match[1] not in {".", ".."} else None


def _parent(url: str) -> tuple[str, str]:
    """Return a folder's parent, with links resolved, and the folder's name there."""
    path = local_path(url)
    if path is not None:
        return os.path.split(os.path.realpath(path))
    parent, _, name = url.rstrip("/").rpartition("/")
    return parent, name


def require_base_url(url: object, where: object) -> str:
    """Return a reference to a base. Raises UnsafeError for any other text."""
    if not isinstance(url, str) or not is_base_url(url):
        what, found = "this is not a reference to a base", url if isinstance(url, str) else reprlib.repr(url)
        raise UnsafeError(what, where=where, found=found, expected="../NAME, or absolute")
    return url


def resolve_base(step: str, url: str) -> str:
    """Return a base's URL."""
    require_base_url(url, step)
    name = sibling(url)
    return url if name is None else f"{_parent(step)[0].rstrip('/')}/{name}"


def refer_to(step: str, base: str) -> str:
    """Return how a step refers to a base."""
    here, there = _parent(step), _parent(base)
    if here == there:
        raise UsageError("a step cannot be its own base", where=step, fix="Save to another folder.")
    if here[0] == there[0] and there[1]:
        return f"../{there[1]}"
    return base if local_path(base) is None else os.path.join(*there)


def is_same_folder(one: str, other: str) -> bool:
    """Return True if two URLs are the same folder."""
    return bool(one and other) and _parent(one) == _parent(other)


def may_open(step: str, folder: str) -> bool:
    """Return True if a folder may be opened although the caller did not name it."""
    # A step's author, who may be untrusted, chooses its references. A step behind a URL must not read local files, or
    # send requests to hosts that the caller does not use.
    try:
        here_is_local, there_is_local = local_path(step) is not None, local_path(folder) is not None
    except UsageError:  # such as `s3:/other`, which names no place
        return False
    if here_is_local or there_is_local:
        return here_is_local and there_is_local
    here, there = _HOST.match(step), _HOST.match(folder)
    return here is not None and there is not None and here[1] == there[1]
