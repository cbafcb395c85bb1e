"""What a power cut would leave: what was fsynced, and of the rest anything, reordered and torn."""

import errno
import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations, product
from math import prod
from random import Random

MUTATORS = (
    "write",
    "pwrite",
    "copy_file_range",
    "fsync",
    "rename",
    "replace",
    "mkdir",
    "unlink",
    "rmdir",
    "link",
    "truncate",
)
"""Functions of `os` by which files and folders change; opening for writing is one more."""


PAGE = 4096
"""Bytes of a file that a disk writes at once, unless it loses power amid them."""

_FEW_CHANGES, _FEW_PAGES, _SAMPLES = 8, 3, 64
_OLD, _TORN, _NEW = range(3)

Names = dict[str, int]
"""Name to inode."""

Change = dict[tuple[int, str], int | None]
"""Folder and name to the inode that it stands for from now on, None for none."""


@contextmanager
def watched(before: Callable[[str, tuple], None], after: Callable[[str, tuple], None]) -> Iterator[None]:
    """Call `before` and `after` around every change of a file or folder made through `os` or an exchange of names."""
    from shardckpt.storage import local_publication

    kept = {name: getattr(os, name) for name in (*MUTATORS, "open")}
    exchange = local_publication.exchange

    def wrap(name: str, whole: Callable) -> Callable:
        def changed(*args, **kwargs):
            if name == "open" and not args[1] & os.O_CREAT:
                return whole(*args, **kwargs)
            before(name, args)
            result = whole(*args, **kwargs)
            after(name, args)
            return result

        return changed

    for name, whole in kept.items():
        setattr(os, name, wrap(name, whole))
    local_publication.exchange = wrap("exchange", exchange)
    try:
        yield
    finally:
        for name, whole in kept.items():
            setattr(os, name, whole)
        local_publication.exchange = exchange


@contextmanager
def killing_at(k: int, torn: Callable[[str, tuple], None] = lambda *_: None) -> Iterator[None]:
    """Kill this process before its k-th change of the disk; `torn` may do a part of that change first."""
    count = 0

    def before(name: str, args: tuple) -> None:
        nonlocal count
        count += 1
        if count == k:
            torn(name, args)
            os.kill(os.getpid(), signal.SIGKILL)

    with watched(before, lambda *_: None):
        yield


@contextmanager
def failing_at(k: int) -> Iterator[Callable[[], int]]:
    """Let the k-th change of the disk fail; yields a function that returns how many there were."""
    count = 0

    def before(name: str, args: tuple) -> None:
        nonlocal count
        count += 1
        if count == k:
            raise OSError(errno.EIO, f"broken {name}")

    with watched(before, lambda *_: None):
        yield lambda: count


