"""Whole parameters from what the ranks of one DeepSpeed model hold: weights, master weights, and optimizer state."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple, NoReturn

from shardckpt.boxes import Shape, strides
from shardckpt.errors import FormatError, UnsupportedError
from shardckpt.format.deepspeed import zero_partition as layout
from shardckpt.format.deepspeed.state_files import ModelState, PartitionOptimState, Slot, StateFileContents, read_groups
from shardckpt.format.deepspeed.zero_files import StateFiles, optim_file_name, part_file_name
from shardckpt.format.deepspeed.zero_partition import PartitionRun
from shardckpt.format.torchsave.tensor_views import LegacyView, UnreadableTensor, ZipView, narrow_layout
from shardckpt.manifest import Lazy, ObjectEntry, Path, Piece, TensorEntry

MODEL, MASTER, OPTIMIZER = "model", "master", "optimizer"
_STATE, _STEP = "state", "step"
EXPERT = re.compile(r"(?P<start>.*\.deepspeed_experts\.)(?P<local>\d{1,6})(?P<rest>\..*)", re.DOTALL)
"""Names of what `deepspeed.moe` puts into its experts."""


Find = Callable[[int, int], TensorEntry | None]
"""Returns the flat tensor of a rank and a unit; None where the rank's file is not there."""


@dataclass(slots=True)
class DeepSpeedManifestBuilder:
    """Collects the merged tensors and values of a checkpoint.

    Attributes:
        url: Of the store, for messages.
        tensors: Arrays by path.
        objects: Values by path.
        aliases: Tied arrays.
        absent: Files that are not there, with size -1.
        warnings: What is odd.
        unread: What is there and is passed over.
    """

    url: str
    tensors: dict[Path, TensorEntry] = field(default_factory=dict)
    objects: dict[Path, ObjectEntry] = field(default_factory=dict)
    aliases: dict[Path, Path] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def put(self, path: Path, entry: TensorEntry) -> None:
        """Add an array under a path of its own."""
        if path in self.tensors:
            raise FormatError(f"{path[-1]!r} is in two places", where=self.url)
        self.tensors[path] = entry._replace(path=path)

    def tie(self, name: Path, first: Path) -> None:
        """Add a further name of an array."""
        if name not in self.tensors and prod(self.tensors[first].shape) > 0:
            self.tensors[name] = self.tensors[first]._replace(path=name)
            self.aliases[name] = first


@dataclass(frozen=True, slots=True)
class TrainedParam:
    """A parameter that an optimizer has.

    Attributes:
        name: Its name.
        shape: Its shape.
        unit: Flat tensor that it starts in.
        runs: Where its elements lie.
    """

    name: str
    shape: Shape
    unit: int
    runs: tuple[PartitionRun, ...]


class PartitionGroup(NamedTuple):
    """Ranks that share a flat group.

    Attributes:
        ranks: In the order of their parts.
        experts: Which set of experts they hold; 0 where all ranks hold the same.
    """

    ranks: tuple[int, ...]
    experts: int

    def name(self, local: str, held: Mapping[str, int]) -> str:
        """Return a parameter's name in the whole model: ranks count their own experts from 0.

        Args:
            local: Its name on a rank.
            held: How many experts each rank holds, by what their names start with.
        """
        match = EXPERT.fullmatch(local)
        if match is None or not self.experts:
            return local
        return f"{match['start']}{self.experts * held[match['start']] + int(match['local'])}{match['rest']}"


