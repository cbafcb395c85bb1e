"""Plan a load: which data of a checkpoint goes into which objects of a state."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from shardckpt import dtypes
from shardckpt.boxes import Box
from shardckpt.checkpoint.load.source import CheckpointSource, allocate, torch_dtype
from shardckpt.checkpoint.load.stateful_fill import hand_over
from shardckpt.checkpoint.load.unflatten import ForeignValue, arrays_in
from shardckpt.checkpoint.stateful.flatten import Models, TensorRef, as_rows, require_model_of, require_no_flat_shard
from shardckpt.checkpoint.stateful.stateful import (
    PerRank,
    Stateful,
    check_array,
    check_tensor,
    dtype_name,
    get_state_dict,
    is_optimizer,
    is_stateful,
)
from shardckpt.checkpoint.stateful.variant import EXTRAS, Variant
from shardckpt.errors import ShardckptError, UsageError
from shardckpt.format.encodings.tagged_json import MAX_DEPTH, path_key
from shardckpt.manifest import Path, TensorEntry, dotted
from shardckpt.plan.naming.fqn import make_cleaner
from shardckpt.plan.naming.sections import find_sections, model_paths
from shardckpt.plan.optim import optimizer_state as optimizers
from shardckpt.state.adapters import torch_fsdp1
from shardckpt.state.adapters.flat_shard_check import FlatShards
from shardckpt.state.adapters.model_index import ModelIndex
from shardckpt.state.keys.kinds import is_sharded_tensor
from shardckpt.state.keys.slots import LARGEST_NOTE, UnequalSteps
from shardckpt.state.local.local_shards import LocalShard, TensorShards, get_tensor_shards
from shardckpt.state.local.optim_shards import OptimTargets, Slot, parameter_names, plan_optim_targets

Put = Callable[[Any], None]


class Taker(NamedTuple):
    """What is built from the checkpoint and handed over.

    Attributes:
        path: What the user calls who takes it.
        tree: As it was saved, arrays as `TensorRef`.
        put: Takes it.
    """

    path: Path
    tree: Any
    put: Put


class LoadItem(NamedTuple):
    """A saved array, and where its elements go.

    Attributes:
        path: What the user calls it.
        entry: The saved array.
        array: The places on this rank.
    """

    path: Path
    entry: TensorEntry
    array: TensorShards


@dataclass
class LoadPlan:
    """The plan of a load, and every reason not to do it.

    Attributes:
        arrays: What is read straight into its place.
        values: What is built from the checkpoint and handed over, in order.
        after: What is called when the arrays are filled: models and optimizers take over what is theirs.
        problems: What does not fit, one sentence each.
        taken: Paths of the checkpoint that somebody wants, with all that is below them.
        missing: What is wanted and not there.
        unexpected: What the checkpoint has and nobody wants.
    """

    arrays: list[LoadItem] = field(default_factory=list)
    values: list[Taker] = field(default_factory=list)
    after: list[Callable[[], None]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    taken: set[Path] = field(default_factory=set)
    missing: set[Path] = field(default_factory=set)
    unexpected: list[Path] = field(default_factory=list)

    def unexpected_shown(self) -> list[str]:
        """Return what nobody wants, a subtree that is unexpected as a whole in one line."""
        return [
            f"unexpected: {dotted(paths[0])}"
            if len(paths) == 1
            else f"unexpected: {dotted(root)} ({len(paths)} values)"
            for root, paths in self.unexpected_roots().items()
        ]

    def unexpected_roots(self) -> dict[Path, list[Path]]:
        """Return what nobody wants, by the shortest path below which nobody wants anything."""
        known = {path[:n] for path in (*self.taken, *self.missing) for n in range(len(path) + 1)}
        groups: dict[Path, list[Path]] = {}
        for path in self.unexpected:
            root = next((path[:n] for n in range(1, len(path)) if path[:n] not in known), path)
            groups.setdefault(root, []).append(path)
        return groups


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load.

    Attributes:
        strict: Names that are missing or unexpected are problems.
        partial: Globs of dotted names: nothing else is loaded; None for everything. One that matches the name of a part
            takes all that is below it.
        cast: Another type than the saved one is no problem.
        is_own_only: What lies in other folders than the checkpoint is left alone.
        unequal_steps: What becomes of steps that differ among parameters that are one flat parameter now.
    """

    strict: bool = True
    partial: tuple[str, ...] | None = None
    cast: bool = False
    is_own_only: bool = False
    unequal_steps: UnequalSteps = "error"

    @property
    def is_selective(self) -> bool:
        """Whether some of the state is to stay as it is."""
        return self.partial is not None and "*" not in self.partial

    def globs_of(self, path: Path) -> Iterator[str]:
        """Yield the globs that match a path, or a part that it lies in."""
        names = [dotted(path[:n]) for n in range(min(1, len(path)), len(path) + 1)]
        for glob in self.partial or ():
            if any(fnmatchcase(name, glob) or fnmatchcase(f"{name}.", glob) for name in names):
                yield glob

    def may_want_below(self, path: Path) -> bool:
        """Tell whether a glob may match something below a path."""
        name = f"{dotted(path)}."
        heads = [re.split(r"[*?\[]", glob, maxsplit=1)[0] for glob in self.partial or ("*",)]
        return any(name.startswith(head) or head.startswith(name) for head in heads)


