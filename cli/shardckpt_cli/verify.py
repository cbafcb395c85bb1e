"""`shardckpt verify`."""

from __future__ import annotations

import typer

from shardckpt_cli import options, output


def verify(
    src: options.Src,
    shapes_from: options.FlatShapesFrom = "",
    base: options.Base = None,
    as_json: options.AllAsJson = False,
) -> None:
    """Check structure, coverage, sizes and checksums; exit 1 for any fault."""
    import shardckpt
    from shardckpt.errors import escape

    with output.show_progress(quiet=as_json) as on_progress:
        result = shardckpt.verify(src, shapes_from=shapes_from, base=base or (), on_progress=on_progress)
    if as_json:
        output.print_json(result)
    else:
        output.warn(result.warnings)
        for problem in result.problems:
            print(problem)
        checked = f", {output.size(result.checked_bytes)} match their checksums" if result.checked_bytes else ""
        state = "intact" if result.ok else output.count(len(result.problems), "problem")
        tensors = output.count(result.tensor_count, "tensor")
        print(f"{escape(result.source)}: {result.format or 'unreadable'}: {tensors}, {state}{checked}")
    raise typer.Exit(0 if result.ok else 1)