class PartitionMerger:
    """Merges the partitions of one model-parallel rank.

    Args:
        contents: What the files hold.
        files: Which files there are.
        made: Where whole arrays go.
        mp: The model-parallel rank.
        models: Data-parallel rank to its model file's content; of one file where every rank has the whole model.
        optims: Data-parallel rank to its optimizer file's content.
    """

    def __init__(
        self,
        contents: StateFileContents,
        files: StateFiles,
        made: DeepSpeedManifestBuilder,
        mp: int,
        models: Mapping[int, ModelState],
        optims: Mapping[int, PartitionOptimState],
    ) -> None:
        self._contents, self._files, self._made, self._mp = contents, files, made, mp
        self._models, self._optims = models, optims
        self._is_split = any(place[1] == mp for place in files.parts)
        self.world = _world(models, optims, made.url)
        self._lengths_of: dict[tuple[int, int], set[int]] = {}
        self._local_experts = self._count_experts()
        self.trained = {param.name: param for param in self._trained()}

    @property
    def tensor_ranks(self) -> int:
        """Ranks that tensor parallelism cuts parameters for, as far as it is said; else 1."""
        return max((state.tensor_ranks for state in self._models.values()), default=1)

    def leave(self, names: Iterable[str]) -> None:
        """Leave parameters to another model-parallel rank, which holds the same ones."""
        for name in names:
            self.trained.pop(name, None)

    # ---------------------------------------------------------------------------------------------------- layout

    def _shapes(self) -> tuple[Mapping[str, Shape], ...]:
        """Return the shapes of every unit, as the lowest rank says."""
        for state in self._models.values():
            if state.shapes is not None:
                return state.shapes
        return ()

    def _trained(self) -> Iterator[TrainedParam]:
        shapes = self._shapes()
        numels = [{name: prod(shape) for name, shape in unit.items()} for unit in shapes]
        names = [name for unit in shapes for name in unit]
        if len(set(names)) < len(names):
            raise FormatError("a parameter is in two groups", where=self._made.url)
        if self._is_split:
            yield from self._split_stage_3(shapes, numels)
        else:
            for unit, group in enumerate(shapes):
                yield from self._split_stage_1_2(unit, group, list(numels[unit].values()))

    def _split_stage_3(
        self, shapes: Sequence[Mapping[str, Shape]], numels: Sequence[Mapping[str, int]]
    ) -> Iterator[TrainedParam]:
        """Stage 3: each parameter by itself, through all flat tensors of a rank."""
        parts = [sum(layout.part_elements(n, self.world) for n in unit.values()) for unit in numels]
        lengths = [self._lengths(state) for state in self._optims.values()]
        if lengths and len(lengths[0]) != len(parts):
            parts, expected = lengths[0], sum(parts)
            if sum(parts) != expected:
                self._refuse("the flat tensors", self._optims, f"{sum(parts)} elements", expected)
        for rank, state in self._optims.items():
            for unit, (found, part) in enumerate(zip(self._lengths(state), parts, strict=False)):
                if found != part:
                    self._refuse(f"flat tensor {unit}", [rank], f"{found} elements", part)
        bounds, offset = layout.offsets(parts), 0
        for unit, group in enumerate(shapes):
            for name, shape in group.items():
                runs = tuple(layout.split_stage3_runs(offset, prod(shape), self.world, bounds))
                yield TrainedParam(name, shape, runs[0].unit if runs else unit, runs)
                offset += layout.part_elements(prod(shape), self.world)

    def _split_stage_1_2(self, unit: int, group: Mapping[str, Shape], numels: Sequence[int]) -> Iterator[TrainedParam]:
        """Stages 1 and 2: one flat group, cut into equal parts for each team of ranks that shares it."""
        first = next(iter(self._optims.values()), None)
        paddings = first.paddings[unit] if first and first.paddings and unit < len(first.paddings) else None
        if paddings is not None and len(paddings) != len(numels):
            self._refuse(f"group {unit}", self._optims, f"{len(paddings)} paddings", f"{len(numels)} parameters")
        offsets = layout.offsets(numels, paddings)
        for rank, state in self._optims.items():
            if unit >= len(state.flats):
                self._refuse(f"group {unit}", [rank], f"{len(state.flats)} flat tensors", len(self._shapes()))
        for team in self._find_groups(unit):
            partition = self._fit_partition(unit, team, offsets[-1], len(group))
            numel_of = dict(zip(group, numels, strict=True))
            cuts = self._rank_runs(numel_of, offsets, partition, unit, team)
            self._check_starts(cuts, numel_of, partition, unit, team)
            for name, shape in group.items():
                yield TrainedParam(team.name(name, self._local_experts), shape, unit, cuts[name])

    @staticmethod
    def _rank_runs(
        numels: Mapping[str, int], offsets: Sequence[int], partition: int, unit: int, team: PartitionGroup
    ) -> dict[str, tuple[PartitionRun, ...]]:
        """Return where the ranks of a team hold each parameter of a flat group."""
        found = {}
        for (name, numel), offset in zip(numels.items(), offsets, strict=False):
            cut = layout.split_partition_runs(offset, numel, partition, unit)
            found[name] = tuple(run._replace(rank=team.ranks[run.rank]) for run in cut)
        return found

    def _fit_partition(self, unit: int, team: PartitionGroup, total: int, params: int) -> int:
        """Return the elements of each part of a flat group, which must explain how long the ranks' tensors are."""
        here = {place: rank for place, rank in enumerate(team.ranks) if rank in self._optims}
        lengths = {place: self._lengths(self._optims[rank])[unit] for place, rank in here.items()}
        partition = layout.fit_partition(total, len(team.ranks), lengths)
        if partition is None:
            expected = layout.partition_elements(total, len(team.ranks))
            place = next((p for p, n in lengths.items() if n > expected), max(lengths))
            lean = layout.lean_elements(total, expected, place)
            either = f"{lean} or {expected}" if lean < expected else str(expected)
            found = f"{lengths[place]} elements"
            self._refuse(f"group {unit}", [here[place]], found, f"{either} for {params} parameters")
        for place, rank in here.items():
            self._lengths_of[unit, rank] = layout.possible_lengths(total, partition, len(team.ranks), place)
        return partition or 1

    def _find_groups(self, unit: int) -> list[PartitionGroup]:
        """Return the teams of ranks that share a flat group: one, but for experts, whose teams hold one set each."""
        state = next(iter(self._optims.values()), None)
        count = state.counts[unit] if state else self.world
        if count == self.world:
            return [PartitionGroup(tuple(range(self.world)), 0)]
        config = self._contents.value(state.file, "ds_config") if state else None
        is_data_first = isinstance(config, dict) and config.get("use_data_before_expert_parallelism") is True
        sets = self.world // count
        if sets * count != self.world or not all(map(EXPERT.fullmatch, self._shapes()[unit])):
            raise UnsupportedError(
                f"group {unit} is shared by {count} of {self.world} ranks in a way that is not known",
                where=self._made.url,
                found=next(iter(self._shapes()[unit]), "no parameters"),
                expected="experts of deepspeed.moe",
                fix="Convert it with DeepSpeed's ds_to_universal.py, and point at the result.",
            )
        if is_data_first:
            return [PartitionGroup(tuple(range(e * count, (e + 1) * count)), e) for e in range(sets)]
        return [PartitionGroup(tuple(range(e, self.world, sets)), e) for e in range(sets)]

    def _count_experts(self) -> dict[str, int]:
        """Return how many experts each rank holds, by what their names start with."""
        held: dict[str, set[int]] = {}
        for unit in self._shapes():
            for match in filter(None, map(EXPERT.fullmatch, unit)):
                held.setdefault(match["start"], set()).add(int(match["local"]))
        return {start: len(experts) for start, experts in held.items()}

    def _check_starts(
        self,
        cuts: Mapping[str, tuple[PartitionRun, ...]],
        numels: Mapping[str, int],
        partition: int,
        unit: int,
        team: PartitionGroup,
    ) -> None:
        """Compare with where ranks themselves say that parameters lie.

        With `round_robin_gradients` DeepSpeed lays parameters in another order, that of `param_shapes`, but counts
        their places in the order that they had before. `zero_to_fp32.py` goes by `param_shapes`, and so do we.
        """
        wrong = self._find_wrong_start(cuts)
        if wrong is None:
            return
        before = {name: numels[name] for name in layout.original_order(list(numels), len(team.ranks))}
        offsets = layout.offsets(list(before.values()))
        if self._find_wrong_start(self._rank_runs(before, offsets, partition, unit, team)) is None:
            return
        name, run, (numel, start) = wrong
        self._refuse(
            f"{name!r}",
            [run.rank],
            f"elements from {start}, {numel} of them",
            f"from {run.at}, {run.stop - run.start} of them",
        )

    def _find_wrong_start(
        self, cuts: Mapping[str, tuple[PartitionRun, ...]]
    ) -> tuple[str, PartitionRun, tuple[int, int]] | None:
        """Return a run of a parameter that its rank tells otherwise, and what the rank says."""
        for name, runs in cuts.items():
            for run in runs:
                state = self._optims.get(run.rank)
                told = state.starts[run.unit] if state and state.starts and run.unit < len(state.starts) else {}
                said = told.get(name)
                if said is not None and said != (run.stop - run.start, run.at):
                    return name, run, said
        return None

    @staticmethod
    def _lengths(state: PartitionOptimState) -> list[int]:
        return [entry.shape[0] for entry in state.flats]

    def _refuse(self, what: str, ranks: Iterable[int], found: object, expected: object) -> NoReturn:
        rank = min(ranks)
        raise FormatError(
            f"{what} of rank {rank} is not as long as param_shapes say",
            where=self._contents.where(self._optims[rank].file) if rank in self._optims else self._made.url,
            found=found,
            expected=expected,
            fix="The files are of different saves, or one is damaged.",
        )

    # ---------------------------------------------------------------------------------------------------- arrays

    def _merge_tensor(
        self, path: Path, shape: Shape, runs: Iterable[PartitionRun], find: Find, absent: Callable[[int], str]
    ) -> TensorEntry:
        """Return an array from its runs; what a missing file holds is refused when it is read."""
        pieces: list[Piece] = []
        stored = ""
        for run in runs:
            tensor = find(run.rank, run.unit)
            if tensor is None:
                file = absent(run.rank)
                self._made.absent[file] = -1
                refused = Lazy(0, 0, UnreadableTensor(path, f"partly in {file}, which is missing"))
                pieces += [Piece(box, file, refused) for box, _ in layout.boxes(shape, run)]
                continue
            if stored not in ("", tensor.stored):
                raise FormatError(
                    f"{path[-1]!r} has a type of its own on rank {run.rank}",
                    where=self._made.url,
                    found=tensor.stored,
                    expected=stored,
                )
            stored = tensor.stored
            if run.at + run.stop - run.start > prod(tensor.shape):
                self._refuse(f"{path[-1]!r}", [run.rank], f"{prod(tensor.shape)} elements", "more")
            pieces += _pieces(tensor, shape, run)
        return TensorEntry(path, shape, stored or "float32", tuple(pieces))

    def _master(self, rank: int, unit: int) -> TensorEntry | None:
        return self._optims[rank].flats[unit] if rank in self._optims else None

    def _missing_optim_file(self, rank: int) -> str:
        known = (name for place, name in self._files.optims.items() if place[1] == self._mp)
        folder = self._files.folder
        return optim_file_name([*known, f"{folder}/zero_pp_rank_0_mp_rank_00_optim_states.pt"], rank, self._mp)

    def merge_master(self, param: TrainedParam) -> TensorEntry:
        """Return a parameter's master weights."""
        return self._merge_tensor((MASTER, param.name), param.shape, param.runs, self._master, self._missing_optim_file)

    def merge_frozen(self, name: str, shape: Shape) -> TensorEntry:
        """Return a frozen parameter that every rank holds a part of (stage 3)."""
        runs = layout.split_stage3_runs(0, prod(shape), self.world, (0, layout.part_elements(prod(shape), self.world)))

        def find(rank: int, _: int) -> TensorEntry | None:
            return self._models[rank].fragments.get(name) if rank in self._models else None

        def absent(rank: int) -> str:
            return part_file_name(self._files.folder, rank, self._mp)

        return self._merge_tensor((MODEL, name), shape, runs, find, absent)

    # ----------------------------------------------------------------------------------------------------- model

    def join_model(self) -> None:
        """Add the weights, live and master, under their names."""
        states = list(self._models.values())
        if not states:
            return
        if self._is_split:
            self._join_parts(states[0])
        else:
            self._join_module(states[0])
        for param in self.trained.values() if self._optims else ():
            self._made.put((MASTER, param.name), self.merge_master(param))
        for state in states:
            for alias, name in state.shared.items():
                for root in (MODEL, MASTER):
                    if (root, name) in self._made.tensors and alias not in self.trained:
                        self._made.tie((root, alias), (root, name))

    def _join_module(self, state: ModelState) -> None:
        """Stages 0 to 2: the file holds the whole model."""
        for name, entry in state.module.items():
            self._made.put((MODEL, name), entry)
            first = self._contents.aliases.get(entry.path, entry.path)
            if first != entry.path and first[:-1] == entry.path[:-1]:
                self._made.aliases[MODEL, name] = (MODEL, str(first[-1]))
        for name, entry in state.fragments.items():
            if name not in state.module:
                self._made.put((MODEL, name), entry)

    def _join_parts(self, state: ModelState) -> None:
        """Stage 3: placeholders say the order and the type, the parts lie in the optimizer's files."""
        frozen = {name: shape for name, shape in state.frozen.items() if name not in self.trained}
        waiting = dict.fromkeys([*self.trained, *frozen])
        for name, entry in state.module.items():
            if name in self.trained and entry.shape != self.trained[name].shape:
                live = self.merge_master(self.trained[name])
                self._made.put(
                    (MODEL, name), live._replace(delivered="" if entry.stored == live.stored else entry.stored)
                )
            elif name in frozen and entry.shape != frozen[name]:
                self._made.put((MODEL, name), self.merge_frozen(name, frozen[name]))
            elif name in state.shared and not prod(entry.shape):
                self._made.tensors.pop((MODEL, name), None)
                continue
            else:
                self._made.put((MODEL, name), entry)
            waiting.pop(name, None)
        for name in waiting:
            param = self.trained.get(name)
            self._made.put((MODEL, name), self.merge_master(param) if param else self.merge_frozen(name, frozen[name]))

    # ------------------------------------------------------------------------------------------------- optimizer

    def join_optimizer(self) -> None:
        """Add the optimizer's state under the names of parameters."""
        odd: set[str] = set()
        for param in self.trained.values():
            names = dict.fromkeys(slot for state in self._optims.values() for slot in state.slots[param.unit])
            for slot in names:
                self._put_slot(param, slot, odd)
            if _STEP not in names:
                self._put_step(param)
        self._made.unread += sorted(odd)
        self._made.warnings += [f"{what} is not shaped like its parameters and is left out" for what in sorted(odd)]

    def groups(self) -> list[tuple[Mapping[str, Slot], list[str]]]:
        """Return the optimizer's groups: what each says, and the names in it; none where its files are not here."""
        if not self._optims:
            return []
        state = self._optims[min(self._optims)]
        names = [[param.name for param in self.trained.values() if param.unit == u] for u in range(len(state.flats))]
        told = read_groups(self._contents, state.file, state.base)
        if not told:
            return [({}, group) for group in names]
        found: list[tuple[Mapping[str, Slot], list[str]]] = []
        for group in told:
            said = group.get("params")
            ids = said.value if isinstance(said, ObjectEntry) and isinstance(said.value, list) else []
            if not all(type(i) is int and 0 <= i < len(names) for i in ids):
                raise FormatError(
                    "a group of the optimizer names flat tensors that are not there",
                    where=self._contents.where(state.file),
                    found=ids,
                    expected=f"numbers below {len(names)}",
                )
            found.append((group, [name for i in ids for name in names[i]]))
        return found

    def _put_step(self, param: TrainedParam) -> None:
        """Some optimizers count their steps for a group, and elastic checkpoints for all."""
        if not self._optims:
            return
        state = self._optims[min(self._optims)]
        value = self._contents.value(state.file, "optimizer_state_dict", "base_optimizer_state_step")
        for group, names in self.groups() if value is None else ():
            said = group.get(_STEP)
            if param.name in names and isinstance(said, ObjectEntry):
                value = said.value
        if value is not None:
            path: Path = (OPTIMIZER, _STATE, param.name, _STEP)
            self._made.objects[path] = ObjectEntry(path, value)

    def _put_slot(self, param: TrainedParam, slot: str, odd: set[str]) -> None:
        path: Path = (OPTIMIZER, _STATE, param.name, slot)
        ranks = [run.rank for run in param.runs if run.rank in self._optims] or list(self._optims)
        values = [value for rank in ranks if (value := self._optims[rank].slots[param.unit].get(slot)) is not None]
        if not values:
            return
        first = values[0]
        if isinstance(first, ObjectEntry):
            self._made.objects[path] = replace(first, path=path)
        elif not first.shape:
            self._made.put(path, first)
        elif any(isinstance(v, ObjectEntry) or len(v.shape) != 1 for v in values) or not self._is_flat(param, slot):
            odd.add(f"{slot} of flat tensor {param.unit}")
        else:
            self._made.put(
                path, self._merge_tensor(path, param.shape, param.runs, self._finder(slot), self._missing_optim_file)
            )

    def _is_flat(self, param: TrainedParam, slot: str) -> bool:
        """Return True if a slot is as long as its flat tensor on every rank, each with its padding or without."""
        for rank, state in self._optims.items():
            value = state.slots[param.unit].get(slot)
            known = self._lengths_of.get((param.unit, rank), set()) | {state.flats[param.unit].shape[0]}
            if isinstance(value, TensorEntry) and value.shape[0] not in known:
                return False
        return True

    def _finder(self, slot: str) -> Find:
        def find(rank: int, unit: int) -> TensorEntry | None:
            if rank not in self._optims:
                return None
            value = self._optims[rank].slots[unit].get(slot)
            if not isinstance(value, TensorEntry):
                raise FormatError(
                    f"rank {rank} lacks {slot} of flat tensor {unit}, which others have",
                    where=self._contents.where(self._optims[rank].file),
                    fix="The files are of different saves, or one is damaged.",
                )
            return value

        return find


