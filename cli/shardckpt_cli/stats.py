"""`shardckpt stats`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt_cli import options, output

if TYPE_CHECKING:
    from shardckpt import LayerStats, TensorStats

_ORDERS: dict[str, Callable[[TensorStats | LayerStats], float]] = {
    "name": lambda _: 0.0,
    "bad": lambda found: -(found.nans + found.infs),
    "l2": lambda found: -found.l2,
    "max": lambda found: -max(abs(found.max), abs(found.min or 0.0)) if found.max is not None else math.inf,
}


def stats(
    src: options.Src,
    part: options.Part = "all",
    include: options.Include = None,
    exclude: options.Exclude = None,
    sort: Annotated[str, typer.Option("--sort", help="Order of rows: name, bad (NaN, Inf), l2 or max.")] = "name",
    top: options.Top = 0,
    by_layer: options.ByLayer = False,
    base: options.Base = None,
    recompute: Annotated[
        bool, typer.Option("--recompute", help="Read all values, even if the save stored this.")
    ] = False,
    as_json: options.AllAsJson = False,
) -> None:
    """Count NaN and Inf, and show extremes and norms; exit 1 if there is a NaN or Inf."""
    import shardckpt
    from shardckpt.errors import escape

    options.require_order(sort, _ORDERS)
    found = shardckpt.stats(
        src, part=part, include=include or (), exclude=exclude or (), base=base or (), recompute=recompute
    )
    if as_json:
        output.print_json(found)
    else:
        items = sorted(found.layers if by_layer else found.tensors, key=_ORDERS[sort])
        rows = [_row(item) for item in items[: top or None]]
        header = ("layer" if by_layer else "tensor", "NaN", "Inf", "zeros", "min", "max", "L2")
        output.show_table(rows, header=header, right=frozenset(range(1, 7)))
        bad = f"{output.count(found.nans, 'NaN')}, {output.count(found.infs, 'Inf')}"
        origin = f"; {found.stored} stored at save, {len(found.tensors) - found.stored} computed"
        print(f"{escape(found.source)}: {output.count(len(found.tensors), 'tensor')}, {bad}{origin}")
    raise typer.Exit(1 if found.nans or found.infs else 0)


def _row(item: TensorStats | LayerStats) -> tuple[str, ...]:
    from shardckpt.errors import escape

    numbers = ("" if number is None else f"{number:.4g}" for number in (item.min, item.max, item.l2))
    return escape(item.name), f"{item.nans}", f"{item.infs}", f"{item.zeros}", *numbers
