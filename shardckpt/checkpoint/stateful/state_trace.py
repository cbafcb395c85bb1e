"""Trace a state: its tensors, its values and its structure key.

States with the same key have the same plan, names and layout, whatever their tensors and values are. Tracing is much
faster than flattening, because it describes tensors in columns, not one by one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardckpt.checkpoint.stateful.stateful import PLAIN_TENSORS, get_state_dict, has_memory
from shardckpt.checkpoint.stateful.tensor_bytes import find_memory
from shardckpt.checkpoint.stateful.walk import LeafKind, is_column, walk
from shardckpt.manifest import Path
from shardckpt.plan.optim.param_groups import NAMES
from shardckpt.state.adapters.flat_shard_check import FlatShards, has_group, has_peers
from shardckpt.state.adapters.model_index import (
    is_fully_sharded,
    is_plain_module,
    locate_in_buckets,
    reshard_all,
    unwrap,
)
from shardckpt.state.keys.kinds import get_metadata

StructureKey = tuple[object, ...]  # equal for states with the same plan


@dataclass(frozen=True)
class StateTrace:
    """A state's trace."""

    key: StructureKey
    tensors: list[torch.Tensor]  # tensors, in the order in which they were found
    local_tensors: list[torch.Tensor]  # the same tensors, with the local tensor in place of each DTensor
    values: list[tuple[Path, Any]]  # plain values, with their paths


def trace_state(state: Any, opened: dict[int, Any]) -> StateTrace | None:
    """Return a state's trace; None if its plan depends on more than a trace."""
    tracer = _Tracer(opened)
    try:
        tracer.add(state, ())
        structure = tracer.finish()
        local_tensors, shardings = _find_local_tensors(tracer.tensors)
        key = (structure, shardings, *_describe(tracer.tensors, local_tensors))
        return StateTrace(key, tracer.tensors, local_tensors, tracer.values)
    except _UntraceableError:
        return None


class _UntraceableError(Exception):
    """A state's plan depends on more than a trace."""


_VALUES = frozenset(
    {bool, int, float, complex, str, bytes, type(None), set, frozenset, Counter, torch.dtype, torch.Size, torch.device}
)
_KEYS = frozenset({str, int})  # different keys of other types may be equal
_TENSORS: frozenset[type] = PLAIN_TENSORS | {DTensor}
_PARAMETERS: frozenset[type] = frozenset({nn.Parameter, DTensor, type(None)})
_BUFFERS: frozenset[type] = _TENSORS | {type(None)}