def plan_load(
    state: Any, saved: CheckpointSource, options: LoadOptions, rank: int, world: int, models: Models
) -> LoadPlan:
    """Plan a load: compare a state with a checkpoint; nothing of either is changed.

    Args:
        state: As for `load`.
        saved: The checkpoint.
        options: How strictly.
        rank: This rank.
        world: How many there are.
        models: Those of the state.
    """
    made = _LoadPlanner(saved, options, rank, world, models)
    made.visit(state, (), _refuse)
    if options.strict and options.partial is None:
        made.plan.unexpected = list(made.unexpected())
    if options.strict:
        made.plan.problems += [f"`partial`: nothing is called {glob!r}" for glob in made.unmatched()]
    return made.plan


def _refuse(value: Any) -> None:
    """Stand for the place of a value that nothing can be put into the place of."""
    kind = type(value).__name__
    raise UsageError(
        "a plain value cannot be loaded in place",
        found="None"
        if value is None
        else f"an empty {kind}"
        if type(value) in (dict, list, tuple) and not value
        else f"a value of type {kind}",
        expected="a state that holds models, optimizers, tensors or values by name",
        fix="Leave the state away to get what was saved: load(path).",
    )


class _LoadPlanner:
    def __init__(self, saved: CheckpointSource, options: LoadOptions, rank: int, world: int, models: Models) -> None:
        self._source, self._options, self._rank, self._world = saved, options, rank, world
        self._models = models
        self._opened: set[Path] = set()  # lists that are visited one entry after the other
        self._matched: set[str] = set()  # globs
        self._shards = FlatShards()
        self.plan = LoadPlan()

    def unexpected(self) -> Iterable[Path]:
        """Yield what the checkpoint has and nobody wants."""
        taken = self.plan.taken
        for saved in self._source.paths:
            for path in self._parts(saved):
                if not any(path[:n] in taken for n in range(len(path) + 1)):
                    yield path

    def unmatched(self) -> list[str]:
        """Return the globs that match nothing, in the state or in the checkpoint: other ranks' states may have more."""
        left = [glob for glob in self._options.partial or () if glob not in self._matched and glob != "*"]
        known = {glob for path in self._source.paths for glob in self._options.globs_of(path)} if left else set()
        return [glob for glob in left if glob not in known]

    def _wants(self, path: Path) -> bool:
        """Tell whether something is to be loaded."""
        if self._options.partial is None:
            return True
        found = set(self._options.globs_of(path))
        self._matched |= found
        return bool(found)

    def _parts(self, path: Path) -> Iterable[Path]:
        """Yield a path; those of the entries of a list that is one value in the checkpoint and several objects here."""
        if path not in self._opened:
            return (path,)
        found, _ = self._source.find(path)
        return _parts_of(found, path, set(self._source.arrays))

    def visit(self, value: Any, path: Path, put: Put) -> None:
        """Add what is wanted of a value and everything in it."""
        if len(path) > MAX_DEPTH:
            raise UsageError("nested too deep, or holds itself", where=dotted(path[:8]))
        if is_sharded_tensor(value):
            self._array(path, path, get_tensor_shards(as_rows(value, path)))
        elif isinstance(value, torch.Tensor):
            check_tensor(value, path)
            require_no_flat_shard(value, path, self._shards)
            self._array(path, path, get_tensor_shards(value))
        elif isinstance(value, nn.Module):
            self._module(value, path)
        elif is_optimizer(value):
            self._optimizer(value, path)
        elif isinstance(value, PerRank):
            self._per_rank(value, path)
        elif isinstance(value, Variant):
            self._variant(value, path)
        elif is_stateful(value):
            self._stateful(value, path)
        elif type(value) in (dict, OrderedDict) and value:
            for key, each in value.items():
                self.visit(each, (*path, path_key(key)), _setter(value, key))
        elif type(value) in (list, tuple) and _holds_objects(value):
            self._sequence(value, path, put)
        elif isinstance(value, np.ndarray):
            self._numpy_array(value, path, put)
        else:
            self._value(path, put, value)

    def _numpy_array(self, value: np.ndarray[Any, Any], path: Path, put: Put) -> None:
        """Want an array: in place where the saved one fits it, else in its stead where that can be."""
        check_array(value, path)
        is_fillable = (
            value.flags.writeable and value.size and value.dtype.isnative and dtypes.is_known(value.dtype.name)
        )
        entry = self._source.arrays.get(path)
        if is_fillable and (put is _refuse or entry is None or self._fits(value, entry)):
            self._array(path, path, get_tensor_shards(torch.from_numpy(value)))
        elif entry is not None and self._options.is_own_only and self._source.lies_elsewhere(entry):
            self.plan.taken.add(path)
        else:
            self._value(path, put, value)

    def _fits(self, value: np.ndarray[Any, Any], entry: TensorEntry) -> bool:
        """Tell whether an array is filled in place: with a saved array of its form, or a tensor, which is not one."""
        saved = self._source.find(entry.path)[0]
        has_form = entry.shape == value.shape and (entry.dtype == value.dtype.name or self._options.cast)
        return has_form or not (isinstance(saved, TensorRef) and saved.kind == "numpy")

    def _sequence(self, value: Any, path: Path, put: Put) -> None:
        self._opened.add(path)
        found, is_there = self._source.find(path)
        if is_there and isinstance(found, (list, tuple)) and len(found) != len(value):
            self._problem(path, f"size mismatch for {dotted(path)}: found {len(found)} entries, expected {len(value)}")
        held = value if isinstance(value, list) else list(value)
        for at, each in enumerate(value):
            self.visit(each, (*path, at), put if held is not value and put is _refuse else _setter(held, at))
        if isinstance(value, tuple) and put is not _refuse:
            self.plan.values.append(Taker(path, None, lambda _: put(tuple(held))))

    def _problem(self, path: Path, text: str) -> None:
        if self._wants(path):
            self.plan.problems.append(text)

    def _missing(self, path: Path) -> None:
        self.plan.missing.add(path)
        if self._options.strict:
            self._problem(path, f"missing: {dotted(path)}")

    def _value(self, path: Path, put: Put, given: Any = None) -> None:
        """Want a value, or whatever an object takes.

        Args:
            path: What the user calls it.
            put: Takes it.
            given: What is in the state now.
        """
        if put is _refuse:
            put(given)
        found, is_there = self._source.find(path)
        if not is_there:
            self._missing(path)
            return
        self.plan.taken.add(path)
        if self._wants(path):
            self.plan.values.append(Taker(path, found, put))

    def _stateful(self, value: Stateful, path: Path) -> None:
        """Want the tensors of an object's state in place, and hand it the rest with them."""
        found, _ = self._source.find(path)
        if next(arrays_in(found), None) is None or not self._wants(path):
            self._value(path, value.load_state_dict)
            return
        self.plan.taken.add(path)
        handover = hand_over(found, get_state_dict(value, path), path, self._source.arrays)
        for fill in handover.fills:
            require_no_flat_shard(fill.tensor, fill.path, self._shards)
            self._array(fill.path, fill.source, get_tensor_shards(fill.tensor))
        for each in handover.missing:
            self._missing(each)
        for each in handover.unplaced if self._options.strict else ():
            self._problem(
                each,
                f"no tensor for {dotted(each)}: {type(value).__name__}.state_dict() has sharded tensors, none of this"
                " name, so that it is not known how this one is cut (let the object make it before the load: torch's"
                " `get_optimizer_state_dict` makes the state of an optimizer)",
            )
        self.plan.values.append(Taker(path, handover.tree, value.load_state_dict))

    def _array(self, path: Path, source: Path, array: TensorShards) -> None:
        """Want one array.

        Args:
            path: What the user calls it.
            source: Where the checkpoint has it.
            array: Where it goes.
        """
        entry = self._source.arrays.get(source)
        if entry is None:
            found, is_there = self._source.find(source)
            if not is_there:
                self._missing(path)
                return
            self.plan.taken.add(source)
            kind = "" if isinstance(found, ForeignValue) else f", but a value of type {type(found).__name__}"
            self._problem(path, f"kind mismatch for {dotted(path)}: the checkpoint has no tensor there{kind}")
            return
        self.plan.taken.add(source)
        if not self._wants(path) or (self._options.is_own_only and self._source.lies_elsewhere(entry)):
            return
        if any(_repeats(shard.tensor) for shard in array.shards) and entry.shape == array.shape:
            array = self._without_repeats(path, entry, array)
        if any(shard.tensor.is_meta for shard in array.shards):
            text = f"no memory for {dotted(path)}: it is on the meta device"
            self.plan.problems.append(f"{text} (`to_empty` gives some)")
        if entry.shape != array.shape:
            text = f"size mismatch for {dotted(path)}: found {list(entry.shape)}, expected {list(array.shape)}"
            self.plan.problems.append(text)
        if entry.dtype != dtype_name(array.dtype) and not self._options.cast:
            text = f"dtype mismatch for {dotted(path)}: found {entry.dtype}, expected {dtype_name(array.dtype)}"
            self.plan.problems.append(f"{text} (cast=True converts)")
        self.plan.arrays.append(LoadItem(path, entry, array))

    def _without_repeats(self, path: Path, entry: TensorEntry, array: TensorShards) -> TensorShards:
        """Return the places of an expanded tensor, each once, if the saved values are alike where it repeats itself."""
        shards = []
        for shard in array.shards:
            size, at = shard.tensor.shape, _once(shard.tensor)
            if not shard.tensor.is_meta:
                (found,) = self._source.locate([entry])  # before memory is taken for it
                values = allocate(found, size)
                self._source.elements.read([(found, array._replace(shards=(LocalShard(shard.box, values),)))])
                if not _are_alike(values, values[at].expand(size)):
                    self._problem(
                        path,
                        f"{dotted(path)} is an expanded tensor, whose elements share memory, and the saved values"
                        " differ where it repeats itself (make it contiguous: `tensor.expand(...).clone()`)",
                    )
            place = shard.tensor.detach()[at]
            shards.append(LocalShard(Box(shard.box.offset, tuple(place.shape)), place))
        return array._replace(shards=tuple(shards))

    def _variant(self, variant: Variant, path: Path) -> None:
        if variant.module is not None:
            self._module(variant.module, path)
        else:
            for name, array in variant.arrays(self._models.of(variant.of)).items():
                self._array((*path, name), (*path, name), array)
        for name, value in variant.extras.items():
            self.visit(value, (*path, name), _refuse)
        self.plan.taken |= {(*path, name) for name in EXTRAS}

    def _module(self, module: nn.Module, path: Path) -> None:
        model = self._models.of(module)
        names = model_names(self._source, path, model.arrays)
        for name, array in model.arrays.items():
            others = (alias for alias, first in model.aliases.items() if first == name)
            found = next((each for each in (name, *others) if each in names), name)
            self._array((*path, name), names.get(found, (*path, found)), array)
        self.plan.taken |= {names[alias] for alias in model.aliases if alias in names}
        for name, owner in model.extra.items():
            self._value((*path, name), owner.set_extra_state)
        self.plan.after.append(model.finish)

    def _optimizer(self, optim: torch.optim.Optimizer, path: Path) -> None:
        description = self._models.description_for(optim)
        root = self._optimizer_root(path)
        if root is None:
            self._missing(path)
            return
        if description is None:
            self._whole_optimizer(optim, path, root)
            return
        self.plan.taken.add(root)
        if not self._options.may_want_below(path):
            return
        try:
            state = self._wanted_of(self._optim_state(root, description, optim), path)
            targets = self._plan_optim_targets(optim, description, state)
        except ShardckptError as error:
            self.plan.problems.append(f"{dotted(path)}: {error}")
            return
        self._fill_optim_targets(targets, state, path)
        self.plan.problems += [f"{dotted(path)}.{text}" for text in targets.problems]
        if self._options.strict:
            self._compare_parameters(optim, description, state, path)
        self.plan.after.append(lambda: targets.put(optim))

    def _compare_parameters(
        self, optim: torch.optim.Optimizer, found: ModelIndex, state: optimizers.OptimizerState, path: Path
    ) -> None:
        """Tell of parameters that only one of the live and the saved optimizer has; groups may be others."""
        live = dict.fromkeys(name for names in parameter_names(found, optim) for name in names)
        groups: Sequence[Mapping[str, Any]] = state.groups
        saved = dict.fromkeys(_first(str(name), found) for group in groups for name in group.get("params", ()))
        kept = dict.fromkeys(_first(key.rpartition("/")[0], found) for key in state.tensors)
        for name in {**saved, **kept}:
            if name not in live:
                self._problem((*path, "state", name), f"unexpected: {dotted((*path, 'state', name))}")
        for name in live if saved else ():
            if name not in saved and name not in kept:
                self._problem((*path, "state", name), f"missing: {dotted((*path, 'state', name))}")

    def _optimizer_root(self, path: Path) -> Path | None:
        """Return where the checkpoint has an optimizer's state: at its path, or the only one there is."""
        if self._source.find(path)[1]:
            return path
        found = find_sections(self._source.manifest).optimizers
        return found[0] if len(found) == 1 and not self._source.is_native else None

    def _whole_optimizer(self, optim: torch.optim.Optimizer, path: Path, root: Path) -> None:
        model = self._models.foreign_for(optim)
        if model is None:
            require_model_of(optim, path, self._shards)
        self.plan.taken.add(root)
        n = len(root)
        wanted = [self._wants((*path, *at[n:])) for at in self._source.paths if at[:n] == root]
        if not any(wanted):
            return
        if not all(wanted):
            self.plan.problems.append(f"{dotted(path)}: it is loaded as a whole, and `partial` names a part of it")
        take: Put = optim.load_state_dict
        if model is not None:
            take = lambda state: torch_fsdp1.put_optim_state(model, optim, state)  # noqa: E731
        self.plan.values.append(Taker(path, self._source.find(root)[0], take))

    def _optim_state(self, root: Path, found: ModelIndex, optim: torch.optim.Optimizer) -> optimizers.OptimizerState:
        shapes = {name: entry.shape for name, entry in found.entries.items()}
        n = len(root)
        tensors = {path: entry for path, entry in self._source.arrays.items() if path[:n] == root}
        small = {path: entry for path, entry in tensors.items() if path[n : n + 1] == ("param_groups",)}
        values = _leaves(self._source.materialised(_without_state(self._source.find(root)[0])), root)
        raw = optimizers.RawOptimizer(
            {path[n:]: entry for path, entry in tensors.items() if path not in small},
            {path[n:]: value for path, value in values.items()},
        )
        numbers = _names_by_number(parameter_names(found, optim), raw.values.get(("param_groups",)))
        return optimizers.key_by_name(raw, shapes, numbers, clean=lambda name: _first(name, found))

    def _wanted_of(self, state: optimizers.OptimizerState, path: Path) -> optimizers.OptimizerState:
        """Return what is to be loaded of an optimizer's state."""
        if not self._options.is_selective:
            return state

        def wants(name: str, slot: str) -> bool:
            return self._wants((*path, "state", name, slot))

        tensors = {key: entry for key, entry in state.tensors.items() if wants(*key.rsplit("/", 1))}
        scalars = {
            name: {slot: value for slot, value in slots.items() if wants(name, slot)}
            for name, slots in state.scalars.items()
        }
        groups = state.groups if self._wants((*path, "param_groups")) else ()
        return replace(state, tensors=tensors, scalars=scalars, groups=groups)

    def _plan_optim_targets(
        self, optim: torch.optim.Optimizer, found: ModelIndex, state: optimizers.OptimizerState
    ) -> OptimTargets:
        slots: dict[str, dict[str, Slot]] = {}
        for key, entry in state.tensors.items():
            name, _, slot = key.rpartition("/")
            slots.setdefault(name, {})[slot] = Slot(entry.shape, torch_dtype(entry))
        return plan_optim_targets(
            found,
            optim,
            slots,
            state.scalars,
            state.groups,
            keeps_rest=self._options.is_selective,
            unequal_steps=self._options.unequal_steps,
        )

    def _fill_optim_targets(self, targets: OptimTargets, state: optimizers.OptimizerState, path: Path) -> None:
        """Request the values of the targets; numbers that several parameters share are compared first."""
        shared: dict[int, list[LoadItem]] = {}
        for name, slot, array in targets.arrays:
            wanted = LoadItem((*path, "state", name, slot), state.tensors[f"{name}/{slot}"], array)
            if not array.shape and array.shards:
                shared.setdefault(array.shards[0].tensor.data_ptr(), []).append(wanted)
            else:
                self.plan.arrays.append(wanted)
        for rows in shared.values():
            self.plan.arrays += rows if len(rows) == 1 else self._one_number(rows, path)

    def _one_number(self, rows: Sequence[LoadItem], path: Path) -> Sequence[LoadItem]:
        """Return what is read into the one number that an optimizer keeps of all parameters of a flat one."""
        values = [self._number(each.entry) for each in rows]
        if all(value == values[0] for value in values):
            return rows[:1]
        if self._options.unequal_steps == "error":
            firsts: dict[Any, str] = {}
            for row, value in zip(rows, values, strict=True):
                firsts.setdefault(value, f"{row.path[-2]}/{row.path[-1]}")
            text = ", ".join(f"{value} of {name}" for value, name in list(firsts.items())[:4])
            start = f"{dotted(path)}: differs among parameters of one flat parameter: "
            self._problem(path, f"{start}{text}{LARGEST_NOTE}")
        return (rows[values.index(max(values))],)

    def _number(self, entry: TensorEntry) -> Any:
        made = torch.empty((), dtype=torch_dtype(entry))
        self._source.fill([(entry, get_tensor_shards(made))])
        return made.item()

    def _per_rank(self, value: PerRank, path: Path) -> None:
        found, is_there = self._source.find(path)
        if not is_there:
            self._missing(path)
            return
        self.plan.taken.add(path)
        if not self._wants(path):
            return
        if not isinstance(found, list):
            self._problem(path, f"kind mismatch for {dotted(path)}: the checkpoint has no state of each rank there")
        elif len(found) == self._world:
            self.plan.values.append(Taker(path, found[self._rank], value.load_state_dict))
        elif type(value).load_other_world is PerRank.load_other_world:
            text = f"every rank has its own {dotted(path)}, and there are more or fewer ranks than saved it"
            found_text = f"found {len(found)}, expected {self._world}"
            self._problem(path, f"{text}: {found_text} (leave it out of the state; `load(path)` has all of them)")
        else:
            self.plan.values.append(Taker(path, found, self._other_world(value, path)))

    def _other_world(self, value: PerRank, path: Path) -> Put:
        def take(states: list[Any]) -> None:
            if not value.load_other_world(states, self._rank, self._world):
                raise UsageError(
                    "every rank has its own, and there are more or fewer ranks than saved it",
                    where=dotted(path),
                    found=f"{len(states)} ranks",
                    expected=self._world,
                    fix="Leave it out of the state, and load it with `load(path)`.",
                )

        return take


