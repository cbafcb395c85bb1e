"""Memory that a process can still use, on the machine and in its control groups, such as a container's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import NamedTuple

_MACHINE = "/proc/meminfo"
_OWN_GROUPS = "/proc/self/cgroup"
_MOUNT = "/sys/fs/cgroup"
_UNLIMITED = 1 << 60


class _Files(NamedTuple):
    """Names of the files that describe a control group's memory."""

    limit: str  # maximum bytes
    used: str  # bytes in use, including cached files, which the kernel can free
    cached: tuple[str, str]  # fields of `memory.stat` with the bytes of cached files


_FIRST_VERSION = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
_SECOND_VERSION = _Files("memory.max", "memory.current", ("active_file", "inactive_file"))


def read_available_bytes(needed: int) -> int | None:
    """Return the bytes that this process can still use, including what the kernel can free; None if unknown."""
    # Above a control group's limit the kernel kills processes although the machine has memory: with
    # `memory.oom.group`, as Kubernetes sets it, the training too.
    found = [*_read_machine(), *_read_groups(needed)]
    return min(found) if found else None


def _read_machine() -> Iterator[int]:
    with suppress(OSError, ValueError, IndexError), open(_MACHINE, encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                yield int(line.split()[1]) << 10
                return


def _read_groups(needed: int) -> Iterator[int]:
    """Yield the available bytes in each control group of this process that has a limit."""
    for folder, files in _list_groups(_OWN_GROUPS, _MOUNT):
        with suppress(OSError, ValueError, IndexError):
            limit = _read_number(os.path.join(folder, files.limit))
            if limit < _UNLIMITED:
                unused = limit - _read_number(os.path.join(folder, files.used))
                # The statistics take the kernel 0.2 ms, so memory that it can free counts only if it is needed.
                yield unused if unused >= needed else max(unused + _read_cached(folder, files), 0)


@cache
def _list_groups(own: str, mount: str) -> tuple[tuple[str, _Files], ...]:
    """Return the folders of this process's groups that may have a limit, and of all groups around them."""
    try:
        with open(own, encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.split(":", 2) for line in file.read().splitlines() if line.count(":") > 1]
    except OSError:
        return ()
    found = []
    for number, controllers, path in lines:
        files, folder = _SECOND_VERSION, mount
        if "memory" in controllers.split(","):
            files, folder = _FIRST_VERSION, os.path.join(mount, "memory")
        elif number != "0":
            continue
        names = [name for name in path.split("/") if name not in ("", "..")]
        around = [os.path.join(folder, *names[:count]) for count in range(len(names), -1, -1)]
        # A container sees only some of them.
        found += [(each, files) for each in around if os.path.exists(os.path.join(each, files.limit))]
    return tuple(found)


def _read_cached(folder: str, files: _Files) -> int:
    with open(os.path.join(folder, "memory.stat"), encoding="ascii") as file:
        fields = [line.split()[:2] for line in file]
    return sum(int(number) for name, number in fields if name in files.cached)


def _read_number(path: str) -> int:
    """Return the number in a file. Raises OSError, or ValueError for other text."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # takes a third of `open`'s time
    try:
        return int(os.read(fd, 64))
    finally:
        os.close(fd)
