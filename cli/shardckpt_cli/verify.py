"""`shardckpt verify`, `doctor` and `repair`."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardckpt_cli import options, output, plans

if TYPE_CHECKING:
    from shardckpt.results import HealthCheck, HealthReport, Problem, Verification

_Src = Annotated[
    str,
    options.take_step(
        "SRC", "Checkpoint: folder or file, path or URL; RUN@latest, RUN@1000, or RUN@1000..2000 for several steps."
    ),
]

# Maximum printed problems of one kind in one file: if a file is missing, each tensor in it has a problem.
_MAX_PER_FILE = 16


def verify(
    src: _Src,
    shapes_from: options.FlatShapesFrom = "",
    base: options.Base = None,
    plan: options.PlanFile = "",
    tasks: options.TaskCount = 0,
    as_json: options.AllAsJson = False,
) -> None:
    """Check structure, coverage, sizes and checksums.

    Exits with 1 for any fault. `intact` means that all files' checksums were compared; without that it is `complete`.
    """
    import shardckpt

    given: dict[str, Any] = {"shapes_from": shapes_from, "base": base or ()}
    if plans.has_planned("verify", [src], given, plan, tasks, as_json=as_json):
        return
    with output.show_progress(quiet=as_json) as on_progress:
        result = shardckpt.verify(src, on_progress=on_progress, **given)
    show_verification(result, as_json=as_json)


def show_verification(result: Verification, *, as_json: bool) -> None:
    """Print a verdict, and exit."""
    from shardckpt.errors import escape

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


_WORDS = {"ok": ("ok", typer.colors.GREEN), "problem": ("PROBLEM", typer.colors.RED), "info": ("-", None)}
_WORD_WIDTH, _NAME_WIDTH = 9, 15  # columns on the screen


def doctor(root: options.Root, html: options.Html = "", as_json: options.AllAsJson = False) -> None:
    """Check a run's health, and show what to type next.

    Exits with 1 if there is a problem. Reads the newest step twice and this machine's newest captures once, and writes
    nothing but --html.
    """
    import shardckpt
    from shardckpt.errors import escape

    found = shardckpt.doctor(root, html=html)
    if as_json:
        output.print_json(found)
    else:
        _show_report(found)
        if html:
            print(f"wrote {escape(html)}")
    raise typer.Exit(0 if found.ok else 1)


def _show_report(found: HealthReport) -> None:
    from shardckpt.errors import escape

    is_terminal = sys.stdout.isatty()
    width = max(shutil.get_terminal_size().columns, 40) if is_terminal else 0
    has_color = is_terminal and not os.environ.get("NO_COLOR")
    for check in found.checks:
        for line in _show_check(check, width, has_color=has_color):
            print(line)
    problems = output.count(len(found.problems), "problem") if found.problems else "no problem"
    step = "no complete step" if found.newest is None else f"step {found.newest} is the newest"
    print(f"{escape(found.root)}: {problems}, {step}")


def _show_check(check: HealthCheck, width: int, *, has_color: bool) -> Iterator[str]:
    """Yield a check's lines: one in a pipe, as many as needed on a terminal."""
    from shardckpt.errors import escape

    word, color = _WORDS[check.status]
    start = f"{word:<{_WORD_WIDTH}}{check.name:<{_NAME_WIDTH}}"
    shown = typer.style(word, fg=color, bold=True) + start[len(word) :] if has_color and color else start
    indent = " " * len(start)
    lines = _wrap(escape(check.text), width - len(indent))
    yield f"{shown}{lines[0]}"
    yield from (f"{indent}{line}" for line in lines[1:])
    if check.next:
        yield f"{indent}next: {escape(check.next)}"  # not wrapped: it is copied


def _wrap(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""] if width > 0 else [text]


def repair(
    src: Annotated[
        str,
        options.take_step("SRC", "Folder with a step: path or URL."),
    ],
    save: Annotated[str, typer.Option("--save", help="The save's id, if SRC has several complete saves.")] = "",
    rehash: Annotated[bool, typer.Option("--rehash", help="Accept bytes that do not match the manifest.")] = False,
    base: options.Base = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every byte; write nothing.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Rebuild a step's manifest and COMMIT from complete files."""
    import shardckpt
    from shardckpt.errors import escape

    result = shardckpt.repair(src, save=save, rehash=rehash, base=base or (), dry_run=dry_run)
    if as_json:
        output.print_json(result)
        return
    output.warn([*result.warnings, *(problem.message for problem in result.problems)])
    done = f"{'would write' if dry_run else 'wrote'} {' and '.join(result.written)}" if result.written else "intact"
    content = f"{output.count(result.tensor_count, 'tensor')} in {output.count(result.file_count, 'file')}"
    print(escape(f"{result.source}: {content}: {done}"))
