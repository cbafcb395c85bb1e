"""`shardckpt merge-adapter`."""

from __future__ import annotations

from typing import Annotated

import typer

from shardckpt_cli.consolidate import run


def merge_adapter(
    base: Annotated[str, typer.Argument(metavar="BASE", help="Checkpoint of the model: folder or file, path or URL.")],
    adapter: Annotated[str, typer.Argument(metavar="ADAPTER", help="Folder of a LoRA adapter, as peft saves it.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="Folder to write, or one .safetensors, .pt or .bin file.")],
    to: Annotated[str, typer.Option("--to", help="Format to write: safetensors, torch, dcp, native.")] = "",
    model_key: Annotated[str, typer.Option("--model-key", help="Where the model is in BASE.")] = "",
    rename: Annotated[list[str] | None, typer.Option("--rename", help="FROM=TO for names of BASE; repeatable.")] = None,
    allow_overflow: Annotated[bool, typer.Option("--allow-overflow", help="Let sums become infinite.")] = False,
    max_shard_size: Annotated[str, typer.Option("--max-shard-size", help="Bytes a file: 5GB or 5GiB.")] = "5GB",
    max_memory: Annotated[str, typer.Option("--max-memory", help="Memory to add to the start-up.")] = "256MiB",
    config_from: Annotated[str, typer.Option("--config-from", help="Folder with config and tokenizer files.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything; write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what lies at DST.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Merge a LoRA adapter into its base, in constant memory; sums are made in float32 and rounded once."""
    run("merge_adapter", locals())
