"""`shardckpt ls`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shardckpt_cli import output


def ls(
    root: Annotated[str, typer.Argument(metavar="ROOT", help="Folder of a run's steps, path or URL.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """List the complete steps of a run, a number a line; others are told on stderr."""
    import shardckpt

    found = shardckpt.ls(root)
    if as_json:
        print(output.as_json(found))
        return
    for step in found.complete:
        print(step.number)
    for step in found.incomplete:
        print(f"not complete: {step.fault}", file=sys.stderr)
