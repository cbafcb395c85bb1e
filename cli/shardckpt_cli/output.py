"""How results are printed: sizes, tables, JSON, and the progress line of a terminal."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

_WIDEST = 96
_MOST_PLACES = 12


class ProgressLike(Protocol):
    """What a progress callback is given."""

    @property
    def done_bytes(self) -> int:
        """Bytes written so far."""

    @property
    def total_bytes(self) -> int:
        """Bytes that will be written."""

    @property
    def seconds(self) -> float:
        """Since the first byte."""


@lru_cache(maxsize=4096)  # a hundred thousand tensors have a few dozen sizes
def size(nbytes: float) -> str:
    """Return bytes as people read them, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def table(rows: Iterable[Sequence[str]], right: frozenset[int] = frozenset()) -> str:
    """Return rows as aligned columns.

    Args:
        rows: Of equal length.
        right: Columns that are aligned to the right.
    """
    kept = [tuple(row) for row in rows]
    if not kept:
        return ""
    widths = [min(max(map(len, column)), _WIDEST) for column in zip(*kept, strict=True)]
    form = "  ".join(f"{{:{'>' if i in right else '<'}{width}}}" for i, width in enumerate(widths))
    return "\n".join(form.format(*row).rstrip() for row in kept)


def as_json(result: Any) -> str:
    """Return a frozen result as JSON; surrogates are escaped, and numbers that JSON lacks are text: "inf", "nan"."""
    return json.dumps(_plain(result), indent=2, default=str)


def _plain(value: Any) -> Any:
    """Return frozen results, nested in one another, as what JSON knows."""
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return value._asdict()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def warn(lines: Iterable[str]) -> None:
    """Print warnings to stderr, a line each."""
    from shardckpt.errors import escape

    for line in lines:
        print(f"warning: {escape(line)}", file=sys.stderr)


def left_out(places: Sequence[str]) -> None:
    """Say on stderr what of the source was not asked for, so that nothing is dropped in silence."""
    from shardckpt.errors import escape

    if places:
        more = f" and {len(places) - _MOST_PLACES} more" if len(places) > _MOST_PLACES else ""
        print(f"left out: {escape(', '.join(places[:_MOST_PLACES]))}{more}", file=sys.stderr)


class ProgressLine:
    """One line on a terminal that is overwritten as bytes are written; nothing if stderr is not a terminal.

    Args:
        quiet: Print nothing at all.
    """

    _LEAST_SECONDS = 0.1

    def __init__(self, quiet: bool) -> None:
        self._shown = -self._LEAST_SECONDS
        self._on = not quiet and sys.stderr.isatty()
        self._dirty = False

    def __call__(self, progress: ProgressLike) -> None:
        """Show how far the work is, at most ten times a second."""
        done = progress.done_bytes >= progress.total_bytes
        if not self._on or (progress.seconds - self._shown < self._LEAST_SECONDS and not done):
            return
        self._shown = progress.seconds
        rate = progress.done_bytes / max(progress.seconds, 1e-6)
        left = (progress.total_bytes - progress.done_bytes) / max(rate, 1.0)
        share = 100 * progress.done_bytes / max(progress.total_bytes, 1)
        done_of_total = f"{size(progress.done_bytes)} of {size(progress.total_bytes)} ({share:.0f} %)"
        text = f"{done_of_total}  {size(rate)}/s  {left:.0f} s left"
        print(f"\r{text:<72}", end="", file=sys.stderr, flush=True)
        self._dirty = True

    def clear(self) -> None:
        """Wipe the line."""
        if self._dirty:
            print("\r" + " " * 72 + "\r", end="", file=sys.stderr, flush=True)
            self._dirty = False
