"""Publish on a store without rename: new names first, the final file last."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection
from contextlib import suppress

from shardckpt.errors import MissingFileError, ShardckptError, StorageError, TargetExistsError, UsageError
from shardckpt.storage.orphans import DEAD_S, is_partial
from shardckpt.storage.publication import (
    FindKept,
    FindMissing,
    Publication,
    files_removed_error,
    folder_exists_error,
    keep_no_file,
    target_exists_error,
)
from shardckpt.storage.replaceable import FileKind, FolderKind, files_below, find_replaceable_files, require_file
from shardckpt.storage.resolve_url import kind as kind_at
from shardckpt.storage.resolve_url import local_path, open_remote, split
from shardckpt.storage.store import ClosingWriter, ObjectStore, Store, Writer, read_bytes


class DeferredWriter(ClosingWriter):
    """A writer whose `close` is deferred until the commit."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`. Raises StorageError."""
        self._writer.write(data)

    def copy_from(self, source: Store, name: str, offset: int, nbytes: int) -> None:
        """Append a range of a file in `source`. Raises StorageError."""
        self._writer.copy_from(source, name, offset, nbytes)

    def close(self) -> None:
        """Do nothing; `finish` closes the file."""

    def finish(self) -> None:
        """Close the file. Raises StorageError."""
        self._writer.close()

    def abort(self) -> None:
        """Remove the written bytes; never raises."""
        self._writer.abort()


