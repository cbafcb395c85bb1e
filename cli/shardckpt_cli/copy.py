"""`shardckpt copy`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt_cli import exits, options, output, plans

if TYPE_CHECKING:
    from shardckpt.results import Copied


def copy(
    src: Annotated[
        str,
        options.take_step("SRC", "Folder with a step or a run, path or URL; RUN@latest, RUN@1000..2000."),
    ],
    dst: Annotated[str, typer.Argument(metavar="DST", help="Folder to write: path or URL.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check source and target, and print the plan; write nothing.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace steps in DST that differ.")] = False,
    plan: options.PlanFile = "",
    tasks: options.TaskCount = 0,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Copy a step or a run, compared with its hashes.

    A copy that was interrupted is continued.
    """
    import shardckpt

    given: dict[str, Any] = {"overwrite": overwrite, "dry_run": dry_run}
    if plans.has_planned("copy", [src, dst], given, plan, tasks, quiet=quiet, as_json=as_json):
        return
    exits.on_interrupt_message("steps copied so far are complete, others do not exist")
    with output.show_progress(quiet=quiet or as_json) as on_progress:
        done = shardckpt.copy(src, dst, on_progress=on_progress, **given)
    show_copied(done, quiet=quiet, as_json=as_json)


def show_copied(done: Copied, *, quiet: bool = False, as_json: bool) -> None:
    """Print what was copied."""
    from shardckpt.errors import escape

    if as_json:
        output.print_json(done)
    if as_json or quiet:
        return
    output.warn(done.warnings)
    output.show_incomplete(done.incomplete)
    output.left_out(done.other_content)
    verb = "would copy" if done.dry_run else "copied"
    for name in done.copied:
        print(f"{verb} {escape(name)}")
    present = f", {len(done.present)} there already" if done.present else ""
    seconds = "" if done.dry_run else f" in {sum(done.seconds.values()):.2f} s"
    folders = output.count(len(done.copied), "folder")
    print(f"{escape(done.target)}: {verb} {folders}, {output.size(done.nbytes)}{seconds}{present}")
