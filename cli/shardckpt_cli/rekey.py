"""`shardckpt rekey`."""

from __future__ import annotations

from typing import Annotated

import typer

from shardckpt_cli.consolidate import run

_Src = Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint: folder or file, path or URL.")]
_Dst = Annotated[str, typer.Argument(metavar="DST", help="Folder to write, or one .safetensors file.")]
_ToNames = Annotated[bool, typer.Option("--to-names", help="Call tensors <parameter>/<slot>.")]
_ToIds = Annotated[bool, typer.Option("--to-ids", help="Call them <number>/<slot>, numbered as torch.optim does.")]
_Flatten = Annotated[bool, typer.Option("--flatten", help="Call them state.<parameter>.<slot>.")]
_Nest = Annotated[bool, typer.Option("--nest", help="Undo --flatten.")]
_Flat = Annotated[bool, typer.Option("--to-flat-parameters", help="Lay out as the files' flat parameters do.")]
_Part = Annotated[str, typer.Option("--part", help="all, or optim for the optimizer alone.")]
_ModelKey = Annotated[str, typer.Option("--model-key", help="Where the model is, if not where the rules look.")]
_OptimKey = Annotated[str, typer.Option("--optim-key", help="Where the optimizer is: KEY, FILE or FILE:KEY.")]
_Names = Annotated[str, typer.Option("--param-names", help="JSON file: object from optimizer id to name, or array.")]
_Shard = Annotated[str, typer.Option("--max-shard-size", help="Bytes a file: 5GB is decimal, 5GiB binary.")]
_Memory = Annotated[str, typer.Option("--max-memory", help="Memory the process may add to its start-up.")]
_Dry = Annotated[bool, typer.Option("--dry-run", help="Check everything and print the plan; write nothing.")]
_Over = Annotated[bool, typer.Option("--overwrite", help="Replace what lies at DST.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def rekey(
    src: _Src,
    dst: _Dst,
    to_names: _ToNames = False,
    to_ids: _ToIds = False,
    flatten: _Flatten = False,
    nest: _Nest = False,
    to_flat_parameters: _Flat = False,
    part: _Part = "all",
    model_key: _ModelKey = "",
    optim_key: _OptimKey = "",
    param_names: _Names = "",
    max_shard_size: _Shard = "5GB",
    max_memory: _Memory = "256MiB",
    dry_run: _Dry = False,
    overwrite: _Over = False,
    quiet: _Quiet = False,
    as_json: _Json = False,
) -> None:
    """Give the state of an optimizer other keys: names, numbers, flattened names, flat parameters. All values stay."""
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
