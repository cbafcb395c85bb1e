"""The command line: registers the commands; imports neither torch nor shardckpt before one of them runs."""

from __future__ import annotations

import gc
import sys

import typer

from shardckpt_cli import compare, consolidate, inspect, ls, merge, prune, rekey, repair, reshard, verify
from shardckpt_cli.exits import guarded, sheltered

app = typer.Typer(
    name="shardckpt",
    help="Read, check and merge checkpoints of sharded PyTorch training.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("consolidate")(sheltered(consolidate.consolidate))
app.command("convert")(sheltered(consolidate.convert))
app.command("rekey")(sheltered(rekey.rekey))
app.command("reshard")(sheltered(reshard.reshard))
app.command("merge-adapter")(sheltered(merge.merge_adapter))
app.command("inspect")(sheltered(inspect.inspect))
app.command("repair")(sheltered(repair.repair))
app.command("verify")(sheltered(verify.verify))
app.command("diff")(sheltered(compare.diff))
app.command("ls")(sheltered(ls.ls))
app.command("prune")(sheltered(prune.prune))


def main() -> None:
    """Run the command; exit codes: 0 done, 1 the checkpoint, 2 the call, 3 the storage, 130 and 143 on signals."""
    # a manifest is a hundred thousand small values that live to the end: looking for cycles among them only costs
    gc.set_threshold(200_000, 50, 100)
    guarded(lambda: app(sys.argv[1:] or ["--help"], standalone_mode=False))
