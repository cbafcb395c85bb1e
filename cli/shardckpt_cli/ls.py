"""`shardckpt ls`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt_cli import options, output

if TYPE_CHECKING:
    from shardckpt import StepInfo


def ls(
    root: options.Root,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Show sizes, times, metrics and statistics in a table.")
    ] = False,
    as_json: options.AllAsJson = False,
) -> None:
    """List the complete steps of a run, one number per line; report others on stderr."""
    import shardckpt

    found = shardckpt.ls(root, metrics=long or as_json)
    if as_json:
        output.print_json(found)
        return
    if long:
        header: tuple[str, ...] = ("step", "size", "saved", "metrics")
        if any(step.has_stats for step in found.complete):
            header = (*header, "statistics")
        output.show_table([_row(step)[: len(header)] for step in found.complete], header=header, right=_NUMBERS)
    else:
        for step in found.complete:
            print(step.number)
    for step in found.incomplete:
        print(f"not complete: {step.fault}", file=sys.stderr)


_NUMBERS = frozenset({0, 1})
"""Columns of numbers."""


def _row(step: StepInfo) -> tuple[str, ...]:
    from shardckpt.errors import escape

    saved = "" if step.saved_at is None else time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(step.saved_at))
    metrics = " ".join(f"{escape(name)}={value:.6g}" for name, value in (step.metrics or {}).items())
    return f"{step.number}", output.size(step.nbytes), saved, metrics, "stored" if step.has_stats else ""
