"""Resolve paths and URLs to stores; URLs with a protocol use fsspec."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Protocol, cast

from shardckpt.errors import MissingFileError, SourceNotFoundError, StorageError, UsageError
from shardckpt.events.warn_user import warn_user
from shardckpt.storage.local import LocalStore
from shardckpt.storage.node_folder import NodeFolder, SharedFolder, find_folder
from shardckpt.storage.orphans import find_moved_aside
from shardckpt.storage.store import ObjectStore, Store, SubfolderStore, check_name, convert_os_errors, storage_error

_BUCKETS = ("s3", "s3a", "gs", "gcs", "az", "abfs")

_PROTOCOL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*(://|::)")


# Schemes of stores above this package, with the class of each, which is imported with its first URL.
_STORES = {"shardckpt-memory": "shardckpt.tiers.memory.memory_store:MemoryStore"}


class _HeldStore(ObjectStore, Protocol):
    """A store that knows what its URL names."""

    def find_kind(self) -> str:
        """Return `file`, `folder` or `missing`."""
        ...


def as_url(path: object) -> str:
    """Return a path argument as text."""
    if isinstance(path, str):
        return path
    if isinstance(path, os.PathLike):
        path = os.fspath(path)
    if not isinstance(path, str):
        is_plain = path is None or isinstance(path, (bool, int, float, bytes))
        found, fix = f"an object of type {type(path).__name__}", f"{_TEXT}." if is_plain else _ORDER
        raise UsageError("the path must be a path or a URL", found=found, fix=fix)
    return path


def as_place(path: object) -> str:
    """Return a path argument as text, and require that it names a place."""
    url = as_url(path)
    if not url or "\0" in url:
        what = "must not contain a NUL character" if url else "must not be empty"
        raise UsageError(f"the path {what}", where=repr(url), fix="Name a file, a folder or a URL.")
    return url


_TEXT = "Name a file, a folder or a URL as text"
_ORDER = f"{_TEXT}; a state goes before it."


def local_path(url: str) -> str | None:
    """Return a URL's local path, with the home folder for `~`; None if it is remote."""
    url = as_place(url)
    if url.startswith(("file://", "local://")):
        return url.partition("://")[2] or "/"
    if _PROTOCOL.match(url):
        return None
    _require_slashes(url)
    return _expand_home(url)


def _require_slashes(url: str) -> None:
    """Refuse `s3:/bucket`, which would be a folder `s3:` here, unless there is one."""
    protocol, colon, place = url.partition(":/")
    if colon and protocol.lower() in _BUCKETS and not os.path.exists(f"{protocol}:"):
        fix = f"Write {protocol.lower()}://{place.lstrip('/')}, or ./{url} for a folder of that name."
        raise UsageError("a URL has two slashes after its protocol", where=url, fix=fix)


def _expand_home(path: str) -> str:
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded == "~" or expanded.startswith("~/"):
        fix = "Set HOME, or name the folder by its path; `./~` names one that is called so."
        raise UsageError("the home folder of the user is not known", where=path, fix=fix)
    return expanded


def fix_folder(url: str) -> str:
    """Return an absolute path, which does not depend on the working directory; URLs stay as they are."""
    path = local_path(url)
    if path is None or os.path.isabs(path):
        return url
    try:
        return os.path.abspath(path)
    except FileNotFoundError:  # the working directory was removed
        return url


def open_store(url: str) -> Store:
    """Return the store for a folder."""
    return _find_mounted(url) or _open_folder(url)


def open_place(url: str) -> Store:
    """Return the store to write into a folder, whatever is mounted there for reads. Raises like `open_store`."""
    path = local_path(url)
    return open_remote(url) if path is None else LocalStore(path)


def _open_folder(url: str) -> Store:
    path = local_path(url)
    if path is None:
        return open_remote(url)
    old = "" if os.path.exists(path) else find_moved_aside(path)
    if old:
        warn_user(f"{path} is missing, since the process that replaced it was interrupted: reading {old}")
    return LocalStore(old or path)


MOUNTED: dict[str, Store] = {}  # by root URL, which they replace for reads


@contextmanager
def mount_store(url: str, store: Store) -> Iterator[None]:
    """Open a URL, and folders below it, as a given store in this process within the context."""
    MOUNTED[url] = store
    try:
        yield
    finally:
        del MOUNTED[url]


def _find_mounted(url: str) -> Store | None:
    """Return a folder's mounted store; None without one."""
    for root, store in [*MOUNTED.items()]:
        folder = url.rstrip("/").removeprefix(root)
        if url.startswith(root) and (not folder or folder.startswith("/")):
            return SubfolderStore(store, folder.lstrip("/")) if folder else store
    return None


def _find_mounted_kind(url: str) -> str:
    """Return what a URL names in a mounted store, like `kind`; empty outside mounted stores."""
    for root, store in [*MOUNTED.items()]:
        name = url.rstrip("/").removeprefix(root).lstrip("/")
        if url.startswith(f"{root}/") and name:
            entries = store.list(name.rpartition("/")[0])
            kinds = ["folder" if entry.is_folder else "file" for entry in entries if entry.name == name]
            return (*kinds, "missing")[0]
        if url == root:
            return "folder" if store.list() else "missing"
    return ""


