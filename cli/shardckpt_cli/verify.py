"""`shardckpt verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from shardckpt_cli import output


def verify(
    src: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint: folder or file, path or URL.")],
    shapes_from: Annotated[
        str, typer.Option("--shapes-from", help="Checkpoint of the same model, for flat parameters of FSDP1.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Check structure, coverage, sizes and stored checksums; exit 1 when something is wrong."""
    import shardckpt
    from shardckpt.errors import escape

    result = shardckpt.verify(src, shapes_from=shapes_from)
    if as_json:
        print(output.as_json(result))
    else:
        output.warn(result.warnings)
        for problem in result.problems:
            print(problem)
        checked = f", {output.size(result.checked_bytes)} match their checksums" if result.checked_bytes else ""
        count = len(result.problems)
        state = "whole" if result.ok else f"{count} problem{'s' * (count != 1)}"
        print(f"{escape(result.source)}: {result.format or 'unreadable'}: {result.tensors} tensors, {state}{checked}")
    raise typer.Exit(0 if result.ok else 1)
