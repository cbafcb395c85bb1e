"""Locate each parameter of a DeepSpeed model in the ranks' flat tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple, NoReturn

from shardckpt.boxes import Shape
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.readers.deepspeed import zero_files as layout
from shardckpt.readers.deepspeed.state_files import ModelState, PartitionOptimState, StateFileContents
from shardckpt.readers.deepspeed.zero_files import PartitionRun, StateFiles

# Names of expert parameters in `deepspeed.moe`.
_EXPERT = re.compile(r"(?P<start>.*\.deepspeed_experts\.)(?P<local>\d{1,6})(?P<rest>\..*)", re.DOTALL)

KEEP_ONE_SAVE = "Keep only one save's files."
CONVERT = "Convert it with DeepSpeed's ds_to_universal.py, and point at the result."


@dataclass(frozen=True, slots=True)
class TrainedParam:
    """A parameter with optimizer state."""

    name: str  # name in the model
    shape: Shape
    unit: int  # index of the flat tensor in which it starts
    runs: tuple[PartitionRun, ...]  # runs of its elements in the ranks' flat tensors


class PartitionGroup(NamedTuple):
    """Ranks that share a flat group."""

    ranks: tuple[int, ...]  # ranks in the order of their partitions
    experts: int  # index of their set of experts; 0 if all ranks have the same parameters

    def name(self, local: str, counts: Mapping[str, int]) -> str:
        """Return a parameter's name in the model; ranks count their own experts from 0."""
        match = _EXPERT.fullmatch(local)
        if match is None or not self.experts:
            return local
        return f"{match['start']}{self.experts * counts[match['start']] + int(match['local'])}{match['rest']}"