class Disk:
    """A folder, what of it is safe, and what a power cut may leave of the rest.

    A change of names (a file made, linked, removed, renamed, two names exchanged) is safe once a folder that it touches
    was fsynced; until then each may be there or not, whatever was changed before or after it. Of a file that changed
    since its fsync each page of 4 KiB may be there, lack, or be torn in the middle; what lacks of a file that grew is
    zeros, or its size is still the old one.

    Args:
        root: The folder; all that lies in it now is safe.
    """

    hears_fsync = True
    """Whether an fsync makes anything safe."""

    def __init__(self, root: str) -> None:
        self._safe_data: dict[int, bytes] = {}
        self._safe_names: dict[int, Names] = {}
        self._names: dict[int, Names] = {}
        self._pending: list[Change] = []
        self._held: dict[int, int] = {}  # an open descriptor for each inode, or its number would be used again
        self._failed: set[int] = set()
        self._root = self._hold(root)
        self._look()
        for change in self._pending:
            self._apply(change, self._safe_names)
        self._pending = []
        for inode in self._held.keys() - self._names.keys():
            self._safe_data[inode] = self._data(inode)

    def close(self) -> None:
        for fd in self._held.values():
            os.close(fd)

    def after(self, name: str, args: tuple) -> None:
        """Note an operation."""
        self._look()
        if name == "fsync" and self.hears_fsync:
            inode = self._hold(f"/proc/self/fd/{args[0]}")
            if inode not in self._failed:
                self._sync(inode)

    @property
    def has_failed(self) -> bool:
        """Whether an fsync has failed."""
        return bool(self._failed)

    def fail_sync(self, fd: int) -> None:
        """Note that an fsync failed: later ones of the same file or folder succeed and make nothing safe."""
        self._failed.add(os.fstat(fd).st_ino)

    def outcomes(self) -> Iterator[dict[str, bytes]]:
        """Yield what a power cut now might leave, contents by path: everything where that is little, else a sample."""
        chance, seen = Random(7), set()
        for chosen in _subsets(len(self._pending), chance):
            names = {folder: dict(entries) for folder, entries in self._safe_names.items()}
            for number in chosen:
                self._apply(self._pending[number], names)
            files = dict(self._walk(names, self._root, ""))
            variants = [_variants(self._safe_data.get(inode, b""), self._data(inode)) for inode in files.values()]
            for contents in _some_of(variants, chance):
                outcome = dict(zip(files, contents, strict=True))
                key = frozenset(outcome.items())
                if key not in seen:
                    seen.add(key)
                    yield outcome

    def _hold(self, path: str) -> int:
        inode = os.stat(path).st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
            if stat.S_ISDIR(os.fstat(self._held[inode]).st_mode):
                self._names[inode], self._safe_names[inode] = {}, {}
        return inode

    def _look(self) -> None:
        """Note how names have changed since the last look; a rename changes two, which stay together."""
        change: Change = {}
        fresh = list(self._names)
        while fresh:
            known = set(self._names)
            for folder in fresh:
                now = self._listed(folder)
                before, self._names[folder] = self._names[folder], now
                gone = {(folder, name): None for name in before.keys() - now.keys()}
                come = {(folder, name): inode for name, inode in now.items() if before.get(name) != inode}
                change |= {**gone, **come}
            fresh = [folder for folder in self._names if folder not in known]
        if change:
            self._pending.append(change)

    def _listed(self, folder: int) -> Names:
        path = f"/proc/self/fd/{self._held[folder]}"
        try:
            return {name: self._hold(os.path.join(path, name)) for name in os.listdir(path)}
        except FileNotFoundError:  # the folder is gone
            return {}

    def _sync(self, inode: int) -> None:
        if inode not in self._names:
            self._safe_data[inode] = self._data(inode)
            return
        for change in self._pending:
            if any(folder == inode for folder, _ in change):
                self._apply(change, self._safe_names)
        self._pending = [change for change in self._pending if all(folder != inode for folder, _ in change)]

    def _data(self, inode: int) -> bytes:
        fd = self._held[inode]
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def _walk(self, names: dict[int, Names], folder: int, prefix: str) -> Iterator[tuple[str, int]]:
        for name, inode in names[folder].items():
            if inode in names:
                yield from self._walk(names, inode, f"{prefix}{name}/")
            else:
                yield prefix + name, inode

    @staticmethod
    def _apply(change: Change, names: dict[int, Names]) -> None:
        for (folder, name), inode in change.items():
            if inode is None:
                names[folder].pop(name, None)
            else:
                names[folder][name] = inode


def _subsets(count: int, chance: Random) -> Iterator[tuple[int, ...]]:
    """Yield subsets of so many changes: every one of few; of many none, all, each alone, all but each, and a sample."""
    everything = range(count)
    if count <= _FEW_CHANGES:
        for size in range(count + 1):
            yield from combinations(everything, size)
        return
    yield from ((), tuple(everything))
    for one in everything:
        yield (one,)
        yield tuple(each for each in everything if each != one)
    for _ in range(_SAMPLES):
        yield tuple(each for each in everything if chance.random() < 0.5)


def _variants(safe: bytes, now: bytes) -> list[bytes]:
    """Return what may be there of a file: every page of few old, torn or new; of many, each kind of loss once."""
    pages = [at for at in range(0, len(now), PAGE) if now[at : at + PAGE] != safe[at : at + PAGE]]
    if not pages:
        return [now] if len(now) == len(safe) else [now, safe]
    if len(pages) <= _FEW_PAGES:
        choices = list(product((_OLD, _TORN, _NEW), repeat=len(pages)))
    else:
        whole = [_NEW] * len(pages)
        torn, first, last = ([*whole[:-1], _TORN], [_OLD, *whole[1:]], [*whole[:-1], _OLD])
        choices = [tuple(each) for each in (whole, torn, first, last, [_OLD] * len(pages))]
    return list(dict.fromkeys([safe, *(_mixed(safe, now, dict(zip(pages, each, strict=True))) for each in choices)]))


def _mixed(safe: bytes, now: bytes, pages: dict[int, int]) -> bytes:
    mixed = bytearray(safe[: len(now)].ljust(len(now), b"\0"))
    for at, state in pages.items():
        end = min(at + PAGE, len(now))
        end -= (end - at) // 2 if state == _TORN else 0
        if state != _OLD:
            mixed[at:end] = now[at:end]
    return bytes(mixed)


def _some_of(variants: list[list[bytes]], chance: Random) -> Iterator[tuple[bytes, ...]]:
    """Yield combinations of what may be there of each file: every one of few, else a sample."""
    if prod(map(len, variants)) <= _SAMPLES:
        yield from product(*variants)
        return
    yield tuple(each[0] for each in variants)
    yield tuple(each[-1] for each in variants)
    for _ in range(_SAMPLES):
        yield tuple(chance.choice(each) for each in variants)
