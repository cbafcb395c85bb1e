"""`shardckpt inspect` and `formats`."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt_cli import options, output

if TYPE_CHECKING:
    from shardckpt.results import Inspection

_MAX_PROBLEMS = 16


def inspect(
    src: options.Src,
    tree: Annotated[bool, typer.Option("--tree", help="Sizes by prefix instead of a table.")] = False,
    as_json: options.AllAsJson = False,
    shapes_from: options.FlatShapesFrom = "",
    base: options.Base = None,
    html: options.Html = "",
) -> None:
    """Show a checkpoint's contents, from metadata alone."""
    import shardckpt
    from shardckpt.errors import escape

    options.refuse_idle(as_json, "with --json", {"--tree": tree})
    options.refuse_idle(html, "with --html", {"--tree": tree})
    found = shardckpt.inspect(src, shapes_from=shapes_from, base=base or (), html=html)
    if as_json:
        output.print_json(found)
        return
    output.warn(found.warnings)
    output.warn(problem.message for problem in found.problems[:_MAX_PROBLEMS])
    if len(found.problems) > _MAX_PROBLEMS:
        more = len(found.problems) - _MAX_PROBLEMS
        output.warn([f"{more} more problems: `shardckpt verify` lists them for each file"])
    print(_summary(found))
    if html:
        print(f"wrote {escape(html)}")
        return
    print()
    (_show_tree if tree else _show_tensors)(found)


def _summary(found: Inspection) -> str:
    from shardckpt.errors import escape

    dtypes = Counter[str]()
    for tensor in found.tensors:
        dtypes[tensor.dtype] += 1
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
    lines = [
        f"{found.source}: {found.format}",
        f"{output.count(len(found.tensors), 'tensor')}, {output.size(found.nbytes)} ({kinds or 'none'}),"
        f" {output.count(len(found.objects), 'other value')}, {output.count(len(found.files), 'file')}",
    ]
    for part, places in found.parts.items():
        shown = [place or "top level" for place in places]
        if shown:
            lines.append(f"{part}: {', '.join(shown[:8])}{', ...' if len(shown) > 8 else ''}")
    if found.stats:
        nans, infs = (sum(getattr(each, name) for each in found.stats) for name in ("nans", "infs"))
        bad = f"{output.count(nans, 'NaN')}, {output.count(infs, 'Inf')}"
        lines.append(f"statistics stored at save: {output.count(len(found.stats), 'tensor')}, {bad}")
    ties = [f"tied: {output.show_name(name)} is {output.show_name(kept)}" for name, kept in found.ties.items()]
    return "\n".join([*map(escape, lines), *ties])


def _show_tensors(found: Inspection) -> None:
    rows = [
        (output.show_name(t.name), t.dtype, _shape(t.shape), output.size(t.nbytes), f"{t.pieces}")
        for t in found.tensors
    ]
    output.show_table(rows, header=("tensor", "dtype", "shape", "size", "pieces"), right=frozenset({3, 4}))


@lru_cache(maxsize=4096)
def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _show_tree(found: Inspection) -> None:
    """Show sizes by prefix, children below parents; a tied tensor counts once."""
    from shardckpt.errors import escape

    sizes, counts = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for tensor in found.tensors:
        segments = tuple(tensor.name.split("."))
        for depth in range(len(segments) + 1):
            sizes[segments[:depth]] += 0 if tensor.name in found.ties else tensor.nbytes
            counts[segments[:depth]] += 1
    rows = [
        (
            "  " * len(prefix) + (escape(prefix[-1]) if prefix else "all"),
            f"{counts[prefix]}",
            output.size(sizes[prefix]),
        )
        for prefix in sorted(sizes)
    ]
    output.show_table(rows, header=("prefix", "tensors", "size"), right=frozenset({1, 2}))


def formats(as_json: options.AllAsJson = False) -> None:
    """List the recognized formats, including plugins' formats."""
    import shardckpt
    from shardckpt.errors import escape

    found = shardckpt.formats()
    if as_json:
        output.print_json(found)
        return
    plugin = {True: "plugin", False: ""}
    rows = [(escape(each.name), escape(each.looks_for), plugin[each.is_plugin]) for each in found.formats]
    output.show_table(rows, header=("format", "recognized by", ""))
