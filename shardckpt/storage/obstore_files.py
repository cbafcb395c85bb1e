"""S3, GCS and Azure by obstore: requests in Rust, without an event loop, behind the interface of fsspec."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from shardckpt.errors import StorageError
from shardckpt.storage.obstore_client import DRIVER, Clients, convert_errors, open_clients

_IN_FLIGHT = 4  # parts of an upload that are sent at the same time

_MAX_PARTS = 10_000  # of S3


class _Process:
    """Whether requests can be sent: the threads of obstore do not exist in a fork."""

    was_used = False
    is_forked = False

    @classmethod
    def enter_fork(cls) -> None:
        """Refuse requests in a process forked after the first one."""
        cls.is_forked = cls.was_used


os.register_at_fork(after_in_child=_Process.enter_fork)


class ObstoreFiles:
    """The subset of fsspec's interface that stores use, for one bucket; paths are relative to it."""

    fixed_upload_size = True  # the parts of an upload cannot grow

    def __init__(self, protocol: str, shown: str, clients: Clients) -> None:
        self.protocol = (protocol,)
        self._shown, self._clients = shown, clients
        self._api = import_module("obstore")

    def __reduce__(self) -> str:
        raise TypeError("connections and credentials are not pickled")

    def invalidate_cache(self) -> None:
        """Do nothing; listings are never cached."""

    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:
        """List a folder; a missing one is empty. Like the following methods, raises exceptions that `retry` knows."""
        assert detail
        found = self._request("list_with_delimiter", path)
        folders = [{"name": name, "size": 0, "type": "directory"} for name in found["common_prefixes"]]
        return [*folders, *map(_describe, found["objects"])]

    def find(self, path: str, detail: bool = True) -> dict[str, dict[str, Any]]:
        """Return metadata for all files below a folder."""
        assert detail
        listing = self._request("list", path)
        with convert_errors():
            return {entry["path"]: _describe(entry) for entry in listing.collect()}

    def info(self, path: str) -> dict[str, Any]:
        """Return metadata for a file or folder."""
        if path:
            with suppress(FileNotFoundError):
                return _describe(self._request("head", path))
        listing = self._request("list", path or None, chunk_size=1)
        with convert_errors():
            first = next(iter(listing), None)
        if path and not first:
            raise FileNotFoundError(path)
        return {"name": path, "size": 0, "type": "directory"}

    def exists(self, path: str) -> bool:
        """Return True if there is a file or folder."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        self._request("delete", path)

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        """Return a file range."""
        return bytes(self._request("get_range", path, start=start, end=end))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
        """Write a file in one request; the mode `create` fails if there is one."""
        self._request("put", path, value, mode=mode, use_multipart=False)

    def open(self, path: str, mode: str, block_size: int) -> ObstoreUpload:
        """Open a file for an upload in parts; the mode `xb` fails in the end if there is one by then."""
        self._require_process()
        with convert_errors():
            writer = self._api.open_writer(
                self._clients.uploads, path, buffer_size=block_size, max_concurrency=_IN_FLIGHT
            )
        return ObstoreUpload(self, path, writer, block_size * _MAX_PARTS, is_new=mode == "xb")

    def _request(self, verb: str, *arguments: Any, **options: Any) -> Any:
        self._require_process()
        with convert_errors():
            return getattr(self._api, verb)(self._clients.requests, *arguments, **options)

    def _require_process(self) -> None:
        if _Process.is_forked:
            fix = f"Start processes by spawn or forkserver, or unset {DRIVER}."
            raise StorageError("obstore cannot be used in a fork of a process that used it", where=self._shown, fix=fix)
        _Process.was_used = True


class ObstoreUpload:
    """A file being uploaded, of which several parts are sent at the same time."""

    def __init__(self, files: ObstoreFiles, path: str, writer: Any, limit: int, *, is_new: bool) -> None:
        self._files, self._path, self._writer = files, path, writer
        self._left, self._is_new = limit, is_new
        self.closed = False

    def write(self, data: bytes) -> None:
        """Append bytes. Raises an exception that `retry` knows."""
        self._left -= len(data)
        if self._left < 0:
            raise OSError(errno.EFBIG, "the upload would have more parts than a bucket allows")
        with convert_errors():
            self._writer.write(data)

    def close(self) -> None:
        """Make the file appear."""
        # obstore cannot make the end of an upload depend on whether the name is in use.
        if self._is_new and self._files.exists(self._path):
            raise FileExistsError(self._path)
        with convert_errors():
            self._writer.close()
        self.closed = True

    def discard(self) -> None:
        """Drop the parts."""
        with convert_errors():
            self._writer.__exit__(InterruptedError, InterruptedError(), None)


def _describe(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return obstore's metadata of a file by fsspec's names."""
    return {
        "name": entry["path"],
        "size": entry["size"],
        "type": "file",
        "LastModified": entry["last_modified"],
        "ETag": entry["e_tag"],
        "version_id": entry["version"],
    }


def connect_obstore(url: str) -> tuple[ObstoreFiles, str]:
    """Return the file system for a URL, and the path in its bucket. Raises UsageError or StorageError."""
    scheme, _, place = url.partition("://")
    bucket, _, path = place.partition("/")
    shown = f"{scheme}://{bucket}"
    return ObstoreFiles(scheme, shown, open_clients(shown)), path.strip("/")
