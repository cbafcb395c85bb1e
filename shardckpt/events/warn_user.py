"""Warnings that point into the code of the user, through the frameworks that call the package."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import warnings

_LOG = logging.getLogger("shardckpt")

_BETWEEN = sys.stdlib_module_names | {
    "accelerate",
    "lightning",
    "shardckpt",
    "torch",
    "torchdata",
    "torchft",
    "torchtitan",
    "transformers",
}
"""Packages whose modules are between the user's code and a warning."""


_OF_THREADS: dict[str | tuple[str, type[Warning], int], int] = {}
"""Warnings of background threads that were shown: as a rule each is shown once."""


def warn_user(message: str) -> None:
    """Warn at the innermost line that is neither of this package nor of a library that called it.

    A background thread has no such line: there the warning names the thread, and no file of the standard library. Where
    warnings are errors, it is logged there: nobody would get the error, and the work of the thread would end.

    Args:
        message: Text of the warning.
    """
    frame, level = inspect.currentframe(), 1
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _BETWEEN:
            warnings.warn(message, stacklevel=level)
            return
        frame, level = frame.f_back, level + 1
    place = f"<thread {threading.current_thread().name}>"
    try:
        warnings.warn_explicit(message, UserWarning, place, 0, "shardckpt", _OF_THREADS)
    except UserWarning:
        if threading.current_thread() is threading.main_thread():
            raise
        _LOG.warning("%s", message)
