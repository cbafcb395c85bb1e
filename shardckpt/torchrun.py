"""Facts about this process's machine: torchrun's variables, CPU cores, versions, and an id."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from functools import cache

MACHINE_BYTES = 8


def local_world_size() -> int | None:
    """Return the number of ranks on this machine; None if torchrun did not start them."""
    # `LOCAL_WORLD_SIZE` counts as missing unless it is a positive decimal number.
    setting = os.environ.get("LOCAL_WORLD_SIZE", "")
    return (int(setting) or None) if setting.isdecimal() else None


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def has_second_core(ranks: int = 1) -> bool:
    """Return True if this process may use two cores that no other rank needs."""
    return count_cores() >= 2 * (local_world_size() or ranks)


@cache
def get_machine_id() -> bytes:
    """Return bytes that are equal for all processes on one machine, and differ between machines."""
    import hashlib  # noqa: PLC0415  (loads OpenSSL; commands do not need it)

    boot = ""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read()
    return hashlib.blake2b(f"{boot} {platform.node()}".encode(), digest_size=MACHINE_BYTES).digest()


@cache
def describe_versions() -> str:
    """Return the installed versions that write steps, such as `shardckpt 0.2.0, torch 2.13.0`."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415  (0.02 s; few commands need it)

    found = []
    for package in ("shardckpt", "torch"):
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return ", ".join(found)
