"""A store over fsspec: a bucket, or a folder on another file system."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime, timezone
from importlib import import_module
from typing import Any, NamedTuple

import fsspec
from fsspec.core import url_to_fs
from fsspec.utils import infer_storage_options

from shardckpt.errors import MissingFileError, StorageError, TruncatedError, UsageError
from shardckpt.storage.fsspec_writer import FsspecWriter, can_create_once, new_writer
from shardckpt.storage.obstore_client import uses_obstore
from shardckpt.storage.obstore_files import connect_obstore
from shardckpt.storage.range_cache import MAX_REQUEST, BlockCache, ByteRange, plan_requests
from shardckpt.storage.retry import ShortBodyError, remote_error, retry
from shardckpt.storage.sftp import SftpFiles, get_connection
from shardckpt.storage.store import Capabilities, Listed, Read, check_name
from shardckpt.storage.thread_pool import ThreadPool

# Bytes that one store caches, so that a small checkpoint is fetched only once, in whatever order it is read.
CACHE_BYTES = 32 << 20

CONCURRENT = 8  # maximum concurrent requests for one read

_SFTP = {"sftp", "ssh"}

_EXTRAS = {"s3": "s3", "s3a": "s3", "abfs": "azure", "abfss": "azure", "az": "azure", "sftp": "sftp", "ssh": "sftp"}


# Retry settings for botocore: five attempts with long pauses, its default, would multiply with the attempts of `retry`.
_S3_RETRIES = {"mode": "standard", "total_max_attempts": 3}


_HTTP_CONNECT_S = 15.0

_HTTP_READ_S = 30.0  # seconds without a byte after which an HTTP request is given up


class _Wanted(NamedTuple):
    """A range that is not in the cache, and its destination."""

    name: str
    start: int
    target: memoryview


_Parts = list[_Wanted]
_Requests = list[tuple[str, ByteRange]]
_Running = deque[tuple[tuple[str, ByteRange], Future[bytes]]]


class FsspecStore:
    """A folder on any fsspec file system. Reads are thread-safe; endpoints and keys come from the environment."""

    def __init__(self, url: str, *, cache_bytes: int = CACHE_BYTES, **storage_options: object) -> None:
        self.url = url
        self._fs, path = connect(url, **storage_options)
        self.capabilities = Capabilities(renames=False, is_local=False, creates_once=can_create_once(self._fs))
        self._root: str = path.rstrip("/")
        self._sizes: dict[str, int] = {}
        self._cache = BlockCache(cache_bytes)
        self._next: dict[str, ByteRange] = {}
        self._lock = threading.Lock()

    def list(self, folder: str = "") -> list[Listed]:
        """Return the content of `folder`, sorted by name."""
        path = self._path(folder) if folder else self._root
        try:
            entries: list[dict[str, Any]] = retry(
                lambda: self._fs.ls(path, detail=True), "cannot list", self._shown(folder)
            )
        except MissingFileError:
            return []
        listed = []
        for entry in entries:
            base = entry["name"].rstrip("/").rpartition("/")[2]
            if entry["name"].strip("/") == path.strip("/") or base in {"", ".", ".."}:
                continue  # some stores list a marker object for the folder itself
            name = f"{folder}/{base}" if folder else base
            is_folder = entry["type"] == "directory"
            if not is_folder and entry["size"] is not None:
                self._sizes[name] = entry["size"]
            # An index of a web server names files without their sizes.
            listed.append(Listed(name, 0 if is_folder else self.size(name), is_folder))
        return sorted(listed)

    def size(self, name: str) -> int:
        """Return a file's size in bytes, without a request if a listing contained it."""
        known = self._sizes.get(name)
        if known is not None:
            return known
        entry, shown = self._get_info(name, "the size"), self._shown(name)
        if entry["type"] == "directory":
            raise MissingFileError("this is a folder, not a file", where=shown)
        if entry["size"] is None:
            raise StorageError("the store does not report the size", where=shown, fix="Copy the file to a disk first.")
        self._sizes[name] = entry["size"]
        return self._sizes[name]

    def read(self, reads: Sequence[Read]) -> None:
        """Fill every buffer, from the cache and with few concurrent requests for the rest."""
        for name, offset, buffer in reads:
            self._check_range(name, offset, offset + buffer.nbytes)
        wanted: dict[str, _Parts] = {}
        with self._lock:
            for name, offset, buffer in reads:
                view = buffer.cast("B") if buffer.nbytes else buffer
                for start, stop in self._cache.copy(name, offset, view) if buffer.nbytes else []:
                    part = view[start - offset : stop - offset]
                    wanted.setdefault(name, []).append(_Wanted(name, start, part))
            requests: _Requests = [(name, span) for name, parts in wanted.items() for span in self._plan(name, parts)]
        if len(requests) == 1:
            self._deliver(*requests[0], self._fetch(*requests[0], threading.Event()), wanted)
        elif requests:
            self._fetch_all(requests, wanted)

    def _plan(self, name: str, parts: _Parts) -> Sequence[ByteRange]:
        """Return the requests for the missing parts of a file."""
        size = self._sizes[name]
        missing = [ByteRange(part.start, part.start + len(part.target)) for part in parts]
        requests = plan_requests(self._cache, name, size, missing)
        last = self._next.get(name)
        if last and len(requests) == 1 and requests[0].start == last.stop:
            start = last.stop  # a request that continues the previous one reads ahead
            stop = min(max(requests[0].stop, start + min(2 * (start - last.start), MAX_REQUEST)), size)
            if not self._cache.holds(name, start, stop):
                requests = [ByteRange(start, stop)]
        self._next[name] = requests[-1]
        return requests

    def _fetch_all(self, requests: _Requests, wanted: dict[str, _Parts]) -> None:
        stop = threading.Event()
        pool = ThreadPool(min(CONCURRENT, len(requests)), "shardckpt-read")
        running: _Running = deque()
        try:
            for request in requests:
                if len(running) == CONCURRENT:  # limits the fetched ranges that wait in memory
                    self._deliver_next(running, wanted)
                running.append((request, pool.submit(self._fetch, *request, stop)))
            while running:
                self._deliver_next(running, wanted)
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)

    def _deliver_next(self, running: _Running, wanted: dict[str, _Parts]) -> None:
        (name, span), future = running.popleft()
        self._deliver(name, span, future.result(), wanted)

    def _fetch(self, name: str, span: ByteRange, stop: threading.Event) -> bytes:
        path, start, end = self._path(name), span.start, span.stop

        def request() -> bytes:
            data = self._cat(path, start, end)
            if len(data) != end - start:
                raise ShortBodyError(f"{len(data)} of {end - start} bytes")
            return data

        return retry(request, "cannot read", f"{self._shown(name)} bytes {start}-{end}", pause=stop.wait)

    def _cat(self, path: str, start: int, end: int) -> bytes:
        if type(self._fs).cat_file is fsspec.AbstractFileSystem.cat_file:
            # fsspec's own cache would read ahead by megabytes.
            with self._fs.open(path, "rb", cache_type="none") as file:
                file.seek(start)
                return bytes(file.read(end - start))
        return bytes(self._fs.cat_file(path, start=start, end=end))

    def _deliver(self, name: str, span: ByteRange, data: bytes, wanted: dict[str, _Parts]) -> None:
        for _, start, target in wanted[name]:
            low, high = max(start, span.start), min(start + len(target), span.stop)
            if low < high:
                target[low - start : high - start] = memoryview(data)[low - span.start : high - span.start]
        with self._lock:
            self._cache.add(name, span.start, data)

    def _check_range(self, name: str, start: int, stop: int) -> None:
        size = self.size(name)
        if start < 0 or stop > size:
            raise TruncatedError.from_size(self._shown(name), size, stop)

    def create(self, name: str, *, is_new: bool = False, needed: str = "") -> FsspecWriter:
        """Start a new file."""
        path = self._path(name)
        self._forget(name)
        return new_writer(self._fs, path, self._shown(name), is_new=is_new, needed=self._path(needed) if needed else "")

    def delete(self, name: str) -> None:
        """Remove a file; a missing one is not an error."""
        path = self._path(name)
        self._forget(name)
        with suppress(MissingFileError):
            retry(lambda: self._fs.rm_file(path), "cannot delete", self._shown(name))

    def delete_files(self, folder: str, names: Collection[str]) -> None:
        """Remove some files in a folder, and the folder if nothing else is there."""
        self._delete_all([f"{folder}/{name}" for name in sorted(names)])
        with suppress(Exception):  # buckets have no folders; elsewhere an empty folder is harmless
            self._fs.rmdir(self._path(folder))

    def _delete_all(self, names: Sequence[str]) -> None:
        """Remove files at the same time. Raises UnsafeError or StorageError."""
        with ThreadPool(CONCURRENT, "shardckpt-delete") as pool:
            for done in [pool.submit(self.delete, name) for name in names]:
                done.result()

    def delete_folder(self, folder: str) -> None:
        """Remove a folder with all its content; a missing one is not an error."""
        below = list(self._walk(folder))
        self._delete_all([entry.name for entry in below if not entry.is_folder])
        for name in (*(entry.name for entry in below if entry.is_folder), folder):
            with suppress(Exception):  # buckets have no folders; elsewhere an empty folder is harmless
                self._fs.rmdir(self._path(name))

    def _walk(self, folder: str) -> Iterator[Listed]:
        """Yield a folder's content recursively, before the folder itself."""
        for entry in self.list(folder):
            if entry.is_folder:
                yield from self._walk(entry.name)
            yield entry

    def changed_at(self, folder: str) -> float | None:
        """Return when a folder last changed, in seconds since the epoch; None if the store has no times."""
        path = self._path(folder)
        entries: dict[str, dict[str, Any]] = retry(
            lambda: self._fs.find(path, detail=True), "cannot list", self._shown(folder)
        )
        times = (_changed(entry) for entry in entries.values())
        return max((time for time in times if time is not None), default=None)

    def written_at(self, name: str) -> float | None:
        """Return when a file was written, in seconds since the epoch; None if the store has no times."""
        return _changed(self._get_info(name, "its time"))

    def version(self, name: str) -> str:
        """Return a text that changes when a file is replaced; empty if unavailable."""
        entry = self._get_info(name, "its version")
        known = [f"{key} {entry[key]}" for key in (*_VERSIONS, *_TIMES) if entry.get(key) is not None]
        return f"{entry.get('size')} {' '.join(known)}" if known else ""

    def rename(self, source: str, target: str) -> None:
        """Raise an error: this store cannot rename folders atomically."""
        raise StorageError("this store cannot rename", where=self._shown(source), expected=target)

    def _get_info(self, name: str, what: str) -> dict[str, Any]:
        """Return what the store knows about a file."""
        path = self._path(name)
        info: dict[str, Any] = retry(lambda: self._fs.info(path), f"cannot find {what}", self._shown(name))
        return info

    def _forget(self, name: str) -> None:
        with self._lock:
            self._sizes.pop(name, None)
            self._next.pop(name, None)
            self._cache.forget(name)

    def _path(self, name: str) -> str:
        check_name(name, self.url)
        return f"{self._root}/{name}"

    def _shown(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}" if name else self.url


