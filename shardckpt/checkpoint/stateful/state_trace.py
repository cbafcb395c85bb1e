"""Trace of a state: its tensors and values, and a description of its structure.

States with the same description have the same plan, names and layout, whatever their tensors and values are. A trace
takes a fraction of the time of flattening, because it describes tensors in columns, not one by one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import nn

from shardckpt.checkpoint.stateful.stateful import PLAIN_TENSORS, PerRank, get_state_dict, has_memory, is_stateful
from shardckpt.checkpoint.stateful.tensor_bytes import find_memory
from shardckpt.checkpoint.stateful.variant import Variant
from shardckpt.format.encodings.tagged_json import MAX_DEPTH, path_key
from shardckpt.manifest import Path
from shardckpt.plan.optim.param_groups import NAMES
from shardckpt.state.adapters.flat_shard_check import FlatShards, has_peers
from shardckpt.state.adapters.model_index import is_plain_module


@dataclass(frozen=True)
class StateTrace:
    """Trace of a state.

    Attributes:
        description: Description of the structure, equal for states with the same plan.
        tensors: Tensors, in the order in which they were found.
        values: Plain values, with their paths.
    """

    description: tuple[object, ...]
    tensors: list[torch.Tensor]
    values: list[tuple[Path, Any]]


def trace_state(state: Any, opened: dict[int, Any]) -> StateTrace | None:
    """Return the trace of a state; None if its plan depends on more than a trace.

    Args:
        state: State as for `save`, of a single rank; a mapping as `as_root` returns it.
        opened: Results of the `state_dict` of objects, by the id of the object; new results are added.

    Raises:
        StateDictError: The `state_dict` of an object raised an exception.
    """
    if has_peers():
        return None
    tracer = _Tracer(opened)
    try:
        tracer.visit(state, ())
        structure = tracer.finish()
        return StateTrace((structure, *_describe(tracer.tensors)), tracer.tensors, tracer.values)
    except _UntraceableError:
        return None


class _UntraceableError(Exception):
    """The plan of a state depends on more than a trace."""


_DICTS = (dict, OrderedDict)
_LISTS = (list, tuple)
_VALUE = "value"
_VALUES = frozenset(
    {bool, int, float, complex, str, bytes, type(None), set, frozenset, torch.dtype, torch.Size, torch.device}
)
_KEYS = frozenset({str, int})  # different keys of other types may be equal
_PARAMETERS: frozenset[type] = frozenset({nn.Parameter, type(None)})
_BUFFERS: frozenset[type] = PLAIN_TENSORS | {type(None)}


class _Tracer:
    """Visitor of a state in the order of the flattened state.

    Args:
        opened: Results of the `state_dict` of objects, by the id of the object.

    Attributes:
        tensors: Tensors, in the order of the visit.
        values: Plain values, with their paths.
    """

    def __init__(self, opened: dict[int, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.values: list[tuple[Path, Any]] = []
        self._opened = opened
        self._structure: list[object] = []
        self._models: list[set[int]] = []
        self._given_models: set[int] = set()
        self._opened_models: set[int] = set()
        self._is_opened = False
        self._optimizers: list[list[list[int]]] = []

    def finish(self) -> list[object]:
        """Return the structure, with the positions of the optimizers' parameters."""
        _require(self._opened_models <= self._given_models)  # others are refused
        places = {id(tensor): at for at, tensor in enumerate(self.tensors)} if self._optimizers else {}
        for groups in self._optimizers:
            # Only then the state is saved by FQN. Otherwise it is the result of `state_dict`, which may have more.
            _require(any(all(map(model.issuperset, groups)) for model in self._models))
            self._structure.extend([places[parameter] for parameter in group] for group in groups)
        if any(map(attrgetter("__dict__"), self.tensors)):
            _require(not any(map(FlatShards().has_parameter, self.tensors)))
        return self._structure

    def visit(self, value: Any, path: Path) -> None:
        """Visit a value and everything in it."""
        kind = type(value)
        if kind in PLAIN_TENSORS:
            self._add_tensors((value,), PLAIN_TENSORS)
        elif kind in _VALUES or isinstance(value, np.generic):
            _require(bool(path))
            self._structure.append(_VALUE)
            self.values.append((path, value))
        elif kind in _DICTS:
            self._visit_dict(value, path)
        elif kind in _LISTS:
            _require(len(path) <= MAX_DEPTH)
            self._structure.append((kind, len(value)))
            for at, item in enumerate(value):
                self.visit(item, (*path, at))
        elif isinstance(value, nn.Module):
            (self._opened_models if self._is_opened else self._given_models).add(id(value))
            self._models.append(set())
            self._visit_module(value)
        elif isinstance(value, torch.optim.Optimizer):
            self._visit_optimizer(value, path)
        else:
            _require(not isinstance(value, (PerRank, Variant)) and is_stateful(value))
            if id(value) not in self._opened:
                self._opened[id(value)] = get_state_dict(value, path)
            was_opened, self._is_opened = self._is_opened, True
            self.visit(self._opened[id(value)], path)
            self._is_opened = was_opened

    def _add_tensors(self, tensors: Iterable[torch.Tensor | None], kinds: frozenset[type]) -> None:
        types = list(map(type, tensors))
        _require(kinds.issuperset(types))
        self._structure.append(types)
        self.tensors.extend(tensor for tensor in tensors if tensor is not None)

    def _visit_dict(self, value: Mapping[Any, Any], path: Path) -> None:
        _require(len(path) <= MAX_DEPTH and _KEYS.issuperset(map(type, value)))
        self._structure.append((type(value), list(value)))
        if PLAIN_TENSORS.issuperset(map(type, value.values())):
            self._add_tensors(value.values(), PLAIN_TENSORS)
            return
        for key, item in value.items():
            self.visit(item, (*path, path_key(key)))

    def _visit_module(self, module: nn.Module) -> None:
        kind: Any = type(module)  # mypy confuses the class with its instances here
        _require(is_plain_module(kind))
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
                self._visit_module(child)

    def _visit_optimizer(self, optim: torch.optim.Optimizer, path: Path) -> None:
        _require(type(optim).state_dict is torch.optim.Optimizer.state_dict)
        self._structure.append((type(optim), len(optim.param_groups)))
        self._optimizers.append([list(map(id, group["params"])) for group in optim.param_groups])
        for at, group in enumerate(optim.param_groups):
            _require(type(group) is dict)
            self._visit_dict(
                {key: value for key, value in group.items() if key not in NAMES}, (*path, "param_groups", at)
            )
            for parameter in group["params"]:
                self._add_slots(optim.state.get(parameter))

    def _add_slots(self, slots: Any) -> None:
        if not slots:
            self._structure.append(None)
            return
        _require(type(slots) is dict)
        _require({str}.issuperset(map(type, slots)))
        self._structure.append(list(slots))
        self._add_tensors(slots.values(), PLAIN_TENSORS)


