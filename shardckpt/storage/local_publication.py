"""Publish on a local disk: write next to the target, sync, then rename into place."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection
from contextlib import suppress
from functools import partial

from shardckpt.errors import NoSpaceError, StorageError, TargetExistsError, UsageError, escape
from shardckpt.storage.linux_syscalls import exchange
from shardckpt.storage.local import LocalStore, LocalWriter, open_folder, sync_folder, sync_name, sync_open_folder
from shardckpt.storage.orphans import (
    OLD,
    PARTIAL,
    find_orphans,
    is_at,
    is_folder,
    is_partial,
    make_partial,
    release,
    remove,
    sibling_path,
    sweep,
    take,
)
from shardckpt.storage.publication import (
    FindKept,
    FindMissing,
    Publication,
    folder_exists_error,
    keep_no_file,
    target_exists_error,
)
from shardckpt.storage.replaceable import FileKind, Kind, find_replaceable_files, require_file
from shardckpt.storage.store import Listed, convert_os_errors, storage_error

_SHOWN = 3


class LocalPublication(Publication):
    """A folder or a file that appears under its name in one atomic rename."""

    is_hidden = True

    def __init__(
        self,
        path: str,
        kind: Kind,
        *,
        overwrite: bool,
        needed_bytes: int,
        find_kept: FindKept = keep_no_file,
    ) -> None:
        self.target = _resolve_target(path)
        self._kind = kind
        self._find_kept = find_kept
        self._overwrite = overwrite
        self._made: list[str] = []
        self._old = ""
        self._is_doubtful = False
        self._partial = ""
        self._lock = self._parent = -1
        self._owner = os.getpid()
        with convert_os_errors("cannot prepare the target", self.target, is_target=True):
            _restore(self.target)
            self._require_replaceable()
            sweep(self.target, PARTIAL)
            if not _is_vacant(self.target):  # else it may be the only copy
                sweep(self.target, OLD)
            require_space(self.target, needed_bytes)  # in addition to the old content, which is removed last
            try:
                self._make_parents()
                self._partial, self._lock = make_partial(self.target)
                self._result = self._lock
                self.staging_url = self._partial
                self._store = LocalStore(self._partial)
            except BaseException:  # a signal may come before the caller has the publication
                remove(self._partial)
                release(self._lock)
                self._remove_parents()
                raise

    def is_better_replaced_by_file(self, prefix: str) -> bool:
        """Return True if the disk cannot exchange folders, and no old name starts with the prefix."""
        try:
            with convert_os_errors("cannot prepare the target", self.target, is_target=True):
                if _is_vacant(self.target) or any(name.startswith(prefix) for name in os.listdir(self.target)):
                    return False
                return not _can_exchange(self._partial)
        except BaseException:
            self.rollback()
            raise

    def create(self, name: str) -> LocalWriter:
        """Start a file in the result. Raises StorageError."""
        return self._store.create(self._get_name(name))

    def find_written(self, name: str) -> str:
        """Return a closed file's path."""
        return os.path.join(self._partial, self._get_name(name))

    def adopt(self, staging_url: str, names: Collection[str]) -> None:
        """Link files from another folder on the same disk; where it has no links, move them."""
        with convert_os_errors("cannot add a finished file", self.target):
            for name in names:
                old, new = os.path.join(staging_url, name), os.path.join(self._partial, self._get_name(name))
                os.makedirs(os.path.dirname(new), exist_ok=True)
                if not _link(old, new):
                    os.rename(old, new)
            for folder in {os.path.dirname(name) for name in names} | {""}:
                sync_folder(os.path.join(self._partial, folder))

    def _get_name(self, name: str) -> str:
        return os.path.basename(self.target) if isinstance(self._kind, FileKind) else name

    def commit(self, find_missing: FindMissing | None = None) -> None:  # noqa: ARG002  (the result appears as one)
        """Move the result to its path, sync, and remove old content."""
        with convert_os_errors("cannot put the result in place", self.target):
            self._require_replaceable()  # another process may have created the target since
            # Opened before the swap, so that after it only the fsync can fail.
            self._parent = open_folder(os.path.dirname(self.target))
            if isinstance(self._kind, FileKind):
                self._place_file()
            else:
                self._place_folder()
        self._settle()

    def rollback(self) -> None:
        """Remove the files; after the result is in place, only clean up. Never raises."""
        if os.getpid() != self._owner:  # a forked child does not own the publication
            return
        # Check the disk, since a signal may come between a rename and the next statement.
        if is_at(self._result, self.target):
            if not self._is_doubtful:
                with suppress(StorageError):
                    self._settle()
            self._release()
            return
        if self._old and not os.path.lexists(self.target):
            with suppress(OSError):  # the next run restores the old content
                os.rename(self._old, self.target)
        remove(self._partial)
        self._release()
        self._remove_parents()

    def _place_file(self) -> None:
        source = os.path.join(self._partial, os.path.basename(self.target))
        self._result = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
        os.replace(source, self.target)

    def _require_replaceable(self) -> None:
        """Require that the target may be replaced. Raises TargetExistsError."""
        is_file = isinstance(self._kind, FileKind)
        _refuse_existing(self.target, overwrite=self._overwrite, single_file=is_file)
        if isinstance(self._kind, FileKind):
            if os.path.lexists(self.target):
                folder, name = os.path.split(self.target)
                require_file(self._kind, LocalStore(folder), name, self.target)
        elif not _is_vacant(self.target):
            find_replaceable_files(self._kind, LocalStore(self.target), partial(_entries, self.target), self.target)

    def _keep_old(self) -> None:
        """Hard-link the files to keep from the old folder into the new one."""
        kept = self._find_kept()
        for name in kept:
            old, new = os.path.join(self.target, name), os.path.join(self._partial, name)
            if os.path.isfile(old) and not os.path.lexists(new) and not _link(old, new):
                with self._store.create(name) as writer:
                    writer.copy_from(LocalStore(self.target), name, 0, os.path.getsize(old))
        if kept:
            sync_folder(self._partial)

    def _require_own_folder(self) -> None:
        """Require that the new files are in this object's folder. Raises StorageError."""
        # If another process removed it, the next new file is in a new folder with this name, and the rest is gone.
        if not is_at(self._lock, self._partial):
            raise StorageError(
                "another process removed the new files while they were written",
                where=self._partial,
                fix="Write them again, after what removes them has ended.",
            )

    def _place_folder(self) -> None:
        self._require_own_folder()
        if self._overwrite:
            self._keep_old()
        try:
            if not self._overwrite or _is_vacant(self.target):
                os.rename(self._partial, self.target)
            elif not exchange(self._partial, self.target):
                self._move_aside()
        except OSError as error:
            if error.errno in {errno.ENOTEMPTY, errno.EEXIST}:
                raise target_exists_error(self.target) from error
            if error.errno == errno.EXDEV:
                raise _fixed_layer_error(self.target, error) from error
            raise

    def _move_aside(self) -> None:
        old = sibling_path(self.target, OLD)
        # Locked while the target does not exist, so that no other process restores the old content as an orphan.
        mark = take(self.target)
        try:
            self._old = old
            os.rename(self.target, old)
            os.rename(self._partial, self.target)
        finally:
            if mark is not None:
                release(mark)

    def _settle(self) -> None:
        """Sync the swap, then remove the old content."""
        try:
            sync_open_folder(self._parent)
        except OSError as error:
            self._is_doubtful = True
            raise self._doubt(error) from error  # the old content must stay until the sync succeeds
        remove(self._partial)  # the old content, if the names were exchanged
        if self._old:
            remove(self._old)
        self._release()

    def _doubt(self, error: OSError) -> StorageError:
        """Return the error for a swap whose sync failed."""
        kept = next((path for path in (self._old, self._partial) if path and os.path.lexists(path)), "")
        then = (
            f"bring back the old content, which stays next to it as {os.path.basename(kept)}" if kept else "remove it"
        )
        return storage_error(
            error, f"the new content is in place and can be loaded, but a power failure may {then}", self.target
        )

    def _release(self) -> None:
        for fd in {self._lock, self._result, self._parent} - {-1}:
            release(fd)
        self._lock = self._result = self._parent = -1

    def _make_parents(self) -> None:
        missing = []
        folder = os.path.dirname(self.target)
        while not os.path.lexists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        sync_name(folder)
        for new in reversed(missing):
            try:
                os.mkdir(new)
            except OSError as error:
                raise _cannot_make(new, error) from error
            self._made.append(new)
            sync_folder(os.path.dirname(new))

    def _remove_parents(self) -> None:
        for folder in reversed(self._made):
            try:
                os.rmdir(folder)
            except OSError:
                return  # another process uses the folder