def _pieces(tensor: TensorEntry, shape: Shape, run: PartitionRun) -> Iterator[Piece]:
    """Yield what one run of a flat tensor holds of an array."""
    for piece in tensor.pieces:
        for box, at in layout.boxes(shape, run):
            assert isinstance(piece.layout, Lazy), "files of torch.save are opened lazily"
            detail = piece.layout.detail
            is_spread = isinstance(detail, ZipView | LegacyView) and detail.view.strides is not None
            yield Piece(box, piece.file, narrow_layout(piece.layout, at, strides(box.size) if is_spread else None))


def _world(models: Mapping[int, ModelState], optims: Mapping[int, PartitionOptimState], url: str) -> int:
    """Return the data-parallel ranks, once all files agree on them."""
    said = {state.file: (max(state.counts), len(state.flats), state.is_split) for state in optims.values()}
    first = next(iter(said.values()), None)
    for file, facts in said.items():
        if facts != first:
            raise FormatError(
                "files of different saves lie here: they disagree on ranks and groups",
                where=f"{url}/{file}",
                found=f"{facts[0]} ranks, {facts[1]} groups",
                expected=first and f"{first[0]} ranks, {first[1]} groups",
                fix="Keep the files of one save.",
            )
    worlds = {state.world for state in models.values() if state.world}
    steps = {state.step for state in models.values()}
    if len(worlds) > 1 or len(steps) > 1 or (first and any(world % first[0] for world in worlds)):
        ranks = sorted({*worlds, *([first[0]] if first else [])})
        raise FormatError(
            "files of different saves lie here",
            where=url,
            found=f"saved by {' and '.join(map(str, ranks))} ranks at steps {', '.join(map(str, sorted(steps)))}",
            expected="one number of ranks and one step",
            fix="Keep the files of one save.",
        )
    world = first[0] if first else max(worlds, default=1)
    strays = [rank for rank in (*models, *optims) if rank >= world]
    if strays:
        raise FormatError(
            "a file is of a rank that the others do not know",
            where=url,
            found=f"rank {strays[0]}",
            expected=f"ranks below {world}",
            fix="It is left from a save of more ranks: keep the files of one save.",
        )
    return world
