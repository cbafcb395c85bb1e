"""Deprecated names and values of public parameters and attributes.

They keep working for one release.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

from shardckpt.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")

Replace = Callable[[Any], tuple[str, Any] | None]
"""Returns the current name and value for a value of a deprecated parameter; None if this value needs no change."""


def renamed_params(**names: str | Replace) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that accepts deprecated keyword parameters.

    Warnings point to the caller's line.

    Args:
        **names: Deprecated name to its current name, which alone is in the signature; or to a function that also
            replaces the value.
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


class RenamedAttribute(Generic[T]):
    """Deprecated name of an attribute: reads the attribute by its current name, and warns.

    Args:
        new: Current name.
    """

    def __init__(self, new: str) -> None:
        self._new, self._old = new, ""

    def __set_name__(self, owner: type, name: str) -> None:
        """Remember the deprecated name."""
        self._old = name

    def __get__(self, instance: object, owner: type) -> T:
        """Return the value of the attribute."""
        warn_renamed(f"{owner.__name__}.{self._old}", f"{owner.__name__}.{self._new}")
        value: T = getattr(instance, self._new)
        return value


def warn_renamed(old: str, new: str) -> None:
    """Warn at the line that uses a deprecated attribute or method.

    The implementation of the attribute calls this.

    Args:
        old: Deprecated name, with the name of its class.
        new: Current name.
    """
    warnings.warn(
        f"`{old}` is deprecated and will be removed in the next release: use `{new}`", DeprecationWarning, stacklevel=3
    )
