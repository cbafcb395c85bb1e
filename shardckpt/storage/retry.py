"""Retry requests that fail with transient errors, with growing pauses; raise other errors at once."""

from __future__ import annotations

import asyncio
import errno
import random
import re
import time
from collections.abc import Callable
from typing import TypeVar

from shardckpt.errors import MissingFileError, ShardckptError, StorageError
from shardckpt.storage.store import storage_error

ATTEMPTS = 4
"""Tries of one request, the first included."""

FIRST_PAUSE_S = 0.5
"""Seconds before the second try, halved to doubled by chance; each further pause is twice as long."""

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
_TRANSIENT_NAMES = re.compile("Timeout|Connect|Incomplete|Payload|HTTPClient|Protocol|Throttl")
"""Classes of aiohttp, botocore, urllib3 and paramiko that stand for an interrupted conversation."""

T = TypeVar("T")


class ShortBodyError(Exception):
    """A response held fewer bytes than were asked for."""


def retry(action: Callable[[], T], what: str, where: str, pause: Callable[[float], object] = time.sleep) -> T:
    """Return the result of `action`; try again after transient errors.

    Args:
        action: One request; may be repeated.
        what: What could not be done, for the message, e.g. "cannot read".
        where: The object, and the range if there is one.
        pause: Waits for some seconds; returns True if another try is of no use.

    Raises:
        MissingFileError: The object does not exist.
        StorageError: The store refused, or failed at every try.
    """
    for number in range(1, ATTEMPTS + 1):
        try:
            return action()
        except ShardckptError:
            raise
        except Exception as error:  # fsspec's back ends raise whatever their libraries do
            seconds = FIRST_PAUSE_S * 2 ** (number - 1) * random.uniform(0.5, 2)  # noqa: S311 (no secret)
            if number == ATTEMPTS or not is_transient(error) or pause(seconds):
                raise remote_error(error, what, where, tries=number) from error
    raise AssertionError("unreachable")


def is_transient(error: BaseException) -> bool:
    """Return True if the same request may succeed a little later."""
    status = _status(error)
    if status is not None:
        return status >= 500 or status in {408, 425, 429}
    if isinstance(error, (ShortBodyError, TimeoutError, asyncio.TimeoutError, ConnectionError, EOFError)):
        return True
    if isinstance(error, OSError):
        named = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
        return not isinstance(error, named) and error.errno not in _PERMANENT
    return any(_TRANSIENT_NAMES.search(kind.__name__) for kind in type(error).__mro__)


def remote_error(error: Exception, what: str, where: str, tries: int = 1) -> StorageError:
    """Return a StorageError for whatever a back end raised; raise it `from` the original."""
    shown = f"{what} (tried {tries} times)" if tries > 1 else what
    if isinstance(error, FileNotFoundError):
        return MissingFileError(shown, where=where, found="no such object", fix="Check the URL.")
    if isinstance(error, PermissionError):
        text = str(error) or "access denied"
        return StorageError(shown, where=where, found=text, fix="Check the credentials and what they may do.")
    if isinstance(error, OSError) and error.errno:
        return storage_error(error, shown, where)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return StorageError(shown, where=where, found=text, fix="Check the endpoint and the credentials, then try again.")


def _status(error: BaseException) -> int | None:
    """Return the HTTP status an error carries, as aiohttp and requests carry it."""
    response = getattr(error, "response", None)
    for owner, name in ((error, "status"), (response, "status_code")):
        value = getattr(owner, name, None)
        if isinstance(value, int):
            return value
    return None
