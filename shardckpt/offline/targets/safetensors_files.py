"""Target `safetensors`: files that `transformers` loads, with an index."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from shardckpt.dtypes import SAFETENSORS_NAMES
from shardckpt.encodings.safetensors import HeaderTensor, encode_header, file_order, looks_like_safetensors
from shardckpt.errors import UsageError
from shardckpt.offline.targets.base import CONFIG_FILES, FRESH, SHARD, Conversion, Target, encode_json
from shardckpt.offline.write.conversion import Layout, PlannedFiles
from shardckpt.offline.write.stream import OutputFile, PlainContent
from shardckpt.plan.layout.output_files import OutputTensor, PlannedFile, index, name_files
from shardckpt.plan.packed_weights import build_metadata, describe_as_plain
from shardckpt.readers.huggingface.index_files import (
    OPTIMIZER,
    OPTIMIZER_FILES_KEY,
    PARAM_GROUPS,
    PARAM_GROUPS_KEY,
    SUFFIX,
)
from shardckpt.storage.replaceable import FileKind, FolderKind


def plan(conversion: Conversion) -> PlannedFiles:
    """Plan a conversion's files."""
    stem = "adapter_model" if conversion.is_adapter else "model"
    groups: dict[str, list[tuple[OutputTensor, ...]]] = {}
    if conversion.options.part != "optim":
        groups[stem] = conversion.split_tensors(conversion.selection.model)
    if conversion.selection.groups is not None:
        groups[OPTIMIZER] = conversion.split_tensors(conversion.selection.optim)
    index_name = f"{next(iter(groups))}.safetensors.index.json"
    if not conversion.is_file:
        return PlannedFiles(
            _folder_kind(stem),
            index_name,
            lambda unique_suffix, _: _plan_folder(conversion, groups, index_name, unique_suffix),
            conversion.nbytes,
        )
    if len(groups) > 1:
        raise UsageError(
            "one file cannot hold a model and an optimizer",
            found=conversion.target,
            fix="Name a folder, or choose --part model or --part optim.",
        )
    [[tensors]] = groups.values()
    file = PlannedFile(conversion.file_name, tensors)
    layout = Layout((build_file(file, _metadata(conversion)),), {})
    return PlannedFiles(_FILE, "", lambda *_: layout, conversion.nbytes)


def _plan_folder(
    conversion: Conversion,
    groups: Mapping[str, list[tuple[OutputTensor, ...]]],
    index_name: str,
    unique_suffix: str,
) -> Layout:
    metadata = _metadata(conversion)
    files = {stem: name_files(parts, stem, unique_suffix) for stem, parts in groups.items()}
    small = conversion.encode_config()
    companions: dict[str, object] = {}
    if conversion.selection.groups is not None:
        from shardckpt.offline.select.group_settings import as_json  # noqa: PLC0415  (as in `selection.select`)

        name = f"param_groups-{unique_suffix}.json" if unique_suffix else PARAM_GROUPS
        small[name] = encode_json(as_json(conversion.selection.groups))
        companions = {OPTIMIZER_FILES_KEY: [f.name for f in files[OPTIMIZER]], PARAM_GROUPS_KEY: name}
    first = next(iter(files.values()))
    # Readers that list the folder would take optimizer files for shards. On stores without rename, the index makes the
    # result loadable.
    if conversion.options.part != "model" or not conversion.is_local or len(first) > 1:
        small[index_name] = encode_json(index(first, companions))
    return Layout(tuple(build_file(file, metadata) for part in files.values() for file in part), small)


def _metadata(conversion: Conversion) -> dict[str, str]:
    """Return the header metadata: the source's, ties, and casts."""
    selection = conversion.selection
    # Ties as `dropped: kept`, as in `save_model`.
    metadata = {**conversion.reader.manifest.metadata, "format": "pt", **selection.ties}
    if conversion.options.dequantize:
        metadata = describe_as_plain(metadata, [t.name for t in selection.model if t.change])
    if selection.packed:
        metadata |= build_metadata(selection.packed, [t.name for t in selection.model])
    casts = {t.name: t.entry.stored for t in selection.model if t.is_cast}
    if casts:
        kinds = set(casts.values())
        metadata["source_dtype"] = kinds.pop() if len(kinds) == 1 else json.dumps(casts)
    return dict(sorted(metadata.items()))


def build_file(file: PlannedFile, metadata: Mapping[str, str]) -> OutputFile:
    """Order a file's tensors and build its header."""
    tensors = {t.name: t for t in file.tensors}
    order = file_order(HeaderTensor(t.name, t.dtype, t.shape) for t in file.tensors)
    header = encode_header(order, metadata)
    parts = tuple(part for placed in order for part in tensors[placed.name].output_parts)
    return PlainContent(header, parts).plan_file(file.name)


def _folder_kind(stem: str) -> FolderKind:
    return FolderKind(
        "one checkpoint of safetensors files",
        payload=re.compile(rf"({stem}|optimizer){SHARD}\.safetensors"),
        other_names=re.compile(
            rf"({stem}|optimizer)\.safetensors\.index\.json|param_groups{FRESH}\.json|{CONFIG_FILES.pattern}"
        ),
        is_one=looks_like_safetensors,
    )


_FILE = FileKind("a safetensors file", looks_like_safetensors)
TARGET = Target(
    name="safetensors",
    title="safetensors",
    files="`model*.safetensors`, `optimizer*.safetensors`, `param_groups.json`",
    read_by="`transformers`, inference servers",
    plan=plan,
    holds_dtype=SAFETENSORS_NAMES.__contains__,
    suffixes=(SUFFIX,),
    keeps_config=True,
    writes_text=True,
)
