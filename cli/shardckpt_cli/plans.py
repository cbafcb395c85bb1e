"""`shardckpt task` and `shardckpt commit`: work that any scheduler shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt_cli import options, output
from shardckpt_cli.consolidate import show_report

if TYPE_CHECKING:
    from shardckpt.results import PlanStatus

_Plan = Annotated[str, typer.Argument(metavar="PLAN", help="File that --plan wrote: path or URL.")]


def task(
    plan: _Plan,
    number: Annotated[int | None, typer.Argument(metavar="[N]", help="Number of the task, from 0.")] = None,
    share: Annotated[
        str, typer.Option("--share", metavar="K/N", help="Run the K-th of N shares, from 1, in place of one task.")
    ] = "",
    status: Annotated[bool, typer.Option("--status", help="Show which tasks have not ended, and run none.")] = False,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Run one task of a plan; a second run does what is left."""
    import shardckpt

    if status:
        options.refuse_idle(True, "with --status", {"N": number is not None, "--share": share})
        found = shardckpt.read_plan_status(plan)
        if as_json:
            output.print_json(found)
        else:
            _show_status(plan, found)
        return
    with output.show_progress(quiet=quiet or as_json) as on_progress:
        report = shardckpt.run_task(plan, number, share=share, on_progress=on_progress)
    if as_json:
        output.print_json(report)
    elif not quiet:
        skipped = f", {len(report.skipped)} done before" if report.skipped else ""
        print(f"{output.count(len(report.done), 'part')} done{skipped}")
        _show_status(plan, report)


def _show_status(plan: str, status: PlanStatus) -> None:
    ended = status.task_count - len(status.missing)
    print(
        f"{plan}: {ended} of {output.count(status.task_count, 'task')} ended,"
        f" {output.size(status.done_bytes)} of {output.size(status.nbytes)}"
    )
    if status.missing:
        print(f"left: {status.missing_ranges}")


def commit(
    plan: _Plan,
    discard: Annotated[
        bool, typer.Option("--discard", help="Remove what the tasks wrote, and leave the target as it is.")
    ] = False,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Publish a plan's result once all of its tasks have ended."""
    import shardckpt

    if discard:
        shardckpt.discard_plan(plan)
        return
    with output.show_progress(quiet=quiet or as_json) as on_progress:
        report = shardckpt.commit_plan(plan, on_progress=on_progress)
    show_report(report, quiet=quiet, as_json=as_json)
