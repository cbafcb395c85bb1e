"""Swapping two names in one step: renameat2 with RENAME_EXCHANGE, which Python does not offer."""

from __future__ import annotations

import ctypes
import errno
import os

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_NOT_HERE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV, errno.EPERM}


def exchange(one: str, other: str) -> bool:
    """Swap two existing names of one file system, so that neither is ever absent.

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