class _Tracer:
    """Collects what the structure key, and later saves, need from a state's leaves."""

    def __init__(self, opened: dict[int, Any]) -> None:
        self.tensors: list[torch.Tensor] = []  # tensors, in the order of the visit
        self.values: list[tuple[Path, Any]] = []  # plain values, with their paths
        self._opened = opened
        self._structure: list[object] = []
        self._models: list[set[int]] = []
        self._given_models: set[int] = set()
        self._opened_models: set[int] = set()
        self._is_opened = False
        self._closed: list[tuple[Any, Path]] = []
        self._optimizers: list[list[list[int]]] = []
        self._registered: set[int] = set()

    def finish(self) -> list[object]:
        """Visit objects' states; return the structure, with the positions of optimizer parameters."""
        # An object's `state_dict` may be collective, and so may flattening a wrapper that has no trace. Every rank
        # finds the wrapper before it opens the first object.
        self._is_opened = True
        for value, path in self._closed:
            self._add_object(value, path)
        _require(self._opened_models <= self._given_models)  # others are refused
        _require(self._registered <= set().union(*self._models))
        places = {id(tensor): at for at, tensor in enumerate(self.tensors)} if self._optimizers else {}
        for groups in self._optimizers:
            # Only then the state is saved by FQN. Otherwise it is the result of `state_dict`, which may have more.
            _require(any(all(map(model.issuperset, groups)) for model in self._models))
            self._structure.extend([places[parameter] for parameter in group] for group in groups)
        shards = FlatShards()
        if has_group():
            _require(not any(map(shards.has_tensor, self.tensors)))
        elif any(map(attrgetter("__dict__"), self.tensors)):
            _require(not any(map(shards.has_parameter, self.tensors)))
        return self._structure

    def add(self, state: Any, path: Path) -> None:
        """Add a state's leaves, and those in objects after all others."""
        for leaf in walk(state, path, self._enter):
            _require(leaf.kind in self._METHODS)
            self._METHODS[leaf.kind](self, leaf.value, leaf.path)

    def _enter(self, container: Any, _path: Path) -> bool:
        """Describe a container. A dict with tensors alone is one column."""
        if not isinstance(container, dict):
            self._structure.append((type(container), len(container)))
            return True
        _require(_KEYS.issuperset(map(type, container)))
        _require(not (has_peers() and get_metadata(container).get("kind")))  # a LOCAL state is refused
        self._structure.append((type(container), list(container)))
        return not is_column(container, _TENSORS)

    def _add_value(self, value: Any, path: Path) -> None:
        _require(bool(path) and (type(value) in _VALUES or isinstance(value, np.generic)))
        self._structure.append(LeafKind.VALUE)
        self.values.append((path, value))

    def _add_object(self, value: Any, path: Path) -> None:
        if not self._is_opened:
            self._structure.append(len(self._closed))
            self._closed.append((value, path))
            return
        if id(value) not in self._opened:
            self._opened[id(value)] = get_state_dict(value, path)
        self.add(self._opened[id(value)], path)

    def _add_model(self, model: nn.Module, _path: Path) -> None:
        (self._opened_models if self._is_opened else self._given_models).add(id(model))
        self._models.append(set())
        self._add_module(unwrap(model), is_resharded=False)

    def _add_tensor(self, tensor: torch.Tensor, _path: Path) -> None:
        self._add_tensors((tensor,), _TENSORS)

    def _add_column(self, column: Mapping[Any, torch.Tensor], _path: Path) -> None:
        self._add_tensors(column.values(), _TENSORS)

    def _add_tensors(self, tensors: Iterable[torch.Tensor | None], kinds: frozenset[type]) -> None:
        types = list(map(type, tensors))
        _require(kinds.issuperset(types))
        self._structure.append(types)
        self.tensors.extend(tensor for tensor in tensors if tensor is not None)

    def _add_module(self, module: nn.Module, *, is_resharded: bool) -> None:
        kind: Any = type(module)  # mypy confuses the class with its instances here
        if not is_plain_module(kind):
            _require(is_fully_sharded(kind))
            if not is_resharded:
                reshard_all(module)
                is_resharded = True
            self._add_buckets(module)
        parameters, buffers, children = module._parameters, module._buffers, module._modules
        names = (kind, list(parameters), list(buffers), list(children))
        self._structure.append((names, frozenset(module._non_persistent_buffers_set)))
        if parameters:
            self._models[-1].update(map(id, parameters.values()))
            self._add_tensors(parameters.values(), _PARAMETERS)
            self._structure.append([None if value is None else value.requires_grad for value in parameters.values()])
        if buffers:
            self._add_tensors(buffers.values(), _BUFFERS)
        for child in children.values():
            if child is None:
                self._structure.append(None)
            else:
                self._add_module(child, is_resharded=is_resharded)

    def _add_buckets(self, module: nn.Module) -> None:
        """Describe where parameters are in the buckets that the flattened state takes them from."""
        located = locate_in_buckets(module)
        if located is None:
            raise _UntraceableError
        parameters, offsets = located
        self._registered.update(map(id, parameters))
        self._structure.append(offsets)

    def _add_optimizer(self, optim: torch.optim.Optimizer, path: Path) -> None:
        _require(type(optim).state_dict is torch.optim.Optimizer.state_dict)
        # With these it is saved as its `state_dict()`, or refused.
        _require(all(isinstance(key, torch.Tensor) for key in optim.state))
        _require(not getattr(optim, "_optimizer_state_dict_post_hooks", None))
        self._structure.append((type(optim), len(optim.param_groups)))
        self._optimizers.append([list(map(id, group["params"])) for group in optim.param_groups])
        for at, group in enumerate(optim.param_groups):
            _require(type(group) is dict)
            self.add({key: value for key, value in group.items() if key not in NAMES}, (*path, "param_groups", at))
            for parameter in group["params"]:
                self._add_slots(optim.state.get(parameter))

    def _add_slots(self, slots: Any) -> None:
        if not slots:
            self._structure.append(None)
            return
        _require(type(slots) is dict)
        _require({str}.issuperset(map(type, slots)))
        self._structure.append(list(slots))
        self._add_tensors(slots.values(), _TENSORS)

    # A table of bound methods would be a cycle, and tensors would stay until the next collection.
    # Leaves of other kinds have no trace.
    _METHODS: ClassVar[Mapping[LeafKind, Callable[..., None]]] = {
        LeafKind.VALUE: _add_value,
        LeafKind.TENSOR: _add_tensor,
        LeafKind.CONTAINER: _add_column,
        LeafKind.MODULE: _add_model,
        LeafKind.OPTIMIZER: _add_optimizer,
        LeafKind.STATEFUL: _add_object,
    }


