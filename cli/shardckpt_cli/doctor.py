"""`shardckpt doctor`."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from shardckpt_cli import options, output

if TYPE_CHECKING:
    from shardckpt.results import HealthCheck, HealthReport

_WORDS = {"ok": ("ok", typer.colors.GREEN), "problem": ("PROBLEM", typer.colors.RED), "info": ("-", None)}
_WORD_WIDTH, _NAME_WIDTH = 9, 15  # columns on the screen


def doctor(root: options.Root, html: options.Html = "", as_json: options.AllAsJson = False) -> None:
    """Check a run's health, and show what to type next.

    Exits with 1 if there is a problem. Reads the newest step twice, and writes nothing but --html.
    """
    import shardckpt
    from shardckpt.errors import escape

    found = shardckpt.doctor(root, html=html)
    if as_json:
        output.print_json(found)
    else:
        _show(found)
        if html:
            print(f"wrote {escape(html)}")
    raise typer.Exit(0 if found.ok else 1)


def _show(found: HealthReport) -> None:
    from shardckpt.errors import escape

    is_terminal = sys.stdout.isatty()
    width = max(shutil.get_terminal_size().columns, 40) if is_terminal else 0
    has_color = is_terminal and not os.environ.get("NO_COLOR")
    for check in found.checks:
        for line in _show_check(check, width, has_color=has_color):
            print(line)
    problems = output.count(len(found.problems), "problem") if found.problems else "no problem"
    step = "no complete step" if found.newest is None else f"step {found.newest} is the newest"
    print(f"{escape(found.root)}: {problems}, {step}")


def _show_check(check: HealthCheck, width: int, *, has_color: bool) -> Iterator[str]:
    """Yield a check's lines: one in a pipe, as many as needed on a terminal."""
    from shardckpt.errors import escape

    word, color = _WORDS[check.status]
    start = f"{word:<{_WORD_WIDTH}}{check.name:<{_NAME_WIDTH}}"
    shown = typer.style(word, fg=color, bold=True) + start[len(word) :] if has_color and color else start
    indent = " " * len(start)
    lines = _wrap(escape(check.text), width - len(indent))
    yield f"{shown}{lines[0]}"
    yield from (f"{indent}{line}" for line in lines[1:])
    if check.next:
        yield f"{indent}next: {escape(check.next)}"  # not wrapped: it is copied


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""] if width > 0 else [text]
