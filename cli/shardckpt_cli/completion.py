"""Values that the shell completes: targets, dtypes and other fixed values, and a run's steps after `RUN@`.

Nothing here reads more than names in local folders, and no fault reaches the shell.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import redirect_stdout
from itertools import islice

Complete = Callable[[str], list[str]]

_VARIABLE = "_SHARDCKPT_COMPLETE"  # set by the shell's completion function
_STEP = re.compile("step-([0-9]{1,18})")
_MAX_NAMES = 10_000
_MAX_STEPS = 200
_NAMED = ("latest", "best")


def is_completing() -> bool:
    """Return whether the shell asks for completions."""
    return _VARIABLE in os.environ


def choose_from(*values: str) -> Complete:
    """Return a function that completes one of some values."""

    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


def complete_target(incomplete: str) -> list[str]:
    """Complete the name of a target."""
    return _list_targets(incomplete, for_ranks=False)


def complete_rank_target(incomplete: str) -> list[str]:
    """Complete the name of a target that has a file for each rank."""
    return _list_targets(incomplete, for_ranks=True)


def _list_targets(incomplete: str, *, for_ranks: bool) -> list[str]:
    import shardckpt

    names = shardckpt.list_targets(for_ranks=for_ranks, imports_plugins=False)
    return [name for name in names if name.startswith(incomplete)]


def complete_step(incomplete: str) -> list[str]:
    """Complete what follows `RUN@`; nothing for another word, so that the shell completes files."""
    run, mark, text = incomplete.rpartition("@")
    if not mark or "://" in run or "/" in text:
        return []
    first, dots, last = text.partition("..")
    try:
        numbers = sorted(islice(_list_numbers(os.path.expanduser(run) or "."), _MAX_STEPS))
    except (OSError, ValueError):  # no such folder, or a name that no folder can have
        return []
    if dots:
        start = int(first) if re.fullmatch("[0-9]{1,18}", first) else 0
        found = [f"{first}..{number}" for number in numbers if number >= start and f"{number}".startswith(last)]
    else:
        found = [name for name in (*_NAMED, *map(str, numbers)) if numbers and name.startswith(text)]
    return [f"{run}@{name}" for name in found]


def _list_numbers(run: str) -> Iterator[int]:
    """Yield the numbers of a local run's committed steps."""
    with os.scandir(run) as entries:
        names = [entry.name for entry in islice(entries, _MAX_NAMES)]
    steps = sorted(((int(match[1]), name) for name in names if (match := _STEP.fullmatch(name))), reverse=True)
    for number, name in steps:
        if os.path.exists(os.path.join(run, name, "COMMIT")):
            yield number


def run_completion(run: Callable[[], object]) -> None:
    """Print the completions that the command prints, without what bash keeps on the left of the word."""
    left = rejoin_words(os.environ)
    with io.StringIO() as shown:
        try:
            with redirect_stdout(shown):
                run()
        finally:
            print("".join(f"{line.removeprefix(left)}\n" for line in shown.getvalue().splitlines()), end="")


def rejoin_words(environment: MutableMapping[str, str]) -> str:
    """Join the words that bash splits at `@`, `:` and `=`; return what it keeps on the left of the current word."""
    # Bash passes `run@10` as three words. It replaces the last of them, with an `@` on its left.
    words, cursor = environment.get("COMP_WORDS", "").split("\n"), environment.get("COMP_CWORD", "")
    if not cursor.isdecimal() or int(cursor) >= len(words):
        return ""
    joined: list[str] = []
    is_open, position = False, 0  # whether the next word continues the last one; the current word
    for at, word in enumerate(words):
        is_break = word in ("@", ":") or (word == "=" and bool(joined) and joined[-1].startswith("--"))
        if joined and (is_break or (is_open and word)):
            joined[-1] += word
        else:
            joined.append(word)
        is_open = is_break
        position = len(joined) - 1 if at <= int(cursor) else position
    environment["COMP_WORDS"], environment["COMP_CWORD"] = "\n".join(joined), str(position)
    current = joined[position]
    return current[: max(current.rfind("@"), current.rfind(":") + 1, 0)] if len(joined) < len(words) else ""
