"""Implement `rekey`: convert optimizer keys."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from typing_extensions import Unpack

from shardckpt.errors import UsageError
from shardckpt.events.progress import OnProgress
from shardckpt.offline.consolidate import export, parse_options
from shardckpt.offline.results.contents import Report
from shardckpt.offline.select.options import RekeyParams
from shardckpt.offline.select.selection import Selection, read_param_names
from shardckpt.plan.optim.output_keys import Keys, rekey_state
from shardckpt.readers.huggingface.index_files import SUFFIX
from shardckpt.readers.registry import resolve_step
from shardckpt.storage.resolve_url import as_url
from shardckpt.storage.store import Store

_KEYS: Mapping[str, Keys] = {
    "names": "names",
    "ids": "ids",
    "flatten": "flat",
    "nest": "names",
    "flat-parameters": "flat-parameters",
}


def rekey(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: str,
    on_progress: OnProgress | None = None,
    **options: Unpack[RekeyParams],
) -> Report:
    """Write a checkpoint like `consolidate`, with other optimizer keys.

    No value changes.

    Args:
        src: Checkpoint with an optimizer, in any readable format: a path or URL.
        dst: Folder to write; with `names`, also a file if it ends in `.safetensors`, without groups.
        to: `names`: tensors are named `<parameter>/<slot>`. `ids`: `<number>/<slot>`, with `torch.optim`'s ids; the
            groups keep the names. `flatten`: `state.<parameter>.<slot>`. `nest`: the inverse of `flatten`.
            `flat-parameters`: `<flat parameter>/<slot>`, one tensor for all members; only for files with layouts: LOCAL
            states, and results of `rekey`. `names` is the inverse.
        on_progress: As for `consolidate`.
        **options: Fields in `Options`; `part` is `all` by default. `param_names` gives the names for a source with ids;
            with `to="ids"` and a source with names, it gives each name's id.

    Returns:
        Report with the written files.

    Raises:
        UsageError: The call is invalid: `to` is unknown, or names are.
        CheckpointError: The checkpoint is damaged, incomplete or unsafe, or has no optimizer.
        StorageError: Reading or writing failed.

    Examples:
        >>> shardckpt.rekey("run/step-100", "by-number", to="ids")  # doctest: +SKIP
    """
    src, dst = resolve_step(src), as_url(dst)
    if to not in _KEYS:
        raise UsageError("`to` must be a kind of keys", found=to, expected=", ".join(_KEYS))
    if "optim_keys" in options:
        raise UsageError("`to` and `optim_keys` exclude each other", found="optim_keys", expected="`to` alone")
    chosen = parse_options("rekey", {"part": "all", **options})
    if chosen.part == "model":
        raise UsageError("the model alone has no keys to change", found="part model", expected="all or optim")
    if dst.endswith(SUFFIX) and _KEYS[to] in ("ids", "flat-parameters"):
        raise UsageError(
            "one file cannot store the param groups, which map its tensors to parameters",
            found=dst,
            fix="Name a folder.",
        )
    numbers = read_param_names(chosen.param_names) if chosen.param_names and to == "ids" else None

    def change(selection: Selection, _config: Mapping[str, object], _store: Store) -> Selection:
        if selection.groups is None:
            raise UsageError("the checkpoint holds no optimizer", where=src, fix="Name it with --optim-key.")
        optim, groups = rekey_state(selection.optim, selection.groups, _KEYS[to], numbers, selection.units)
        return replace(selection, optim=optim, groups=groups)

    return export(src, dst, chosen, on_progress, change=change)
