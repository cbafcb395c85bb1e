"""Retry requests after transient errors; raise other errors immediately."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

from shardckpt.errors import MissingFileError, ShardckptError, StorageError, describe_with_class
from shardckpt.events import count_retry
from shardckpt.storage.store import storage_error

ATTEMPTS = 4  # for one request, including the first

# A request without any answer for so many seconds since the first attempt is not tried again; clients retry, too.
UNANSWERED_S = 45.0

# If no attempt had an answer, other requests to the same server get only one attempt for so many seconds.
LOST_S = 60.0

# Seconds before the second attempt, times a random factor of 0.5 to 2; each further pause is twice as long.
FIRST_PAUSE_S = 0.5

# Source of that factor.
PAUSES = random.Random()  # noqa: S311 (no secret; Python's own generator belongs to training)

_PERMANENT = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.EINVAL,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EEXIST,
    errno.ENOTEMPTY,
    errno.ENOSYS,
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
}
# Exceptions in aiohttp, botocore, urllib3 and paramiko for interrupted connections.
_TRANSIENT_NAMES = re.compile("Timeout|Connect|Incomplete|Payload|HTTPClient|Protocol|Throttl")

# Exceptions in the same libraries for connections that were not made.
_UNREACHABLE_NAMES = {
    "ClientConnectorError",
    "ConnectionTimeoutError",
    "EndpointConnectionError",
    "ConnectTimeoutError",
    "NewConnectionError",
    "NoValidConnectionsError",
}

_MISSING_BUCKET = re.compile("(?i)(bucket|container) does not exist")  # texts of S3, of Google's and of Azure's store

# S3's codes for credentials that may have been replaced since they were read.
EXPIRED_CODES = {
    "ExpiredToken",
    "ExpiredTokenException",
    "TokenRefreshRequired",
    "InvalidToken",
    "InvalidAccessKeyId",
}

# Exceptions for connections that ended before an answer started.
_DROPPED_NAMES = {"ConnectionClosedError", "ServerDisconnectedError", "RemoteDisconnected"}

CREDENTIALS: WeakSet[Any] = WeakSet()  # credentials of clients beside s3fs, each with a method `renew`

LOST: dict[str, float] = {}  # servers without an answer, and the last failure's time

T = TypeVar("T")


class ShortBodyError(Exception):
    """A response has fewer bytes than requested."""


def retry(action: Callable[[], T], what: str, where: str, pause: Callable[[float], object] | None = None) -> T:
    """Return the result of `action`, retried after transient errors."""
    started = time.monotonic()
    with WATCH.waiting(where):
        return _retry(action, what, where, pause or time.sleep, started)


def _retry(action: Callable[[], T], what: str, where: str, pause: Callable[[float], object], started: float) -> T:
    server = _find_server(where)
    attempts = 1 if time.monotonic() - LOST.get(server, -LOST_S) < LOST_S else ATTEMPTS
    for number in range(1, attempts + 1):
        try:
            result = action()
        except ShardckptError:
            raise
        except Exception as raised:  # fsspec's back ends raise exceptions of their libraries
            error = _find_failure(raised)
            seconds = FIRST_PAUSE_S * 2 ** (number - 1) * PAUSES.uniform(0.5, 2)
            elapsed, has_answer = time.monotonic() - started, not _has_no_answer(error)
            is_late = elapsed > UNANSWERED_S and not has_answer
            if number == 1 < attempts and _needs_new_credentials(error) and _read_credentials():
                count_retry()
                continue
            # A pause that returns True ends the retries.
            if number == attempts or is_late or not is_transient(error) or pause(seconds):
                if not has_answer:
                    LOST[server] = time.monotonic()
                raise remote_error(error, what, where, number, elapsed if is_late else None) from raised
            count_retry()
        else:
            LOST.pop(server, None)
            return result
    raise AssertionError("unreachable")


def _find_server(where: str) -> str:
    """Return a URL's protocol and server or bucket."""
    return "/".join(where.split("/", 3)[:3])


def _has_no_answer(error: BaseException) -> bool:
    """Return True if a server did not start to answer."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return _is_unreachable(error) or _is_unanswered(error) or bool(names & _DROPPED_NAMES)


def _needs_new_credentials(error: BaseException) -> bool:
    """Return True if S3 refused the credentials themselves."""
    for each in (error, error.__cause__):
        response = getattr(each, "response", None)
        if isinstance(response, dict) and response.get("Error", {}).get("Code") in EXPIRED_CODES:
            return True
    return False


def renew_credentials(file: Any) -> None:
    """Make an S3 upload read the credentials again, once for each request that S3 refuses because of them."""
    # A part cannot be written again through the file: it keeps parts that S3 has, and would send them twice.
    request = getattr(file, "_call_s3", None)
    if request is None:
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return request(*args, **kwargs)
        except Exception as error:
            if not (_needs_new_credentials(error) and _read_credentials()):
                raise
            count_retry()
            return request(*args, **kwargs)

    file._call_s3 = call


def _read_credentials() -> bool:
    """Make this process's S3 clients read their credentials again; return True if there are any."""
    clients = list(sys.modules["s3fs"].S3FileSystem._cache.values()) if "s3fs" in sys.modules else []
    credentials = list(CREDENTIALS)
    try:
        for client in clients:
            client.connect(refresh=True)
        for each in credentials:
            each.renew()
    except Exception:  # noqa: BLE001  (the error of the request is the one to show)
        return False
    return bool(clients or credentials)


