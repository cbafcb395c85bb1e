"""Flatten a user's state into a tree of plain values and this rank's arrays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.checkpoint.stateful.numpy_arrays import tensor_from_numpy
from shardckpt.checkpoint.stateful.stateful import (
    PLAIN_TENSORS,
    PerRank,
    as_root,
    check_tensor,
    get_state_dict,
    has_step_hooks,
    is_capturable,
    keeps_state_elsewhere,
    require_memory,
    to_named_value,
    writes_own_parameters,
)
from shardckpt.checkpoint.stateful.tensor_bytes import find_memory, view_box
from shardckpt.checkpoint.stateful.variant import Variant
from shardckpt.checkpoint.stateful.walk import Leaf, LeafKind, is_column, map_leaves, walk
from shardckpt.encodings import tagged_json
from shardckpt.encodings.tagged_json import NamedValue, encode_array_ref, path_key
from shardckpt.errors import UnsupportedError, UsageError
from shardckpt.events.warn_user import warn_user
from shardckpt.manifest import Path, dotted
from shardckpt.native.payload import PayloadChunk
from shardckpt.plan.subclass_record import SUBCLASS
from shardckpt.readers.opened.state_tree import TensorRef, iter_refs
from shardckpt.state.adapters.flat_shard_check import FlatShardError, FlatShards, has_peers
from shardckpt.state.keys.kinds import get_metadata, is_flat_part, is_sharded_tensor, require_not_local
from shardckpt.state.keys.slots import OpaqueStateError, is_wrapper_subclass
from shardckpt.state.local.tensor_shards import TensorShards, find_wrapper, get_tensor_shards
from shardckpt.state.local.tensor_subclasses import take_apart

if TYPE_CHECKING:
    from shardckpt.state.adapters.model_index import ModelIndex
    from shardckpt.state.local.local_shards import LocalModel

OpenedStates = Mapping[int, Any]  # results of the `state_dict` of objects in a state, by the id of the object


@dataclass
class FlattenedState:
    """Flattened state on this rank, without copies: valid until the state changes."""

    tree: Any = None  # containers and plain values, equal on every rank, with arrays as `TensorRef`
    arrays: dict[Path, TensorShards] = field(default_factory=dict)  # distinct arrays by path, in the order of the tree
    ties: dict[Path, Path] = field(default_factory=dict)  # further paths of shared arrays, each with the first path
    # Values that some ranks do not have: optimizer slots for parameters that a rank has no part of.
    optional_values: dict[Path, Any] = field(default_factory=dict)
    # Per-rank values, by the path of the list with the values of all ranks.
    per_rank_values: dict[Path, Any] = field(default_factory=dict)
    # Paths of arrays that may differ between ranks; rank 0's are saved.
    buffers: set[Path] = field(default_factory=set)
    model: Path | None = None  # path of the first model; None without a model
    frozen: set[Path] = field(default_factory=set)  # paths of parameters that do not require gradients
    # Paths of optimizer states, with the FQNs of their parameters in order.
    slots: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    # Paths of optimizers whose own `state_dict()` has other keys than `state` and `param_groups`.
    optimizers: list[Path] = field(default_factory=list)
    # Paths of variants of a model's weights, with the path of the model; None if it is not saved.
    variants: dict[Path, Path | None] = field(default_factory=dict)
    modules: dict[Path, nn.Module] = field(default_factory=dict)  # modules that are saved by name, by path
    # Paths of what is saved by name, so that ranks may have different parts: models, variants, their optimizers.
    parts: list[Path] = field(default_factory=list)
    # Paths of arrays that only optimizer steps and loads write: parameters, and states of optimizers with step hooks.
    step_written: set[Path] = field(default_factory=set)

    def views(self, chunks: Sequence[PayloadChunk]) -> Iterable[torch.Tensor]:
        """Return the elements of chunks, as views of this rank's shards."""
        return (view_box(self.arrays[chunk.path], chunk.box) for chunk in chunks)

    @property
    def devices(self) -> set[torch.device]:
        """The tensors' devices."""
        return {shard.tensor.device for array in self.arrays.values() for shard in array.shards}

    def find_step_written(self) -> set[Path]:
        """Return the paths in `step_written`, without memory that other arrays or modules write."""
        own = [path for path, module in self.modules.items() if writes_own_parameters(module)]
        written = {path for path in self.step_written if not any(path[: len(each)] == each for each in own)}
        others = {each for path, array in self.arrays.items() if path not in written for each in _storages(array)}
        return {path for path in written if others.isdisjoint(_storages(self.arrays[path]))}


