"""`shardckpt stream`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from shardckpt_cli import consolidate, options, output

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardckpt.results import VersionInfo, VersionList

_ACTIONS = ("ls", "verify", "export", "compact", "serve")
_DIALECTS = ("hf", "hf-delta")
_CHECKSUMS = ("xxh3-128", "adler32")
_RIGHT = frozenset({0, 1, 3, 4, 5})  # columns with numbers


def stream(
    action: Annotated[
        str, typer.Argument(metavar="ls|verify|export|compact|serve", help="What to do with the versions.")
    ],
    src: Annotated[str, options.take_step("STREAM", "Stream: path or URL; STREAM@12 or STREAM@latest for a version.")],
    dst: Annotated[str, typer.Argument(metavar="[DST]", help="With export: folder to write.")] = "",
    dialect: Annotated[
        str,
        options.choose(
            "--dialect",
            "With export: hf, one version for transformers and vLLM (the default); or hf-delta, versions as folders"
            " of changes for slime, miles and ModelExpress.",
            *_DIALECTS,
        ),
    ] = "hf",
    checksum: Annotated[
        str,
        options.choose("--checksum", "With hf-delta: xxh3-128 (the default); adler32 for ModelExpress.", *_CHECKSUMS),
    ] = _CHECKSUMS[0],
    follow: Annotated[
        float,
        typer.Option(
            "--follow",
            metavar="SECONDS",
            help="With hf-delta: write each new version once it is published, until none comes for so long.",
        ),
    ] = 0.0,
    keep_anchors: Annotated[
        int | None,
        typer.Option("--keep-anchors", metavar="N", help="With compact: remove versions before the newest N anchors."),
    ] = None,
    keep: Annotated[
        list[int] | None,
        typer.Option("--keep", metavar="NUMBER", help="With compact: keep this version readable; may be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With compact: write and remove nothing.")] = False,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="With serve: address; the default is 127.0.0.1:8470.")
    ] = "",
    config_from: options.ConfigFrom = "",
    overwrite: options.Overwrite = False,
    as_json: options.AllAsJson = False,
) -> None:
    """List, check, export, compact or serve a weight stream.

    `verify` reads each version from its anchor, and exits with 1 for any fault. `compact` writes an anchor for the
    newest version. `serve` lets receivers on other hosts read a folder over HTTP; everybody who reaches the port can.
    """
    import shardckpt

    of_delta = {"--checksum": checksum != _CHECKSUMS[0], "--follow": follow != 0.0}
    _check(action, dst, dialect, given={"--config-from": config_from, "--overwrite": overwrite}, of_delta=of_delta)
    compaction = {"--keep-anchors": keep_anchors is not None, "--keep": bool(keep), "--dry-run": dry_run}
    options.refuse_idle(action != "compact", f"with {action}", compaction)
    options.refuse_idle(action != "serve", f"with {action}", {"--listen": listen})
    if action == "serve":
        _serve(src, listen or "127.0.0.1:8470")
        return
    if action == "ls":
        found = shardckpt.list_versions(src)
    elif action == "verify":
        found = shardckpt.verify_versions(src)
    elif action == "compact":
        found = shardckpt.compact_versions(src, keep_anchors=keep_anchors, keep=keep or (), dry_run=dry_run)
    elif dialect == "hf-delta":
        found = shardckpt.export_versions(src, dst, checksum=checksum, follow_s=follow)
    else:
        config = config_from or None
        order = {"src": src, "dst": dst, "config_from": config, "overwrite": overwrite or None}
        consolidate.run("consolidate", {**order, "quiet": as_json, "as_json": False})
        found = replace(shardckpt.list_versions(src), target=dst)
    if as_json:
        output.print_json(found)
    elif action != "export" or dialect == "hf-delta":
        _show(found)
    raise typer.Exit(0 if found.ok else 1)


def _serve(src: str, listen: str) -> None:
    """Serve a folder until the process is interrupted."""
    import shardckpt
    from shardckpt.errors import UsageError

    host, mark, port = listen.rpartition(":")
    if not (mark and host and port.isdecimal() and int(port) < 1 << 16):
        raise UsageError("--listen must be HOST:PORT", found=listen)
    with shardckpt.build_stream_server(src, host.strip("[]"), int(port)) as server:
        print(f"serving {src} at http://{host}:{server.server_port}", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def _check(action: str, dst: str, dialect: str, *, given: Mapping[str, object], of_delta: Mapping[str, object]) -> None:
    """Require an action and options that fit."""
    from shardckpt.errors import UsageError

    if action not in _ACTIONS:
        raise UsageError("unknown action of `stream`", found=action, expected=", ".join(_ACTIONS))
    if dialect not in _DIALECTS:
        raise UsageError("unknown --dialect", found=dialect, expected=" or ".join(_DIALECTS))
    if (action == "export") != bool(dst):
        raise UsageError("`stream export` needs a folder to write, and no other action takes one", found=dst or "none")
    is_delta, is_export = dialect == "hf-delta", action == "export"
    options.refuse_idle(not is_export, f"with {action}", {"--dialect": is_delta, **given})
    options.refuse_idle(not is_delta, "without --dialect hf-delta", of_delta)
    options.refuse_idle(is_delta, "with --dialect hf-delta", given)


def _show(found: VersionList) -> None:
    from shardckpt.errors import escape

    header = ("version", "epoch", "published", "base", "changes", "changed", "anchor")
    output.show_table([_row(each) for each in found.versions], header=header, right=_RIGHT)
    for each in found.versions:
        if each.problem:
            print(f"version {each.number} (epoch {each.epoch}): {escape(each.problem)}")
    count, full = output.count(len(found.versions), "version"), output.size(found.full_bytes)
    faulty = sum(bool(each.problem) for each in found.versions)
    state = f", {faulty} with problems" if faulty else ", intact" if found.is_verified else ""
    target = f", written to {escape(found.target)}" if found.target else ""
    removed = f", {len(found.removed)} removed" if found.removed else ""
    print(f"{escape(found.source)}: {count} of {full}{state}{target}{removed}")


def _row(each: VersionInfo) -> tuple[str, ...]:
    """Return a version's text by column."""
    base = "" if each.base is None else f"{each.base}"
    if each.base is not None and each.base_epoch != each.epoch:
        base = f"{each.base} (epoch {each.base_epoch})"
    changes = ("", "") if each.base is None else (output.size(each.nbytes), f"{each.share:.2%}")
    time = output.show_time(each.published_at)
    return f"{each.number}", f"{each.epoch}", time, base, *changes, "yes" if each.has_anchor else ""
