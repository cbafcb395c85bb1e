"""`shardckpt merge-adapter`, `rekey` and `reshard`, which write checkpoints as `consolidate` does."""

from __future__ import annotations

from typing import Annotated

import typer

from shardckpt_cli import options
from shardckpt_cli.consolidate import run


def merge_adapter(
    base: Annotated[
        str,
        options.take_step("BASE", "The model's checkpoint: folder or file, path or URL."),
    ],
    adapter: Annotated[
        list[str],
        options.take_step("ADAPTER", "LoRA adapter: a folder of peft, or a step of its model; repeatable."),
    ],
    dst: options.Dst,
    to: options.To = "",
    model_key: Annotated[str, typer.Option("--model-key", help="Where the model is in BASE.")] = "",
    rename: Annotated[list[str] | None, typer.Option("--rename", help="FROM=TO for names in BASE; repeatable.")] = None,
    adapter_weights: Annotated[
        list[float] | None,
        typer.Option("--adapter-weight", help="Factor for an adapter; once for each, in their order."),
    ] = None,
    dtype: options.Dtype = "",
    keep_fp32: options.KeepFp32 = None,
    dequantize: options.Dequantize = False,
    quantize: options.Quantize = "",
    quantize_include: options.QuantizeInclude = None,
    quantize_exclude: options.QuantizeExclude = None,
    allow_overflow: Annotated[bool, typer.Option("--allow-overflow", help="Accept sums that become infinite.")] = False,
    max_shard_size: options.ShortMaxShardSize = "5GB",
    max_memory: options.ShortMaxMemory = "256MiB",
    config_from: Annotated[str, typer.Option("--config-from", help="Folder with config and tokenizer files.")] = "",
    dry_run: options.DryRun = False,
    overwrite: options.Overwrite = False,
    plan: options.PlanFile = "",
    tasks: options.TaskCount = 0,
    quiet: options.Quiet = False,
    as_json: options.AsJson = False,
) -> None:
    """Merge LoRA adapters into their base.

    Sums are rounded once, from float32.
    """
    run("merge_adapter", locals())


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
