"""A DeepSpeed checkpoint's file names, their kinds, and their folder; arithmetic for its partitions, on element counts.

Stages 1 and 2 concatenate a group's parameters, pad the end, and give each rank an equal partition. Stage 3
partitions each parameter individually and concatenates a rank's parts.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeVar

from shardckpt.boxes import Box, Shape, chunk_range, flat_to_boxes
from shardckpt.errors import AmbiguousError, FormatError, IncompleteError
from shardckpt.reader import Source
from shardckpt.storage.store import Store

LATEST = "latest"
_MAX_TAG_BYTES = 4096
_N = r"\d{1,7}"
_RANK = re.compile(
    rf"(?P<prefix>(bf16_|fp16_)?zero_pp_rank_)(?P<rank>{_N})_mp_rank_(?P<mp>{_N})_(?P<kind>optim|model)_states\.pt"
)
_MODEL = re.compile(rf"mp_rank_(?P<mp>{_N})_model_states\.pt")
_LAYER = re.compile(rf"layer_(?P<layer>{_N})(-model_(?P<mp>{_N}))?-model_states\.pt")
_EXPERT = re.compile(rf"(layer_(?P<layer>{_N})_)?expert_(?P<expert>{_N})_mp_rank_(?P<mp>{_N})_model_states\.pt")
_EXPERT_OPTIM = re.compile(rf"expp_rank_(?P<rank>{_N})_mp_rank_(?P<mp>{_N})_optim_states\.pt")
_ALL = (_RANK, _MODEL, _LAYER, _EXPERT, _EXPERT_OPTIM)

_K = TypeVar("_K")

Place = tuple[int, int]  # data-parallel rank and model-parallel rank

# Possible alignments of a partition, in elements: 2 since collectives are aligned to 4 bytes, 1 in older versions.
_ALIGNMENTS = (2, 1)


@dataclass(slots=True)
class StateFiles:
    """One checkpoint's files by content; names are relative to the store."""

    folder: str  # folder of the files in the store; empty for the root
    sizes: dict[str, int] = field(default_factory=dict)  # file name to size in bytes
    # Model-parallel rank to the file with the full model (stages 0 to 2).
    models: dict[int, str] = field(default_factory=dict)
    # Data-parallel and model-parallel rank to the file with the rank's part of the model (stage 3).
    parts: dict[Place, str] = field(default_factory=dict)
    # Data-parallel and model-parallel rank to the file with the rank's part of the optimizer.
    optims: dict[Place, str] = field(default_factory=dict)
    # Layer and model-parallel rank to the layer's file (pipelines).
    layers: dict[tuple[int, int], str] = field(default_factory=dict)
    # Layer, expert and model-parallel rank to the expert's file; layer -1 in old checkpoints.
    experts: dict[tuple[int, int, int], str] = field(default_factory=dict)
    # Expert-parallel and model-parallel rank to the optimizer file.
    expert_optims: dict[Place, str] = field(default_factory=dict)

    @property
    def model_ranks(self) -> list[int]:
        """Model-parallel ranks for which any file exists."""
        places = (*self.parts, *self.optims)
        return sorted({*self.models, *(mp for _, mp in places), *(key[-1] for key in (*self.layers, *self.experts))})


def is_state_file(name: str) -> bool:
    """Return True if DeepSpeed writes files with this name."""
    return any(pattern.fullmatch(name) for pattern in _ALL)


def is_part(name: str) -> bool:
    """Return True if a file contains a part of a model: a rank, layer or expert."""
    return is_state_file(name) and _MODEL.fullmatch(name) is None


def find_folder(source: Source) -> str | None:
    """Return the folder with a source's state files, empty for the root; None if no folder has any."""
    if source.file is not None:
        return None
    if any(map(is_state_file, source.files)):
        return ""
    tag = read_tag(source, LATEST)
    if tag in source.folders:
        return tag if holds_states(source.store, tag) else None
    found = [name for name in source.folders if name.startswith("global_step") and holds_states(source.store, name)]
    if tag and found:
        raise IncompleteError(
            f"{LATEST} names a folder that is not there",
            where=source.url,
            found=tag,
            expected=", ".join(found[:4]),
            fix="Point at one folder, or copy the missing one.",
        )
    if len(found) > 1:
        raise AmbiguousError(
            "several steps are here and no file `latest` names one",
            where=source.url,
            found=", ".join(found[:8]),
            fix="Point at one folder.",
        )
    return found[0] if found else None


def holds_states(store: Store, folder: str) -> bool:
    """Return True if a folder contains state files."""
    return any(is_state_file(entry.name.rpartition("/")[2]) for entry in store.list(folder) if not entry.is_folder)


def read_tag(source: Source, name: str) -> str:
    """Return the folder that a pointer file names; empty if it names no subfolder."""
    entry = source.listing.get(name)
    if entry is None or entry.is_folder or not 0 < entry.size <= _MAX_TAG_BYTES:
        return ""
    return source.head(name, entry.size).decode("utf-8", "replace").strip()


def sort_files(store: Store, folder: str) -> StateFiles:
    """Return a folder's state files, sorted by content."""
    entries = [entry for entry in store.list(folder) if not entry.is_folder]
    found = StateFiles(folder)
    for entry in sorted(entries, key=lambda e: e.name):
        name = entry.name.rpartition("/")[2]
        if _put(found, name, entry.name, store.url):
            found.sizes[entry.name] = entry.size
    return found


