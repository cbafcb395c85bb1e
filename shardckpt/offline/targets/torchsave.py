"""Target `torch`: files that `torch.load(weights_only=True)` reads.

All bytes are planned, then streamed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from shardckpt.manifest import Path, unflatten
from shardckpt.offline.select.selection import Selection
from shardckpt.offline.targets.base import (
    CONFIG_FILES,
    SHARD,
    Conversion,
    PlannedRanks,
    RankOptions,
    Target,
    encode_json,
)
from shardckpt.offline.targets.fsdp_rank_files import plan_rank_files
from shardckpt.offline.targets.torch_archive import archive_file, can_pickle
from shardckpt.offline.write.conversion import Layout, PlannedFiles
from shardckpt.offline.write.stream import OutputFile, iter_parts
from shardckpt.plan.layout.output_files import OutputTensor, name_files
from shardckpt.plan.optim.output_keys import to_state_paths
from shardckpt.reader import Reader
from shardckpt.readers.torchsave.reader import looks_like_torch
from shardckpt.readers.torchsave.writer import TYPES, Storage, TensorValue, plan_archive
from shardckpt.storage.replaceable import FileKind, FolderKind

SUFFIX = ".bin"
OPTIMIZER_FILE = "optimizer.bin"


def plan(conversion: Conversion) -> PlannedFiles:
    """Plan `pytorch_model*.bin` with its index and `optimizer.bin`, or one file."""
    if conversion.is_file:
        layout = Layout((_single_file(conversion),), {})
        return PlannedFiles(_FILE, "", lambda *_: layout, conversion.nbytes)
    stem = "adapter_model" if conversion.is_adapter else "pytorch_model"
    index = f"{stem}.bin.index.json"
    return PlannedFiles(
        _folder_kind(stem), index, lambda suffix, _: _plan_folder(conversion, stem, index, suffix), conversion.nbytes
    )


def _plan_folder(conversion: Conversion, stem: str, index: str, unique_suffix: str) -> Layout:
    selection = conversion.selection
    payload: list[OutputFile] = []
    small = conversion.encode_config()
    if conversion.options.part != "optim":
        groups = conversion.split_tensors(selection.model)
        files, content = model_files(selection, groups, stem, unique_suffix)
        payload += files
        if len(files) > 1 or not conversion.is_local:
            small[index] = encode_json(content)
    if selection.groups is not None:
        payload.append(torch_file(OPTIMIZER_FILE, _optimizer(selection, 0), selection.optim))
    return Layout(tuple(payload), small)


def model_files(
    selection: Selection, groups: Sequence[tuple[OutputTensor, ...]], stem: str, unique_suffix: str
) -> tuple[list[OutputFile], dict[str, object]]:
    """Return a model's files and its index."""
    named = name_files(groups, stem, unique_suffix, SUFFIX)
    keeps_order = selection.keeps_order
    files = [
        torch_file(file.name, state_dict(selection, file.tensors), file.tensors, keeps_order=keeps_order)
        for file in named
    ]
    total = sum(t.nbytes for group in groups for t in group)
    weights = {name: f.name for f in named for name in state_dict(selection, f.tensors)}
    elements = sum(prod(t.shape) for group in groups for t in group)
    metadata = {"total_parameters": elements, "total_size": total}
    return files, {"metadata": metadata, "weight_map": dict(sorted(weights.items()))}


def _single_file(conversion: Conversion) -> OutputFile:
    """Return a part's single file: a state dict, or both under their keys."""
    selection, name = conversion.selection, conversion.file_name
    if conversion.options.part == "optim":
        return torch_file(name, _optimizer(selection, 0), selection.optim)
    model: dict[str, object] = dict(state_dict(selection, selection.model))
    if selection.groups is None:
        return torch_file(name, model, selection.model, keeps_order=selection.keeps_order)
    value = {"model": model, "optimizer": _optimizer(selection, len(selection.model))}
    return torch_file(name, value, (*selection.model, *selection.optim), keeps_order=selection.keeps_order)


def torch_file(name: str, value: object, tensors: Sequence[OutputTensor], *, keeps_order: bool = True) -> OutputFile:
    """Return a file with a value."""
    storages = [Storage(t.dtype, prod(t.shape)) for t in tensors]
    archive = plan_archive(value, storages, keeps_order=keeps_order)
    return archive_file(name, archive, list(iter_parts(tensors)), len(tensors))


def state_dict(selection: Selection, tensors: Sequence[OutputTensor]) -> dict[str, TensorValue]:
    """Return names to tensors in state-dict order, including tied names; storages have the given order."""
    numbers = {tensor.name: number for number, tensor in enumerate(tensors)}
    order = selection.order or tuple(numbers)
    found = {}
    for name in (*order, *numbers):
        number = numbers.get(selection.ties.get(name, name))
        if number is not None and name not in found:
            found[name] = TensorValue(number, tensors[number].dtype, tensors[number].shape)
    return found


def _optimizer(selection: Selection, first: int) -> dict[str | int, object]:
    """Return the optimizer's state dict, with storages numbered from `first`."""
    content: Mapping[str, Any] = selection.groups or {}
    arrays, values = to_state_paths(selection.optim, content)
    numbers = {tensor.name: first + number for number, tensor in enumerate(selection.optim)}
    leaves: dict[Path, object] = {
        path: TensorValue(numbers[tensor.name], tensor.dtype, tensor.shape) for path, tensor in arrays.items()
    }
    tree: dict[str | int, object] = unflatten({**leaves, **values}, "the selection", has_lists=True)
    return tree


def _plan_ranks(reader: Reader, options: RankOptions) -> PlannedRanks:
    return plan_rank_files(reader, options, TARGET.title)


def _folder_kind(stem: str) -> FolderKind:
    return FolderKind(
        "one checkpoint of torch files",
        payload=re.compile(rf"{stem}{SHARD}\.bin|optimizer\.bin"),
        other_names=re.compile(rf"{stem}\.bin\.index\.json|{CONFIG_FILES.pattern}"),
        is_one=looks_like_torch,
    )


_FILE = FileKind("a file of torch.save", looks_like_torch)
TARGET = Target(
    name="torch",
    title="a torch file",
    files="`pytorch_model*.bin` with an index, `optimizer.bin`; or one file if `DST` ends in `.pt`, `.pth` or `.bin`",
    read_by="`torch.load(weights_only=True)`, also with `mmap=True`",
    plan=plan,
    holds_dtype=TYPES.__contains__,
    holds_value=can_pickle,
    suffixes=(".pt", ".pth", ".bin"),
    keeps_config=True,
    plan_ranks=_plan_ranks,
)
