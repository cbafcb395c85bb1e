"""Read and check the JSON fields of a native step, one by one."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Mapping
from typing import Any

from shardckpt.errors import FormatError, UnsafeError, UnsupportedError
from shardckpt.format.native.base_refs import is_base_url
from shardckpt.format.native.payload import VERSION
from shardckpt.manifest import Path

MAX_BYTES = 1 << 62
"""Upper limit of a stated file size, larger than any real file."""

NEWER = "Read it with a newer release of shardckpt."

_MAX_INT = (1 << 63) - 1
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_SAVE = re.compile(r"[0-9a-z]{1,64}")
_SHA256 = re.compile("[0-9a-f]{64}")


def read_fields(value: object, kinds: Mapping[str, type], where: object) -> dict[str, Any]:
    """Return a JSON object that has the given fields.

    Args:
        value: Parsed JSON.
        kinds: Field name to type.
        where: Name of the file, for messages.

    Raises:
        FormatError: The value is not an object, or a field is missing or of another type.
    """
    if not isinstance(value, dict):
        raise field_error("no JSON object", value, "", where)
    for name, kind in kinds.items():
        if name not in value:
            raise FormatError(f"the field {name!r} is missing", where=where)
        if not isinstance(value[name], kind):
            raise field_error(f"the field {name!r} must be a {kind.__name__}", value[name], "", where)
    return value


def read_list(value: object, name: str, where: object) -> list[Any]:
    """Return a list. Raises FormatError for any other value."""
    if not isinstance(value, list):
        raise field_error(f"{name!r} must be a list", value, "", where)
    return value


def read_fixed(value: object, length: int, name: str, where: object) -> list[Any]:
    """Return a list of a given length. Raises FormatError for any other value."""
    if not isinstance(value, list) or len(value) != length:
        raise field_error(f"an entry of {name!r} is none", value, f"a list of {length}", where)
    return value


def read_integer(value: object, name: str, where: object, *, below: int) -> int:
    """Return an integer in `[0, below)`. Raises FormatError for any other value."""
    if type(value) is not int or not 0 <= value < below:
        raise field_error(f"a number of {name!r} is none", value, f"0 to {below - 1}", where)
    return value


def read_path(value: object, where: object) -> Path:
    """Return a path, which JSON stores as a list of texts and integers.

    Raises:
        FormatError: The value is not a path.
    """
    for key in read_list(value, "path", where):
        if type(key) is not str and type(key) is not int:
            raise field_error("a path must be a list of texts and integers", value, "", where)
    return tuple(value)  # type: ignore[arg-type]


def plain_name(value: object, where: object) -> str:
    """Return the name of a file directly in the step's folder.

    Raises:
        UnsafeError: The name could refer to another folder.
    """
    if not isinstance(value, str) or not _PLAIN_NAME.fullmatch(value):
        raise UnsafeError("this is not the name of a file in the step's folder", where=where, found=format_value(value))
    return value


def read_base_url(url: object, where: object) -> str:
    """Return a reference to a base. Raises UnsafeError for any other text."""
    if not is_base_url(url):
        raise UnsafeError(
            "this is not a reference to a base", where=where, found=format_value(url), expected="../NAME, or absolute"
        )
    return str(url)


def read_save(value: object, where: object) -> str:
    """Return the id of a save. Raises FormatError for any other value."""
    if not isinstance(value, str) or not _SAVE.fullmatch(value):
        raise field_error("the save's id is none", value, "digits and small letters", where)
    return value


def read_sha256(value: object, whose: str, where: object) -> str:
    """Return a SHA-256 in hexadecimal digits. Raises FormatError for any other value."""
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise field_error(f"{whose} is none", value, "64 hexadecimal digits", where)
    return value


def read_version(value: object, where: object) -> tuple[int, int]:
    """Return the major and minor version of the format.

    Raises:
        FormatError: The value is not a version.
        UnsupportedError: The major version is different.
    """
    major, minor = (read_integer(n, "version", where, below=_MAX_INT) for n in read_fixed(value, 2, "version", where))
    if major != VERSION[0]:
        raise UnsupportedError(
            f"this step has version {major}.{minor} of the format",
            where=where,
            found=f"{major}.{minor}",
            expected=f"{VERSION[0]}.x",
            fix=NEWER,
        )
    return major, minor


def format_value(value: object) -> str:
    """Return a value for a message, shortened if it is long."""
    return value if isinstance(value, str) else reprlib.repr(value)  # reprlib shortens before it formats


def field_error(what: str, found: object, expected: str, where: object) -> FormatError:
    """Return the error for a field with an unexpected value."""
    return FormatError(what, where=where, found=format_value(found), expected=expected)
