"""Edits of decoded JSON, for tables of refused contents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Change: TypeAlias = Callable[[Any], object]


def put(value: object, *at: Any) -> Change:
    """Set a value in the content."""

    def change(content: Any) -> None:
        for key in at[:-1]:
            content = content[key]
        content[at[-1]] = value

    return change
