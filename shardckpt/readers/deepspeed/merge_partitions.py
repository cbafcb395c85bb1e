"""Merge a DeepSpeed model's partitions into full tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod

from shardckpt.boxes import Box, Shape
from shardckpt.errors import FormatError
from shardckpt.manifest import ObjectEntry, Path, TensorEntry
from shardckpt.readers.deepspeed import zero_files as layout
from shardckpt.readers.deepspeed.locate_params import DataParallelRanks, TrainedParam
from shardckpt.readers.deepspeed.state_files import ModelState, Slot, read_groups
from shardckpt.readers.deepspeed.zero_files import PartitionRun, optim_file_name, part_file_name
from shardckpt.readers.merge_shards import (
    OTHER_SAVE,
    ManifestBuilder,
    Shard,
    join_entries,
    merge_equal,
    merge_shards,
    slice_shard,
)

MODEL, MASTER, OPTIMIZER = "model", "master", "optimizer"
_STATE, _STEP = "state", "step"

# Returns the flat tensor of a rank and a unit index; None if the rank's file is missing.
Find = Callable[[int, int], TensorEntry | None]


def _merge_runs(
    builder: ManifestBuilder,
    ranks: DataParallelRanks,
    path: Path,
    shape: Shape,
    runs: Iterable[PartitionRun],
    find: Find,
    name_missing: Callable[[int], str],
) -> TensorEntry:
    """Return a tensor merged from its runs in the ranks' flat tensors."""
    shards: list[Shard] = []
    missing: list[tuple[Box, str]] = []
    for run in runs:
        entry, boxes = find(run.rank, run.unit), layout.boxes(shape, run)
        if entry is None:
            missing += [(box, name_missing(run.rank)) for box, _ in boxes]
            continue
        if run.at + run.stop - run.start > prod(entry.shape):
            ranks.refuse(f"{path[-1]!r}", [run.rank], f"{prod(entry.shape)} elements", "more")
        file = entry.pieces[0].file if entry.pieces else f"rank {run.rank}"
        shards.append(Shard(file, entry.stored, slice_shard(entry, boxes)))
    return merge_shards(builder, path, shape, shards, missing)


def _name_optim_file(ranks: DataParallelRanks) -> Callable[[int], str]:
    """Return a function that names a rank's optimizer file."""
    known = [name for place, name in ranks.files.optims.items() if place[1] == ranks.mp]
    default = f"{ranks.files.folder}/zero_pp_rank_0_mp_rank_00_optim_states.pt"
    return lambda rank: optim_file_name([*known, default], rank, ranks.mp)


def merge_master(builder: ManifestBuilder, ranks: DataParallelRanks, param: TrainedParam) -> TensorEntry:
    """Return a parameter's master weights."""

    def find(rank: int, unit: int) -> TensorEntry | None:
        return ranks.optims[rank].flats[unit] if rank in ranks.optims else None

    path: Path = (MASTER, param.name)
    return _merge_runs(builder, ranks, path, param.shape, param.runs, find, _name_optim_file(ranks))


def merge_frozen(builder: ManifestBuilder, ranks: DataParallelRanks, name: str, shape: Shape) -> TensorEntry:
    """Return a frozen parameter, whose partitions every rank has (stage 3)."""
    numel = prod(shape)
    runs = layout.split_stage3_runs(0, numel, ranks.world, (0, layout.part_elements(numel, ranks.world)))

    def find(rank: int, _: int) -> TensorEntry | None:
        return ranks.models[rank].fragments.get(name) if rank in ranks.models else None

    def name_missing(rank: int) -> str:
        return part_file_name(ranks.files.folder, rank, ranks.mp)

    return _merge_runs(builder, ranks, (MODEL, name), shape, runs, find, name_missing)


def tie_shared(builder: ManifestBuilder, states: Iterable[ModelState], trained: Collection[str]) -> None:
    """Add shared parameters' further names, except names with optimizer state and empty tensors."""
    for alias, name in ((alias, name) for state in states for alias, name in state.shared.items()):
        for root in (MODEL, MASTER):
            entry = builder.tensors.get((root, name))
            if entry is not None and alias not in trained and 0 not in entry.shape:
                builder.tie((root, alias), (root, name))


def put_model(builder: ManifestBuilder, ranks: DataParallelRanks, params: Mapping[str, TrainedParam]) -> None:
    """Add the model weights and the master weights by name."""
    states = list(ranks.models.values())
    if ranks.is_split:
        _put_parts(builder, ranks, states, params)
    else:
        _put_module(builder, ranks, states[0])
    for param in params.values() if ranks.optims else ():
        builder.put((MASTER, param.name), merge_master(builder, ranks, param))
    tie_shared(builder, states, params)


def _put_module(builder: ManifestBuilder, ranks: DataParallelRanks, state: ModelState) -> None:
    """Add the weights in stages 0 to 2, where the file contains the full model."""
    for name, entry in state.module.items():
        builder.put((MODEL, name), entry)
        first = ranks.contents.aliases.get(entry.path, entry.path)
        if first != entry.path and first[:-1] == entry.path[:-1]:
            builder.content.aliases[MODEL, name] = (MODEL, str(first[-1]))
    for name, entry in state.fragments.items():
        if name not in state.module:
            builder.put((MODEL, name), entry)


