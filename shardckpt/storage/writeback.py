"""Starting the disk early, so that the fsync at the end finds little to do: sync_file_range, which Python lacks."""

from __future__ import annotations

import ctypes

_WRITE = 2
"""SYNC_FILE_RANGE_WRITE: begin writing what is dirty, wait for nothing. It promises nothing either; fsync does."""

STEP_BYTES = 1 << 25
"""Bytes after which it is worth a call."""


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Ask the kernel to begin writing a range of a file to the disk; a hint, so nothing is said where it cannot.

    Args:
        fd: The file, open for writing.
        offset: First byte.
        nbytes: Bytes.
    """
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call(ctypes.c_int(fd), ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_WRITE))
