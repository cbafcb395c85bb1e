"""Turns what an operating system reports into errors of our own, cause and errno kept."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from shardckpt.errors import MissingFileError, NoSpaceError, ShardckptError, StorageError

_REMEDIES = {
    errno.ENOSPC: "Free some space, or choose a target elsewhere.",
    errno.EDQUOT: "Free some of your quota, or choose a target elsewhere.",
    errno.EACCES: "Check the permissions.",
    errno.EPERM: "Check the permissions.",
    errno.EROFS: "Choose a target that can be written.",
    errno.EBUSY: "If this is a mount point, choose a folder inside it.",
    errno.EXDEV: "Choose a target on one file system; remove an old one by hand first.",
    errno.ENOTDIR: "A part of the path is a file: choose another.",
    errno.ENOENT: "Check the path; the checkpoint may be incomplete.",
}


_NO_PLACE = "No folder can be made there: choose another target."


def storage_error(error: OSError, what: str, where: str, *, is_target: bool = False) -> StorageError:
    """Return a StorageError for an OSError, as specific as its errno allows.

    Args:
        error: What the system raised; becomes the cause once the result is raised `from` it.
        what: What could not be done, e.g. "cannot read".
        where: The file or folder.
        is_target: Whether it is one that is made: then nothing can be missing from it.
    """
    kind: type[StorageError] = StorageError
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        kind = NoSpaceError
    elif is_target:
        pass
    elif error.errno in {errno.ENOENT, errno.ENOTDIR} or isinstance(error, FileNotFoundError):
        kind = MissingFileError
    reason = error.strerror or str(error) or type(error).__name__
    is_placeless = is_target and error.errno == errno.ENOENT
    fix = _NO_PLACE if is_placeless else _REMEDIES.get(error.errno or 0, "")
    result = kind(what, where=where, found=reason, fix=fix)
    result.errno = error.errno
    result.strerror = error.strerror
    return result


@contextmanager
def convert_os_errors(what: str, where: str, *, is_target: bool = False) -> Iterator[None]:
    """Let an OSError out of the block as a StorageError; our own errors pass as they are."""
    try:
        yield
    except ShardckptError:  # some of ours are OSErrors too
        raise
    except OSError as error:
        raise storage_error(error, what, where, is_target=is_target) from error