def _require(condition: bool) -> None:
    if not condition:
        raise _UntraceableError


def _find_local_tensors(tensors: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[object]]:
    """Return the tensors, with DTensors' local tensors, and the DTensors' shape, mesh and placements."""
    if not any(type(tensor) is DTensor for tensor in tensors):
        return tensors, []
    local_tensors, shardings = [], list[object]()
    meshes: dict[int, object] = {}
    with torch.no_grad():
        for tensor in tensors:
            if type(tensor) is DTensor:
                mesh = tensor.device_mesh
                described = meshes.get(id(mesh)) or meshes.setdefault(id(mesh), _describe_mesh(mesh))
                placements = tensor.placements
                # In many versions of torch a strided shard equals a plain one, which has other rows.
                shardings.append((tensor.shape, placements, list(map(type, placements)), described))
                tensor = tensor.to_local()
                _require(type(tensor) in PLAIN_TENSORS)
            local_tensors.append(tensor)
    return local_tensors, shardings


# Descriptions of meshes, which torch computes again for each caller.
_MESHES: WeakKeyDictionary[DeviceMesh, object] = WeakKeyDictionary()

os.register_at_fork(after_in_child=_MESHES.clear)  # a child may be another rank of an equal mesh


def _describe_mesh(mesh: DeviceMesh) -> object:
    """Return a mesh's ranks, and this rank's coordinate; a mesh itself would keep its groups alive."""
    found = _MESHES.get(mesh)
    if found is None:
        found = _MESHES[mesh] = mesh.device_type, mesh.mesh.tolist(), mesh.get_coordinate()
    return found


def _describe(tensors: list[torch.Tensor], local_tensors: list[torch.Tensor]) -> tuple[object, ...]:
    """Describe this rank's tensors: everything except their elements."""
    try:
        shapes = [tensor.shape for tensor in local_tensors]
    except RuntimeError as error:  # nested tensors do not have a shape
        raise _UntraceableError from error
    dtypes = [tensor.dtype for tensor in local_tensors]
    devices = [tensor.device for tensor in local_tensors]
    layouts = [tensor.layout for tensor in local_tensors]
    _require(set(layouts) <= {torch.strided})
    strides = [None if tensor.is_contiguous() else tensor.stride() for tensor in local_tensors]
    return shapes, dtypes, devices, strides, _describe_sharing(tensors, local_tensors)


def _describe_sharing(tensors: list[torch.Tensor], local_tensors: list[torch.Tensor]) -> object:
    """Return which tensors are one object or share memory; None if no tensors do."""
    objects = list(map(id, tensors))
    starts = list(map(torch.Tensor.data_ptr, local_tensors))
    _require(all(map(has_memory, local_tensors)))
    if len(tensors) == len(set(objects)) == len(set(starts)):
        return None
    return _find_firsts(objects), _find_firsts(map(find_memory, local_tensors))


def _find_firsts(keys: Iterable[Hashable]) -> list[int]:
    """Return for each key where the first equal key is."""
    firsts: dict[Hashable, int] = {}
    return [firsts.setdefault(key, at) for at, key in enumerate(keys)]
