"""`shardckpt verify`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt_cli import completion, options, output

if TYPE_CHECKING:
    from shardckpt.results import Problem

_Src = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="Checkpoint: folder or file, path or URL; RUN@latest, RUN@1000, or RUN@1000..2000 for several steps.",
        autocompletion=completion.complete_step,
    ),
]

# Maximum printed problems of one kind in one file: if a file is missing, each tensor in it has a problem.
_MAX_PER_FILE = 16


def verify(
    src: _Src,
    shapes_from: options.FlatShapesFrom = "",
    base: options.Base = None,
    as_json: options.AllAsJson = False,
) -> None:
    """Check structure, coverage, sizes and checksums.

    Exits with 1 for any fault. `intact` means that all files' checksums were compared; without that it is `complete`.
    """
    import shardckpt
    from shardckpt.errors import escape

    with output.show_progress(quiet=as_json) as on_progress:
        result = shardckpt.verify(src, shapes_from=shapes_from, base=base or (), on_progress=on_progress)
    if as_json:
        output.print_json(result)
    else:
        output.warn(result.warnings)
        _show_problems(result.problems)
        checked = f", {output.size(result.checked_bytes)} match their checksums" if result.checked_bytes else ""
        without = len(result.files_without_checksums)
        if without:
            checked += f", no checksums in {output.count(without, 'file')}"
        state = "complete" if without or not result.checked_bytes else "intact"
        if not result.ok:
            state = output.count(len(result.problems), "problem")
        tensors = output.count(result.tensor_count, "tensor")
        print(f"{escape(result.source)}: {result.format or 'unreadable'}: {tensors}, {state}{checked}")
    raise typer.Exit(0 if result.ok else 1)


def _show_problems(problems: Iterable[Problem]) -> None:
    """Print the first problems of each kind in a file, and the number of others."""
    from shardckpt.errors import escape

    counts = Counter[tuple[str, str]]()
    for problem in problems:
        counts[problem.file, problem.kind] += 1
        if counts[problem.file, problem.kind] <= _MAX_PER_FILE:
            print(problem)
    for (file, kind), number in counts.items():
        if number > _MAX_PER_FILE:
            place = f"{escape(file)}: " if file else ""
            more = output.count(number - _MAX_PER_FILE, "more problem")
            print(f"{place}{kind.replace('_', ' ')}: {more}: --json lists all")