def _require(condition: bool) -> None:
    if not condition:
        raise _UntraceableError


def _describe(tensors: list[torch.Tensor]) -> tuple[object, ...]:
    """Return the description of tensors: everything except their elements."""
    try:
        shapes = [tensor.shape for tensor in tensors]
    except RuntimeError as error:  # nested tensors do not have a shape
        raise _UntraceableError from error
    dtypes = [tensor.dtype for tensor in tensors]
    devices = [tensor.device for tensor in tensors]
    layouts = [tensor.layout for tensor in tensors]
    _require(set(layouts) <= {torch.strided})
    return shapes, dtypes, devices, _describe_sharing(tensors)


def _describe_sharing(tensors: list[torch.Tensor]) -> object:
    """Return which tensors are one object or share memory; None if no tensors do."""
    objects = list(map(id, tensors))
    starts = [tensor.data_ptr() for tensor in tensors]
    _require(all(map(has_memory, tensors)))
    if len(tensors) == len(set(objects)) == len(set(starts)):
        return None
    return _find_firsts(objects), _find_firsts(map(find_memory, tensors))


def _find_firsts(keys: Iterable[Hashable]) -> list[int]:
    """Return for each key the position of the first equal key."""
    firsts: dict[Hashable, int] = {}
    return [firsts.setdefault(key, at) for at, key in enumerate(keys)]
