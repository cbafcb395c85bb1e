"""Warnings that point into the user's code, through the frameworks that call the package."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import warnings

_LOG = logging.getLogger("shardckpt")

# Packages whose modules are between the user's code and a warning.
_BETWEEN = sys.stdlib_module_names | {
    "accelerate",
    "lightning",
    "ray",
    "shardckpt",
    "torch",
    "torchdata",
    "torchft",
    "torchtitan",
    "transformers",
}


# How often background threads gave each warning: as a rule each is shown once.
_OF_THREADS: dict[str | tuple[str, type[Warning], int], int] = {}


def warn_user(message: str) -> None:
    """Warn at the innermost line that is neither in this package nor in a library that called it."""
    # A background thread has no such line: there the warning names the thread, and no file in the standard library.
    # Where warnings are errors, it is logged there: no caller would get the error, and the thread's work would end.
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