@dataclass(frozen=True)
class DataParallelRanks:
    """One model-parallel rank's files."""

    contents: StateFileContents
    files: StateFiles  # all files, by kind
    mp: int
    # Data-parallel rank to the state of its model file; one file if every rank has the full model.
    models: Mapping[int, ModelState]
    optims: Mapping[int, PartitionOptimState]  # data-parallel rank to the state of its optimizer file
    world: int

    @cached_property
    def is_split(self) -> bool:
        """Whether each parameter is partitioned individually (stage 3)."""
        return any(place[1] == self.mp for place in self.files.parts)

    @cached_property
    def shapes(self) -> tuple[Mapping[str, Shape], ...]:
        """Parameter shapes for each flat tensor, as the lowest rank stores them."""
        return next((state.shapes for state in self.models.values() if state.shapes is not None), ())

    @cached_property
    def first_optim(self) -> PartitionOptimState | None:
        """State in the lowest rank's optimizer file; None without one."""
        return self.optims[min(self.optims)] if self.optims else None

    @cached_property
    def params(self) -> dict[str, TrainedParam]:
        """Parameters with optimizer state, by name."""
        return {param.name: param for param in self._locate_params()}

    @property
    def tensor_ranks(self) -> int:
        """Number of tensor-parallel ranks; 1 if no file stores it."""
        return max((state.tensor_ranks for state in self.models.values()), default=1)

    def slot_lengths(self, unit: int) -> dict[int, set[int]]:
        """Return each rank's possible slot lengths, in elements."""
        lengths = {rank: {state.flats[unit].shape[0]} for rank, state in self.optims.items()}
        for group in [] if self.is_split else self._find_groups(unit):
            total, partition = self._offsets(unit)[-1], self._fit_partition(unit, group)
            for place, rank in enumerate(group.ranks):
                if rank in lengths:
                    lengths[rank] |= layout.possible_lengths(total, partition, len(group.ranks), place)
        return lengths

    def _locate_params(self) -> Iterator[TrainedParam]:
        names = [name for unit in self.shapes for name in unit]
        if len(set(names)) < len(names):
            raise FormatError("a parameter is in two groups", where=self.contents.url)
        if self.is_split:
            yield from self._locate_stage3()
            return
        for unit in range(len(self.shapes)):
            yield from self._locate_stage1_2(unit)

    def _locate_stage3(self) -> Iterator[TrainedParam]:
        """Locate parameters in stage 3, where each is partitioned individually."""
        parts = [sum(layout.part_elements(prod(shape), self.world) for shape in unit.values()) for unit in self.shapes]
        lengths = {rank: [entry.shape[0] for entry in state.flats] for rank, state in self.optims.items()}
        first = next(iter(lengths.values()), parts)
        if len(first) != len(parts):
            if sum(first) != sum(parts):
                self.refuse("the flat tensors", self.optims, f"{sum(first)} elements", sum(parts))
            parts = first
        for rank, found in lengths.items():
            for unit, (numel, part) in enumerate(zip(found, parts, strict=False)):
                if numel != part:
                    self.refuse(f"flat tensor {unit}", [rank], f"{numel} elements", part)
        bounds, offset = layout.offsets(parts), 0
        for unit, group in enumerate(self.shapes):
            for name, shape in group.items():
                runs = tuple(layout.split_stage3_runs(offset, prod(shape), self.world, bounds))
                yield TrainedParam(name, shape, runs[0].unit if runs else unit, runs)
                offset += layout.part_elements(prod(shape), self.world)

    def _locate_stage1_2(self, unit: int) -> Iterator[TrainedParam]:
        """Locate parameters in stages 1 and 2, where a flat group has equal partitions."""
        for rank, state in self.optims.items():
            if unit >= len(state.flats):
                self.refuse(f"group {unit}", [rank], f"{len(state.flats)} flat tensors", len(self.shapes))
        offsets = self._offsets(unit)
        for group in self._find_groups(unit):
            runs = self._split_group(self._numels(unit), offsets, unit, group)
            self._require_starts(runs, unit, group)
            for name, shape in self.shapes[unit].items():
                yield TrainedParam(group.name(name, self._count_experts()), shape, unit, runs[name])

    def _numels(self, unit: int) -> dict[str, int]:
        return {name: prod(shape) for name, shape in self.shapes[unit].items()}

    def _offsets(self, unit: int) -> list[int]:
        """Return each parameter's offset in a flat group, and the group's end."""
        first, numels = next(iter(self.optims.values()), None), list(self._numels(unit).values())
        paddings = first.paddings[unit] if first and first.paddings and unit < len(first.paddings) else None
        if paddings is not None and len(paddings) != len(numels):
            self.refuse(f"group {unit}", self.optims, f"{len(paddings)} paddings", f"{len(numels)} parameters")
        return layout.offsets(numels, paddings)

    def _split_group(
        self, numels: Mapping[str, int], offsets: Sequence[int], unit: int, group: PartitionGroup
    ) -> dict[str, tuple[PartitionRun, ...]]:
        """Return each parameter's runs in a flat group."""
        partition = self._fit_partition(unit, group)
        return {
            name: tuple(
                run._replace(rank=group.ranks[run.rank])
                for run in layout.split_partition_runs(offset, numel, partition, unit)
            )
            for (name, numel), offset in zip(numels.items(), offsets, strict=False)
        }

    def _fit_partition(self, unit: int, group: PartitionGroup) -> int:
        """Return a flat group's partition size in elements, which must match the ranks' tensors."""
        total = self._offsets(unit)[-1]
        lengths = {
            place: self.optims[rank].flats[unit].shape[0]
            for place, rank in enumerate(group.ranks)
            if rank in self.optims
        }
        partition = layout.fit_partition(total, len(group.ranks), lengths)
        if partition is None:
            expected = layout.partition_elements(total, len(group.ranks))
            place = next((p for p, n in lengths.items() if n > expected), max(lengths))
            lean = layout.lean_elements(total, expected, place)
            either = f"{lean} or {expected}" if lean < expected else str(expected)
            found = f"{lengths[place]} elements"
            self.refuse(
                f"group {unit}", [group.ranks[place]], found, f"{either} for {len(self.shapes[unit])} parameters"
            )
        return partition or 1

    def _find_groups(self, unit: int) -> list[PartitionGroup]:
        """Return the rank groups that share a flat group: one, or one for each set of experts."""
        state = next(iter(self.optims.values()), None)
        count = state.counts[unit] if state else self.world
        if count == self.world:
            return [PartitionGroup(tuple(range(self.world)), 0)]
        sets = self.world // count
        if sets * count != self.world or not all(map(_EXPERT.fullmatch, self.shapes[unit])):
            raise UnsupportedError(
                f"group {unit} is shared by {count} of {self.world} ranks in an unknown way",
                where=self.contents.url,
                found=next(iter(self.shapes[unit]), "no parameters"),
                expected="experts of deepspeed.moe",
                fix=CONVERT,
            )
        config = self.contents.value(state.file, "ds_config") if state else None
        if isinstance(config, dict) and config.get("use_data_before_expert_parallelism") is True:
            return [PartitionGroup(tuple(range(e * count, (e + 1) * count)), e) for e in range(sets)]
        return [PartitionGroup(tuple(range(e, self.world, sets)), e) for e in range(sets)]

    def _count_experts(self) -> dict[str, int]:
        """Return how many experts each rank has, by name prefix."""
        experts: dict[str, set[int]] = {}
        for match in (match for unit in self.shapes for match in map(_EXPERT.fullmatch, unit) if match):
            experts.setdefault(match["start"], set()).add(int(match["local"]))
        return {start: len(numbers) for start, numbers in experts.items()}

    def _require_starts(self, runs: Mapping[str, tuple[PartitionRun, ...]], unit: int, group: PartitionGroup) -> None:
        """Compare runs with the parameter offsets that ranks store."""
        # With `round_robin_gradients` DeepSpeed reorders parameters: `param_shapes` has the new order, the stored
        # offsets have the old one. Like `zero_to_fp32.py`, this module uses `param_shapes`.
        wrong = self._find_wrong_start(runs)
        if wrong is None:
            return
        numels = self._numels(unit)
        before = {name: numels[name] for name in layout.original_order(list(numels), len(group.ranks))}
        offsets = layout.offsets(list(before.values()))
        if self._find_wrong_start(self._split_group(before, offsets, unit, group)) is None:
            return
        name, run, (numel, start) = wrong
        found, expected = f"{numel} elements from {start}", f"{run.stop - run.start} from {run.at}"
        self.refuse(f"{name!r}", [run.rank], found, expected)

    def _find_wrong_start(
        self, runs: Mapping[str, tuple[PartitionRun, ...]]
    ) -> tuple[str, PartitionRun, tuple[int, int]] | None:
        """Return a run and its rank's different stored offset; None if all match."""
        for name, run in ((name, run) for name, each in runs.items() for run in each):
            state = self.optims.get(run.rank)
            starts = state.starts[run.unit] if state and state.starts and run.unit < len(state.starts) else {}
            stored = starts.get(name)
            if stored is not None and stored != (run.stop - run.start, run.at):
                return name, run, stored
        return None

    def refuse(self, what: str, ranks: Iterable[int], found: object, expected: object) -> NoReturn:
        """Raise the error for a tensor with a wrong length."""
        rank = min(ranks)
        raise FormatError(
            f"{what} of rank {rank} is not as long as param_shapes say",
            where=self.contents.where(self.optims[rank].file) if rank in self.optims else self.contents.url,
            found=found,
            expected=expected,
            fix="The files are from different saves, or one is damaged.",
        )