class BufferedWriter(ClosingWriter):
    """A small file that is kept in memory until the commit."""

    def __init__(self, store: ObjectStore, name: str) -> None:
        self._store, self._name = store, name
        self._data = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append `data`."""
        self._data += data

    def copy_from(self, source: Store, name: str, offset: int, nbytes: int) -> None:
        """Append a range of a file in `source`. Raises StorageError."""
        self._data += read_bytes(source, name, offset, nbytes)

    def close(self) -> None:
        """Do nothing; `finish` writes the file."""

    def finish(self, *, is_new: bool = False, needed: str = "") -> None:
        """Write the file."""
        try:
            with self._store.create(self._name, is_new=is_new, needed=needed) as writer:
                writer.write(self._data)
        except TargetExistsError:
            if not self.is_written():  # if it is, the first answer was lost and the request repeated
                raise

    def is_written(self) -> bool:
        """Return True if the store has a file with these bytes. Raises StorageError."""
        try:
            store = open_remote(self._store.url)
            nbytes = store.size(self._name)
            return nbytes == len(self._data) and read_bytes(store, self._name, 0, nbytes) == self._data
        except MissingFileError:
            return False

    def abort(self) -> None:
        """Do nothing."""


class RemoteFolder(Publication):
    """A folder that becomes loadable with its last object, on a store or disk that cannot replace folders."""

    # Files with new names are written while the old content stays complete. The commit removes the old content, its
    # `last` first, so that no reader mixes old and new files. Then it writes the files with old names, then `last`.
    #
    # If all names but the last have a prefix that no old name has, `last` is replaced atomically, and files without a
    # reference are removed afterwards. If there was no `last`, the new one is created only if there still is none: one
    # of two concurrent publications succeeds. Otherwise, or if the store cannot create files that way, both succeed and
    # the later one stays. So recent files of other publications are not removed.

    def __init__(
        self,
        url: str,
        kind: FolderKind,
        *,
        overwrite: bool,
        last: str | None,
        prefix: str = "",
        find_kept: FindKept = keep_no_file,
        staged: Collection[str] = (),
    ) -> None:
        if kind_at(url) == "file":
            raise TargetExistsError("the target is a file", where=url, fix="Choose another name.")
        is_place = url.partition("://")[2].strip("/") or url.startswith("memory:")
        if not is_place and local_path(url) is None:
            raise UsageError("this URL names no place", where=url, fix="Name a bucket, and a folder in it.")
        self.staging_url = url
        self._store = open_remote(url)
        self._last = last
        if overwrite:
            old = find_replaceable_files(kind, self._store, self._store.list, url)
        else:
            old = _only_partials(self._store, url, last, staged)
        self._old = [name for name in old if name not in staged]
        self.unique_suffix = os.urandom(4).hex() if self._old else ""
        self._deferred: dict[str, DeferredWriter | BufferedWriter] = {}
        self._written: list[str] = []
        self._prefix = "" if any(name.startswith(prefix) for name in self._old) else prefix
        self._find_kept = find_kept
        self._is_done = self._is_doubtful = False

    def create(self, name: str) -> Writer:
        """Start a file, which appears on close, or at the commit if it is `last` or replaces an old file."""
        if name == self._last:
            self._deferred[name] = BufferedWriter(self._store, name)
            return self._deferred[name]
        writer = self._store.create(name)
        if name in self._old:
            self._deferred[name] = DeferredWriter(writer)
            return self._deferred[name]
        self._written.append(name)
        return writer

    def commit(self, find_missing: FindMissing | None = None) -> None:
        """Remove old content and close the deferred files, `last` at the end."""
        last = self._deferred.get(self._last or "")
        if isinstance(last, BufferedWriter) and len(self._deferred) == 1 and (self._prefix or not self._old):
            self._flip(last, find_missing)
            return
        if self._last in self._old:
            self._store.delete(self._last)
        for name in self._list_unneeded(set(self._old) - {self._last}):
            self._store.delete(name)
        for name in sorted(self._deferred, key=lambda name: name == self._last):
            self._written.append(name)
            self._deferred[name].finish()
        self._is_done = True

    def _flip(self, last: BufferedWriter, find_missing: FindMissing | None) -> None:
        """Create or replace `last`, then remove old files."""
        self._is_doubtful = True  # the request may succeed although its answer is lost
        is_new = self._last not in self._old
        replaced = [] if is_new else [*self._list_named(), *self._list_dead()]
        last.finish(is_new=is_new, needed=self._written[-1] if self._written else "")
        if find_missing is not None:
            self._require_written(last, find_missing)
        self._is_done = True
        gone = replaced if not is_new else self._old if self._is_only() else self._list_dead()
        for name in self._list_unneeded(set(gone) - set(self._deferred)):
            with suppress(StorageError):  # readers do not need them
                self._store.delete(name)

    def _require_written(self, last: BufferedWriter, find_missing: FindMissing) -> None:
        """Remove `last` if files are missing."""
        # The request for `last` may succeed late: after another process published this folder, removed files of this
        # publication, and removed its own `last`.
        missing: Collection[str] = ()
        with suppress(StorageError):  # without a look, assume that they are there
            missing = find_missing()
        if missing:
            if last.is_written():
                self._store.delete(self._last or "")
            raise files_removed_error(f"{self._store.url}/{self._last}", min(missing))

    def _list_unneeded(self, names: Collection[str]) -> list[str]:
        """Return the old files that do not stay."""
        if not names:
            return []
        try:
            return sorted(set(names).difference(self._find_kept()))
        except ShardckptError:  # unneeded files do no harm, but a needed one cannot be replaced
            return []

    def _is_only(self) -> bool:
        """Return True if no other running save can succeed any more. Known after the request for `last`."""
        with suppress(ShardckptError):
            return open_remote(self.staging_url).capabilities.creates_once
        return False

    def _list_named(self) -> list[str]:
        """Return the files that the old `last` names."""
        store, text = open_remote(self.staging_url), b""
        with suppress(StorageError):
            text = read_bytes(store, self._last or "", 0, store.size(self._last or ""))
        return [name for name in _all_files(store) if json.dumps(name).encode() in text]

    def _list_dead(self) -> list[str]:
        """Return the old files, except recent ones from other saves, which may still be running."""
        of_a_save = re.compile(rf"\.?[0-9a-z]{{{len(self._prefix)}}}[-.].*")
        return [name for name in self._old if not of_a_save.fullmatch(name) or self._is_dead(name)]

    def _is_dead(self, name: str) -> bool:
        """Return True if a file is older than `DEAD_S`, or its age is unknown."""
        with suppress(StorageError):
            written = self._store.written_at(name)
            return written is None or all(now() - written > DEAD_S for now in (time.time, self._read_store_time))
        return False

    def _read_store_time(self) -> float:
        """Return when the store got this save's last file: this machine's clock may be days ahead."""
        written = self._store.written_at(self._written[-1]) if self._written else None
        return time.time() if written is None else written

    def rollback(self) -> None:
        """Delete the written files, the last first, unless the commit happened or may have; never raises."""
        if self._is_done:
            return
        for writer in self._deferred.values():
            writer.abort()
        files = [*reversed(self._written), *self._list_other_files()]
        if self._is_doubtful:
            # Another process may have found `last`, refer to the files, and have removed `last` again.
            files = self._list_unneeded(files) if self._is_rolled_back() else []
        for name in files:
            with suppress(StorageError):
                self._store.delete(name)
        if files and self._store.capabilities.is_local:  # elsewhere an empty folder is harmless, or there is none
            with suppress(ShardckptError):
                parent, own = split(self.staging_url)
                open_remote(parent).delete_files(own, ())

    def _is_rolled_back(self) -> bool:
        """Remove a new `last`; return True if nothing refers to the files."""
        last = self._deferred.get(self._last or "")
        if not isinstance(last, BufferedWriter) or self._last is None or self._last in self._old:
            return False
        with suppress(StorageError):
            if last.is_written():
                self._store.delete(self._last)
            return True
        return False

    def _list_other_files(self) -> list[str]:
        """Return files that other processes wrote for this result."""
        if not self._prefix:
            return []
        with suppress(StorageError):
            return [entry.name for entry in self._store.list() if entry.name.startswith(self._prefix)]
        return []


class RemoteFile(Publication):
    """One object, which its store replaces atomically."""

    def __init__(self, url: str, kind: FileKind, *, overwrite: bool) -> None:
        what = kind_at(url)
        if what == "folder":
            raise folder_exists_error(url)
        if what == "file" and not overwrite:
            raise target_exists_error(url)
        parent, self._name = split(url)
        self._store = open_remote(parent)
        self._is_new = what == "missing"
        if not self._is_new:
            require_file(kind, self._store, self._name, url)
        self._writer: DeferredWriter | None = None

    def create(self, name: str) -> Writer:
        """Start the file; it appears at the commit. Raises StorageError."""
        assert name == self._name, name
        self._writer = DeferredWriter(self._store.create(name, is_new=self._is_new))
        return self._writer

    def commit(self, find_missing: FindMissing | None = None) -> None:  # noqa: ARG002  (there is one file)
        """Make the file appear. Raises StorageError."""
        if self._writer is not None:
            self._writer.finish()

    def rollback(self) -> None:
        """Abort the upload; never raises."""
        if self._writer is not None:
            self._writer.abort()


def _all_files(store: Store) -> list[str]:
    return list(files_below(store.list, "", store.url))


def _only_partials(store: Store, url: str, last: str | None, staged: Collection[str]) -> list[str]:
    """Return the files in a folder that has only incomplete content."""
    partials = []
    for name in files_below(store.list, "", url):
        if not is_partial(name) and name not in staged:
            is_complete = last is None or any(entry.name == last for entry in store.list())
            if is_complete:
                raise target_exists_error(url)
            fix = "If a killed run left them, pass overwrite=True (--overwrite)."
            raise TargetExistsError(f"the target holds files, but no {last}", where=url, fix=fix)
        partials.append(name)
    return partials
