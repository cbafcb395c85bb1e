"""`shardckpt prune`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shardckpt_cli import exits, options, output

_Last = Annotated[int | None, typer.Option("--keep-last", metavar="N", help="Keep the newest N steps.")]
_Every = Annotated[int | None, typer.Option("--keep-every", metavar="N", help="Keep steps that N divides.")]
_Best = Annotated[int | None, typer.Option("--keep-best", metavar="N", help="Keep the best N steps by --metric.")]
_Metric = Annotated[str, typer.Option("--metric", metavar="NAME", help="Metric that --keep-best compares.")]
_Mode = Annotated[str, typer.Option("--mode", help="Which metric is the best: min or max.")]
_For = Annotated[
    str | None, typer.Option("--keep-for", metavar="TIME", help="Keep steps that are younger than this: 36h, 7d, 2w.")
]
_Verify = Annotated[bool, typer.Option("--verify", help="Check every byte of the newest step before removing others.")]
_Dry = Annotated[bool, typer.Option("--dry-run", help="Print the steps to remove; remove nothing.")]


def prune(
    root: options.Root,
    keep_last: _Last = None,
    keep_every: _Every = None,
    keep_best: _Best = None,
    metric: _Metric = "loss",
    mode: _Mode = "min",
    keep_for: _For = None,
    verify: _Verify = False,
    dry_run: _Dry = False,
    as_json: options.AllAsJson = False,
) -> None:
    """Remove steps that no rule keeps, and files of saves that died a day ago.

    The newest complete step stays.
    """
    import shardckpt
    from shardckpt.errors import escape

    exits.on_interrupt_message("steps removed so far are gone, all others are complete")
    done = shardckpt.prune(
        root,
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        metric=metric,
        mode=mode,  # type: ignore[arg-type]  # checked there
        keep_for=keep_for,
        verify=verify,
        dry_run=dry_run,
    )
    if as_json:
        output.print_json(done)
        return
    for step in done.incomplete:
        print(f"not complete: {step.fault}", file=sys.stderr)
    verb = "would remove" if dry_run else "removed"
    for step in done.removed:
        print(f"{verb} {step.number}, {output.size(step.nbytes)}")
    for name in done.orphans:
        print(f"{verb} {escape(name)}, which was never finished")
    for name in done.other_content:
        print(f"{'would leave' if dry_run else 'left'} {escape(name)}, which no save wrote")
    stay = "would keep" if dry_run else "kept"
    print(
        f"{stay} {len(done.kept)}, the newest {done.kept[-1].number}" if done.kept else f"{stay} none: none is complete"
    )
