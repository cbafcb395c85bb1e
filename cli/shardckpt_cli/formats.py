"""`shardckpt formats`."""

from __future__ import annotations

from shardckpt_cli import options, output


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
