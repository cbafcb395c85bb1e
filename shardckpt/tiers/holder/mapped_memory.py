"""Map a holder's memory, on huge pages if these are cheap.

New memory on 4 KiB pages costs four times as much as copying its bytes; on huge pages it costs half
(docs/decisions/0058-captures-yield-to-the-training.md).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from contextlib import suppress
from functools import cache, partial

HUGE_BYTES = 2 << 20  # size of a huge page on most processors; on others memory has small pages

_MAP_FIXED = 0x10
_MADV_COLLAPSE = 25  # move bytes onto huge pages: since Linux 6.1, whatever `shmem_enabled` says

_MADV_DONTFORK = 10

_FAILED = ctypes.c_void_p(-1).value

_BALLOONS = "/sys/bus/virtio/drivers/virtio_balloon"
_REPORTS_FREE_PAGES = 5  # a balloon's feature bit: the host takes free huge pages from this virtual machine


def map_memory(fd: int, start: int, nbytes: int, *, is_shared: bool) -> memoryview:
    """Map a file range at an address that fits huge pages; the map ends with its last view."""
    # Without `is_shared`, writes stay in the map. `start` must be a multiple of `HUGE_BYTES`.
    libc = _load_libc()
    space = libc.mmap(None, nbytes + HUGE_BYTES, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if space == _FAILED:
        raise _last_error()
    at = -(-space // HUGE_BYTES) * HUGE_BYTES
    flags = (mmap.MAP_SHARED if is_shared else mmap.MAP_PRIVATE) | _MAP_FIXED
    if libc.mmap(at, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, start) == _FAILED:
        error = _last_error()
        libc.munmap(space, nbytes + HUGE_BYTES)
        raise error
    memory = (ctypes.c_ubyte * nbytes).from_address(at)
    if is_shared:  # a forked process would keep a removed file's memory
        libc.madvise(at, nbytes, _MADV_DONTFORK)
    unmap = partial(_unmap_own, os.getpid()) if is_shared else libc.munmap
    weakref.finalize(memory, unmap, space, nbytes + HUGE_BYTES).atexit = False
    return memoryview(memory).cast("B")


def _unmap_own(process: int, start: int, nbytes: int) -> None:
    """Unmap memory in the process that mapped it: a forked one may have something else there."""
    if os.getpid() == process:
        _load_libc().munmap(start, nbytes)


def map_sealed(fd: int) -> memoryview | None:
    """Map sealed memory, which no process can change; None if it is not sealed, or cannot be mapped."""
    with suppress(OSError):
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return map_memory(fd, 0, os.fstat(fd).st_size, is_shared=False)
    return None


def add_huge_pages(fd: int, used: int, stop: int) -> memoryview | None:
    """Lengthen a file by huge pages; return its bytes from `used` to `stop`, None if the system has no such pages."""
    if not has_cheap_huge_pages():
        return None
    start, end = used // HUGE_BYTES * HUGE_BYTES, -(-stop // HUGE_BYTES) * HUGE_BYTES
    libc, writing = _load_libc(), ctypes.PyDLL(None)  # a call without the interpreter's lock takes 5 ms to get it back
    try:
        if os.fstat(fd).st_size < end:
            os.ftruncate(fd, end)  # up to the end of the last huge page
        memory = map_memory(fd, start, end - start, is_shared=True)
    except OSError:
        return None
    for at in range(-(-used // HUGE_BYTES) * HUGE_BYTES, end, HUGE_BYTES):  # only what has a page becomes a huge one
        if writing.pwrite(fd, b"\0", ctypes.c_size_t(1), ctypes.c_int64(at)) != 1:
            return None
    if libc.madvise(ctypes.addressof(ctypes.c_ubyte.from_buffer(memory)), end - start, _MADV_COLLAPSE):
        return None
    return memory[used - start : stop - start]


@cache
def has_cheap_huge_pages() -> bool:
    """Return False if the host takes free huge pages: getting one back takes longer than using small pages."""
    with suppress(OSError):
        for name in os.listdir(_BALLOONS):
            features = os.path.join(_BALLOONS, name, "features")
            if os.path.isfile(features):
                with open(features, encoding="ascii") as file:
                    if file.read()[_REPORTS_FREE_PAGES : _REPORTS_FREE_PAGES + 1] == "1":
                        return False
    return True


@cache
def _load_libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = address
    libc.mmap.argtypes = [address, size, number, number, number, ctypes.c_int64]
    libc.munmap.argtypes = [address, size]
    libc.madvise.argtypes = [address, size, number]
    return libc


def _last_error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
