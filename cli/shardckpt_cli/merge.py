"""`shardckpt merge-adapter`."""

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