def _link(old: str, new: str) -> bool:
    """Link a file under another name; return False if the disk has no links. Raises OSError."""
    try:
        os.link(old, new)
    except OSError as error:
        if error.errno not in {errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV}:
            raise
        return False
    return True


def _cannot_make(folder: str, error: OSError) -> StorageError:
    """Return the error for a parent folder that cannot be created."""
    if error.errno != errno.ENOENT:
        return storage_error(error, "cannot make this folder", folder)
    result = StorageError(  # the parent exists: such file systems do not allow new folders
        "cannot make this folder", where=folder, found=error.strerror, fix="Choose a target elsewhere."
    )
    result.errno, result.strerror = error.errno, error.strerror
    return result


def _fixed_layer_error(target: str, error: OSError) -> StorageError:
    """Return the error for an old folder that the system cannot rename, even on its own file system."""
    result = StorageError(
        "the old folder cannot be renamed: it is in a fixed layer of a container's image (overlayfs)",
        where=target,
        found=error.strerror,
        fix="Choose another target, or replace the folder by a copy of it (`cp -a`, then `rm -r` and `mv`) first.",
    )
    result.errno, result.strerror = error.errno, error.strerror
    return result


def _find_working_folder() -> str:
    """Return the working directory's real path; empty if it was removed."""
    try:
        return os.path.realpath(os.curdir)
    except FileNotFoundError:
        return ""


