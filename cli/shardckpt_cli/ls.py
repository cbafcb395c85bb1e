"""`shardckpt ls` and `tiers`."""

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


_Action = Annotated[str, typer.Argument(metavar="[stop]", help="`stop` ends holders; their captures are lost.")]
_Run = Annotated[str, typer.Argument(metavar="[RUN]", help="Id of the run whose holder to end; all without it.")]


def tiers(action: _Action = "", run: _Run = "", as_json: options.AllAsJson = False) -> None:
    """List the holders that keep captures in memory on this machine, or end them.

    Only those of this user.
    """
    import shardckpt

    if action not in {"", "stop"}:
        raise shardckpt.UsageError("`tiers` has one action", found=action, expected="stop")
    if action == "stop":
        for stopped in shardckpt.stop_tiers(run or None):
            print(f"stopped {stopped}")
        return
    found = shardckpt.tiers()
    if as_json:
        output.print_json(found)
        return
    rows = [
        (
            holder.run,
            " ".join(map(str, holder.steps)),
            output.size(holder.nbytes),
            output.size(holder.max_bytes),
            f"{holder.clients}",
            f"{holder.pid}",
            f"{max(time.time() - holder.started_at, 0.0):.0f} s",
        )
        for holder in found.holders
    ]
    if rows:
        output.show_table(rows, header=("run", "steps", "size", "limit", "clients", "pid", "age"), right=_TIER_NUMBERS)
    else:
        print("no holder of this user answers", file=sys.stderr)


_TIER_NUMBERS = frozenset({2, 3, 4, 5, 6})
"""Columns of numbers."""
