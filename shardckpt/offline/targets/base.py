"""Interface for targets: supported values, and the files of a conversion.

A target is one frozen value. To add one, write a module and add a line in `target_registry.py`, or an entry point
`shardckpt.targets` in another distribution (docs/extending.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardckpt.dtypes import QUANTIZED
from shardckpt.encodings.pickle_stubs import Global, InstanceStub, PerRankValue
from shardckpt.errors import UnsupportedError, UsageError
from shardckpt.manifest import Path, dotted
from shardckpt.offline.select.config_files import ConfigFiles, with_dtype
from shardckpt.offline.select.options import Options, parse_dtype
from shardckpt.offline.select.selection import Selection
from shardckpt.offline.write.conversion import PlannedFiles
from shardckpt.plan.layout.output_files import OutputTensor, parse_size, split_as_stored, split_by_size
from shardckpt.plan.naming.model_files import CONFIG
from shardckpt.reader import Reader
from shardckpt.storage.resolve_url import local_path

# Config files that belong to a model's weights; tokenizers and other files do not.
CONFIG_FILES = re.compile(r"(generation_|adapter_)?config\.json")

FRESH = "(-[0-9a-f]{8})?"
# Unique suffix and file number, before the extension.
SHARD = rf"{FRESH}(-\d{{5}}-of-\d{{5}})?"

_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion's source, options and target.

    Attributes:
        target: Path or URL, as the caller gave it.
        options: Options in the call.
        reader: Open checkpoint.
        config: Config and tokenizer files to copy.
        selection: Located and complete tensors, and settings, under their final names.
        is_file: Whether the target is one file.
        keeps_split: Whether to keep the source's distribution of tensors over files.
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
        """The single file's name."""
        return self.target.rpartition("/")[2]

    @property
    def is_local(self) -> bool:
        """Whether the target is on a local disk."""
        return local_path(self.target) is not None

    @property
    def is_adapter(self) -> bool:
        """Whether the source is an adapter, whose files have other names."""
        return self.reader.manifest.format == "adapter"

    @property
    def max_file_bytes(self) -> int:
        """Maximum tensor data per file, in bytes."""
        return parse_size(self.options.max_shard_size)

    @property
    def nbytes(self) -> int:
        """Tensor data in the selection, in bytes."""
        return sum(tensor.nbytes for tensor in (*self.selection.model, *self.selection.optim))

    def split_tensors(self, tensors: Sequence[OutputTensor]) -> list[tuple[OutputTensor, ...]]:
        """Return the tensors for each file, at least one."""
        if self.is_file:
            return [tuple(tensors)]
        split = split_as_stored(tensors) if self.keeps_split else split_by_size(tensors, self.max_file_bytes)
        return split or [()]

    def encode_config(self) -> dict[str, bytes]:
        """Return config files to keep, and a `config.json` that a cast or a quantization changes."""
        kept, config = dict(self.config.kept), self.config.config
        if not self.config.is_changed and not (config and self.options.dtype):
            return kept
        cast = with_dtype(config, parse_dtype(self.options.dtype)) if self.options.dtype else config
        return {**kept, CONFIG: encode_json(cast)}


@dataclass(frozen=True, slots=True)
class RankOptions:
    """Arguments of `reshard`, with sizes in bytes."""

    world_size: int  # 0 to keep the split of the source, with `dcp`
    max_file_bytes: int  # tensor data only
    keep_whole: tuple[str, ...] = ()  # globs: names that rank files do not split
    allow_loss: bool = False  # omit values that the target cannot store


@dataclass(frozen=True, slots=True)
class PlannedRanks:
    """A full checkpoint, planned for several ranks."""

    files: PlannedFiles
    tensors: Mapping[Path, OutputTensor]
    ties: Mapping[Path, Path]  # further path of a tensor to its path in `tensors`
    warnings: tuple[str, ...]  # one sentence each


def accept_options(options: Options) -> None:
    """Accept all options."""


def can_encode(value: object) -> bool:
    """Return True if tagged JSON can store a value exactly."""
    from shardckpt.encodings.tagged_json import encode  # noqa: PLC0415  (as in `_list_settings`)
    from shardckpt.offline.select.group_settings import plain_value  # noqa: PLC0415

    try:
        encode(plain_value(value))
    except UnsupportedError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Target:
    """An output format.

    Attributes:
        name: Name in `--to`.
        title: Phrase for messages: `a DCP checkpoint`.
        files: Description of the written files, for the table of targets.
        read_by: Readers of the files, for the table of targets.
        plan: Plans a conversion's files; reads no tensor data. Raises UsageError for content that cannot be written.
        holds_dtype: Returns True if tensors with a dtype, in torch's spelling, can be stored exactly.
        holds_value: Returns True if an optimizer's setting or value can be stored exactly.
        suffixes: File name suffixes that select a single file; empty if the target is always a folder.
        check: Checks options before the source is opened. Raises UsageError.
        keeps_config: Whether a replaced checkpoint's config files stay.
        writes_text: Whether to write values as text that cannot be stored exactly, instead of omitting them.
        plan_ranks: Plans a full checkpoint for several ranks, for `reshard`; None if not supported.
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


def require_quantization(target: Target, dtype: str) -> None:
    """Require a target to have a quantized type."""
    if dtype in QUANTIZED and not target.holds_dtype(dtype):
        raise UsageError(
            f"--dtype {dtype} is a GGUF type", found=f"--to {target.name}", expected="--to gguf, or DST.gguf"
        )


def encode_json(content: Mapping[str, object]) -> bytes:
    """Return indented JSON."""
    try:
        return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
    except UnicodeEncodeError:  # unpaired surrogates, which are escaped here
        return (json.dumps(content, indent=2) + "\n").encode()


def _list_settings(selection: Selection) -> Iterable[tuple[Path, object]]:
    """Return optimizer settings by path, empty without an optimizer."""
    if selection.groups is None:
        return ()
    from shardckpt.offline.select.group_settings import iter_settings  # noqa: PLC0415  (most conversions write no optimizer)

    return iter_settings(selection.groups)


def drop_unsupported(selection: Selection, target: Target, *, allow_loss: bool) -> Selection:
    """Drop from a selection the values that the target cannot store, with warnings."""
    dtypes = {t.name: t.dtype for t in (*selection.model, *selection.optim) if not target.holds_dtype(t.dtype)}
    values = {path: value for path, value in _list_settings(selection) if not target.holds_value(value)}
    lost_tensors = [f"{name}, of type {dtype}" for name, dtype in dtypes.items()]
    lost_values = [describe_lost(path, value) for path, value in values.items()]
    if not dtypes and not values:
        return selection
    require_allowed([*lost_tensors, *lost_values], target.title, allow_loss=allow_loss)
    groups = selection.groups
    if groups is not None and not target.writes_text:
        from shardckpt.offline.select.group_settings import drop_settings  # noqa: PLC0415  (as in `_list_settings`)

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
    """Require that values may be lost if there are any to lose."""
    if lost and not allow_loss:
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        raise UsageError(
            f"{title} cannot hold all of this",
            found=", ".join(lost[:_SHOWN]) + more,
            fix="Pass allow_loss=True (--allow-loss) to omit it, or choose another format with --to.",
        )


def describe_lost(path: Path, value: object) -> str:
    """Describe a lost value by its path and type."""
    if isinstance(value, PerRankValue):
        return f"{dotted(path)}, which differs between ranks"
    kind = value.name if isinstance(value, (InstanceStub, Global)) else type(value).__name__
    return f"{dotted(path)}, of type {kind}"