def _resolve_target(path: str) -> str:
    target = os.path.realpath(path)
    if f"{_find_working_folder()}/".startswith(f"{target.rstrip('/')}/"):
        raise UsageError(
            "the target holds the working directory, so it cannot be replaced in one step",
            where=path,
            fix="Name a folder below it, or run the command from elsewhere.",
        )
    if os.path.ismount(target):
        raise UsageError(
            "the target is a mount point, so it cannot be replaced in one step",
            where=path,
            fix="Name a folder below it.",
        )
    return target


def _can_exchange(folder: str) -> bool:
    """Return True if a disk exchanges two folders. Raises OSError."""
    one, other = (os.path.join(folder, name) for name in ("1", "2"))
    os.mkdir(one)
    os.mkdir(other)
    try:
        return exchange(one, other)
    finally:
        os.rmdir(one)
        os.rmdir(other)


def _restore(target: str) -> None:
    """Restore old content that a killed process moved aside, if still needed."""
    if not _is_vacant(target):
        return
    with suppress(OSError):  # another user's, or another process has just made the target
        for left in [*filter(is_folder, find_orphans(target, OLD))][-1:]:
            os.rename(left, target)


def _is_vacant(target: str) -> bool:
    """Return True if the target does not exist or is an empty folder."""
    try:
        return not os.listdir(target)
    except FileNotFoundError:
        return True
    except NotADirectoryError:
        return not os.path.lexists(target)  # or its parent is a file


def _entries(root: str, folder: str) -> list[Listed]:
    """Return a folder's content; links count as files."""
    prefix = f"{folder}/" if folder else ""
    listed = []
    with suppress(FileNotFoundError), os.scandir(os.path.join(root, folder)) as entries:
        for entry in entries:
            status, is_folder = entry.stat(follow_symlinks=False), entry.is_dir(follow_symlinks=False)
            if not (is_folder or stat.S_ISLNK(status.st_mode) or stat.S_ISREG(status.st_mode)):
                raise _special_file_error(entry.path)
            listed.append(Listed(prefix + entry.name, status.st_size, is_folder))
    return sorted(listed)


def _refuse_existing(target: str, *, overwrite: bool, single_file: bool) -> None:
    if _is_vacant(target) and not (single_file and os.path.isdir(target)):
        return
    is_folder = os.path.isdir(target)
    if single_file and is_folder:
        raise folder_exists_error(target)
    if not single_file and not is_folder:
        raise TargetExistsError("the target is a file", where=target, fix="Choose another name.")
    if single_file and not os.path.isfile(target):
        raise _special_file_error(target)
    if not overwrite and not (single_file and os.path.getsize(target) == 0):
        raise target_exists_error(target)


def _special_file_error(path: str) -> TargetExistsError:
    """Return the error for a pipe, socket or device in place of the result."""
    mode = os.lstat(path).st_mode
    found = "a FIFO" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
    return TargetExistsError(
        "only regular files are replaced", where=path, found=found, fix="Choose another name; pipes cannot be written."
    )


def require_space(target: str, needed_bytes: int) -> None:
    """Require that the target's disk has space."""
    folder = os.path.dirname(target)
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    # Some network file systems do not report free space.
    if disk.f_blocks and free < needed_bytes:
        raise NoSpaceError(
            "the target's disk cannot hold the result",
            where=target,
            found=f"{free} bytes free",
            expected=f"at least {needed_bytes}",
            fix=f"Free some space{_describe_unfinished(folder)}, or choose a target elsewhere; an old target stays"
            " until the new one is complete.",
        )


def _describe_unfinished(folder: str) -> str:
    """Name the files that killed or running saves left in a folder; empty if none."""
    left: list[str] = []
    with suppress(OSError):
        left = sorted(filter(is_partial, os.listdir(folder)))
    shown = ", ".join(map(escape, left[:_SHOWN])) + (", ..." if len(left) > _SHOWN else "")
    return f" ({shown} next to it: from a save that was killed, or is still running)" if left else ""
