"""`shardckpt prune`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt_cli import exits, options, output

if TYPE_CHECKING:
    from shardckpt.results import UnfinishedFolder

_UNFINISHED_FOR = "1d"
_Steps = Annotated[
    str,
    options.take_step("ROOT", "Folder of a run's steps, path or URL; ROOT@1000..2000 names steps to remove."),
]
_Last = Annotated[int | None, typer.Option("--keep-last", metavar="N", help="Keep the newest N steps.")]
_Every = Annotated[int | None, typer.Option("--keep-every", metavar="N", help="Keep steps that N divides.")]
_Best = Annotated[int | None, typer.Option("--keep-best", metavar="N", help="Keep the best N steps by --metric.")]
_Metric = Annotated[
    str, typer.Option("--metric", metavar="NAME", help="Metric that --keep-best compares. Default: loss.")
]
_Mode = Annotated[
    str,
    options.choose("--mode", "Which metric is the best: min (the default) or max.", "min", "max"),
]
_For = Annotated[
    str | None, typer.Option("--keep-for", metavar="TIME", help="Keep steps that are younger than this: 36h, 7d, 2w.")
]
_Verify = Annotated[bool, typer.Option("--verify", help="Check every byte of the newest step before removing others.")]
_Unfinished = Annotated[
    str,
    typer.Option(
        "--unfinished-for",
        metavar="TIME",
        help="Remove what unfinished saves and removals left this long ago; 0 only if no job saves into the run.",
    ),
]
_Dry = Annotated[bool, typer.Option("--dry-run", help="Print the steps to remove; remove nothing.")]


def prune(
    root: _Steps,
    keep_last: _Last = None,
    keep_every: _Every = None,
    keep_best: _Best = None,
    metric: _Metric = "",
    mode: _Mode = "",
    keep_for: _For = None,
    verify: _Verify = False,
    unfinished_for: _Unfinished = _UNFINISHED_FOR,
    dry_run: _Dry = False,
    as_json: options.AllAsJson = False,
) -> None:
    """Remove steps that no rule keeps.

    The newest complete step always stays. Files of saves that died a day ago go, too.
    """
    import shardckpt
    from shardckpt.errors import escape

    options.refuse_idle(not keep_best, "without --keep-best", {"--metric": metric, "--mode": mode})
    exits.on_interrupt_message("steps removed so far are gone, all others are complete")
    done = shardckpt.prune(
        root,
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        metric=metric or "loss",
        mode=mode or "min",  # type: ignore[arg-type]  # checked there
        keep_for=keep_for,
        verify=verify,
        unfinished_for=unfinished_for,
        dry_run=dry_run,
    )
    if as_json:
        output.print_json(done)
        return
    names_steps = "@" in root and done.root != root
    has_rule = bool(keep_last or keep_every or keep_best or keep_for or names_steps)
    if not has_rule and unfinished_for == _UNFINISHED_FOR:
        print(_NO_RULE, file=sys.stderr)
    output.show_incomplete([step for step in done.incomplete if not step.is_unfinished])
    _show_unfinished(done.unfinished)
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


_NO_RULE = "no rule is given: all complete steps stay; name --keep-last, --keep-every, --keep-best or --keep-for"


def _show_unfinished(folders: Sequence[UnfinishedFolder]) -> None:
    """Print to stderr which folders from unfinished saves and removals stay, and when they may go."""
    from shardckpt.errors import escape

    if not folders:
        return
    names = output.join_first([escape(folder.name) for folder in folders])
    nbytes = output.size(sum(folder.nbytes for folder in folders))
    times = [folder.removable_at for folder in folders if folder.removable_at is not None]
    known = f"may go from {output.show_time(min(times))} on" if times else "have no known age"
    print(
        f"not complete: {output.count(len(folders), 'folder')}, {nbytes}, from saves or removals that were interrupted,"
        f" or still run: {names}. They {known}; if no job saves into this run, --unfinished-for 0 removes them now",
        file=sys.stderr,
    )
