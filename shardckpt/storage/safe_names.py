"""The one check that every file name passes before it reaches a disk or a bucket."""

from __future__ import annotations

from shardckpt.errors import UnsafeError


def check_name(name: str, where: str) -> None:
    """Refuse a name that could mean anything but a place below its root.

    Args:
        name: Relative, with forward slashes; often taken from an untrusted file.
        where: The root, for the message.

    Raises:
        UnsafeError: The name is empty, absolute, climbs with `..`, or cannot be a file name at all.
    """
    if not name or name.startswith("/") or "\0" in name or ".." in name.split("/") or not _is_encodable(name):
        raise UnsafeError(
            "this file name leaves the checkpoint's folder",
            where=where,
            found=repr(name),
            expected="a relative name without '..'",
            fix="Do not use this checkpoint unless you know who wrote it.",
        )


def _is_encodable(name: str) -> bool:
    try:
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return False
    return True