# Names under which file systems report when an object was written; a replaced object has a new time.
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")

# Names under which file systems report a version that changes with an object's content.
_VERSIONS = ("ETag", "etag", "e_tag", "VersionId", "version_id", "generation", "md5Hash", "content_md5", "blob_id")


def _changed(entry: Mapping[str, Any]) -> float | None:
    """Return when an object was written; file systems use many keys."""
    value = next((entry[key] for key in _TIMES if entry.get(key) is not None), None)
    if isinstance(value, str):
        with suppress(ValueError):
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    return float(value) if isinstance(value, (int, float)) else None


def connect(url: str, **storage_options: object) -> tuple[Any, str]:
    """Return the file system for a URL, and the path in it."""
    protocol = url.partition(":")[0]
    if protocol in _SFTP:
        return _connect_sftp(url, protocol, storage_options)
    if protocol in {"s3", "s3a"} and "\n" in url:  # s3fs finds no key in it
        raise UsageError("a URL of S3 must not contain a line break", where=repr(url), fix="Choose another name.")
    if uses_obstore(protocol):
        return connect_obstore(url)
    if protocol in {"s3", "s3a"} and not {"AWS_MAX_ATTEMPTS", "AWS_RETRY_MODE"} & os.environ.keys():
        # Reads are retried by `retry`; these retries apply to uploads.
        storage_options = {"config_kwargs": {"retries": _S3_RETRIES}, **storage_options}
    if protocol in {"http", "https"} and "client_kwargs" not in fsspec.config.conf.get(protocol, {}):
        storage_options = {"client_kwargs": {"timeout": _build_http_timeout()}, **storage_options}
    try:
        fs, path = url_to_fs(url, **storage_options)
        fs.invalidate_cache()  # fsspec shares file system objects, and their cached listings with them
    except ImportError as error:
        raise _missing_package(url, protocol, error) from error
    except ValueError as error:
        raise UsageError("this URL cannot be used", where=url, found=error, fix=_correct_url(url, protocol)) from error
    except Exception as error:
        raise remote_error(error, "cannot set up access", url) from error
    return fs, path


