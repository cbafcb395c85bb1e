"""The command line: builds the command for one verb, and imports neither torch nor shardckpt until it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import typer

from shardckpt_cli import (
    commit,
    compare,
    completion,
    consolidate,
    conversions,
    copy,
    inspect,
    ls,
    plans,
    prune,
    stats,
    stream,
    verify,
)
from shardckpt_cli.commands import Command, CommandWithTargets, CommandWithVerbs
from shardckpt_cli.exits import run_main, wrap_command


class Verb(NamedTuple):
    """A command, named by its verb."""

    function: Callable[..., None]  # its docstring is the help
    command_class: type[Command] = Command
    help: str | None = None  # in place of the docstring
    has_one_writer: bool = False  # if torchrun starts it on each rank, only rank 0 runs it


VERBS = {
    "consolidate": Verb(consolidate.consolidate, CommandWithTargets),
    "convert": Verb(consolidate.consolidate, CommandWithTargets, consolidate.CONVERT_HELP),
    "rekey": Verb(conversions.rekey, has_one_writer=True),
    "reshard": Verb(conversions.reshard, CommandWithTargets, has_one_writer=True),
    "merge-adapter": Verb(conversions.merge_adapter, CommandWithTargets, has_one_writer=True),
    "inspect": Verb(inspect.inspect),
    "formats": Verb(inspect.formats),
    "copy": Verb(copy.copy, has_one_writer=True),
    "doctor": Verb(verify.doctor),
    "repair": Verb(verify.repair, has_one_writer=True),
    "verify": Verb(verify.verify),
    "diff": Verb(compare.diff),
    "stats": Verb(stats.stats),
    "history": Verb(stats.history),
    "bisect": Verb(stats.bisect),
    "ls": Verb(ls.ls),
    "prove": Verb(ls.prove),
    "prune": Verb(prune.prune, has_one_writer=True),
    "tiers": Verb(ls.tiers),
    "task": Verb(plans.task),
    "commit": Verb(commit.commit, has_one_writer=True),
    "stream": Verb(stream.stream, has_one_writer=True),
}


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 200}  # the terminal's width


def build_command(first_word: str = "") -> Any:
    """Return the command with only the verb that will run: building all verbs takes longer than most runs."""
    app = typer.Typer(
        name="shardckpt",
        help="Read, check and merge checkpoints of sharded PyTorch training.",
        cls=CommandWithVerbs,
        add_completion=first_word not in VERBS,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings=CONTEXT,
    )
    app.callback()(_take_options)
    # All verbs are built to show, suggest or complete them.
    for name in [first_word] if first_word in VERBS else VERBS:
        verb = VERBS[name]
        function = consolidate.run_on_first_rank(verb.function) if verb.has_one_writer else verb.function
        app.command(name, cls=verb.command_class, help=verb.help, context_settings=CONTEXT)(wrap_command(function))
    return typer.main.get_command(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        import shardckpt

        print(f"shardckpt {shardckpt.__version__}")
        raise typer.Exit


def _take_options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Accept the options before the verb."""


def main() -> None:
    """Run the command."""
    # Exit codes: 0 success, 1 checkpoint, 2 usage, 3 storage, 130 and 143 signals.
    words = sys.argv[1:] or ["--help"]

    def run() -> object:
        return build_command(words[0])(words, standalone_mode=False)

    run_main(lambda: completion.run_completion(run) if completion.is_completing() else run())
