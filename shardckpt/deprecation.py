"""Earlier names and values of public parameters and attributes, which keep working for one release."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from shardckpt.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")

Replace = Callable[[Any], tuple[str, Any] | None]
"""Returns today's name and value for a value of an earlier parameter; None if nothing has changed for it."""


def renamed_params(**names: str | Replace) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that accepts earlier keyword parameters, with a warning at the caller's line.

    Args:
        **names: Earlier name to today's, which alone is in the signature; or a function that replaces its value too.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        shown = function.__qualname__.removesuffix(".__init__")

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for old in [name for name in kwargs if name in names]:
                name = names[old]
                replaced = (name, kwargs[old]) if isinstance(name, str) else name(kwargs[old])
                if replaced is None:
                    continue
                new, value = replaced
                if new in kwargs:
                    raise UsageError(f"{shown}() got `{new}` and its earlier name `{old}`", fix=f"Pass `{new}` alone.")
                warnings.warn(
                    f"`{old}` of {shown}() is deprecated and will be removed in the next release: use `{new}`",
                    DeprecationWarning,
                    stacklevel=2,
                )
                del kwargs[old]
                kwargs[new] = value
            return function(*args, **kwargs)

        return call

    return decorate


def warn_renamed(old: str, new: str) -> None:
    """Warn at the line that uses the earlier name of an attribute or a method, which calls this.

    Args:
        old: The earlier name, with that of its class.
        new: Today's.
    """
    warnings.warn(
        f"`{old}` is deprecated and will be removed in the next release: use `{new}`", DeprecationWarning, stacklevel=3
    )
