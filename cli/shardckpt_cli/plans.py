"""`--plan` and `shardckpt task`: work that any scheduler shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt_cli import options, output

if TYPE_CHECKING:
    from shardckpt.results import PlanStatus

Plan = Annotated[str, typer.Argument(metavar="PLAN", help="File that --plan wrote: path or URL.")]


def has_planned(
    verb: str, sources: list[str], given: dict[str, Any], path: str, tasks: int, *, quiet: bool = False, as_json: bool
) -> bool:
    """Write a plan in place of the work if the user asks for one."""
    options.refuse_idle(not path, "without --plan", {"--tasks": tasks})
    if not path:
        return False
    import shardckpt

    chosen = {name: value for name, value in given.items() if value is not None}
    status = shardckpt.plan_tasks(path, verb, *sources, tasks=tasks, **chosen)
    if as_json:
        output.print_json(status)
    elif not quiet:
        last = status.task_count - 1
        number = f"N, with N from 0 to {last}" if last else "0"
        print(
            f"planned {output.count(status.task_count, 'task')}, {output.size(status.nbytes)}: {path}\n"
            f"next: shardckpt task {path} {number}; then shardckpt commit {path}"
        )
    return True


def task(
    plan: Plan,
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
    has_sizes = status.nbytes > 0  # steps of a run have none
    output.draw_bar(status.done_bytes if has_sizes else ended, status.nbytes if has_sizes else status.task_count)
    print(
        f"{plan}: {ended} of {output.count(status.task_count, 'task')} ended,"
        f" {output.size(status.done_bytes)} of {output.size(status.nbytes)}"
    )
    if status.missing:
        print(f"left: {status.missing_ranges}")