def _find_failure(error: Exception) -> Exception:
    """Return the cause of an error: fsspec calls each HTTP failure a missing file."""
    cause = error.__cause__
    is_hidden = isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and is_transient(cause)
    return cause if is_hidden and isinstance(cause, Exception) else error


def is_transient(error: BaseException) -> bool:
    """Return True if the same request may succeed later."""
    status = _status(error)
    if status is not None:
        return status >= 500 or status in {408, 425, 429}
    if isinstance(error, (ShortBodyError, TimeoutError, asyncio.TimeoutError, ConnectionError, EOFError)):
        return True
    if isinstance(error, OSError):
        named = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
        return not isinstance(error, named) and error.errno not in _PERMANENT
    return any(_TRANSIENT_NAMES.search(kind.__name__) for kind in type(error).__mro__)


def remote_error(
    error: Exception, what: str, where: str, tries: int = 1, given_up_after: float | None = None
) -> StorageError:
    """Return a StorageError for a back end's exception, to raise `from` it."""
    times = f"tried {tries} times" if tries > 1 else "tried"
    if given_up_after is not None:
        times += f" for {given_up_after:.0f} s"
    shown = f"{what} ({times})" if tries > 1 or given_up_after is not None else what
    if _is_unreachable(error):
        text = f"{shown}: the server cannot be reached"
        fix = "Check the address, the network and that the server runs, then try again."
        return StorageError(text, where=where, found=describe_with_class(error), fix=fix)
    if _has_no_answer(error):
        text, fix = f"{shown}: the server does not answer", "Check the endpoint and the network, then try again."
        return StorageError(text, where=where, found=describe_with_class(error), fix=fix)
    if isinstance(error, FileNotFoundError):
        if _MISSING_BUCKET.search(str(error)):
            server = _find_server(where)
            return MissingFileError(
                f"{shown}: the bucket does not exist", where=where, found=server, fix="Check its name, or create it."
            )
        return MissingFileError(shown, where=where, found="no such object", fix="Check the URL.")
    if isinstance(error, PermissionError):
        text = str(error) or "access denied"
        return StorageError(shown, where=where, found=text, fix="Check the credentials and what they may do.")
    if isinstance(error, OSError) and error.errno:
        return storage_error(error, shown, where)
    text = describe_with_class(error)
    return StorageError(shown, where=where, found=text, fix="Check the endpoint and the credentials, then try again.")


def _is_unreachable(error: BaseException) -> bool:
    """Return True if no connection to a server could be made."""
    if _status(error) is not None:
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    return isinstance(error, ConnectionRefusedError) or bool(names & _UNREACHABLE_NAMES)


def _is_unanswered(error: BaseException) -> bool:
    """Return True if a request had no answer within its client's limit."""
    return _status(error) is None and any("Timeout" in kind.__name__ for kind in type(error).__mro__)


def _status(error: BaseException) -> int | None:
    """Return the HTTP status in an exception of aiohttp or requests."""
    response = getattr(error, "response", None)
    for owner, name in ((error, "status"), (response, "status_code")):
        value = getattr(owner, name, None)
        if isinstance(value, int):
            return value
    return None


FIRST_NOTICE_S = 10.0  # seconds without an answer before the first warning
NEXT_NOTICE_S = 60.0  # seconds between further lines

_TICK_S = 1.0

_LOG = logging.getLogger("shardckpt")


class RequestWatch:
    """Requests that wait for an answer, with a thread that logs a warning if none comes; it ends when none waits."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Forget all requests, as in a forked process, which does not have the thread."""
        self._started: dict[object, tuple[str, float]] = {}
        self._answered_at = 0.0
        self._lock = threading.Lock()
        self._is_running = False

    @contextmanager
    def waiting(self, where: str) -> Iterator[None]:
        """Watch one request within the context."""
        key = object()
        with self._lock:
            self._started[key] = where, time.monotonic()
            starts, self._is_running = not self._is_running, True
        try:
            if starts:
                self._start_thread()
            yield
        finally:
            with self._lock:
                del self._started[key]
                self._answered_at = time.monotonic()

    def _start_thread(self) -> None:
        try:
            threading.Thread(target=self._run, name="request watch", daemon=True).start()
        except RuntimeError:  # as while the process ends; the request does not need the thread
            self._is_running = False

    def _run(self) -> None:
        due = FIRST_NOTICE_S
        while True:
            time.sleep(min(_TICK_S, FIRST_NOTICE_S))
            with self._lock:
                if not self._started:
                    self._is_running = False
                    return
                where, started = min(self._started.values(), key=lambda entry: entry[1])
                silent = time.monotonic() - max(started, self._answered_at)
            if silent < FIRST_NOTICE_S:
                due = FIRST_NOTICE_S
            elif silent >= due:
                due += NEXT_NOTICE_S
                _LOG.warning("%s: no answer for %d s, still waiting", where, silent)


WATCH = RequestWatch()

os.register_at_fork(after_in_child=WATCH.forget)
