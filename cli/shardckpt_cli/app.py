"""The command line: registers the commands; imports neither torch nor shardckpt before one of them runs."""

from __future__ import annotations

import gc
import sys
from typing import Annotated

import typer

from shardckpt_cli import compare, consolidate, inspect, ls, merge, prune, rekey, repair, reshard, verify
from shardckpt_cli.exits import run_main, wrap_command
from shardckpt_cli.options import CommandWithTargets

app = typer.Typer(
    name="shardckpt",
    help="Read, check and merge checkpoints of sharded PyTorch training.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        import shardckpt

        print(f"shardckpt {shardckpt.__version__}")
        raise typer.Exit


@app.callback()
def _take_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Take what stands before the command."""


_consolidate = wrap_command(consolidate.consolidate)
app.command("consolidate", cls=CommandWithTargets)(_consolidate)
app.command("convert", cls=CommandWithTargets, help=consolidate.CONVERT_HELP)(_consolidate)
app.command("rekey")(wrap_command(rekey.rekey))
app.command("reshard", cls=CommandWithTargets)(wrap_command(reshard.reshard))
app.command("merge-adapter", cls=CommandWithTargets)(wrap_command(merge.merge_adapter))
app.command("inspect")(wrap_command(inspect.inspect))
app.command("repair")(wrap_command(repair.repair))
app.command("verify")(wrap_command(verify.verify))
app.command("diff")(wrap_command(compare.diff))
app.command("ls")(wrap_command(ls.ls))
app.command("prune")(wrap_command(prune.prune))


def main() -> None:
    """Run the command; exit codes: 0 done, 1 the checkpoint, 2 the call, 3 the storage, 130 and 143 on signals."""
    # a manifest is a hundred thousand small values that live to the end: looking for cycles among them only costs
    gc.set_threshold(200_000, 50, 100)
    run_main(lambda: app(sys.argv[1:] or ["--help"], standalone_mode=False))
