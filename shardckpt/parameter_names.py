"""What names of parameters say: the segments that wrappers put in, and which names numbers stand for."""

from __future__ import annotations

from collections.abc import Sequence

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Segments that torch.compile, FSDP1 and activation checkpointing put into names, at any depth."""


def unwrapped(name: str) -> str:
    """Return a name without the segments of wrappers; one of nothing else stays as it is."""
    return ".".join(s for s in name.split(".") if s not in WRAPPERS) or name


def unique_match(wanted: Sequence[object], offered: Sequence[tuple[str, object]]) -> list[str] | None:
    """Return the names that match what is wanted in order, if exactly one choice of names does; None fits anything.

    Counts the ways from the back (dynamic programming), in `len(wanted) * len(offered)` steps.

    Args:
        wanted: What is known of each number, such as a shape.
        offered: Names, and the same of each.
    """
    rows, columns = len(wanted), len(offered)
    ways = [[0] * (columns + 1) for _ in range(rows)] + [[1] * (columns + 1)]
    for i in range(rows - 1, -1, -1):
        for j in range(columns - 1, -1, -1):
            fits = wanted[i] is None or wanted[i] == offered[j][1]
            ways[i][j] = min(ways[i][j + 1] + (ways[i + 1][j + 1] if fits else 0), 2)
    if ways[0][0] != 1:
        return None
    match, j = [], 0
    for i in range(rows):
        while ways[i][j + 1] == 1:
            j += 1
        match.append(offered[j][0])
        j += 1
    return match
