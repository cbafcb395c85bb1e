"""`shardckpt consolidate` and `shardckpt convert`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt_cli import output

if TYPE_CHECKING:
    from shardckpt import Report

_Src = Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint: folder or file, path or URL.")]
_Dst = Annotated[str, typer.Argument(metavar="DST", help="Folder to write, or one .safetensors, .pt or .bin file.")]
_To = Annotated[
    str,
    typer.Option(
        "--to", help="Format to write: safetensors (unless DST tells), torch, dcp, native or deepspeed-universal."
    ),
]
_Part = Annotated[str, typer.Option("--part", help="model, optim or all.")]
_Weights = Annotated[str, typer.Option("--weights", help="live, or master, ema, a variant that it holds.")]
_ModelKey = Annotated[str, typer.Option("--model-key", help="Where the model is, if not where the rules look.")]
_OptimKey = Annotated[str, typer.Option("--optim-key", help="Where the optimizer is: KEY, FILE or FILE:KEY.")]
_OptimKeys = Annotated[str, typer.Option("--optim-keys", help="Keys of the optimizer written: names, ids or flat.")]
_Names = Annotated[str, typer.Option("--param-names", help="JSON file: object from optimizer id to name, or array.")]
_Shapes = Annotated[str, typer.Option("--shapes-from", help="Checkpoint of the same model, for whole shapes.")]
_Base = Annotated[str, typer.Option("--base", help="Where the folder is now that SRC refers to, if it was moved.")]
_Dtype = Annotated[str, typer.Option("--dtype", help="Cast the model's float tensors: fp32, bf16, fp16, fp64.")]
_Keep = Annotated[list[str] | None, typer.Option("--keep-fp32", help="Glob of names that are not cast; repeatable.")]
_Overflow = Annotated[bool, typer.Option("--allow-overflow", help="Let a cast turn finite values into infinity.")]
_Loss = Annotated[bool, typer.Option("--allow-loss", help="Leave out what the format written cannot hold.")]
_Shard = Annotated[str, typer.Option("--max-shard-size", help="Bytes a file: 5GB is decimal, 5GiB binary.")]
_Memory = Annotated[str, typer.Option("--max-memory", help="Memory the process may add to its start-up.")]
_Include = Annotated[list[str] | None, typer.Option("--include", help="Glob of names to take; repeatable.")]
_Exclude = Annotated[list[str] | None, typer.Option("--exclude", help="Glob of names to leave; repeatable.")]
_Rules = Annotated[str, typer.Option("--rules", help="TOML file of rules, or the name of a set that comes along.")]
_Rename = Annotated[list[str] | None, typer.Option("--rename", help="FROM=TO for whole names; repeatable, in order.")]
_Config = Annotated[str, typer.Option("--config-from", help="Folder with config.json and tokenizer files to carry.")]
_Dry = Annotated[bool, typer.Option("--dry-run", help="Check everything and print the plan; write nothing.")]
_Over = Annotated[bool, typer.Option("--overwrite", help="Replace what lies at DST.")]
_Jobs = Annotated[int, typer.Option("--jobs", help="Output files written side by side.")]
_Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def consolidate(
    src: _Src,
    dst: _Dst,
    to: _To = "",
    part: _Part = "model",
    weights: _Weights = "live",
    model_key: _ModelKey = "",
    optim_key: _OptimKey = "",
    optim_keys: _OptimKeys = "names",
    param_names: _Names = "",
    shapes_from: _Shapes = "",
    base: _Base = "",
    dtype: _Dtype = "",
    keep_fp32: _Keep = None,
    allow_overflow: _Overflow = False,
    allow_loss: _Loss = False,
    max_shard_size: _Shard = "5GB",
    max_memory: _Memory = "256MiB",
    include: _Include = None,
    exclude: _Exclude = None,
    rename: _Rename = None,
    rules: _Rules = "",
    config_from: _Config = "",
    dry_run: _Dry = False,
    overwrite: _Over = False,
    jobs: _Jobs = 1,
    quiet: _Quiet = False,
    as_json: _Json = False,
) -> None:
    """Merge a sharded checkpoint into full tensors, in constant memory; the result loads in transformers as it is."""
    run("consolidate", locals())


def convert(
    src: _Src,
    dst: _Dst,
    to: _To = "",
    part: _Part = "model",
    weights: _Weights = "live",
    model_key: _ModelKey = "",
    optim_key: _OptimKey = "",
    optim_keys: _OptimKeys = "names",
    param_names: _Names = "",
    shapes_from: _Shapes = "",
    base: _Base = "",
    dtype: _Dtype = "",
    keep_fp32: _Keep = None,
    allow_overflow: _Overflow = False,
    allow_loss: _Loss = False,
    max_memory: _Memory = "256MiB",
    include: _Include = None,
    exclude: _Exclude = None,
    rename: _Rename = None,
    rules: _Rules = "",
    config_from: _Config = "",
    dry_run: _Dry = False,
    overwrite: _Over = False,
    jobs: _Jobs = 1,
    quiet: _Quiet = False,
    as_json: _Json = False,
) -> None:
    """Convert a checkpoint, keeping how its tensors are split over files."""
    run("convert", locals())


def run(verb: str, given: dict[str, Any]) -> None:
    """Call a verb that writes a checkpoint, and print what it did.

    Args:
        verb: Its name on the front door.
        given: Its arguments, with `quiet` and `as_json` for the printing; None for what was not given.
    """
    import shardckpt

    quiet, as_json = given.pop("quiet"), given.pop("as_json")
    if "jobs" in given and int(os.environ.get("WORLD_SIZE", "1")) > 1:  # under torchrun
        given["parallel"] = True
        quiet = quiet or os.environ.get("RANK", "0") != "0"
        as_json = as_json and os.environ.get("RANK", "0") == "0"
    options = {key: value for key, value in given.items() if value is not None}
    line = output.ProgressLine(quiet or as_json)
    try:
        report: Report = getattr(shardckpt, verb)(on_progress=line, **options)
    finally:
        line.clear()
    if as_json:
        print(output.as_json(report))
        return
    if not quiet:
        output.warn(report.warnings)
        print(_words(report), flush=True)
        output.left_out(report.left_out)


def _words(report: Report) -> str:
    """Return what was done (or would be) in a few lines."""
    from shardckpt.errors import escape

    did = "would write" if report.dry_run else "wrote"
    files = len(report.files)
    lines = [
        f"{report.source}: {report.format}",
        f"{did} {report.tensors} tensors, {output.size(report.nbytes)}, in {files} file{'s' * (files != 1)}"
        f" to {report.target}",
    ]
    lines += [f"  {f.name}  {f.tensors} tensors  {output.size(f.nbytes)}" for f in report.files]
    if report.carried:
        lines.append(f"  and {', '.join(report.carried)}")
    lines += [f"tied: {name} is {kept}" for name, kept in report.ties.items()]
    lines += [f"cast: {count} tensors {kinds}" for kinds, count in report.cast.items()]
    if not report.dry_run:
        lines.append("  ".join(f"{phase} {seconds:.2f} s" for phase, seconds in report.seconds.items()))
    return "\n".join(map(escape, lines))
