"""`shardckpt diff`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt_cli import options, output

if TYPE_CHECKING:
    from shardckpt import Comparison, TensorDifference, ValueDifference


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Checkpoint: folder or file, path or URL.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another, of any format and world size.")],
    part: options.Part = "all",
    include: options.Include = None,
    exclude: options.Exclude = None,
    atol: Annotated[float, typer.Option("--atol", help="Absolute tolerance of floating-point numbers.")] = 0.0,
    rtol: Annotated[float, typer.Option("--rtol", help="Tolerance relative to the value in B.")] = 0.0,
    rename: Annotated[list[str] | None, typer.Option("--rename", help="FROM=TO for names of A; repeatable.")] = None,
    rules: Annotated[str, typer.Option("--rules", help="TOML file of rules, or a set's name, for A.")] = "",
    base: options.Base = None,
    as_json: options.AllAsJson = False,
) -> None:
    """Compare tensors and other values; exit 0 if all are compared and equal."""
    import shardckpt

    result = shardckpt.diff(
        a,
        b,
        part=part,
        include=include or (),
        exclude=exclude or (),
        atol=atol,
        rtol=rtol,
        rules=rules,
        rename=rename or (),
        base=base or (),
    )
    if as_json:
        print(output.as_json(result))
    else:
        _show(result)
    raise typer.Exit(0 if result.same else 1)


def _show(result: Comparison) -> None:
    from shardckpt.errors import escape

    output.warn(result.warnings)
    for name, why in result.not_compared.items():
        print(f"not compared: {escape(name)}: {escape(why)}", file=sys.stderr)
    output.left_out(result.left_out)
    rows = [*map(_tensor_row, result.differences), *map(_value_row, result.value_differences)]
    output.show_table(rows)
    compared = output.count(result.compared, "tensor")
    values = f" and {output.count(result.compared_values, 'other value')}" if result.compared_values else ""
    equal = result.equal + result.equal_values
    refused = f", {len(result.not_compared)} not compared" if result.not_compared else ""
    print(f"{compared}{values} in both, {equal} equal, {output.count(len(rows), 'difference')}{refused}")


def _tensor_row(found: TensorDifference) -> tuple[str, ...]:
    from shardckpt.errors import escape

    numbers = ""
    if found.max_abs is not None:
        numbers = f"max abs {found.max_abs:.3g}, max rel {found.max_rel:.3g}, NaN {found.nans[0]} / {found.nans[1]}"
        if found.kind == "values" and found.max_abs == 0:
            numbers += ": other bits of equal numbers (-0.0, or a NaN)"
    return escape(found.name), found.kind, _both(found.a, found.b), numbers


def _value_row(found: ValueDifference) -> tuple[str, ...]:
    from shardckpt.errors import escape

    return escape(found.name), found.kind, escape(_both(found.a, found.b)), ""


def _both(a: str, b: str) -> str:
    return a if a == b else " / ".join(filter(None, (a, b)))
