"""Serve a stream's folder over HTTP, read-only and by ranges, for servers on other hosts."""

from __future__ import annotations

import os
import re
from functools import partial
from http import HTTPStatus
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import BinaryIO

from shardckpt.errors import SourceNotFoundError
from shardckpt.storage.store import convert_os_errors

__all__ = ["build_stream_server"]

_RANGE = re.compile(r"bytes=(\d{1,19})-(\d{0,19})")
_BUFFER = 1 << 20
_TIMEOUT_S = 60.0


def build_stream_server(folder: str, host: str, port: int) -> ThreadingHTTPServer:
    """Return a server of a folder; its `serve_forever` blocks.

    Args:
        folder: Path of the stream. Everything in it can be read by everyone who reaches the port.
        host: Address to listen on.
        port: Port; 0 for a free one, which `server_port` names then.

    Raises:
        SourceNotFoundError: The folder does not exist.
        StorageError: The address cannot be used.
    """
    if not os.path.isdir(folder):
        raise SourceNotFoundError("no such folder", where=folder)
    with convert_os_errors("cannot serve the stream", f"{host}:{port}"):
        return ThreadingHTTPServer((host, port), partial(_RangeHandler, directory=folder))


class _RangeHandler(SimpleHTTPRequestHandler):
    """Answers GET and HEAD with listings, files, and one range of a file."""

    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT_S  # seconds without a byte after which a connection ends

    def do_GET(self) -> None:
        """Answer with a range if one is asked for."""
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if match is None:
            super().do_GET()
            return
        path = self.translate_path(self.path)
        try:
            file = open(path, "rb")  # noqa: SIM115  (closed below)
        except OSError:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        with file:
            self._send_range(file, int(match[1]), int(match[2]) if match[2] else None)

    def _send_range(self, file: BinaryIO, start: int, last: int | None) -> None:
        size = os.fstat(file.fileno()).st_size
        stop = size if last is None else min(last + 1, size)
        if start >= stop:
            self.send_response(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            self.send_header("Content-Range", f"bytes */{size}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(HTTPStatus.PARTIAL_CONTENT)
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        file.seek(start)
        left = stop - start
        while left:
            data = file.read(min(left, _BUFFER))
            if not data:
                self.close_connection = True
                return
            self.wfile.write(data)
            left -= len(data)

    def end_headers(self) -> None:
        """Say that ranges are understood, and that nothing may be cached."""
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Cache-Control", "no-store")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a receiver asks several times a second."""