def _put(found: StateFiles, name: str, path: str, url: str) -> bool:
    """Add one file to its kind; return True if its name is known."""
    if match := _RANK.fullmatch(name):
        place = int(match["rank"]), int(match["mp"])
        _put_once(found.optims if match["kind"] == "optim" else found.parts, place, path, url)
    elif match := _MODEL.fullmatch(name):
        _put_once(found.models, int(match["mp"]), path, url)
    elif match := _LAYER.fullmatch(name):
        _put_once(found.layers, (int(match["layer"]), int(match["mp"] or 0)), path, url)
    elif match := _EXPERT.fullmatch(name):
        layer = -1 if match["layer"] is None else int(match["layer"])
        _put_once(found.experts, (layer, int(match["expert"]), int(match["mp"])), path, url)
    elif match := _EXPERT_OPTIM.fullmatch(name):
        _put_once(found.expert_optims, (int(match["rank"]), int(match["mp"])), path, url)
    else:
        return False
    return True


def _put_once(files: dict[_K, str], key: _K, path: str, url: str) -> None:
    if key in files:
        raise FormatError(
            "two files have the same rank",
            where=url,
            found=f"{files[key]} and {path}",
            fix="Keep each save alone in its own folder.",
        )
    files[key] = path


def optim_file_name(known: Iterable[str], rank: int, mp: int) -> str:
    """Return the name for a missing optimizer file, derived from an existing one."""
    beside = next(iter(known))
    folder, _, name = beside.rpartition("/")
    match = _RANK.fullmatch(name)
    prefix = match["prefix"] if match else "zero_pp_rank_"
    return f"{folder}/{prefix}{rank}_mp_rank_{mp:02d}_optim_states.pt".removeprefix("/")


def part_file_name(folder: str, rank: int, mp: int) -> str:
    """Return the name for a missing file with a rank's part of the model."""
    return f"{folder}/zero_pp_rank_{rank}_mp_rank_{mp:02d}_model_states.pt".removeprefix("/")


class PartitionRun(NamedTuple):
    """A parameter's contiguous elements in one rank's flat tensor."""

    rank: int  # data-parallel rank
    unit: int  # index of the flat tensor on the rank
    at: int  # first element in that flat tensor
    start: int  # first element in the parameter, in row-major order
    stop: int  # end of the elements in the parameter, exclusive


def partition_elements(total: int, world: int, alignment: int = 2) -> int:
    """Return how many elements each rank's equal partition has in stages 1 and 2, with padding."""
    return -(-total // (alignment * world)) * alignment


def lean_elements(total: int, partition: int, rank: int) -> int:
    """Return how many elements a rank's partition has without padding at the group's end."""
    return min(max(total - rank * partition, 0), partition)


def possible_lengths(total: int, partition: int, world: int, rank: int) -> set[int]:
    """Return a rank's possible tensor lengths in elements: with padding, without, and as in old versions."""
    # Before 0.15, DeepSpeed attributed all padding of a group to the last rank. If that exceeds its partition,
    # `part[:length - padding]` counts from the end and keeps some of the padding.
    found = {partition, lean_elements(total, partition, rank)}
    padding = world * partition - total
    if rank == world - 1 and padding > partition:
        found.add(max(2 * partition - padding, 0))
    return found


def original_order(names: Sequence[str], world: int) -> list[str]:
    """Return the parameters' order before `round_robin_gradients` reordered them."""
    reordered = [i for rank in range(world) for i in range(rank, len(names), world)]
    return [name for _, name in sorted(zip(reordered, names, strict=True))]


def fit_partition(total: int, world: int, lengths: Mapping[int, int]) -> int | None:
    """Return the partition size that explains all lengths, with padding or without; None if no size does."""
    for alignment in _ALIGNMENTS:
        partition = partition_elements(total, world, alignment)
        if all(n in possible_lengths(total, partition, world, rank) for rank, n in lengths.items()):
            return partition
    return None


def offsets(numels: Sequence[int], paddings: Sequence[int] | None = None) -> list[int]:
    """Return each parameter's offset in a group, and the group's end, in elements."""
    spaces = [n + p for n, p in zip(numels, paddings, strict=True)] if paddings else numels
    return list(accumulate(spaces, initial=0))


def split_partition_runs(offset: int, numel: int, partition: int, unit: int = 0) -> list[PartitionRun]:
    """Split a parameter over ranks like stages 1 and 2."""
    runs, start = [], 0
    while start < numel:
        rank, at = divmod(offset + start, partition)
        stop = min(start + partition - at, numel)
        runs.append(PartitionRun(rank, unit, at, start, stop))
        start = stop
    return runs


def part_elements(numel: int, world: int) -> int:
    """Return how many elements each rank has of one parameter in stage 3, with padding."""
    return chunk_range(numel, world, 0)[1]


def split_stage3_runs(offset: int, numel: int, world: int, bounds: Sequence[int]) -> list[PartitionRun]:
    """Split a parameter over ranks like stage 3."""
    part = part_elements(numel, world)
    runs = []
    for rank in range(world):
        start, end = rank * part, min((rank + 1) * part, numel)
        while start < end:
            place = offset + start - rank * part
            unit = bisect_right(bounds, place) - 1
            stop = min(start + bounds[unit + 1] - place, end)
            runs.append(PartitionRun(rank, unit, place - bounds[unit], start, stop))
            start = stop
    return runs


def boxes(shape: Shape, run: PartitionRun) -> list[tuple[Box, int]]:
    """Return a run's boxes, each with its first element in the flat tensor."""
    at, found = run.at, []
    for box in flat_to_boxes(shape, run.start, run.stop):
        found.append((box, at))
        at += box.volume
    return found
