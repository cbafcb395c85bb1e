"""What a format cannot hold of a selection: listed as a whole before anything is written, and left out if allowed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardckpt.dtypes import SAFETENSORS_NAMES, is_known
from shardckpt.errors import UnsupportedError, UsageError
from shardckpt.format.encodings.pickle_stubs import Global, InstanceStub, Ordered
from shardckpt.format.encodings.tagged_json import encode
from shardckpt.format.torchsave.writer import TYPES, encode_archive
from shardckpt.manifest import Path, dotted
from shardckpt.offline.select.group_settings import drop_settings, iter_settings, plain_value
from shardckpt.offline.select.selection import Selection
from shardckpt.plan.layout.output_files import OutputTensor

_SHOWN = 8
_TITLES = {
    "safetensors": "safetensors",
    "native": "a step",
    "torch": "a torch file",
    "dcp": "a DCP checkpoint",
    "deepspeed-universal": "a universal checkpoint",
}
_OF_TORCH = ("torch", "dcp", "deepspeed-universal")


def drop_unsupported(selection: Selection, to: str, *, allow_loss: bool) -> Selection:
    """Drop from a selection what the target format cannot hold, with warnings.

    Args:
        selection: What was asked for.
        to: The format: `safetensors`, `torch`, `dcp`, `native` or `deepspeed-universal`.
        allow_loss: Leave out what it cannot hold.

    Raises:
        UsageError: There is such, and it may not be left out; the message lists it.
    """
    tensors = [t.name for t in (*selection.model, *selection.optim) if not _is_supported(to, t)]
    types = {t.name: t.dtype for t in (*selection.model, *selection.optim)}
    values = dict(_list_unsupported(selection, to))
    lost = [f"{name}, of type {types[name]}" for name in tensors]
    lost += [describe_lost(path, value) for path, value in values.items()]
    if not lost:
        return selection
    require_allowed(lost, to, allow_loss=allow_loss)
    gone = set(tensors)
    groups = selection.groups
    if groups is not None and to != "safetensors":  # there it stands as text
        groups = drop_settings(groups, frozenset(values))
    done = "written as text" if to == "safetensors" else "left out"
    return replace(
        selection,
        model=tuple(t for t in selection.model if t.name not in gone),
        optim=tuple(t for t in selection.optim if t.name not in gone),
        groups=groups,
        ties={name: kept for name, kept in selection.ties.items() if kept not in gone},
        warnings=(
            *selection.warnings,
            *(f"left out: {what}" for what in lost[: len(tensors)]),
            *(f"{done}: {what}" for what in lost[len(tensors) :]),
        ),
    )


def require_allowed(lost: Sequence[str], to: str, *, allow_loss: bool) -> None:
    """Refuse to lose anything that may not be lost.

    Args:
        lost: What would be, a phrase each.
        to: The format.
        allow_loss: Whether it may be.

    Raises:
        UsageError: Something would be.
    """
    if lost and not allow_loss:
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        raise UsageError(
            f"{_TITLES[to]} cannot hold all of this",
            found=", ".join(lost[:_SHOWN]) + more,
            fix="Pass allow_loss=True (--allow-loss) to do without it, or choose another format with --to.",
        )


def describe_lost(path: Path, value: object) -> str:
    """Describe a lost value by its path and type."""
    kind = value.name if isinstance(value, (InstanceStub, Global)) else type(value).__name__
    return f"{dotted(path)}, of type {kind}"


def is_unsupported(to: str, value: object) -> bool:
    """Return True if a format cannot hold a value that is not a tensor."""
    try:
        if to in _OF_TORCH:
            encode_archive(value)
        else:
            encode(plain_value(value))
    except UnsupportedError:
        return True
    return to == "dcp" and _is_opened_in_order(value)


def _is_opened_in_order(value: object) -> bool:
    """Return True if a value holds an `OrderedDict` where torch's planner opens it: it would come back as a dict."""
    if isinstance(value, (OrderedDict, Ordered)):
        return bool(value)
    if isinstance(value, dict):
        return any(map(_is_opened_in_order, value.values()))
    return isinstance(value, list) and any(map(_is_opened_in_order, value))


def _list_unsupported(selection: Selection, to: str) -> Iterator[tuple[Path, object]]:
    for path, value in iter_settings(selection.groups) if selection.groups is not None else ():
        if is_unsupported(to, value):
            yield path, value


def _is_supported(to: str, tensor: OutputTensor) -> bool:
    if to in _OF_TORCH:
        return tensor.dtype in TYPES
    return tensor.dtype in SAFETENSORS_NAMES if to == "safetensors" else is_known(tensor.dtype)