def _repeats(tensor: torch.Tensor) -> bool:
    """Tell whether elements of a tensor share memory, as `expand` makes them."""
    return any(size > 1 and not stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _once(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return the index that takes each element of an expanded tensor once."""
    return tuple(slice(0, 1) if not stride else slice(None) for stride in tensor.stride())


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124  (NaN)


def _names_by_number(live: Sequence[Sequence[str]], groups: Any) -> dict[int, str] | None:
    """Return the names of numbered parameters: as torch does, by their position in groups of the same sizes."""
    if not isinstance(groups, (list, tuple)) or len(groups) != len(live):
        return None
    numbers = [list(group.get("params", ())) for group in groups if isinstance(group, dict)]
    if [len(each) for each in numbers] != [len(names) for names in live]:
        return None
    pairs = [pair for each, names in zip(numbers, live, strict=True) for pair in zip(each, names, strict=True)]
    return {number: name for number, name in pairs if type(number) is int} or None


def _setter(container: Any, key: Any) -> Put:
    def put(value: Any) -> None:
        container[key] = value

    return put


def _holds_objects(value: Any) -> bool:
    return any(
        isinstance(each, (torch.Tensor, nn.Module, PerRank, Variant, np.ndarray))
        or is_stateful(each)
        or (type(each) in (list, tuple, dict, OrderedDict) and _holds_objects(_members(each)))
        for each in value
    )


def _parts_of(value: Any, path: Path, arrays: Set[Path]) -> Iterator[Path]:
    """Yield the paths of the values in a nest; those of arrays are told anyhow."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _parts_of(each, (*path, path_key(key)), arrays)
    elif type(value) in (list, tuple) and value:
        for at, each in enumerate(value):
            yield from _parts_of(each, (*path, at), arrays)
    elif path not in arrays:
        yield path


def _members(value: Any) -> Iterable[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value)


def model_names(saved: CheckpointSource, path: Path, names: Iterable[str]) -> Mapping[str, Path]:
    """Return the names of a model's tensors in the checkpoint, with where they are.

    They are at the model's own path; in a checkpoint of another tool, where that has its model, as it spells them.

    Args:
        saved: The checkpoint.
        path: Where the model is in the state.
        names: Of its tensors.
    """
    n = len(path)
    here = {str(at[n]): at for at in saved.arrays if len(at) == n + 1 and at[:n] == path}
    if saved.is_native or any(name in here for name in names):
        clean = make_cleaner(here)
        return {**{clean(name): at for name, at in here.items()}, **here}
    found = find_sections(saved.manifest)
    depth = len(found.model)
    back = dict(zip(saved.manifest.tensors, saved.arrays, strict=True))
    stored = {back[at]: ".".join(map(str, at[depth:])) or dotted(at) for at in model_paths(saved.manifest, found)}
    clean = make_cleaner(stored.values())
    return {saved.renamed(clean(name)): at for at, name in stored.items()}


def _without_state(tree: Any) -> Any:
    """Return an optimizer's nest without the tensors of its state, which go straight to their places."""
    if not isinstance(tree, dict):
        return tree
    if "state" not in tree:  # flattened: `state.{name}.{slot}`
        return {key: value for key, value in tree.items() if not (_is_array(value) and _is_flat_slot(key))}
    state = tree["state"]
    kept = {name: _plain_slots(slots) for name, slots in state.items()} if isinstance(state, dict) else state
    return {**tree, "state": kept}


def _plain_slots(slots: Any) -> Any:
    if not isinstance(slots, dict):
        return slots
    return {slot: value for slot, value in slots.items() if not _is_array(value)}


def _is_flat_slot(key: Any) -> bool:
    return isinstance(key, str) and key.startswith("state.")


def _is_array(value: Any) -> bool:
    return hasattr(value, "path") and hasattr(value, "kind")


def _leaves(tree: Any, root: Path) -> dict[Path, Any]:
    """Return the values of an optimizer's nest by path, groups as one value."""
    found: dict[Path, Any] = {}
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key == "state" and isinstance(value, dict):
                for name, slots in value.items():
                    if isinstance(slots, dict):
                        found.update({_below(root, key, name, slot): each for slot, each in slots.items()})
            else:
                found[_below(root, key)] = value
    return found


def _first(name: str, found: ModelIndex) -> str:
    return found.aliases.get(name, name)


def _below(root: Path, *keys: Any) -> Path:
    return (*root, *keys)
