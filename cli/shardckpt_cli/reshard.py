"""`shardckpt reshard`."""

from __future__ import annotations

from typing import Annotated

import typer

from shardckpt_cli import options
from shardckpt_cli.consolidate import run


def reshard(
    src: options.Src,
    dst: Annotated[str, typer.Argument(metavar="DST", help="Folder to write.")],
    world_size: Annotated[int, typer.Option("--world-size", help="Ranks that tensors are split for.")],
    to: options.ToForRanks = "native",
    max_shard_size: options.ShortMaxShardSize = "5GB",
    max_memory: options.ShortMaxMemory = "256MiB",
    shapes_from: options.FlatShapesFrom = "",
    base: options.Base = None,
    keep_whole: Annotated[
        list[str] | None, typer.Option("--keep-whole", help="Glob for names that rank files do not split; repeatable.")
    ] = None,
    allow_loss: Annotated[
        bool, typer.Option("--allow-loss", help="Leave out values that the format cannot hold.")
    ] = False,
    dry_run: options.DryRun = False,
    overwrite: options.Overwrite = False,
    plan: options.PlanFile = "",
    tasks: options.TaskCount = 0,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Split a checkpoint for another number of ranks.

    No value changes.
    """
    run("reshard", locals())