def open_remote(url: str) -> ObjectStore:
    """Return a store in which files appear one by one. Raises UsageError like `open_store`."""
    path = local_path(url)
    if path is not None:
        return SharedFolder(path)
    if _is_held(url):
        return _open_held(url)
    folder = find_folder(url)
    if folder is not None:
        return NodeFolder(url, folder)
    from shardckpt.storage.fsspec_store import FsspecStore  # noqa: PLC0415  (fsspec costs a tenth of a second)

    return FsspecStore(url)


def _is_held(url: str) -> bool:
    """Return True if a store of `_STORES` opens a URL."""
    scheme, mark, _ = url.partition("://")
    return bool(mark) and scheme in _STORES


def _open_held(url: str) -> _HeldStore:
    module, _, name = _STORES[url.partition("://")[0]].partition(":")
    return cast("_HeldStore", getattr(import_module(module), name)(url))


def split(url: str) -> tuple[str, str]:
    """Split a path or URL into its folder's URL and its name there."""
    path = local_path(url)
    trimmed = (url if path is None else path).rstrip("/")
    parent, slash, name = trimmed.rpartition("/")
    if not name or name in {".", ".."} or (path is None and (parent.endswith("/") or not slash)):
        raise UsageError("this names no file or folder inside another one", where=url, fix="Name a place below it.")
    if path is not None and not parent:
        parent = "/" if slash else "."
    return parent, name


def kind(url: str) -> str:
    """Return what a URL names: `file`, `folder` or `missing`."""
    path = local_path(url)
    if mounted := _find_mounted_kind(url):
        return mounted
    if _is_held(url):
        return _open_held(url).find_kind()
    if path is None:
        path = find_folder(url)
    if path is None:
        from shardckpt.storage.fsspec_store import find_kind  # noqa: PLC0415  (as above)

        return find_kind(url)
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return "folder" if find_moved_aside(path) else "missing"
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.ENAMETOOLONG}:  # nothing can exist at this path
            return "missing"
        raise storage_error(error, "cannot look at it", path) from error
    return "folder" if stat.S_ISDIR(mode) else "file"


def split_step_suffix(url: str) -> tuple[str, str] | None:
    """Return the run and the text after the `@` of a path such as `RUN@latest`; None for another path.

    A `#` means the same.
    """
    scheme = url.find("://")
    start = 0 if scheme < 0 else url.find("/", scheme + 3)  # a host may have a user before its `@`
    if start < 0:
        return None
    at = url.rfind("@best:", start)  # a metric's name may contain slashes
    if at < 0:
        at = max(url.rfind(mark, max(start, url.rfind("/"))) for mark in "@#")
    return None if at < 0 else (url[:at] or ".", url[at + 1 :])


def find_missing_bucket(url: str) -> str:
    """Return the bucket's URL if the bucket is known to be missing; else an empty text."""
    protocol, _, place = url.partition("://")
    bucket = f"{protocol}://{place.strip('/').partition('/')[0]}"
    if protocol not in _BUCKETS or "@" in bucket:
        return ""
    try:
        return bucket if kind(bucket) == "missing" else ""
    except StorageError:  # the folder may exist in a bucket that this user may not list
        return ""


def missing_bucket_error(bucket: str) -> SourceNotFoundError:
    """Return the error for a bucket that does not exist."""
    return SourceNotFoundError("this bucket does not exist", where=bucket, fix="Check its name, or create it.")


def not_found_error(url: str, what: str = "nothing is stored here") -> SourceNotFoundError:
    """Return the error for a path or URL where nothing is stored; it names a missing bucket."""
    if bucket := find_missing_bucket(url):
        return missing_bucket_error(bucket)
    return SourceNotFoundError(what, where=url, fix="Check the path or URL.")


def file_version(folder: str, name: str) -> str:
    """Return a text that changes when a file is replaced; empty if unavailable."""
    path = local_path(folder)
    if path is None:
        return open_remote(folder).version(name)
    where = os.path.join(path, name)
    with convert_os_errors("cannot look at it", where):
        try:
            status = os.stat(where)
        except FileNotFoundError as error:
            raise MissingFileError("no such file", where=where) from error
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def read_version(url: str, name: str, *, of_source: bool = False) -> str:
    """Return a file's size and a text that changes when it is replaced. Raises MissingFileError or StorageError.

    `of_source` adds when its metadata changed, which no program sets: files may be replaced with their times. A commit
    links what tasks wrote, which changes this time.
    """
    check_name(name, url)
    path = local_path(url)
    if path is None:
        store = open_remote(url)
        return f"{store.size(name)} {store.version(name)}"
    where = os.path.join(path, name)
    with convert_os_errors("cannot look at it", where):
        status = os.stat(where)
    times = (status.st_mtime_ns, status.st_ctime_ns) if of_source else (status.st_mtime_ns,)
    return " ".join(map(str, (status.st_size, *times)))
