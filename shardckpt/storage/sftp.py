"""SFTP for stores: one connection per server, with pipelining and reconnection.

fsspec's connection allows one thread at a time, never reconnects after an error, and waits for an answer after each
32 KiB written.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shardckpt.errors import StorageError

_SILENCE_S = 60.0  # seconds without an answer after which a connection counts as lost

_KEEPALIVE_S = 30
_PACKET = 32 << 10


class SftpFiles:
    """The subset of fsspec's interface that stores use; calls are serialized."""

    protocol = ("sftp", "ssh")

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._fs: Any = None
        self.turn = threading.RLock()

    def live(self) -> Any:
        """Return a file system, on a new connection if the last was lost. The caller must hold `turn`."""
        if self._fs is not None and (self._fs.ftp.get_channel().closed or not _transport(self._fs).is_active()):
            self.forget()
        if self._fs is None:
            fs = self._connect()
            _require_known_host(fs)
            self._fs = fs
            _transport(self._fs).set_keepalive(_KEEPALIVE_S)
            self._fs.ftp.get_channel().settimeout(_SILENCE_S)
        return self._fs

    def forget(self) -> None:
        """Close the connection; the next call opens a new one."""
        lost, self._fs = self._fs, None
        if lost is not None:
            lost.client.close()

    def leave(self) -> None:
        """Close the socket inherited by a fork; the parent continues to use it."""
        if self._fs is not None:
            with suppress(Exception):
                _transport(self._fs).sock.close()

    def invalidate_cache(self) -> None:
        """Do nothing; listings are never cached."""

    def ls(self, path: str, detail: bool = True) -> Any:
        """List a folder. Like the following methods, raises exceptions of paramiko."""
        return self._request(lambda fs: fs.ls(path, detail=detail))

    def info(self, path: str) -> Any:
        """Return metadata for a file or folder."""
        return self._request(lambda fs: fs.info(path))

    def find(self, path: str, detail: bool = True) -> Any:
        """Return metadata for all files below a folder."""
        return self._request(lambda fs: fs.find(path, detail=detail))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Create a folder and its parents."""
        self._request(lambda fs: fs.makedirs(path, exist_ok=exist_ok))

    def rm_file(self, path: str) -> None:
        """Remove a file."""
        self._request(lambda fs: fs.ftp.remove(path))

    def rmdir(self, path: str) -> None:
        """Remove an empty folder."""
        self._request(lambda fs: fs.ftp.rmdir(path))

    def mv(self, path: str, target: str) -> None:
        """Rename a file atomically; an existing target is replaced."""
        self._request(lambda fs: fs.ftp.posix_rename(path, target))

    def mv_new(self, path: str, target: str) -> None:
        """Rename a file atomically if the target does not exist."""
        try:
            self._request(lambda fs: fs.ftp.rename(path, target))
        except OSError as error:
            if self._request(lambda fs: fs.exists(target)):
                raise FileExistsError(target) from error
            raise

    def cat_file(self, path: str, start: int, end: int) -> bytes:
        """Return a file range; all requests are sent before the first answer is read."""

        def read(fs: Any) -> bytes:
            with fs.ftp.open(path, "rb") as file:
                return b"".join(file.readv([(start, end - start)]))

        data: bytes = self._request(read)
        return data

    def open(self, path: str, mode: str, block_size: int = 0) -> SftpUpload:
        """Open a file for writing."""
        assert mode == "wb", (mode, block_size)
        with self.turn:
            return SftpUpload(self, self._request(lambda fs: fs.ftp.open(path, "wb")))

    def _request(self, action: Callable[[Any], Any]) -> Any:
        with self.turn:
            fs = self.live()
            try:
                return action(fs)
            except (TimeoutError, EOFError):  # the next request would take a late answer for its own
                self.forget()
                raise


class SftpUpload:
    """A file being written; each write sends all packets before reading answers."""

    def __init__(self, files: SftpFiles, file: Any) -> None:
        self._files, self._file = files, file

    def write(self, data: bytes) -> None:
        """Append bytes. Raises OSError if the server rejects any."""
        with self._files.turn:
            # paramiko ignores errors of pipelined writes; a final write that is not pipelined reads all answers.
            self._file.set_pipelined(True)
            self._file.write(data[:-_PACKET])
            self._file.set_pipelined(False)
            self._file.write(data[-_PACKET:])

    def close(self) -> None:
        """Close the file."""
        with self._files.turn:
            self._file.close()


def _transport(fs: Any) -> Any:
    return fs.client.get_transport()


def _require_known_host(fs: Any) -> None:
    """Compare a server's key with `known_hosts`, which fsspec does not read."""
    port = int(fs.ssh_kwargs.get("port") or 22)
    name = fs.host if port == 22 else f"[{fs.host}]:{port}"
    hosts = type(fs.client.get_host_keys())()
    with suppress(OSError):
        hosts.load(os.path.expanduser("~/.ssh/known_hosts"))
    known, key = hosts.lookup(name) or {}, _transport(fs).get_remote_server_key()
    expected = known.get(key.get_name())
    if expected is not None and expected != key:
        fs.client.close()
        raise StorageError(
            "the server's key has changed: somebody may pose as the server",
            where=name,
            found=f"{key.get_name()} {key.get_base64()[:24]}...",
            expected=f"{expected.get_base64()[:24]}...",
            fix="If the server was set up again, remove its old key: ssh-keygen -R NAME.",
        )


_SHARED: dict[tuple[int, str], SftpFiles] = {}
_SHARING = threading.Lock()


def get_connection(server: str, connect: Callable[[], Any]) -> SftpFiles:
    """Return this process's connection to a server."""
    with _SHARING:  # keyed by process: a forked child must not use its parent's
        return _SHARED.setdefault((os.getpid(), server), SftpFiles(connect))


def _after_fork() -> None:
    """Drop the parent's connections without sending anything on them."""
    global _SHARING  # noqa: PLW0603  (another thread may have held it)
    _SHARING = threading.Lock()
    for files in _SHARED.values():
        files.leave()


os.register_at_fork(after_in_child=_after_fork)
