"""System calls that Python lacks, or has on Linux alone: renameat2, sync_file_range, setpriority."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from contextlib import suppress

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2  # start writing dirty pages without waiting; guarantees nothing, unlike fsync

# Niceness for background threads: they get a tenth of a core that others want too. With a lower priority, a thread
# that is interrupted would keep the interpreter's lock for longer.
LOW_PRIORITY = 10

_LOWEST_PRIORITY = 19

STEP_BYTES = 1 << 25  # minimum bytes worth a call to `start_writeback`

_NOT_HERE = {errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EXDEV, errno.EPERM}


def exchange(one: str, other: str) -> bool:
    """Swap two existing names on one file system atomically; return False, without a change, if not supported."""
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
    """Ask the kernel to start writing a file range; a hint that never fails."""
    # The disk starts early, so that the final fsync has little left to write.
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(ctypes.c_int(fd), ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def lower_priority() -> None:
    """Run this thread, and threads that it starts, after others that need its core; never fails."""
    if sys.platform == "linux":  # elsewhere a priority belongs to the process
        with suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, 0, min(own + LOW_PRIORITY, _LOWEST_PRIORITY))