def build_ranks(
    contents: StateFileContents,
    files: StateFiles,
    mp: int,
    models: Mapping[int, ModelState],
    optims: Mapping[int, PartitionOptimState],
) -> DataParallelRanks:
    """Return one model-parallel rank's files, with a consistent world size."""
    return DataParallelRanks(contents, files, mp, models, optims, _find_world(models, optims, contents.url))


def _find_world(models: Mapping[int, ModelState], optims: Mapping[int, PartitionOptimState], url: str) -> int:
    """Return the data-parallel world size, on which all files must agree."""
    facts = {state.file: (max(state.counts), len(state.flats), state.is_split) for state in optims.values()}
    first = next(iter(facts.values()), None)
    for file, fact in facts.items():
        if first is not None and fact != first:
            raise FormatError(
                "files from different saves are here: they disagree on ranks and groups",
                where=f"{url}/{file}",
                found=f"{fact[0]} ranks, {fact[1]} groups",
                expected=f"{first[0]} ranks, {first[1]} groups",
                fix=KEEP_ONE_SAVE,
            )
    worlds = {state.world for state in models.values() if state.world}
    steps = {state.step for state in models.values()}
    if len(worlds) > 1 or len(steps) > 1 or (first and any(world % first[0] for world in worlds)):
        ranks = sorted({*worlds, *([first[0]] if first else [])})
        raise FormatError(
            "files from different saves are here",
            where=url,
            found=f"saved by {' and '.join(map(str, ranks))} ranks at steps {', '.join(map(str, sorted(steps)))}",
            expected="one world size and one step",
            fix=KEEP_ONE_SAVE,
        )
    world = first[0] if first else max(worlds, default=1)
    stray = next((rank for rank in (*models, *optims) if rank >= world), None)
    if stray is not None:
        raise FormatError(
            "a file's rank is too high",
            where=url,
            found=f"rank {stray}",
            expected=f"ranks below {world}",
            fix="A save by more ranks left it: keep only one save's files.",
        )
    return world
