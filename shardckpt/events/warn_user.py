"""Warnings that point into the code of the user, through the frameworks that call the package."""

from __future__ import annotations

import inspect
import sys
import warnings

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


def warn_user(message: str) -> None:
    """Warn at the innermost line that is neither of this package nor of a library that called it.

    A background thread has no such line: there the warning points to where the thread began.

    Args:
        message: Text of the warning.
    """
    frame, level = inspect.currentframe(), 1
    while frame is not None and frame.f_back is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _BETWEEN:
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
