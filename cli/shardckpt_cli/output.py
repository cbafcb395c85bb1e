"""Print results: sizes, tables, JSON, and progress on a terminal.

`rich` formats output for terminals, and is imported only for them. Pipes and files get plain text, one row per line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any, Protocol, TextIO

if TYPE_CHECKING:
    from shardckpt.results import Progress

SCHEMA_VERSION = 1  # for all commands' JSON; every change raises it, except an added field

_WIDEST = 96
_MAX_PLACES = 12
_MAX_DRAWN = 1000  # maximum rows in a table that rich draws, at 0.25 ms each
_BAR_WIDTH = 40  # characters


class IncompleteStep(Protocol):
    """A step that cannot be loaded."""

    @property
    def number(self) -> int:
        """The step's number."""

    @property
    def fault(self) -> str:
        """Reason why it is not complete."""

    @property
    def is_unfinished(self) -> bool:
        """Whether its save or removal was interrupted, or is still running."""


@lru_cache(maxsize=4096)  # checkpoints of 100,000 tensors have a few dozen sizes
def size(nbytes: float) -> str:
    """Return bytes as text in decimal units: `1.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def count(number: int, noun: str) -> str:
    """Return a number with its noun: `1 tensor`, `2 tensors`."""
    return f"{number} {noun}{'s' * (number != 1)}"


def show_time(seconds: float | None) -> str:
    """Return a time, in seconds since the epoch, as text in UTC; empty without one."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(seconds))


def show_name(name: str) -> str:
    """Return a name for a table: escaped; if it is long, braces keep only their first item."""
    # Lightning's keys of callbacks contain all arguments. `--json` has full names.
    from shardckpt.errors import escape

    return escape(_ITEMS.sub(r"{\1, ...}", name) if len(name) > _LONG_NAME else name)


_LONG_NAME = 80
_ITEMS = re.compile(r"\{([^{},]+),[^{}]+\}")  # items in braces, as in a dict; the first item is a group


def show_table(
    rows: Sequence[Sequence[str]], *, header: Sequence[str] = (), right: frozenset[int] = frozenset()
) -> None:
    """Print rows as aligned columns; on a terminal, long names are wrapped within their column."""
    lines = [header, *rows] if header else rows
    if not lines:
        return
    if _can_draw(sys.stdout) and not os.environ.get("NO_COLOR") and len(rows) <= _MAX_DRAWN:
        _draw_table(rows, header, right)
    else:
        columns = [
            map(str.rjust if i in right else str.ljust, column, repeat(min(max(map(len, column)), _WIDEST)))
            for i, column in enumerate(zip(*lines, strict=True))
        ]
        print("\n".join(map(str.rstrip, map("  ".join, zip(*columns, strict=True)))))


def _draw_table(rows: Sequence[Sequence[str]], header: Sequence[str], right: frozenset[int]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    names = header or [""] * len(rows[0])
    columns = [Column(name, justify="right" if i in right else "left", overflow="fold") for i, name in enumerate(names)]
    drawn = Table(*columns, box=None, pad_edge=False, show_header=bool(header))
    for row in rows:
        drawn.add_row(*row)
    # names may contain [bold] or :smile:, which would be replaced
    Console(markup=False, emoji=False, highlight=False).print(drawn)


def draw_bar(done: int, total: int) -> None:
    """Draw a bar with what is done, on a terminal."""
    if not total or not _can_draw(sys.stdout):
        return
    from rich.console import Console
    from rich.progress_bar import ProgressBar

    console = Console()
    console.print(ProgressBar(total=total, completed=done, width=_BAR_WIDTH))
    console.print()  # a bar has no end of line


def _can_draw(stream: TextIO) -> bool:
    """Return True if a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def print_json(result: Any) -> None:
    """Print a command's result as JSON, with its schema's version."""
    # Dataclasses and named tuples are objects with their fields and properties. Surrogates are escaped, and numbers
    # that JSON lacks are text: "inf", "nan".
    print(json.dumps({"schema_version": SCHEMA_VERSION, **_plain(result)}, indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    """Return nested results as JSON values."""
    if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
        return {name: _plain(getattr(value, name)) for name in list_members(value.__class__)}
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, frozenset):
        value = sorted(value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


@lru_cache(maxsize=64)
def list_members(cls: type) -> tuple[str, ...]:
    """Return a dataclass's or named tuple's fields and properties, which are the JSON's keys."""
    fields = getattr(cls, "_fields", None) or tuple(field.name for field in dataclasses.fields(cls))
    return *fields, *(name for name, value in vars(cls).items() if isinstance(value, property))


def warn(lines: Iterable[str]) -> None:
    """Print warnings to stderr, one per line."""
    from shardckpt.errors import escape

    for line in lines:
        print(f"warning: {to_shell(escape(line))}", file=sys.stderr)


def left_out(places: Sequence[str]) -> None:
    """Print skipped content to stderr."""
    from shardckpt.errors import escape

    if places:
        print(f"left out: {join_first([*map(escape, places)])}", file=sys.stderr)


def show_incomplete(steps: Sequence[IncompleteStep]) -> None:
    """Print why steps are not complete to stderr: a line for each, but one line for all that are unfinished."""
    unfinished = [step for step in steps if step.is_unfinished]
    shown = [step.fault for step in steps if len(unfinished) == 1 or not step.is_unfinished]
    if len(unfinished) > 1:
        numbers = join_first([f"{step.number}" for step in unfinished])
        shown.append(
            f"{len(unfinished)} steps whose save or removal was interrupted, or still runs: {numbers}."
            " `shardckpt prune` removes them a day after their last change; `shardckpt repair` restores complete ones"
        )
    for fault in shown:
        print(f"not complete: {fault}", file=sys.stderr)


def join_first(names: Sequence[str]) -> str:
    """Return names with commas; if there are many, the first names and the number of others."""
    more = f" and {len(names) - _MAX_PLACES} more" if len(names) > _MAX_PLACES else ""
    return ", ".join(names[:_MAX_PLACES]) + more


@contextmanager
def show_progress(*, quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """Show bytes, rate and remaining time on a terminal; yield the callback for progress, None if nothing is shown."""
    if quiet or not _can_draw(sys.stderr):
        yield None
        return
    import shardckpt

    with shardckpt.events.show_progress() as show:
        yield show


_arguments: list[str] = []  # names of the running command's arguments


def note_arguments(names: Iterable[str]) -> None:
    """Note the running command's arguments, which `to_shell` writes as options."""
    _arguments[:] = names


def to_shell(message: str) -> str:
    """Return a library message in the words of the command line."""
    # Messages name a Python argument and its option together: `overwrite=True (--overwrite)`. A name in backquotes is
    # an argument if the command has an option for it.
    message = _PYTHON_AND_OPTION.sub(r"\1", _OPTION_AND_PYTHON.sub(r"\1", message))
    return _NAME.sub(lambda found: _name_option(found[1]) if found[1] in _arguments else found[0], message)


_PYTHON_AND_OPTION = re.compile(r"\b\w+=\w* \((--[^()]+)\)")
_OPTION_AND_PYTHON = re.compile(r"(--[a-z-]+(?: [A-Z]+)?) \(\w+=\)")
_NAME = re.compile(r"`(\w+)`")


def _name_option(argument: str) -> str:
    return f"--{argument.replace('_', '-')}"
