"""From the objects that a user holds to a nest of plain values and the arrays of which parts lie on this rank."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.checkpoint.stateful.stateful import (
    PerRank,
    array_of,
    check_tensor,
    get_state_dict,
    is_optimizer,
    is_stateful,
    named,
)
from shardckpt.checkpoint.stateful.variant import Variant
from shardckpt.errors import UnsupportedError, UsageError
from shardckpt.format.encodings import tagged_json
from shardckpt.format.encodings.tagged_json import ArrayRef, NamedValue, path_key
from shardckpt.manifest import Path, dotted
from shardckpt.state.adapters import torch_fsdp1
from shardckpt.state.adapters.flat_shard_check import FlatShardError, FlatShards, has_peers
from shardckpt.state.adapters.model_index import ModelIndex
from shardckpt.state.adapters.sharded_tensor import as_dtensor
from shardckpt.state.keys.kinds import is_flat_part, is_sharded_tensor, note_of, require_not_local
from shardckpt.state.keys.slots import OpaqueStateError
from shardckpt.state.local.local_shards import LocalModel, TensorShards, get_tensor_shards, local_model
from shardckpt.state.local.optim_shards import local_optimizer
from shardckpt.state.optim.optim_state_dict import ForeignParameterError, map_optimizer_params


class ArrayAt(NamedTuple):
    """Stands in a captured nest for an array.

    Attributes:
        path: Where it sits.
        kind: `tensor` or `numpy`.
    """

    path: Path
    kind: str = "tensor"


@dataclass
class Captured:
    """A state as it is on this rank. Nothing in it is copied: it is valid until the state changes.

    Attributes:
        nest: Containers and plain values, the same on every rank; arrays as `ArrayAt`.
        arrays: Each array once, in the order of the nest.
        ties: Further path of an array to its first.
        loose: Values that a rank may lack: what optimizers keep of parameters of which it has no part.
        own: What this rank alone has, by the path of the list of all ranks'.
        buffers: Arrays of which ranks may have different ones; the first rank's counts.
        model: Where the first model is; None where there is none.
        frozen: Parameters that take no part in gradients.
        slots: Where optimizers keep their state, with the names of their parameters in order.
        variants: Where further weights of a model are, with where that is; None where it is not saved.
    """

    nest: Any = None
    arrays: dict[Path, TensorShards] = field(default_factory=dict)
    ties: dict[Path, Path] = field(default_factory=dict)
    loose: dict[Path, Any] = field(default_factory=dict)
    own: dict[Path, Any] = field(default_factory=dict)
    buffers: set[Path] = field(default_factory=set)
    model: Path | None = None
    frozen: set[Path] = field(default_factory=set)
    slots: dict[Path, tuple[str, ...]] = field(default_factory=dict)
    variants: dict[Path, Path | None] = field(default_factory=dict)


class Models:
    """The models of a state, each looked at once; optimizers find theirs here.

    Args:
        state: As the user handed it in.
    """

    def __init__(self, state: Any) -> None:
        self._found: dict[int, tuple[nn.Module, LocalModel]] = {}
        self._look(state, ())

    def _look(self, value: Any, path: Path) -> None:
        if isinstance(value, nn.Module):
            if id(value) not in self._found:
                self._found[id(value)] = (value, _local_model(value, path))
        elif isinstance(value, Variant):
            self._look(value.of, path)
            self._look(value.module, path)
        elif isinstance(value, (Mapping, list, tuple)) and len(path) < tagged_json.MAX_DEPTH:
            for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
                self._look(each, (*path, path_key(key)))

    def __iter__(self) -> Iterator[LocalModel]:
        """Yield what lies here of each model, in the order of the state."""
        return (found for _, found in self._found.values())

    def of(self, model: nn.Module) -> LocalModel:
        """Return what of a model lies here."""
        return self._found[id(model)][1]

    def description_for(self, optim: torch.optim.Optimizer) -> ModelIndex | None:
        """Return the one model that has all parameters of an optimizer; None where no single one has."""
        for _, model in self._found.values():
            if model.found is not None:
                try:
                    map_optimizer_params(model.found, optim)
                except ForeignParameterError:
                    continue
                return model.found
        return None

    def foreign_for(self, optim: torch.optim.Optimizer) -> nn.Module | None:
        """Return the model under torch's own wrapper that has an optimizer's parameters; None where none has."""
        wanted = {id(p) for group in optim.param_groups for p in group["params"]}
        for module, model in self._found.values():
            if model.found is None and wanted <= {id(p) for p in module.parameters()}:
                return module
        return None


def _local_model(model: nn.Module, path: Path) -> LocalModel:
    try:
        return local_model(model)
    except FlatShardError as error:
        raise FlatShardError(".".join(filter(None, (dotted(path), str(error.where))))) from error


def require_no_flat_shard(tensor: torch.Tensor, path: Path, shards: FlatShards) -> None:
    """Refuse a tensor that is a rank's shard of a flat parameter: other ranks have other elements under its name.

    Args:
        tensor: As the user handed it in.
        path: Where it is in the state.
        shards: The flat parameters of this process.

    Raises:
        FlatShardError: It is one.
    """
    if shards.has_tensor(tensor):
        raise FlatShardError(dotted(path))


def as_rows(value: torch.Tensor, path: Path) -> DTensor:
    """Return a ShardedTensor as a DTensor over the same memory.

    Args:
        value: The ShardedTensor.
        path: Where it is in the state.

    Raises:
        FlatShardError: It is a flat parameter of a LOCAL state.
        ShardedTensorError: It is cut in another way than into rows.
    """
    if is_flat_part(str(path[-1]) if path else "", value):
        raise FlatShardError(dotted(path))
    return as_dtensor(dotted(path), value, None)


def require_model_of(optim: torch.optim.Optimizer, path: Path, shards: FlatShards) -> None:
    """Refuse an optimizer of flat parameters whose model is not in the state: nothing names what it keeps.

    Args:
        optim: The optimizer.
        path: Where it is in the state.
        shards: The flat parameters of this process.

    Raises:
        UsageError: It is one.
    """
    parameters = (each for group in optim.param_groups for each in group["params"])
    if has_peers() and any(map(shards.has_parameter, parameters)):
        raise UsageError(
            "the optimizer holds flat parameters of FullyShardedDataParallel, and their model is not in the state",
            where=dotted(path),
            fix='Save and load both together: {"model": model, "optim": optim}; or use `optim_state_dict(model, optim)`'
            " and `load_optim_state_dict`.",
        )


def capture(state: Any, rank: int, world: int) -> Captured:
    """Look at everything in a state; nothing is copied or moved.

    Args:
        state: Modules, optimizers, objects with `state_dict` and `load_state_dict`, tensors and plain values, in dicts
            and lists.
        rank: This rank.
        world: How many there are.

    Raises:
        UnsupportedError: Something that cannot be saved; the message names its dotted path.
    """
    return _Capture(Models(state), rank, world).run(state)


class _Capture:
    def __init__(self, models: Models, rank: int, world: int) -> None:
        self._models, self._rank, self._world = models, rank, world
        self._made = Captured()
        self._known: dict[Hashable, Path] = {}
        self._places: dict[int, Path] = {}
        self._variants: list[tuple[Path, nn.Module]] = []
        self._kept: list[torch.Tensor] = []  # so that no identity is used twice
        self._shards = FlatShards()
        self._is_own = False

    def run(self, state: Any) -> Captured:
        root = dict(state) if isinstance(state, Mapping) and not isinstance(state, dict) else state
        self._made.nest = self._visit(root, ())
        self._made.variants = {path: self._places.get(id(model)) for path, model in self._variants}
        return self._made

    def _visit(self, value: Any, path: Path) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        kind = type(value)
        if kind is dict or kind is OrderedDict:
            self._check_depth(path)
            if not self._is_own and note_of(value).get("kind") and has_peers():
                require_not_local(value, dotted(path))
            return kind((key, self._visit(each, (*path, path_key(key)))) for key, each in value.items())
        if kind is list or kind is tuple:
            self._check_depth(path)
            return kind(self._visit(each, (*path, at)) for at, each in enumerate(value))
        if self._is_own and isinstance(value, (nn.Module, torch.optim.Optimizer, Variant, PerRank)):
            raise UnsupportedError(
                f"an object of the class {type(value).__name__} cannot be inside PerRank with other things",
                where=dotted(path),
                fix="Wrap it alone: PerRank(it); or wrap its `state_dict()`.",
            )
        if isinstance(value, nn.Module):
            return self._module(value, path)
        if isinstance(value, Variant):
            return self._variant(value, path)
        if is_optimizer(value):
            return self._optimizer(value, path)
        if isinstance(value, PerRank):
            return self._per_rank(value, path)
        if is_stateful(value):
            return self._visit(get_state_dict(value, path), path)
        if isinstance(value, np.ndarray):
            return self._tensor(array_of(value, path), path, "numpy")
        return value

    def _check_depth(self, path: Path) -> None:
        if len(path) > tagged_json.MAX_DEPTH:
            raise UnsupportedError("nested too deep, or holds itself", where=dotted(path[:8]))

    def _tensor(self, value: torch.Tensor, path: Path, kind: str = "tensor") -> ArrayAt:
        if is_sharded_tensor(value):
            return self._sharded_tensor(value, path)
        check_tensor(value, path)
        if not self._is_own:
            require_no_flat_shard(value, path, self._shards)
        try:
            array = get_tensor_shards(value)
        except UnsupportedError as error:
            raise UnsupportedError(error.what, where=dotted(path), found=error.found, fix=error.fix) from error
        self._kept.append(value)
        is_whole = not isinstance(value, DTensor) and value.numel()
        self._add(path, array, _memory(array) if is_whole else ("object", id(value)))
        return ArrayAt(path, kind)

    def _sharded_tensor(self, value: torch.Tensor, path: Path) -> ArrayAt:
        """Take what torch's wrapper gives where it has no mesh."""
        self._kept.append(value)
        self._add(path, get_tensor_shards(as_rows(value, path)), ("object", id(value)))
        return ArrayAt(path)

    def _add(self, path: Path, array: TensorShards, identity: Hashable) -> None:
        if path in self._made.arrays or path in self._made.ties:
            raise UsageError("two keys of a dict are spelt alike", where=dotted(path))
        first = self._known.setdefault(identity, path)
        if first == path:
            self._made.arrays[path] = array
        else:
            self._made.ties[path] = first

    def _module(self, model: nn.Module, path: Path) -> dict[str, Any]:
        self._places.setdefault(id(model), path)
        if self._made.model is None:
            self._made.model = path
        nest = self._weights(model, path)
        self._made.frozen |= {(*path, name) for name in self._models.of(model).frozen} & self._made.arrays.keys()
        return nest

    def _variant(self, variant: Variant, path: Path) -> dict[str, Any]:
        self._variants.append((path, variant.of))
        if variant.module is not None:
            nest = self._weights(variant.module, path)
        else:
            nest = {}
            for name, array in variant.arrays(self._models.of(variant.of)).items():
                self._add((*path, name), array, ("variant", path, name))
                nest[name] = ArrayAt((*path, name))
        return {**nest, **{name: self._visit(value, (*path, name)) for name, value in variant.extras.items()}}

    def _weights(self, model: nn.Module, path: Path) -> dict[str, Any]:
        found = self._models.of(model)
        nest: dict[str, Any] = {}
        for name in found.names:
            place = (*path, name)
            if name in found.arrays:
                array = found.arrays[name]
                if array.shards and array.shards[0].tensor.is_meta:
                    check_tensor(array.shards[0].tensor, place)
                is_whole = len(array.shards) == 1 and array.shards[0].box.size == array.shape and array.shape
                self._add(place, array, _memory(array) if is_whole else ("model", id(found), name))
                nest[name] = ArrayAt(place)
                if name in found.buffers:
                    self._made.buffers.add(place)
            elif name in found.aliases:
                first = (*path, found.aliases[name])
                self._made.ties[place] = self._made.ties.get(first, first)
                nest[name] = ArrayAt(place)
            elif name in found.extra:
                nest[name] = self._visit(found.extra[name].get_extra_state(), place)
        return nest

    def _optimizer(self, optim: torch.optim.Optimizer, path: Path) -> Any:
        found = self._models.description_for(optim)
        if found is None:
            model = self._models.foreign_for(optim)
            if model is None:
                if not self._is_own:
                    require_model_of(optim, path, self._shards)
                return self._visit(get_state_dict(optim, path), path)
            return self._visit(torch_fsdp1.whole_optim_state(model, optim, offload=False, first_only=False), path)
        try:
            taken = local_optimizer(found, optim)
        except OpaqueStateError as error:
            where = f"{dotted(path)}.{error.where}"
            raise OpaqueStateError(error.what, where=where, found=error.found, fix=error.fix) from error
        for (name, slot), array in taken.arrays.items():
            place = (*path, "state", name, slot)
            self._add(place, array, ("optimizer", place))
        for (name, slot), value in taken.values.items():
            place = (*path, "state", name, slot)
            self._made.loose[place] = self._visit(value, place)
        root = (*path, "state")
        self._made.slots[root] = taken.names
        groups = self._visit(taken.groups, (*path, "param_groups"))
        return {"state": {}, "param_groups": groups}

    def _per_rank(self, value: PerRank, path: Path) -> list[None]:
        was_own, self._is_own = self._is_own, True
        self._made.own[path] = self._visit(get_state_dict(value, path), (*path, self._rank))
        self._is_own = was_own
        return [None] * self._world


def _memory(array: TensorShards) -> Hashable:
    own = array.shards[0].tensor
    return (str(own.device), own.data_ptr(), tuple(own.shape), own.stride(), own.dtype)


def encoded(nest: Any, number: Callable[[ArrayAt], int], path: Path = ()) -> object:
    """Return a captured nest as tagged JSON.

    Args:
        nest: Of a capture.
        number: Gives each array its index.
        path: Where it sits.

    Raises:
        UnsupportedError: A value that the format has no form for; the message names its dotted path.
    """

    def leaf(value: object, at: Path) -> ArrayRef | NamedValue | None:
        del at
        return ArrayRef(number(value), value.kind) if isinstance(value, ArrayAt) else named(value)

    return tagged_json.encode(nest, path, leaf)
