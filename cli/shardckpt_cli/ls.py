"""`shardckpt ls`."""

from __future__ import annotations

import sys

from shardckpt_cli import options, output


def ls(
    root: options.Root,
    as_json: options.AllAsJson = False,
) -> None:
    """List the complete steps of a run, one number per line; report others on stderr."""
    import shardckpt

    found = shardckpt.ls(root)
    if as_json:
        print(output.as_json(found))
        return
    for step in found.complete:
        print(step.number)
    for step in found.incomplete:
        print(f"not complete: {step.fault}", file=sys.stderr)
