"""`shardckpt reshard`."""

from __future__ import annotations

from typing import Annotated

import typer

from shardckpt_cli.consolidate import run


def reshard(
    src: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint: folder or file, path or URL.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="Folder to write.")],
    world_size: Annotated[int, typer.Option("--world-size", help="For how many ranks tensors are cut.")],
    to: Annotated[str, typer.Option("--to", help="Format to write: native, dcp or torch (rank files).")] = "native",
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="Bytes a file: 5GB or 5GiB.")] = "5GB",
    max_memory: Annotated[str, typer.Option("--max-memory", help="Memory to add to the start-up.")] = "256MiB",
    shapes_from: Annotated[
        str, typer.Option("--shapes-from", help="Checkpoint of the same model, for flat parameters of FSDP1.")
    ] = "",
    keep_whole: Annotated[
        list[str] | None, typer.Option("--keep-whole", help="Glob of names that rank files do not cut; repeatable.")
    ] = None,
    allow_loss: Annotated[bool, typer.Option("--allow-loss", help="Leave out what the format cannot hold.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything; write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what lies at DST.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Write all that a checkpoint holds for another number of ranks; no value is changed."""
    run("reshard", locals())
