"""`shardckpt diff`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt_cli import options, output

if TYPE_CHECKING:
    from shardckpt import TensorDifference


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="Checkpoint: folder or file, path or URL.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another, of any format and world size.")],
    rename: Annotated[list[str] | None, typer.Option("--rename", help="FROM=TO for names of A; repeatable.")] = None,
    rules: Annotated[str, typer.Option("--rules", help="TOML file of rules, or a set's name, for A.")] = "",
    base: options.Base = None,
    as_json: options.AllAsJson = False,
) -> None:
    """Compare two checkpoints tensor by tensor; exit 0 when they are equal, 1 when they differ."""
    import shardckpt

    result = shardckpt.diff(a, b, rules=rules, rename=rename or (), base=base or ())
    if as_json:
        print(output.as_json(result))
    else:
        output.warn(result.warnings)
        if result.differences:
            print(output.table(_row(d) for d in result.differences))
        print(f"{result.compared} tensors in both, {result.equal} equal, {len(result.differences)} differences")
    raise typer.Exit(0 if result.same else 1)


def _row(found: TensorDifference) -> tuple[str, ...]:
    from shardckpt.errors import escape

    words = found.a if found.a == found.b else " / ".join(filter(None, (found.a, found.b)))
    numbers = ""
    if found.max_abs is not None:
        numbers = f"max abs {found.max_abs:.3g}, max rel {found.max_rel:.3g}, NaN {found.nans[0]} / {found.nans[1]}"
    return escape(found.name), found.kind, words, numbers
