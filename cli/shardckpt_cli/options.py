"""The arguments and options that several commands have, declared once; each command says its own default."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperCommand

Src = Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint: folder or file, path or URL.")]
Dst = Annotated[str, typer.Argument(metavar="DST", help="Folder to write, or one .safetensors, .pt or .bin file.")]
Root = Annotated[str, typer.Argument(metavar="ROOT", help="Folder of a run's steps, path or URL.")]


class CommandWithTargets(TyperCommand):
    """A command whose help lists the formats that can be written; they are looked up only for the help."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        import shardckpt

        targets, rank_targets = (", ".join(shardckpt.list_targets(for_ranks=ranks)) for ranks in (False, True))
        for parameter in self.params:
            text = getattr(parameter, "help", None)
            if text:
                parameter.help = text.format(targets=targets, rank_targets=rank_targets)  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


# what is read
To = Annotated[
    str,
    typer.Option("--to", help="Format to write, the first one unless DST says otherwise: {targets}."),
]
ToForRanks = Annotated[str, typer.Option("--to", help="Format to write, torch being rank files: {rank_targets}.")]
Part = Annotated[str, typer.Option("--part", help="model, optim or all.")]
Weights = Annotated[str, typer.Option("--weights", help="live, or master, ema, a variant that it holds.")]
ModelKey = Annotated[str, typer.Option("--model-key", help="Where the model is, if not where the rules look.")]
OptimKey = Annotated[str, typer.Option("--optim-key", help="Where the optimizer is: KEY, FILE or FILE:KEY.")]
OptimKeys = Annotated[str, typer.Option("--optim-keys", help="Keys of the optimizer written: names, ids or flat.")]
ParamNames = Annotated[str, typer.Option("--param-names", help="JSON file: names by optimizer id, array or object.")]
ShapesFrom = Annotated[str, typer.Option("--shapes-from", help="Checkpoint of the same model, for full shapes.")]
FlatShapesFrom = Annotated[
    str, typer.Option("--shapes-from", help="Checkpoint of the same model, for flat parameters of FSDP1.")
]
Base = Annotated[
    list[str] | None,
    typer.Option("--base", help="Where a folder is that the checkpoint refers to: PATH or NAME=PATH; repeatable."),
]

# what becomes of it
Dtype = Annotated[str, typer.Option("--dtype", help="Cast the model's float tensors: fp32, bf16, fp16, fp64.")]
KeepFp32 = Annotated[list[str] | None, typer.Option("--keep-fp32", help="Glob of names that are not cast; repeatable.")]
AllowOverflow = Annotated[
    bool, typer.Option("--allow-overflow", help="Accept finite values that a cast makes infinite.")
]
AllowLoss = Annotated[bool, typer.Option("--allow-loss", help="Leave out what the format written cannot hold.")]
Include = Annotated[list[str] | None, typer.Option("--include", help="Glob of names to take; repeatable.")]
Exclude = Annotated[list[str] | None, typer.Option("--exclude", help="Glob of names to leave; repeatable.")]
Rename = Annotated[list[str] | None, typer.Option("--rename", help="FROM=TO for full names; repeatable, in order.")]
Rules = Annotated[str, typer.Option("--rules", help="TOML file of rules, or the name of a set that comes along.")]
ConfigFrom = Annotated[str, typer.Option("--config-from", help="Folder with config.json and tokenizer files to carry.")]

# how it is written
MaxShardSize = Annotated[str, typer.Option("--max-shard-size", help="Bytes a file: 5GB is decimal, 5GiB binary.")]
MaxMemory = Annotated[str, typer.Option("--max-memory", help="Memory the process may add to its start-up.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and print the plan; write nothing.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint of the same format at DST.")]
Jobs = Annotated[int, typer.Option("--jobs", help="Output files written side by side.")]

# the same in the words of commands with few options
ShortMaxShardSize = Annotated[str, typer.Option("--max-shard-size", help="Bytes a file: 5GB or 5GiB.")]
ShortMaxMemory = Annotated[str, typer.Option("--max-memory", help="Memory to add to the start-up.")]
ShortDryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything; write nothing.")]

# what is printed
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
AllAsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