def _correct_url(url: str, protocol: str) -> str:
    """Return a fix for a URL that fsspec refuses."""
    lower = protocol.lower()
    if lower != protocol:
        return f"Write it with small letters: {lower}{url[len(protocol) :]}"
    return "Check it for typing errors."


def _build_http_timeout() -> object:
    """Return limits for each wait; None without aiohttp, fsspec's HTTP client."""
    try:
        client = import_module("aiohttp")
    except ImportError:
        return None
    # aiohttp's own limit is five minutes for a complete request.
    return client.ClientTimeout(total=None, sock_connect=_HTTP_CONNECT_S, sock_read=_HTTP_READ_S)


def _connect_sftp(url: str, protocol: str, options: Mapping[str, object]) -> tuple[SftpFiles, str]:
    """Return this process's connection to an SSH server; the first use opens it."""
    try:
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise _missing_package(url, protocol, error) from error
    parts = infer_storage_options(url)
    if not parts.get("host"):
        raise UsageError("this URL names no host", where=url, fix=f"Write {protocol}://user@host/folder.")
    server = repr([parts.get(key) for key in ("username", "password", "host", "port")] + sorted(options.items()))
    return get_connection(server, lambda: url_to_fs(url, skip_instance_cache=True, **options)[0]), parts["path"]


_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "http": "aiohttp", "https": "aiohttp", "hf": "huggingface_hub"}


def _missing_package(url: str, protocol: str, error: ImportError) -> UsageError:
    extra = _EXTRAS.get(protocol)
    package = f"'shardckpt[{extra}]'" if extra else _PACKAGES.get(protocol)
    fix = f"pip install {package}" if package else "Install the package that fsspec names."
    return UsageError(f"{protocol}:// needs a package that is missing", where=url, found=error, fix=fix)


def find_kind(url: str) -> str:
    """Return what a remote URL names: `file`, `folder` or `missing`."""
    fs, path = connect(url)
    try:
        entry: dict[str, Any] = retry(lambda: fs.info(path), "cannot look at it", url)
    except MissingFileError:
        return "missing"
    # To fsspec each page is a file; a web server redirects from a folder to its name with a slash.
    is_page = str(entry.get("url", url) if url.startswith(_WEB) else "").endswith("/")
    return "folder" if entry["type"] == "directory" or is_page else "file"


_WEB = ("http://", "https://")
