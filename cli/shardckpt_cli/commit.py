"""`shardckpt commit`: what the tasks of a plan did, as the planned verb shows it."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from typing import Annotated

import typer

from shardckpt_cli import compare, consolidate, copy, options, output, plans, stats, verify

_SHOW = {
    "Comparison": compare.show_comparison,
    "Copied": copy.show_copied,
    "History": stats.show_history,
    "Report": consolidate.show_report,
    "Statistics": stats.show_stats,
    "Verification": verify.show_verification,
}


def commit(
    plan: plans.Plan,
    discard: Annotated[
        bool, typer.Option("--discard", help="Remove what the tasks wrote, and leave the target as it is.")
    ] = False,
    as_json: options.AllAsJson = False,
) -> None:
    """Publish a plan's result, or print it, once all of its tasks have ended.

    Exits as the planned verb does.
    """
    import shardckpt

    if discard:
        options.refuse_idle(True, "with --discard", {"--json": as_json})
        shardckpt.discard_plan(plan)
        return
    exits: list[typer.Exit] = []
    with ExitStack() as progress:

        def show(result: object) -> None:
            progress.close()
            try:
                _SHOW[type(result).__name__](result, as_json=as_json)  # type: ignore[operator]
            except typer.Exit as wanted:  # a verdict, not a failure
                exits.append(wanted)
            sys.stdout.flush()

        on_progress = progress.enter_context(output.show_progress(quiet=as_json))
        shardckpt.commit_plan(plan, on_progress=on_progress, on_result=show)
    for wanted in exits:
        raise wanted
