"""What a target cannot hold of a selection: listed in full before anything is written, and left out if allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardckpt.errors import UsageError
from shardckpt.format.encodings.pickle_stubs import Global, InstanceStub
from shardckpt.manifest import Path, dotted
from shardckpt.offline.select.group_settings import drop_settings, iter_settings
from shardckpt.offline.select.selection import Selection
from shardckpt.offline.targets.base import Target

_SHOWN = 8


def drop_unsupported(selection: Selection, target: Target, *, allow_loss: bool) -> Selection:
    """Drop from a selection what the target cannot hold, with warnings.

    Args:
        selection: The tensors and settings to write.
        target: The format that is written.
        allow_loss: Leave out what it cannot hold.

    Raises:
        UsageError: It cannot hold something that may not be left out; the message lists it.
    """
    dtypes = {t.name: t.dtype for t in (*selection.model, *selection.optim) if not target.holds_dtype(t.dtype)}
    settings = iter_settings(selection.groups) if selection.groups is not None else ()
    values = {path: value for path, value in settings if not target.holds_value(value)}
    lost_tensors = [f"{name}, of type {dtype}" for name, dtype in dtypes.items()]
    lost_values = [describe_lost(path, value) for path, value in values.items()]
    if not dtypes and not values:
        return selection
    require_allowed([*lost_tensors, *lost_values], target.title, allow_loss=allow_loss)
    groups = selection.groups
    if groups is not None and not target.writes_text:
        groups = drop_settings(groups, frozenset(values))
    verb = "written as text" if target.writes_text else "left out"
    return replace(
        selection,
        model=tuple(t for t in selection.model if t.name not in dtypes),
        optim=tuple(t for t in selection.optim if t.name not in dtypes),
        groups=groups,
        ties={name: kept for name, kept in selection.ties.items() if kept not in dtypes},
        warnings=(
            *selection.warnings,
            *(f"left out: {what}" for what in lost_tensors),
            *(f"{verb}: {what}" for what in lost_values),
        ),
    )


def require_allowed(lost: Sequence[str], title: str, *, allow_loss: bool) -> None:
    """Refuse to lose anything that may not be lost.

    Args:
        lost: Phrases for what would be lost.
        title: The target, such as `a DCP checkpoint`.
        allow_loss: Whether it may be lost.

    Raises:
        UsageError: Something would be lost.
    """
    if lost and not allow_loss:
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        raise UsageError(
            f"{title} cannot hold all of this",
            found=", ".join(lost[:_SHOWN]) + more,
            fix="Pass allow_loss=True (--allow-loss) to do without it, or choose another format with --to.",
        )


def describe_lost(path: Path, value: object) -> str:
    """Describe a lost value by its path and type."""
    kind = value.name if isinstance(value, (InstanceStub, Global)) else type(value).__name__
    return f"{dotted(path)}, of type {kind}"