def _storages(array: TensorShards) -> list[int]:
    return [shard.tensor.untyped_storage()._cdata for shard in array.shards]


class LocalModels:
    """Models in a state, each indexed once; optimizers find their models here."""

    def __init__(self, state: Any) -> None:
        self._models: dict[int, tuple[nn.Module, LocalModel]] = {}
        self._paths: dict[int, Path] = {}
        self._parameters: dict[str, nn.Parameter] = {}  # outside the models
        with torch.inference_mode(False):  # in inference mode a view of a DTensor raises
            for path, kind, value in walk(state, (), lambda container, _: not is_column(container, {torch.Tensor})):
                if kind is LeafKind.MODULE:
                    self._add_model(value, path)
                elif kind is LeafKind.VARIANT:
                    self._add_model(value.of, path)
                    self._add_model(value.module, path)
                elif type(value) is nn.Parameter:
                    self._parameters[dotted(path)] = value

    def _add_model(self, model: nn.Module | None, path: Path) -> None:
        if model is not None and id(model) not in self._models:
            self._models[id(model)] = _unwrap_local_model(model, path)
            self._paths[id(model)] = path

    def __iter__(self) -> Iterator[LocalModel]:
        """Yield this rank's shards of each model, in state order."""
        return (model for _, model in self._models.values())

    def get(self, model: nn.Module, path: Path) -> LocalModel:
        """Return this rank's shards of a model."""
        if id(model) not in self._models:
            raise UnsupportedError(
                "a module that an object's `state_dict` returns cannot be saved",
                where=dotted(path),
                found=f"an object of the class {type(model).__name__}",
                fix="Return its `state_dict()` there, or add the module itself to the state.",
            )
        return self._models[id(model)][1]

    def find_index_for(self, optim: torch.optim.Optimizer) -> ModelIndex | None:
        """Return the index of the model with all an optimizer's parameters; None without one."""
        # If several models have the parameters together, or the state has some itself, the index is of all of these,
        # and its names start with paths in the state.
        from shardckpt.state.local.optim_shards import find_index  # noqa: PLC0415  (tensors alone need no engine)

        models = {dotted(self._paths[number]): each for number, each in self._models.items()}
        return find_index(models, self._parameters, optim)

    def find_foreign_for(self, optim: torch.optim.Optimizer) -> nn.Module | None:
        """Return the model under torch's wrapper with an optimizer's parameters, or None."""
        wanted = {id(p) for group in optim.param_groups for p in group["params"]}
        for module, model in self._models.values():
            if model.index is None and wanted <= {id(p) for p in module.parameters()}:
                return module
        return None


def _unwrap_local_model(module: nn.Module, path: Path) -> tuple[nn.Module, LocalModel]:
    from shardckpt.state.adapters.model_index import unwrap  # noqa: PLC0415  (tensors alone need no engine)
    from shardckpt.state.local.local_shards import local_model  # noqa: PLC0415  (as above)

    model = unwrap(module)
    try:
        return model, local_model(model)
    except FlatShardError as error:
        raise FlatShardError(".".join(filter(None, (dotted(path), str(error.where))))) from error
    except UsageError as error:
        where = ".".join(filter(None, (dotted(path), str(error.where))))
        raise type(error)(error.what, where=where, found=error.found, expected=error.expected, fix=error.fix) from error


def require_no_flat_shard(tensor: torch.Tensor, path: Path, shards: FlatShards) -> None:
    """Refuse a tensor that is a shard of a flat parameter."""
    # Under its name, other ranks have other elements.
    if shards.has_tensor(tensor):
        raise FlatShardError(dotted(path))


def view_as_dtensor(value: torch.Tensor, path: Path) -> DTensor:
    """Return a ShardedTensor as a DTensor over the same memory."""
    if is_flat_part(str(path[-1]) if path else "", value):
        raise FlatShardError(dotted(path))
    from shardckpt.state.adapters.sharded_tensor import as_dtensor  # noqa: PLC0415  (other tensors need no engine)

    return as_dtensor(dotted(path), value, None)


def require_model_for(optim: torch.optim.Optimizer, path: Path, shards: FlatShards) -> None:
    """Refuse an optimizer for flat parameters if its model is not in the state."""
    # Only the model knows the names of its slots.
    parameters = (parameter for group in optim.param_groups for parameter in group["params"])
    if any(map(shards.has_parameter, parameters)):
        raise UsageError(
            "the optimizer holds flat parameters of FullyShardedDataParallel, and their model is not in the state",
            where=dotted(path),
            fix='Save and load both together: {"model": model, "optim": optim}; or use `optim_state_dict(model, optim)`'
            " and `load_optim_state_dict`.",
        )


