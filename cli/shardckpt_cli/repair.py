"""`shardckpt repair`."""

from __future__ import annotations

from typing import Annotated

import typer

from shardckpt_cli import options, output


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
