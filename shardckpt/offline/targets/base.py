"""What every target offers: what it can hold, and the files that it makes of a conversion.

A target is one frozen value; adding one is a module and a line in `target_registry.py`, or an entry point
`shardckpt.targets` of another distribution (docs/extending.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardckpt.errors import UnsupportedError, UsageError
from shardckpt.format.encodings.pickle_stubs import Global, InstanceStub
from shardckpt.format.encodings.tagged_json import encode
from shardckpt.format.reader import Reader
from shardckpt.manifest import Path, dotted
from shardckpt.offline.select.config_files import CONFIG, ConfigFiles, with_dtype
from shardckpt.offline.select.group_settings import drop_settings, iter_settings, plain_value
from shardckpt.offline.select.options import Options, parse_dtype
from shardckpt.offline.select.selection import Selection
from shardckpt.offline.write.conversion import PlannedFiles
from shardckpt.plan.layout.output_files import OutputTensor, parse_size, split_as_stored, split_by_size
from shardckpt.storage.resolve_url import local_path

CONFIG_FILES = re.compile(r"(generation_|adapter_)?config\.json")
"""A model's config belongs to its weights; a tokenizer, and any other file beside them, belongs to somebody else."""

FRESH = "(-[0-9a-f]{8})?"
SHARD = rf"{FRESH}(-\d{{5}}-of-\d{{5}})?"
"""What names of files may have before their suffix: a unique suffix, and the number of the file."""

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Conversion:
    """What is to be written, and where.

    Attributes:
        target: Path or URL, as the caller gave it.
        options: The options of the call.
        reader: The open checkpoint.
        config: Config and tokenizer files that are copied beside the result.
        selection: Tensors and settings under their final names, located and proven complete.
        is_file: Whether the target is one file.
        keeps_split: Whether tensors stay split over files as the source has them.
    """

    target: str
    options: Options
    reader: Reader
    config: ConfigFiles
    selection: Selection
    is_file: bool = False
    keeps_split: bool = False

    @property
    def file_name(self) -> str:
        """Name of the one file."""
        return self.target.rpartition("/")[2]

    @property
    def is_local(self) -> bool:
        """Whether the target is on a disk of this machine."""
        return local_path(self.target) is not None

    @property
    def is_adapter(self) -> bool:
        """Whether the source is an adapter, whose files have other names."""
        return self.reader.manifest.format == "adapter"

    @property
    def max_file_bytes(self) -> int:
        """Bytes of tensor data in a file."""
        return parse_size(self.options.max_shard_size)

    @property
    def nbytes(self) -> int:
        """Bytes of tensor data in the selection."""
        return sum(tensor.nbytes for tensor in (*self.selection.model, *self.selection.optim))

    def split_tensors(self, tensors: Sequence[OutputTensor]) -> list[tuple[OutputTensor, ...]]:
        """Return the tensors of each file, at least one."""
        if self.is_file:
            return [tuple(tensors)]
        split = split_as_stored(tensors) if self.keeps_split else split_by_size(tensors, self.max_file_bytes)
        return split or [()]

    def encode_config(self) -> dict[str, bytes]:
        """Return config files that stay, and the model's `config.json` if a cast changes the dtype in it."""
        kept = dict(self.config.kept)
        if not (self.options.dtype and self.config.config):
            return kept
        return {**kept, CONFIG: encode_json(with_dtype(self.config.config, parse_dtype(self.options.dtype)))}


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Arguments of `reshard`, with sizes in bytes.

    Attributes:
        world_size: Ranks that the tensors are split for.
        max_file_bytes: Bytes of tensor data in a file.
        keep_whole: Globs of names that rank files do not split.
        allow_loss: Leave out values that the target cannot hold.
    """

    world_size: int
    max_file_bytes: int
    keep_whole: tuple[str, ...] = ()
    allow_loss: bool = False


@dataclass(frozen=True, slots=True)
class PlannedRanks:
    """A full checkpoint, planned for a number of ranks.

    Attributes:
        files: The files to write.
        tensors: Tensors by path, each once.
        ties: Further path of a tensor to its path in `tensors`.
        warnings: What is odd or was left out, a sentence each.
    """

    files: PlannedFiles
    tensors: Mapping[Path, OutputTensor]
    ties: Mapping[Path, Path]
    warnings: tuple[str, ...]


def accept_options(options: Options) -> None:
    """Accept all options."""


def can_encode(value: object) -> bool:
    """Return True if tagged JSON holds a value exactly."""
    try:
        encode(plain_value(value))
    except UnsupportedError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Target:
    """One format that can be written.

    Attributes:
        name: As `--to` names it.
        title: One such checkpoint, for messages: `a DCP checkpoint`.
        files: The files that are written, for the table of targets.
        read_by: Who reads them, for the table of targets.
        plan: Plans the files of a conversion; reads no tensor data. Raises UsageError for what cannot be written.
        holds_dtype: Returns True if tensors of a dtype, by torch's name, can be stored exactly.
        holds_value: Returns True if a setting or value of an optimizer can be stored exactly.
        suffixes: Ends of names that mean one file; empty if the target is always a folder.
        check: Checks options before the source is opened. Raises UsageError.
        keeps_config: Whether config files of a checkpoint that is replaced stay with the new one.
        writes_text: Whether a value that cannot be stored exactly is written as text, not left out.
        plan_ranks: Plans a full checkpoint for a number of ranks, for `reshard`; None if the target cannot.
    """

    name: str
    title: str
    files: str
    read_by: str
    plan: Callable[[Conversion], PlannedFiles]
    holds_dtype: Callable[[str], bool]
    holds_value: Callable[[object], bool] = can_encode
    suffixes: tuple[str, ...] = ()
    check: Callable[[Options], None] = accept_options
    keeps_config: bool = False
    writes_text: bool = False
    plan_ranks: Callable[[Reader, RankOptions], PlannedRanks] | None = None


def encode_json(content: Mapping[str, object]) -> bytes:
    """Return JSON as people read it; half a surrogate pair is escaped, since UTF-8 has no form for it."""
    try:
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:
        return (json.dumps(content, indent=2) + "\n").encode()


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
