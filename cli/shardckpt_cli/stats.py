"""`shardckpt stats`, and over a run's steps `history` and `bisect`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt_cli import options, output, plans

if TYPE_CHECKING:
    from shardckpt.results import History, LayerStats, Statistics, TensorStats

_ORDERS: dict[str, Callable[[TensorStats | LayerStats], float]] = {
    "name": lambda _: 0.0,
    "bad": lambda found: -(found.nans + found.infs),
    "l2": lambda found: -found.l2,
    "max": lambda found: -max(abs(found.max), abs(found.min or 0.0)) if found.max is not None else math.inf,
}

_STATS = ("nans", "infs", "zeros", "min", "max", "mean", "l2")
_OF_FINITE = ("min", "max", "mean", "l2")
_Tensor = Annotated[list[str] | None, typer.Option("--tensor", help="Glob for tensor names; repeatable. Default: all.")]


def stats(
    src: options.Src,
    part: options.StatsPart = "",
    include: options.Include = None,
    exclude: options.Exclude = None,
    sort: Annotated[
        str,
        options.choose("--sort", "Row order: name, bad (NaN, Inf), l2 or max.", "name", "bad", "l2", "max"),
    ] = "name",
    top: options.Top = 0,
    by_layer: options.ByLayer = False,
    base: options.Base = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Read all values, even if the save stored this.")
    ] = False,
    plan: options.PlanFile = "",
    tasks: options.TaskCount = 0,
    as_json: options.AllAsJson = False,
) -> None:
    """Count NaN and Inf, and show extremes and norms.

    Exits with 1 if there is a NaN or Inf.
    """
    import shardckpt

    options.require_order(sort, _ORDERS)
    options.refuse_idle(as_json, "with --json", {"--sort": sort != "name", "--top": top, "--by-layer": by_layer})
    given: dict[str, Any] = {"part": part, "include": include or (), "exclude": exclude or (), "base": base or ()}
    given["recompute"] = recompute
    if plans.has_planned("stats", [src], given, plan, tasks, as_json=as_json):
        return
    show_stats(shardckpt.stats(src, **given), sort, top, by_layer=by_layer, as_json=as_json)


def show_stats(found: Statistics, sort: str = "name", top: int = 0, *, by_layer: bool = False, as_json: bool) -> None:
    """Print statistics, and exit."""
    from shardckpt.errors import escape

    if as_json:
        output.print_json(found)
    else:
        items = sorted(found.layers if by_layer else found.tensors, key=_ORDERS[sort])
        rows = [_row(item) for item in items[: top or None]]
        header = ("layer" if by_layer else "tensor", "NaN", "Inf", "zeros", "min", "max", "L2")
        _note_left_out(found.left_out)
        output.show_table(rows, header=header, right=frozenset(range(1, 7)))
        bad = f"{output.count(found.nans, 'NaN')}, {output.count(found.infs, 'Inf')}"
        origin = f"; {found.stored} stored at save, {len(found.tensors) - found.stored} computed"
        print(f"{escape(found.source)}: {output.count(len(found.tensors), 'tensor')}, {bad}{origin}")
    raise typer.Exit(1 if found.nans or found.infs else 0)


def _note_left_out(names: Collection[str]) -> None:
    if names:
        tensors = output.count(len(names), "tensor")
        words = "with counters (steps, batches), single numbers outside the model and random generators' states"
        print(f"left out: {tensors} {words}; --part all takes them", file=sys.stderr)


def _row(item: TensorStats | LayerStats) -> tuple[str, ...]:
    numbers = (_show_value(item, stat, ".4g") for stat in ("min", "max", "l2"))
    return output.show_name(item.name), f"{item.nans}", f"{item.infs}", f"{item.zeros}", *numbers


def _show_value(item: TensorStats | LayerStats, stat: str, form: str) -> str:
    """Return a statistic as text; a dash if it needs finite values and all are NaN or Inf."""
    value = getattr(item, stat)
    is_left_out = item.min is None and item.nans + item.infs > 0 and stat in _OF_FINITE
    return "-" if is_left_out else "" if value is None else format(value, form)


def history(
    root: options.Steps,
    tensor: _Tensor = None,
    stat: Annotated[
        str,
        options.choose("--stat", "Statistic to print: nans, infs, zeros, min, max, mean or l2 (the default).", *_STATS),
    ] = "",
    part: options.StatsPart = "",
    html: options.Html = "",
    plan: options.PlanFile = "",
    tasks: options.TaskCount = 0,
    as_json: options.AllAsJson = False,
) -> None:
    """Print a tensor statistic over a run's steps.

    Each line is a step, a tensor and a value.
    """
    import shardckpt

    options.refuse_idle(as_json, "with --json", {"--stat": stat})
    options.refuse_idle(html, "with --html", {"--stat": stat})
    stat = stat or "l2"
    if stat not in _STATS:
        raise typer.BadParameter(f"--stat must be one of {', '.join(_STATS)}, got {stat}")
    given: dict[str, Any] = {"part": part, "include": tensor or (), "html": html}
    if plans.has_planned("history", [root], given, plan, tasks, as_json=as_json):
        return
    show_history(shardckpt.history(root, **given), stat, html, as_json=as_json)


def show_history(found: History, stat: str = "l2", html: str = "", *, as_json: bool) -> None:
    """Print a statistic over steps."""
    from shardckpt.errors import escape

    if as_json:
        output.print_json(found)
        return
    output.warn(found.warnings)
    _note_left_out(dict.fromkeys(name for step in found.steps for name in step.left_out))
    if html:
        print(f"{escape(found.root)}: {output.count(len(found.steps), 'step')}\nwrote {escape(html)}")
        return
    rows = [
        (f"{step.number}", escape(each.name), _show_value(each, stat, ".6g"))
        for step in found.steps
        for each in step.tensors
    ]
    output.show_table(rows, header=("step", "tensor", stat), right=frozenset({0, 2}))


def bisect(
    root: options.Steps,
    when: Annotated[
        str,
        options.choose("--when", "nan, inf, or a comparison such as 'l2>100' or 'max>=1e4'.", "nan", "inf"),
    ],
    tensor: _Tensor = None,
    scan: Annotated[
        bool, typer.Option("--scan", help="Look at every step, the oldest first: for a condition that ends again.")
    ] = False,
    part: options.StatsPart = "",
    as_json: options.AllAsJson = False,
) -> None:
    """Find the first step in which a condition is true.

    Exits with 1 if there is one.
    Without --scan, the condition must stay true once it is, as NaN in weights does: the newest step is tried first.
    Statistics leave NaN and Inf out: steps that have them do not end the search. Examples:
    bisect RUN --when 'l2>100' for weights and optimizer slots, bisect RUN --when 'max>1e3' --tensor '*.weight' for
    some weights.
    """
    import shardckpt
    from shardckpt.errors import escape

    found = shardckpt.bisect(root, when=when, scan=scan, part=part, include=tensor or ())
    if as_json:
        output.print_json(found)
        raise typer.Exit(0 if found.first is None else 1)
    output.warn(found.warnings)
    _note_left_out(found.left_out)
    if found.first is None:
        more = "" if scan else "; --scan looks at all"
        looks = output.count(len(found.examined), "step")
        print(f"{escape(found.root)}: {escape(when)} in no step that was looked at: {looks}{more}")
    else:
        first = found.first
        rows = [
            (escape(t.name), f"{t.nans} NaN", f"{t.infs} Inf", f"L2 {_show_value(t, 'l2', '.4g')}")
            for t in first.tensors
        ]
        output.show_table(rows)
        tensors = output.count(len(first.tensors), "tensor")
        print(
            f"step {first.number} is the first with {escape(when)}, in {tensors};"
            f" looked at {output.count(len(found.examined), 'step')}: {escape(first.path)}"
        )
    raise typer.Exit(0 if found.first is None else 1)