def _put_parts(
    builder: ManifestBuilder, ranks: DataParallelRanks, states: Sequence[ModelState], params: Mapping[str, TrainedParam]
) -> None:
    """Add the weights in stage 3."""
    # Placeholders give order and dtype; the optimizer files contain the partitions. Each rank has the buffers in full.
    state = states[0]
    frozen = {name: shape for name, shape in state.frozen.items() if name not in params}
    waiting = dict.fromkeys([*params, *frozen])
    for name, entry in state.module.items():
        if name in params and entry.shape != params[name].shape:
            live = merge_master(builder, ranks, params[name])
            live = live._replace(delivered="" if entry.stored == live.stored else entry.stored)
        elif name in frozen and entry.shape != frozen[name]:
            live = merge_frozen(builder, ranks, name, frozen[name])
        elif name in state.shared and not prod(entry.shape):
            builder.tensors.pop((MODEL, name), None)
            continue
        else:
            live = join_entries((MODEL, name), [each.module[name] for each in states if name in each.module])
        builder.put((MODEL, name), live)
        waiting.pop(name, None)
    for name in waiting:
        if name in params:
            builder.put((MODEL, name), merge_master(builder, ranks, params[name]))
        else:
            builder.put((MODEL, name), merge_frozen(builder, ranks, name, frozen[name]))


def put_optimizer(builder: ManifestBuilder, ranks: DataParallelRanks, params: Mapping[str, TrainedParam]) -> None:
    """Add the optimizer's state by parameter name; see `put_model`."""
    odd: set[str] = set()
    units = {param.unit for param in params.values()} if ranks.optims else set()
    names = {unit: dict.fromkeys(s for state in ranks.optims.values() for s in state.slots[unit]) for unit in units}
    lengths = {unit: ranks.slot_lengths(unit) for unit in units}
    steps = _read_steps(ranks, params)
    for param in params.values():
        slots = names.get(param.unit, {})
        for slot in slots:
            if not _put_slot(builder, ranks, param, slot, lengths[param.unit]):
                odd.add(f"{slot} of flat tensor {param.unit}")
        if _STEP not in slots and param.name in steps:
            builder.put_value((OPTIMIZER, _STATE, param.name, _STEP), steps[param.name])
    builder.unread += sorted(odd)
    builder.warnings += [f"{what} is not shaped like its parameters and is left out" for what in sorted(odd)]


def _put_slot(
    builder: ManifestBuilder,
    ranks: DataParallelRanks,
    param: TrainedParam,
    slot: str,
    lengths: Mapping[int, Collection[int]],
) -> bool:
    """Add a parameter's slot; return False if its layout is another."""
    path: Path = (OPTIMIZER, _STATE, param.name, slot)
    owners = [run.rank for run in param.runs if run.rank in ranks.optims] or list(ranks.optims)
    found = {rank: value for rank in owners if (value := ranks.optims[rank].slots[param.unit].get(slot)) is not None}
    values = list(found.values())
    if not values:
        return True
    if isinstance(values[0], ObjectEntry) or not values[0].shape:
        builder.put(path, merge_equal(path, [ranks.optims[rank].file for rank in found], values))
        return True
    if any(isinstance(value, ObjectEntry) or len(value.shape) != 1 for value in values):
        return False
    for rank, state in ranks.optims.items():
        value = state.slots[param.unit].get(slot)
        if isinstance(value, TensorEntry) and value.shape[0] not in lengths[rank]:
            return False
    builder.put(
        path,
        _merge_runs(builder, ranks, path, param.shape, param.runs, _slot_finder(ranks, slot), _name_optim_file(ranks)),
    )
    return True


def _slot_finder(ranks: DataParallelRanks, slot: str) -> Find:
    def find(rank: int, unit: int) -> TensorEntry | None:
        if rank not in ranks.optims:
            return None
        value = ranks.optims[rank].slots[unit].get(slot)
        if not isinstance(value, TensorEntry):
            raise FormatError(
                f"rank {rank} lacks {slot} of flat tensor {unit}, which others have",
                where=ranks.contents.where(ranks.optims[rank].file),
                fix=OTHER_SAVE,
            )
        return value

    return find


def _read_steps(ranks: DataParallelRanks, params: Mapping[str, TrainedParam]) -> dict[str, object]:
    """Return each parameter's step; empty unless the optimizer stores steps per group or, if elastic, one for all."""
    if ranks.first_optim is None:
        return {}
    value = ranks.contents.value(ranks.first_optim.file, "optimizer_state_dict", "base_optimizer_state_step")
    if value is not None:
        return dict.fromkeys(params, value)
    steps: dict[str, object] = {}
    for group, names in list_groups(ranks, params):
        step = group.get(_STEP)
        if isinstance(step, ObjectEntry) and step.value is not None:
            steps |= dict.fromkeys(names, step.value)
    return steps


def list_groups(
    ranks: DataParallelRanks, params: Mapping[str, TrainedParam]
) -> list[tuple[Mapping[str, Slot], list[str]]]:
    """Return options and parameter names for each optimizer group; empty without optimizer files."""
    state = ranks.first_optim
    if state is None:
        return []
    names = [[param.name for param in params.values() if param.unit == unit] for unit in range(len(state.flats))]
    stored = read_groups(ranks.contents, state.file, state.base)
    if not stored:
        return [({}, group) for group in names]
    groups: list[tuple[Mapping[str, Slot], list[str]]] = []
    for group in stored:
        entry = group.get("params")
        ids = entry.value if isinstance(entry, ObjectEntry) and isinstance(entry.value, list) else []
        if not all(type(i) is int and 0 <= i < len(names) for i in ids):
            raise FormatError(
                "an optimizer group names flat tensors that do not exist",
                where=ranks.contents.where(state.file),
                found=ids,
                expected=f"numbers below {len(names)}",
            )
        groups.append((group, [name for i in ids for name in names[i]]))
    return groups