def flatten_state(state: Any, rank: int, world: int, opened: OpenedStates | None = None) -> FlattenedState:
    """Flatten a state, without copies or communication."""
    root = as_root(state)
    with torch.inference_mode(False), torch.no_grad():  # in inference mode a view of a DTensor raises
        return _StateFlattener(LocalModels(root), rank, world, opened or {}).run(root)


_SHOWN = 4  # maximum number of names in a warning

_ALONE_PER_RANK = frozenset({LeafKind.MODULE, LeafKind.VARIANT, LeafKind.OPTIMIZER, LeafKind.PER_RANK})


class _StateFlattener:
    def __init__(self, models: LocalModels, rank: int, world: int, opened: OpenedStates) -> None:
        self._models, self._rank, self._world, self._opened = models, rank, world, opened
        self._made = FlattenedState()
        self._known: dict[Hashable, Path] = {}
        self._places: dict[int, Path] = {}
        self._variants: list[tuple[Path, nn.Module]] = []
        self._kept: list[torch.Tensor] = []  # keeps ids unique
        self._shards = FlatShards()
        self._is_per_rank = False
        self._has_captured_steps = False  # a graph may replay an optimizer's steps, and no hook sees them

    def run(self, state: Any) -> FlattenedState:
        self._made.tree = self._visit(state, ())
        if self._has_captured_steps:
            self._made.step_written.clear()
        self._made.variants = {path: self._places.get(id(model)) for path, model in self._variants}
        return self._made

    def _visit(self, value: Any, path: Path) -> Any:
        return map_leaves(value, self._take, path, self._enter)

    def _enter(self, container: Any, path: Path) -> bool:
        if not self._is_per_rank and has_peers() and get_metadata(container).get("kind"):
            require_not_local(container, dotted(path))
        return not is_column(container)

    def _take(self, leaf: Leaf) -> Any:
        if self._is_per_rank and leaf.kind in _ALONE_PER_RANK:
            raise UnsupportedError(
                f"an object of the class {type(leaf.value).__name__} cannot be inside PerRank with other things",
                where=dotted(leaf.path),
                fix="Wrap it alone: PerRank(it); or wrap its `state_dict()`.",
            )
        return self._METHODS[leaf.kind](self, leaf.value, leaf.path)

    def _value(self, value: Any, _path: Path) -> Any:
        return value

    def _array(self, value: Any, path: Path) -> Any:
        return self._tensor(tensor_from_numpy(value, path), path, "numpy")

    def _column(self, column: dict[Any, Any], path: Path) -> Any:
        return type(column)((key, self._tensor(item, (*path, path_key(key)))) for key, item in column.items())

    def _stateful(self, value: Any, path: Path) -> Any:
        return self._visit(self._get_state_dict(value, path), path)

    def _get_state_dict(self, value: Any, path: Path) -> Any:
        state = self._opened[id(value)] if id(value) in self._opened else get_state_dict(value, path)
        held = value.held if isinstance(value, PerRank) else value
        self._has_captured_steps |= isinstance(held, torch.optim.Optimizer) and is_capturable(held)
        has_usual_keys = isinstance(state, Mapping) and {"state", "param_groups"} <= state.keys()
        if isinstance(held, torch.optim.Optimizer) and not has_usual_keys:
            self._made.optimizers.append(path)
        return state

    def _tensor(self, value: torch.Tensor, path: Path, kind: str = "tensor") -> Any:
        is_plain = type(value) in PLAIN_TENSORS
        if not is_plain and is_sharded_tensor(value):
            return self._sharded_tensor(value, path)
        if not is_wrapper_subclass(value):
            check_tensor(value, path)
        if not self._is_per_rank and value.dim() == 1:
            require_no_flat_shard(value, path, self._shards)
        try:
            array = get_tensor_shards(value)
        except UnsupportedError as error:
            raise UnsupportedError(error.what, where=dotted(path), found=error.found, fix=error.fix) from error
        self._kept.append(value)
        is_full = (is_plain or not isinstance(value, DTensor)) and 0 not in array.shape
        return self._add(path, array, _memory(array) if is_full else ("object", id(value)), kind)

    def _tensor_shards(self, value: TensorShards, path: Path) -> Any:
        return self._add(path, value, ("shards", path))

    def _sharded_tensor(self, value: torch.Tensor, path: Path) -> Any:
        """Add a ShardedTensor, which torch's wrapper returns without a mesh."""
        self._kept.append(value)
        return self._add(path, get_tensor_shards(view_as_dtensor(value, path)), ("object", id(value)))

    def _add(
        self,
        path: Path,
        array: TensorShards,
        identity: Hashable,
        kind: str = "tensor",
        *,
        is_step_written: bool = False,
    ) -> Any:
        """Add an array, or the inner tensors of a wrapper subclass, and return its place in the tree."""
        if find_wrapper(array) is not None:
            return self._add_inner(path, array, identity)
        if path in self._made.arrays or path in self._made.ties:
            raise UsageError("two keys of a dict are spelt alike", where=dotted(path))
        _check_shards(array, path)
        for shard in array.shards:
            require_memory(shard.tensor, path)
        # What a rank keeps for itself is saved apart: of memory that it shares with a buffer, rank 0's is saved.
        first = self._known.setdefault((self._is_per_rank, identity), path)
        if first == path:
            self._made.arrays[path] = array
            if is_step_written:
                self._made.step_written.add(path)
        else:
            self._made.ties[path] = first
            if not is_step_written:
                self._made.step_written.discard(first)
        return TensorRef(path, kind)

    def _add_inner(self, path: Path, array: TensorShards, identity: Hashable) -> dict[str, Any]:
        record, inner = take_apart(array, dotted(path))
        tree: dict[str, Any] = {SUBCLASS: record.encode()}
        for name, part in inner.items():
            _check_shards(part, (*path, name))
            # Inner tensors of a full tensor may be shared one by one.
            own = _memory(part) if identity is None else (identity, name)
            tree[name] = self._add((*path, name), part, own)
        return tree

    def _module(self, model: nn.Module, path: Path) -> dict[str, Any]:
        from shardckpt.state.model.module_hooks import find_unsaved  # noqa: PLC0415  (tensors alone need no engine)

        self._places.setdefault(id(model), path)
        self._made.modules[path] = model
        self._made.parts.append(path)
        if self._made.model is None:
            self._made.model = path
        tree = self._weights(model, path, is_step_written=self._models.get(model, path).index is not None)
        unsaved = find_unsaved(self._models.get(model, path).index)  # on all ranks: a `state_dict()` may be collective
        if self._rank == 0:
            _warn_of_unsaved([name for name in unsaved if name not in tree], path)
        frozen = [tree[name] for name in self._models.get(model, path).frozen]
        self._made.frozen |= {ref.path for part in frozen for ref in iter_refs(part)} & self._made.arrays.keys()
        return tree

    def _variant(self, variant: Variant, path: Path) -> dict[str, Any]:
        self._variants.append((path, variant.of))
        self._made.parts.append(path)
        if variant.module is not None:
            tree = self._weights(variant.module, path)
        else:
            tree = {}
            for name, array in variant.arrays(self._models.get(variant.of, path)).items():
                tree[name] = self._add((*path, name), array, ("variant", path, name))
        return {**tree, **{name: self._visit(value, (*path, name)) for name, value in variant.extras.items()}}

    def _weights(self, model: nn.Module, path: Path, *, is_step_written: bool = False) -> dict[str, Any]:
        weights = self._models.get(model, path)
        tree: dict[str, Any] = {}
        for name in weights.names:
            place = (*path, name)
            if name in weights.arrays:
                array = weights.arrays[name]
                _check_shards(array, place)
                has_all = len(array.shards) == 1 and array.shards[0].box.size == array.shape and array.shape
                # Of a small sharded one other ranks may have nothing, so they cannot know its memory.
                is_full = has_all and name not in weights.sharded
                identity = _memory(array) if is_full else ("model", id(weights), name)
                is_parameter = name not in weights.buffers
                tree[name] = self._add(place, array, identity, is_step_written=is_step_written and is_parameter)
                if name in weights.buffers and name not in weights.sharded:
                    self._made.buffers |= {ref.path for ref in iter_refs(tree[name])}
            elif name in weights.aliases:
                tree[name] = self._tie(tree[weights.aliases[name]], len(path), name)
            elif name in weights.extra:
                tree[name] = self._visit(weights.extra[name].get_extra_state(), place)
        return tree

    def _tie(self, tree: Any, depth: int, name: str) -> Any:
        """Return a parameter's tree under another of its names."""
        if not isinstance(tree, TensorRef):
            return {key: self._tie(item, depth, name) if key != SUBCLASS else item for key, item in tree.items()}
        place = (*tree.path[:depth], name, *tree.path[depth + 1 :])
        self._made.ties[place] = self._made.ties.get(tree.path, tree.path)
        return TensorRef(place)

    def _optimizer(self, optim: torch.optim.Optimizer, path: Path) -> Any:
        if keeps_state_elsewhere(optim):
            return self._stateful(optim, path)
        from shardckpt.state.adapters import torch_fsdp1  # noqa: PLC0415  (tensors alone need no engine)
        from shardckpt.state.local.optim_shards import (  # noqa: PLC0415  (as above)
            find_unsaved_values,
            is_saved_as_returned,
            local_optimizer,
        )

        index = self._models.find_index_for(optim)
        if index is not None and is_saved_as_returned(index, optim):
            index = None
        if index is None:
            model = self._models.find_foreign_for(optim)
            if model is None:
                if not self._is_per_rank:
                    require_model_for(optim, path, self._shards)
                return self._stateful(optim, path)
            return self._visit(torch_fsdp1.full_optim_state(model, optim, offload=False, first_only=False), path)
        try:
            taken = local_optimizer(index, optim)
        except (OpaqueStateError, UnsupportedError) as error:
            where = f"{dotted(path)}.{error.where}"
            raise type(error)(
                error.what, where=where, found=error.found, expected=error.expected, fix=error.fix
            ) from error
        self._has_captured_steps |= is_capturable(optim)
        for (name, slot), array in taken.arrays.items():
            place = (*path, "state", name, slot)
            tree = self._add(place, array, ("optimizer", place), is_step_written=has_step_hooks(optim))
            if not isinstance(tree, TensorRef):
                self._made.optional_values[place] = tree
        for (name, slot), value in taken.values.items():
            place = (*path, "state", name, slot)
            self._made.optional_values[place] = self._visit(value, place)
        root = (*path, "state")
        self._made.slots[root] = taken.names
        self._made.parts.append(path)
        unsaved = find_unsaved_values(optim)  # on all ranks, as above
        if unsaved:
            raise UnsupportedError(
                "values that an optimizer of a sharded model has besides slots and groups cannot be saved with it",
                where=_list_some(unsaved, path),
                fix="Put `optim_state_dict(model, optim)` into the state to leave them out, and add those to keep under"
                " names of their own.",
            )
        groups = self._visit(taken.groups, (*path, "param_groups"))
        return {"state": {}, "param_groups": groups}

    def _per_rank(self, value: PerRank, path: Path) -> list[None]:
        was_per_rank, self._is_per_rank = self._is_per_rank, True
        self._made.per_rank_values[path] = self._visit(self._get_state_dict(value, path), (*path, self._rank))
        self._is_per_rank = was_per_rank
        return [None] * self._world

    # A table of bound methods would be a cycle, and tensors would stay until the next collection.
    _METHODS: ClassVar[Mapping[LeafKind, Callable[..., Any]]] = {
        LeafKind.VALUE: _value,
        LeafKind.TENSOR: _tensor,
        LeafKind.MODULE: _module,
        LeafKind.VARIANT: _variant,
        LeafKind.OPTIMIZER: _optimizer,
        LeafKind.PER_RANK: _per_rank,
        LeafKind.STATEFUL: _stateful,
        LeafKind.CONTAINER: _column,
        LeafKind.ARRAY: _array,
        LeafKind.SHARDS: _tensor_shards,
    }


def _warn_of_unsaved(names: Sequence[str], path: Path) -> None:
    if names:
        warn_user(
            "values of a `state_dict()` other than parameters, buffers and extra state are not saved:"
            f" {_list_some(names, path)}. Put the modules that have them into the state too, each as"
            " shardckpt.PerRank(module)."
        )


def _list_some(names: Sequence[str], path: Path) -> str:
    shown = ", ".join(dotted((*path, name)) for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _check_shards(array: TensorShards, path: Path) -> None:
    if find_wrapper(array) is None:
        for shard in array.shards:
            check_tensor(shard.tensor, path)


def _memory(array: TensorShards) -> Hashable:
    """Return what arrays with the same memory have in common; None for a wrapper subclass, which has none."""
    return None if find_wrapper(array) is not None else find_memory(array.shards[0].tensor)


def encoded(tree: Any, number: Callable[[TensorRef], int], path: Path = ()) -> object:
    """Return a state tree as tagged JSON."""

    def leaf(value: object, at: Path) -> NamedValue | None:
        del at
        return to_named_value(value)

    def encode_ref(ref: TensorRef) -> object:
        return encode_array_ref(number(ref), ref.kind)

    return tagged_json.encode(tree, path, leaf, {TensorRef: encode_ref})
