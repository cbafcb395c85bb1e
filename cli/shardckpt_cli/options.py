"""Arguments and options that several commands share; each command sets its own default."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any

import typer

from shardckpt_cli import completion


def take_step(name: str, text: str) -> Any:
    """Return an argument that is a checkpoint, a run or a step of one; the shell completes steps."""
    return typer.Argument(metavar=name, help=text, autocompletion=completion.complete_step)


def choose(name: str, text: str, *choices: str) -> Any:
    """Return an option with one of several values, which the shell completes."""
    return typer.Option(name, help=text, autocompletion=completion.choose_from(*choices))


Src = Annotated[
    str,
    take_step("SRC", "Checkpoint: folder or file, path or URL; RUN@latest, RUN@best or RUN@1000; STREAM@12."),
]
Dst = Annotated[
    str, typer.Argument(metavar="DST", help="Folder to write, or one .safetensors, .pt, .bin or .gguf file.")
]
Root = Annotated[
    str,
    typer.Argument(metavar="ROOT", help="Folder of a run's steps, path or URL."),
]
Steps = Annotated[
    str,
    take_step("ROOT", "Folder of a run's steps, path or URL; ROOT@1000..2000 for some of them."),
]

# input
_PARTS = completion.choose_from("model", "optim", "all")
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        rich_help_panel="What",
        help="Format to write: {targets}. Default: by DST's suffix, else the first.",
        autocompletion=completion.complete_target,
    ),
]
Tp = Annotated[
    int,
    typer.Option(
        "--tp",
        metavar="N",
        rich_help_panel="What",
        help="Tensor-parallel ranks, for --to vllm-sharded.",
        show_default=False,
    ),
]
ToForRanks = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        rich_help_panel="What",
        help="Format to write: {rank_targets}. torch writes one file per rank.",
        autocompletion=completion.complete_rank_target,
    ),
]
Part = Annotated[
    str | None,
    typer.Option(
        "--part",
        metavar="PART",
        rich_help_panel="What",
        help="Sections to write: model, optim or all. Default: model; convert --to dcp writes the full checkpoint.",
        show_default=False,
        autocompletion=_PARTS,
    ),
]
ReadPart = Annotated[
    str,
    typer.Option(
        "--part",
        metavar="PART",
        rich_help_panel="What",
        help="Sections to read: model, optim or all.",
        autocompletion=_PARTS,
    ),
]
StatsPart = Annotated[
    str,
    typer.Option(
        "--part",
        metavar="PART",
        rich_help_panel="What",
        help="Sections to read: model, optim or all. all includes counters and random generators' states, as a glob"
        " does. Default: all without these.",
        autocompletion=_PARTS,
        show_default=False,
    ),
]
Weights = Annotated[
    str,
    typer.Option(
        "--weights",
        metavar="NAME",
        rich_help_panel="What",
        help="Weights to take: live, master, ema, or a variant's name.",
        autocompletion=completion.choose_from("live", "master", "ema"),
    ),
]
ModelKey = Annotated[
    str,
    typer.Option(
        "--model-key", metavar="KEY", rich_help_panel="What", help="The model's key, if it is not found automatically."
    ),
]
OptimKey = Annotated[
    str,
    typer.Option(
        "--optim-key", metavar="KEY", rich_help_panel="What", help="Where the optimizer is: KEY, FILE or FILE:KEY."
    ),
]
OptimKeys = Annotated[
    str,
    typer.Option(
        "--optim-keys",
        metavar="KEYS",
        rich_help_panel="Names",
        help="Keys in the written optimizer: names, ids or flat.",
        autocompletion=completion.choose_from("names", "ids", "flat"),
    ),
]
ParamNames = Annotated[
    str,
    typer.Option(
        "--param-names",
        metavar="PATH",
        rich_help_panel="Names",
        help="JSON file: names by optimizer id, array or object.",
    ),
]
ShapesFrom = Annotated[
    str,
    typer.Option(
        "--shapes-from",
        metavar="PATH",
        rich_help_panel="Where",
        help="Checkpoint with the same model, for full shapes.",
    ),
]
FlatShapesFrom = Annotated[
    str,
    typer.Option(
        "--shapes-from",
        metavar="PATH",
        rich_help_panel="Where",
        help="Checkpoint with the same model, for FSDP1's flat parameters.",
    ),
]
Base = Annotated[
    list[str] | None,
    typer.Option(
        "--base",
        metavar="PATH",
        rich_help_panel="Where",
        help="Folder that the checkpoint refers to: PATH or NAME=PATH; repeatable.",
    ),
]

# conversion
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        rich_help_panel="Precision",
        help="Cast the model's float tensors: fp32, bf16, fp16, fp64; q8_0 for a .gguf file.",
        autocompletion=completion.choose_from("fp32", "bf16", "fp16", "fp64", "q8_0"),
    ),
]
KeepFp32 = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-fp32", metavar="GLOB", rich_help_panel="Precision", help="Glob for names that are not cast; repeatable."
    ),
]
Dequantize = Annotated[
    bool,
    typer.Option(
        "--dequantize",
        rich_help_panel="Precision",
        help="Write quantized weights (torchao, bitsandbytes, fp8) as plain ones.",
    ),
]
Quantize = Annotated[
    str,
    typer.Option(
        "--quantize",
        metavar="SCHEME",
        rich_help_panel="Precision",
        help="fp8-block: linear weights in fp8 with a scale for each 128 x 128 block.",
        autocompletion=completion.choose_from("fp8-block"),
    ),
]
QuantizeInclude = Annotated[
    list[str] | None,
    typer.Option(
        "--quantize-include",
        metavar="GLOB",
        rich_help_panel="Precision",
        help="Glob for weights to quantize instead; repeatable.",
    ),
]
QuantizeExclude = Annotated[
    list[str] | None,
    typer.Option(
        "--quantize-exclude",
        metavar="GLOB",
        rich_help_panel="Precision",
        help="Glob for weights not to quantize; repeatable.",
    ),
]
AllowOverflow = Annotated[
    bool,
    typer.Option(
        "--allow-overflow", rich_help_panel="Precision", help="Accept finite values that a cast makes infinite."
    ),
]
AllowLoss = Annotated[
    bool,
    typer.Option(
        "--allow-loss", rich_help_panel="Precision", help="Leave out values that the written format cannot hold."
    ),
]
Include = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", rich_help_panel="Names", help="Glob for names to take; repeatable."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="GLOB", rich_help_panel="Names", help="Glob for names to leave; repeatable."),
]
Rename = Annotated[
    list[str] | None,
    typer.Option(
        "--rename", metavar="FROM=TO", rich_help_panel="Names", help="FROM=TO for full names; repeatable, in order."
    ),
]
Rules = Annotated[
    str,
    typer.Option(
        "--rules", metavar="PATH", rich_help_panel="Names", help="TOML file with rules, or a built-in set's name."
    ),
]
ConfigFrom = Annotated[
    str,
    typer.Option(
        "--config-from",
        metavar="PATH",
        rich_help_panel="Where",
        help="Folder with config.json and tokenizer files to copy.",
    ),
]

# output
MaxShardSize = Annotated[
    str,
    typer.Option(
        "--max-shard-size", metavar="SIZE", rich_help_panel="Where", help="Bytes per file: 5GB is decimal, 5GiB binary."
    ),
]
MaxMemory = Annotated[
    str,
    typer.Option(
        "--max-memory",
        metavar="SIZE",
        rich_help_panel="Machine",
        help="Memory that the process may use beyond its start-up.",
    ),
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", rich_help_panel="Where", help="Check the source and print the plan; write nothing."),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", rich_help_panel="Where", help="Replace a checkpoint in the same format at DST.")
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        metavar="N",
        rich_help_panel="Machine",
        help="Threads that read and write; as many as help if not given.",
    ),
]
Parallel = Annotated[
    bool | None,
    typer.Option(
        "--parallel/--no-parallel",
        rich_help_panel="Machine",
        help="Share the files among all ranks, each of which runs this command. Default: if torchrun started it.",
        show_default=False,
    ),
]

PlanFile = Annotated[
    str,
    typer.Option(
        "--plan",
        metavar="FILE",
        rich_help_panel="Machine",
        help="Write a plan instead; then run `shardckpt task FILE N` anywhere, and `shardckpt commit FILE`.",
        show_default=False,
    ),
]
TaskCount = Annotated[
    int,
    typer.Option(
        "--tasks",
        metavar="N",
        rich_help_panel="Machine",
        help="Maximum number of tasks in the plan. Default: one for each part.",
        show_default=False,
        min=0,
    ),
]

# shorter descriptions for commands with few options
ShortMaxShardSize = Annotated[
    str, typer.Option("--max-shard-size", metavar="SIZE", rich_help_panel="Where", help="Bytes per file: 5GB or 5GiB.")
]
ShortMaxMemory = Annotated[
    str, typer.Option("--max-memory", metavar="SIZE", rich_help_panel="Machine", help="Memory beyond the start-up.")
]

# printing
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
AllAsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Html = Annotated[str, typer.Option("--html", metavar="PATH", help="Write a page for browsers to this file.")]
Top = Annotated[int, typer.Option("--top", metavar="N", help="Show only the first N rows; 0 shows all.", min=0)]
ByLayer = Annotated[bool, typer.Option("--by-layer", help="A row for each layer instead of each tensor.")]


def require_order(sort: str, orders: Collection[str]) -> None:
    """Refuse a value for `--sort` that is not in `orders`."""
    if sort not in orders:
        raise typer.BadParameter(f"--sort must be one of {', '.join(orders)}, got {sort}")


def refuse_idle(is_idle: object, why: str, given: Mapping[str, object]) -> None:
    """Refuse options that do nothing."""
    idle = [name for name, value in given.items() if value and is_idle]
    if idle:
        raise typer.BadParameter(f"{idle[0]} does nothing {why}")
