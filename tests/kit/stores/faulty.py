"""An HTTP server in front of another one, which breaks the requests that a test chooses."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from unittest import mock

CODES = {500: "InternalError", 503: "SlowDown", 429: "TooManyRequests", 403: "AccessDenied", 501: "NotImplemented"}
DROP, LOST, SHORT, SLOW = "drop", "lost", "short", "slow"

Fault = int | str | None
Rule = Callable[[int, str, str], Fault]
"""Given a request's number, method and path, says what happens: an HTTP status, `drop` (the connection, before the
request gets anywhere), `lost` (the connection, after it took effect), `short` (half of the answer's body), `slow` (an
answer that takes its time), or nothing."""


class Faulty:
    """What a test sees of the server.

    Attributes:
        url: Where it listens.
        rule: What becomes of requests.
        requests: Those that came: method and path.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.rule: Rule = lambda number, method, path: None
        self.requests: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def arm(self, rule: Rule) -> None:
        """Count anew, and break what a rule says."""
        with self._lock:
            self.requests.clear()
            self.rule = rule

    def heal(self) -> None:
        """Break nothing any more."""
        self.arm(lambda number, method, path: None)

    def fault(self, method: str, path: str) -> Fault:
        """Count a request; say what becomes of it."""
        with self._lock:
            self.requests.append((method, path))
            return self.rule(len(self.requests), method, path)


@contextmanager
def faulty(upstream: str) -> Iterator[Faulty]:
    """Run the server.

    Args:
        upstream: Whom it stands for: http://host:port.
    """
    address = upstream.removeprefix("http://")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def _serve(self) -> None:
            body = self._body()
            fault = seen.fault(self.command, self.path)
            if fault == DROP:
                self.close_connection = True
                return
            if fault == SLOW:
                time.sleep(0.3)
            if isinstance(fault, int):
                text = f"<Error><Code>{CODES[fault]}</Code><Message>broken for a test</Message></Error>".encode()
                self._answer(fault, [("Content-Type", "application/xml")], b"" if self.command == "HEAD" else text)
                return
            status, headers, answer = self._passed_on(body)
            if fault == LOST:
                self.close_connection = True
                return
            self._answer(status, headers, answer, is_short=fault == SHORT)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve  # noqa: N815

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while True:
                parts.append(self.rfile.readline())
                nbytes = int(parts[-1].split(b";")[0], 16)
                parts.append(self.rfile.read(nbytes + 2) if nbytes else b"")
                if not nbytes:
                    while parts[-1] != b"\r\n":
                        parts.append(self.rfile.readline())
                    return b"".join(parts)

        def _passed_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection(address, timeout=30)
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in self.headers.items():
                if name.lower() not in {"connection", "expect"}:
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            return answer.status, answer.getheaders(), data

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, is_short: bool = False) -> None:
            self.send_response_only(status)
            is_head = self.command == "HEAD"
            for name, value in headers:
                if name.lower() not in {"connection", "transfer-encoding"} | (set() if is_head else {"content-length"}):
                    self.send_header(name, value)
            if not is_head:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if is_short else body)
            self.close_connection = self.close_connection or is_short

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, *_: object) -> None:
            """Say nothing: clients that go away are what is tested."""

    server = Server(("127.0.0.1", 0), Handler)
    seen = Faulty(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def faulty_s3(upstream: str) -> Iterator[Faulty]:
    """Run the server in front of an S3 server, with the environment pointing at it and no client of before or after."""
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    with faulty(upstream) as front, mock.patch.dict("os.environ", AWS_ENDPOINT_URL=front.url):
        yield front
        front.heal()
        s3fs.S3FileSystem.clear_instance_cache()
