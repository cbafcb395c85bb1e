"""System calls of Linux that Python does not offer: renameat2, sync_file_range."""

from __future__ import annotations

import ctypes
import errno
import os

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2
"""Begin writing what is dirty, wait for nothing. It promises nothing either; fsync does."""

STEP_BYTES = 1 << 25
"""Bytes after which it is worth a call of `start_writeback`."""

_NOT_HERE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV, errno.EPERM}


def exchange(one: str, other: str) -> bool:
    """Swap two existing names of one file system, so that both always exist: renameat2 with RENAME_EXCHANGE.

    Returns:
        False where the kernel or the file system cannot; nothing has changed then.

    Raises:
        OSError: It can, but failed.
    """
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_HERE:
        return False
    raise OSError(code, os.strerror(code), one, None, other)


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Ask the kernel to begin writing a range of a file to the disk; a hint, without an error if it cannot.

    The disk starts early, so that the fsync at the end finds little to do.

    Args:
        fd: The file, open for writing.
        offset: First byte.
        nbytes: Bytes.
    """
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(ctypes.c_int(fd), ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))
