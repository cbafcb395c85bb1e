"""Plan a load: visit a state, and plan a source for each value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from shardckpt.checkpoint.load.load_plan import (
    LoadOptions,
    LoadPlan,
    LoadPlanBuilder,
    Put,
    Taker,
    model_names,
)
from shardckpt.checkpoint.load.source import CheckpointSource
from shardckpt.checkpoint.load.stateful_fill import FilledMemory, hand_over
from shardckpt.checkpoint.stateful.flatten import (
    LocalModels,
    require_no_flat_shard,
    view_as_dtensor,
)
from shardckpt.checkpoint.stateful.numpy_arrays import check_array, has_torch_dtype, has_torch_strides, share_memory
from shardckpt.checkpoint.stateful.stateful import (
    PerRank,
    Stateful,
    check_tensor,
    get_state_dict,
    keeps_state_elsewhere,
)
from shardckpt.checkpoint.stateful.variant import EXTRAS, Variant
from shardckpt.checkpoint.stateful.walk import LeafKind, find_kind, require_depth, walk
from shardckpt.encodings.tagged_json import path_key
from shardckpt.errors import UsageError
from shardckpt.manifest import Path, TensorEntry, dotted
from shardckpt.plan.naming.sections import find_sections
from shardckpt.readers.opened.state_tree import ForeignValue, TensorRef, iter_refs, read_numpy
from shardckpt.state.adapters.flat_shard_check import FlatShards
from shardckpt.state.keys.kinds import is_sharded_tensor
from shardckpt.state.keys.slots import is_wrapper_subclass
from shardckpt.state.local.quant_states import QuantState
from shardckpt.state.local.tensor_shards import TensorShards, get_tensor_shards


def plan_load(
    state: Any, saved: CheckpointSource, options: LoadOptions, rank: int, world: int, models: LocalModels
) -> LoadPlan:
    """Plan a load: compare a state with a checkpoint, without changing the state."""
    builder = LoadPlanBuilder(saved, options)
    planner = _LoadPlanner(builder, rank, world, models)
    # Once, and not for each local tensor; new state of an optimizer is for training, also in inference mode.
    with torch.inference_mode(False), torch.no_grad():
        planner.visit(state, (), _refuse)
        planner.plan_objects()
        builder.check_shared_memory()
    plan = builder.plan
    if options.strict and options.takes_all:
        for path in planner.find_unexpected():
            is_of_model = any(path[:n] in planner.models for n in range(len(path)))
            (plan.of_others if is_of_model else plan.unexpected).append(path)
    if options.strict:
        plan.problems += [f"`include`: nothing is called {glob!r}" for glob in builder.unmatched_globs()]
    return plan


def _refuse(value: Any) -> None:
    """Raise the error for a value outside a container, which cannot be replaced."""
    kind = type(value).__name__
    raise UsageError(
        "a plain value cannot be loaded in place",
        found="None"
        if value is None
        else f"an empty {kind}"
        if type(value) in (dict, list, tuple) and not value
        else f"a value of type {kind}",
        expected="a state that holds models, optimizers, tensors or values by name",
        fix="Omit the state to get the saved values: load(path).",
    )


class _LoadPlanner:
    """Visits a state and plans a source for each value."""

    def __init__(self, builder: LoadPlanBuilder, rank: int, world: int, models: LocalModels) -> None:
        self._builder, self._rank, self._world, self._models = builder, rank, world, models
        self._opened: set[Path] = set()  # paths of lists whose entries are visited
        self.models: set[Path] = set()  # paths of models and variants, and where the checkpoint has a model
        self._shards = FlatShards()
        self._objects: list[tuple[int, Stateful, Path]] = []  # objects with tensors, each with the index of its value

    def find_unexpected(self) -> Iterator[Path]:
        """Yield the paths that only the checkpoint has."""
        taken = self._builder.plan.taken
        for saved in self._builder.source.paths:
            for path in self._parts(saved):
                if path not in taken and not any(path[:n] in taken for n in range(len(path))):
                    yield path

    def _parts(self, path: Path) -> Iterable[Path]:
        """Yield a path, or the entry paths for a list with objects in the state, which is one saved value."""
        if path not in self._opened:
            return (path,)
        saved, _ = self._builder.source.find(path)
        return _iter_parts(saved, path, set(self._builder.source.arrays))

    def visit(self, value: Any, path: Path, put: Put) -> None:
        """Plan to load a value and everything in it."""
        self._METHODS[find_kind(value)](self, value, path, put)

    def _tensor(self, value: torch.Tensor, path: Path, _put: Put) -> None:
        if is_sharded_tensor(value):
            value = view_as_dtensor(value, path)
        else:
            if not is_wrapper_subclass(value):
                check_tensor(value, path)
            require_no_flat_shard(value, path, self._shards)
        self._builder.add_array(path, path, get_tensor_shards(value))

    def _container(self, value: Any, path: Path, put: Put) -> None:
        require_depth(path)
        if isinstance(value, dict) and value:
            for key, item in value.items():
                self.visit(item, (*path, path_key(key)), _setter(value, key))
        elif not isinstance(value, dict) and _has_objects(value):
            self._sequence(value, path, put)
        else:
            self._value(value, path, put)

    def _array(self, value: np.ndarray[Any, Any], path: Path, put: Put) -> None:
        """Plan to load an array: in place if the saved one fits, else as replacement."""
        check_array(value, path)
        is_fillable = value.flags.writeable and value.size and value.dtype.isnative
        is_fillable = is_fillable and has_torch_dtype(value) and has_torch_strides(value)
        entry = self._builder.source.arrays.get(path)
        if entry is None and (found := self._pickled_array(path)) is not None:
            fits = found.shape == value.shape and (found.dtype.name == value.dtype.name or self._builder.options.cast)
            can_fill = bool(value.flags.writeable) and fits
            self._value(value, path, partial(np.copyto, value, casting="unsafe") if can_fill else put)
        elif is_fillable and (put is _refuse or entry is None or self._fits(value, entry)):
            self._builder.add_array(path, path, get_tensor_shards(share_memory(value)))
        elif entry is not None and self._builder.options.is_own_only and self._builder.source.is_elsewhere(entry):
            self._builder.plan.taken.add(path)
        else:
            self._value(value, path, put)

    def _pickled_array(self, path: Path) -> np.ndarray[Any, Any] | None:
        """Return the array that a pickle has at a path, among its other values."""
        saved = self._builder.source.find(path)[0]
        found = read_numpy(saved.value) if isinstance(saved, ForeignValue) else None
        return found if isinstance(found, np.ndarray) else None

    def _fits(self, value: np.ndarray[Any, Any], entry: TensorEntry) -> bool:
        """Return True if an array is filled in place, from a tensor or an array with its shape and dtype."""
        saved = self._builder.source.find(entry.path)[0]
        has_form = entry.shape == value.shape and (entry.dtype == value.dtype.name or self._builder.options.cast)
        return has_form or not (isinstance(saved, TensorRef) and saved.kind == "numpy")

    def _sequence(self, value: Any, path: Path, put: Put) -> None:
        saved, is_there = self._builder.source.find(path)
        if _is_row(saved, len(value)) and not _has_objects(value, _PLAIN_KINDS):
            self._value(value, path, put)  # one value of a pickle, such as the state of NumPy's generator
            return
        self._opened.add(path)
        if is_there and isinstance(saved, (list, tuple)) and len(saved) != len(value):
            self._builder.add_problem(
                path, f"size mismatch for {dotted(path)}: found {len(saved)} entries, expected {len(value)}"
            )
        held = value if isinstance(value, list) else list(value)
        for at, item in enumerate(value):
            self.visit(item, (*path, at), put if held is not value and put is _refuse else _setter(held, at))
        if isinstance(value, tuple) and put is not _refuse:
            self._builder.plan.values.append(Taker(path, None, lambda _: put(tuple(held))))

    def _value(self, value: Any, path: Path, put: Put) -> None:
        if put is _refuse:
            put(value)
        self._builder.add_value(path, put)

    def _stateful(self, value: Stateful, path: Path, _put: Put) -> None:
        """Plan to fill an object's tensors in place, and to pass it the complete state."""
        saved, _ = self._builder.source.find(path)
        if next(iter_refs(saved), None) is None or not self._builder.wants(path):
            self._builder.add_value(path, value.load_state_dict)
            return
        self._builder.plan.taken.add(path)
        self._objects.append((len(self._builder.plan.values), value, path))
        self._builder.plan.values.append(Taker(path, saved, value.load_state_dict))

    def plan_objects(self) -> None:
        """Plan the objects' tensors, after all that the state itself names, which are filled in any case."""
        if not self._objects:
            return
        self._builder.plan.is_collective = True
        filled = FilledMemory(self._builder.plan.arrays)
        for at, value, path in self._objects:
            self._plan_object(at, value, path, filled)

    def _plan_object(self, at: int, value: Stateful, path: Path, filled: FilledMemory) -> None:
        taker = self._builder.plan.values[at]
        handover = hand_over(taker.tree, get_state_dict(value, path), path, self._builder.source.arrays, filled)
        for fill in handover.fills:
            require_no_flat_shard(fill.tensor, fill.path, self._shards)
            self._builder.add_array(fill.path, fill.source, get_tensor_shards(fill.tensor))
        for place in handover.missing:
            self._builder.add_missing(place)
        for place in handover.unplaced if self._builder.options.strict else ():
            self._builder.add_problem(
                place,
                f"no tensor for {dotted(place)}: {type(value).__name__}.state_dict() has sharded tensors, but none with"
                " this name, so its sharding is unknown (create the tensor before the load: torch's"
                " `get_optimizer_state_dict` creates an optimizer's state)",
            )
        self._builder.plan.values[at] = taker._replace(tree=handover.tree)

    def _variant(self, variant: Variant, path: Path, put: Put) -> None:
        self.models.add(path)
        if variant.module is not None:
            self._module(variant.module, path, put)
        else:
            for name, array in variant.arrays(self._models.get(variant.of, path)).items():
                self._builder.add_array((*path, name), (*path, name), array)
        for name, value in variant.extras.items():
            self.visit(value, (*path, name), _refuse)
        self._builder.plan.taken |= {(*path, name) for name in EXTRAS}

    def _tensor_shards(self, value: TensorShards, path: Path, _put: Put) -> None:
        self._builder.add_array(path, path, value)

    def _module(self, module: nn.Module, path: Path, _put: Put) -> None:
        from shardckpt.state.model.module_hooks import find_quantized  # noqa: PLC0415  (tensors alone need no engine)

        saved = self._builder.source
        self.models |= {path} if saved.is_native else {path, find_sections(saved.manifest).model}
        model = self._models.get(module, path)
        names = model_names(self._builder.source, path, (*model.arrays, *model.aliases))
        others: dict[str, list[str]] = {}
        for alias, first in model.aliases.items():
            others.setdefault(first, []).append(alias)
        quantized = set(find_quantized(model.index))
        without: set[str] = set()  # scales that an older checkpoint does not have
        for state in model.quant_states:
            if any(name in names for name in state.names):
                quantized.discard(state.weight)
                self._quant_text(state, path, names)
                without.add(state.text_name)
            else:
                without.update(state.names)
        for name, array in model.arrays.items():
            if name in without:
                continue
            if name in quantized and self._builder.require_equal((*path, name), names.get(name, (*path, name)), array):
                continue
            if name in others:
                spellings = {(*path, each): names.get(each) for each in (name, *others[name])}
                self._builder.add_shared_array(spellings, array)
            else:
                self._builder.add_array((*path, name), names.get(name, (*path, name)), array)
        self._builder.plan.taken |= {names[alias] for alias in model.aliases if alias in names}
        missing = {(*path, name) for name in model.arrays} & self._builder.plan.missing
        if missing and len(missing) == len(model.arrays) and any(map(self._builder.wants, missing)):
            self._builder.plan.unmatched.append(path)
        for name, owner in model.extra.items():
            self._builder.add_value((*path, name), owner.set_extra_state)
        self._builder.plan.is_collective |= model.index is None
        self._builder.plan.after.append(model.finish)

    def _quant_text(self, state: QuantState, path: Path, names: Mapping[str, Path]) -> None:
        """Compare the form of a packed weight, and plan to load what its text has."""
        if not state.text_name:
            return
        place = (*path, state.text_name)
        saved = self._builder.read_bytes(place, names.get(state.text_name, place))
        if saved is None:
            return
        if (difference := state.find_difference(saved)) is not None:
            self._builder.add_problem(
                place, f"{dotted((*path, state.weight))} is quantized in another way: {difference}"
            )
        else:
            self._builder.plan.after.append(partial(state.load_text, saved))

    def _optimizer(self, optim: Any, path: Path, put: Put) -> None:
        if keeps_state_elsewhere(optim):
            self._stateful(optim, path, put)
            return
        from shardckpt.checkpoint.load.optim_load_plan import (  # noqa: PLC0415  (tensors alone need no engine)
            OptimizerLoadPlanner,
        )

        OptimizerLoadPlanner(self._builder, self._models, self._shards).plan(optim, path)

    def _per_rank(self, value: PerRank, path: Path, _put: Put) -> None:
        saved, is_there = self._builder.source.find(path)
        if not is_there:
            self._builder.add_missing(path)
            return
        self._builder.plan.taken.add(path)
        if not self._builder.wants(path):
            return
        if not isinstance(saved, list):
            self._builder.add_problem(
                path, f"kind mismatch for {dotted(path)}: the checkpoint has no per-rank state there"
            )
        elif len(saved) == self._world:
            self._builder.plan.values.append(Taker(path, saved[self._rank], value.load_state_dict))
        elif type(value).load_other_world is PerRank.load_other_world:
            text = f"{dotted(path)} was saved per rank by another number of ranks"
            found_text = f"found {len(saved)}, expected {self._world}"
            self._builder.add_problem(
                path, f"{text}: {found_text} (leave it out of the state; `load(path)` returns it for all ranks)"
            )
        else:
            self._builder.plan.values.append(Taker(path, saved, self._other_world(value, path)))

    def _other_world(self, value: PerRank, path: Path) -> Put:
        def take(states: list[Any]) -> None:
            if not value.load_other_world(states, self._rank, self._world):
                raise UsageError(
                    "this was saved per rank, by another number of ranks",
                    where=dotted(path),
                    found=f"{len(states)} ranks",
                    expected=self._world,
                    fix="Leave it out of the state, and load it with `load(path)`.",
                )

        return take

    # A table of bound methods would be a cycle, and tensors would stay until the next collection.
    _METHODS: ClassVar[Mapping[LeafKind, Callable[..., None]]] = {
        LeafKind.VALUE: _value,
        LeafKind.TENSOR: _tensor,
        LeafKind.MODULE: _module,
        LeafKind.VARIANT: _variant,
        LeafKind.OPTIMIZER: _optimizer,
        LeafKind.PER_RANK: _per_rank,
        LeafKind.STATEFUL: _stateful,
        LeafKind.ARRAY: _array,
        LeafKind.SHARDS: _tensor_shards,
        LeafKind.CONTAINER: _container,
    }


def _setter(container: Any, key: Any) -> Put:
    def put(value: Any) -> None:
        container[key] = value

    return put


_PLAIN_KINDS = frozenset({LeafKind.VALUE, LeafKind.ARRAY})


def _has_objects(value: Any, plain: Set[LeafKind] = frozenset({LeafKind.VALUE})) -> bool:
    return any(leaf.kind not in plain for leaf in walk(value))


def _is_row(saved: object, length: int) -> bool:
    """Return True for a list or tuple in a pickle that has this length, and no tensors."""
    return isinstance(saved, ForeignValue) and isinstance(saved.value, (list, tuple)) and len(saved.value) == length


def _iter_parts(value: Any, path: Path, arrays: Set[Path]) -> Iterator[Path]:
    """Yield the paths in a tree that lead to values, without arrays."""
    if isinstance(value, dict) and value:
        for key, part in value.items():
            yield from _iter_parts(part, (*path, path_key(key)), arrays)
    elif type(value) in (list, tuple) and value:
        for at, part in enumerate(value):
            yield from _iter_parts(part, (*path, at), arrays)
    elif path not in arrays:
        yield path
