"""`shardckpt diff`."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt_cli import options, output, plans

if TYPE_CHECKING:
    from shardckpt.results import Comparison, LayerDifference, TensorDifference, ValueDifference


def diff(
    a: Annotated[
        str,
        options.take_step("A", "Checkpoint: folder or file, path or URL."),
    ],
    b: Annotated[
        str,
        options.take_step("B", "Another, in any format and for any world size."),
    ],
    part: options.ReadPart = "all",
    include: options.Include = None,
    exclude: options.Exclude = None,
    atol: Annotated[float, typer.Option("--atol", help="Absolute tolerance for floating-point numbers.")] = 0.0,
    rtol: Annotated[float, typer.Option("--rtol", help="Tolerance relative to the value in B.")] = 0.0,
    rename: Annotated[list[str] | None, typer.Option("--rename", help="FROM=TO for names in A; repeatable.")] = None,
    rules: Annotated[str, typer.Option("--rules", help="TOML file of rules, or a set's name, for A.")] = "",
    sort: Annotated[
        str,
        options.choose("--sort", "Order of tensors: name, rel (relative L2), l2 or max.", "name", "rel", "l2", "max"),
    ] = "name",
    top: options.Top = 0,
    by_layer: options.ByLayer = False,
    base: options.Base = None,
    html: options.Html = "",
    plan: options.PlanFile = "",
    tasks: options.TaskCount = 0,
    as_json: options.AllAsJson = False,
) -> None:
    """Compare tensors and other values.

    Exits with 0 if all are compared and equal, else with 1.
    """
    import shardckpt

    options.require_order(sort, _ORDERS)
    options.refuse_idle(as_json, "with --json", {"--sort": sort != "name", "--top": top, "--by-layer": by_layer})
    given: dict[str, Any] = {
        "part": part,
        "include": include or (),
        "exclude": exclude or (),
        "atol": atol,
        "rtol": rtol,
    }
    given |= {"rules": rules, "rename": rename or (), "base": base or (), "html": html}
    if plans.has_planned("diff", [a, b], given, plan, tasks, as_json=as_json):
        return
    with output.show_progress(quiet=as_json) as on_progress:
        result = shardckpt.diff(a, b, on_progress=on_progress, **given)
    show_comparison(result, sort, top, html, by_layer=by_layer, as_json=as_json)


def show_comparison(
    result: Comparison, sort: str = "name", top: int = 0, html: str = "", *, by_layer: bool = False, as_json: bool
) -> None:
    """Print differences, and exit."""
    from shardckpt.errors import escape

    if as_json:
        output.print_json(result)
    else:
        _show(result, by_layer, sort, top)
        if html:
            print(f"wrote {escape(html)}")
    raise typer.Exit(0 if result.same else 1)


def _show(result: Comparison, by_layer: bool, sort: str, top: int) -> None:
    from shardckpt.errors import escape

    output.warn(result.warnings)
    for name, why in result.not_compared:
        print(f"not compared: {escape(name)}: {escape(why)}", file=sys.stderr)
    output.left_out(result.left_out)
    order = _ORDERS[sort]
    last = {found for found in result.differences if sort != "name" and _is_integer(found)}
    if by_layer:
        first = {found.layer for found in result.differences if found not in last}
        layers = sorted(result.layers, key=lambda found: (found.name not in first, order(found)))
        tensors = [*map(_layer_row, layers)]
        if counters := sum(found.is_counter for found in result.differences):
            tensors.append(("(no layer)", output.count(counters, "counter"), ""))
    else:
        ordered = sorted(result.differences, key=lambda found: (found in last, order(found)))
        tensors = [*map(_tensor_row, ordered)]
    rows = [*tensors, *map(_value_row, result.value_differences)]
    output.show_table(rows[: top or None])
    if top and len(rows) > top:
        print(f"{output.count(len(rows) - top, 'row')} more")
    compared = output.count(result.compared, "tensor")
    values = f" and {output.count(result.compared_values, 'other value')}" if result.compared_values else ""
    equal = result.equal + result.equal_values
    refused = f", {len(result.not_compared)} not compared" if result.not_compared else ""
    differences = output.count(len(result.differences) + len(result.value_differences), "difference")
    print(f"{compared}{values} in both, {equal} equal, {differences}{refused}")


def _fall(number: float | None) -> float:
    """Return a key that sorts large numbers first, and None last."""
    return math.inf if number is None else -number


def _is_integer(found: TensorDifference) -> bool:
    """Return True for integers, which are sorted last: random generators' states have huge norms."""
    return found.a is not None and "int" in found.a.dtype


# Sorting is stable: equal tensors stay in the order of their names.
_ORDERS: dict[str, Callable[[TensorDifference | LayerDifference], float]] = {
    "name": lambda _: 0.0,
    "rel": lambda found: _fall(found.relative_l2),
    "l2": lambda found: _fall(found.l2),
    "max": lambda found: _fall(found.max_abs),
}


def _layer_row(found: LayerDifference) -> tuple[str, ...]:
    numbers = ""
    if found.l2 is not None:
        numbers = f"max abs {found.max_abs:.3g}, L2 {found.l2:.3g}, rel L2 {found.relative_l2:.3g}"
    return output.show_name(found.name), output.count(found.tensor_count, "tensor"), numbers


def _tensor_row(found: TensorDifference) -> tuple[str, ...]:
    numbers = ""
    if found.max_abs is not None:
        numbers = f"max abs {found.max_abs:.3g}, max rel {found.max_rel:.3g}, NaN {found.nans[0]} / {found.nans[1]}"
        if found.l2 is not None:
            numbers += f", L2 {found.l2:.3g}, rel L2 {found.relative_l2:.3g}"
        if found.kind == "values" and found.max_abs == 0:
            numbers += ": equal numbers with other bits (-0.0, or a NaN)"
    return output.show_name(found.name), _say(found.kind), _both(f"{found.a or ''}", f"{found.b or ''}"), numbers


def _value_row(found: ValueDifference) -> tuple[str, ...]:
    from shardckpt.errors import escape

    return output.show_name(found.name), _say(found.kind), escape(_both(found.a, found.b)), ""


def _say(kind: str) -> str:
    """Return a kind in words."""
    return kind.replace("_", " ")


def _both(a: str, b: str) -> str:
    return a if a == b else " / ".join(filter(None, (a, b)))
