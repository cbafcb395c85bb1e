"""`shardckpt rekey`."""

from __future__ import annotations

from typing import Annotated

import typer

from shardckpt_cli import options
from shardckpt_cli.consolidate import run

_Dst = Annotated[str, typer.Argument(metavar="DST", help="Folder to write, or one .safetensors file.")]
_ToNames = Annotated[bool, typer.Option("--to-names", help="Name tensors <parameter>/<slot>.")]
_ToIds = Annotated[bool, typer.Option("--to-ids", help="Name them <number>/<slot>, numbered as torch.optim does.")]
_Flatten = Annotated[bool, typer.Option("--flatten", help="Name them state.<parameter>.<slot>.")]
_Unflatten = Annotated[bool, typer.Option("--nest", help="Undo --flatten.")]
_Flat = Annotated[bool, typer.Option("--to-flat-parameters", help="Pack them like the flat parameters in the files.")]
_Part = Annotated[str, typer.Option("--part", help="all, or optim for the optimizer alone.")]


def rekey(
    src: options.Src,
    dst: _Dst,
    to_names: _ToNames = False,
    to_ids: _ToIds = False,
    flatten: _Flatten = False,
    nest: _Unflatten = False,
    to_flat_parameters: _Flat = False,
    part: _Part = "all",
    model_key: options.ModelKey = "",
    optim_key: options.OptimKey = "",
    param_names: options.ParamNames = "",
    base: options.Base = None,
    max_shard_size: options.MaxShardSize = "5GB",
    max_memory: options.MaxMemory = "256MiB",
    dry_run: options.DryRun = False,
    overwrite: options.Overwrite = False,
    plan: options.PlanFile = "",
    tasks: options.TaskCount = 0,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Change the keys in optimizer state to names, ids or others."""
    given = locals()
    flags = {
        "to_names": "names",
        "to_ids": "ids",
        "flatten": "flatten",
        "nest": "nest",
        "to_flat_parameters": "flat-parameters",
    }
    chosen = [to for flag, to in flags.items() if given.pop(flag)]
    if len(chosen) != 1:
        raise typer.BadParameter("choose one of --to-names, --to-ids, --flatten, --nest and --to-flat-parameters")
    run("rekey", {**given, "to": chosen[0]})
