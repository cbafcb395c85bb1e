"""Objects in a state that training changes: models, optimizers, schedules, scalers and tensors with gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LRScheduler

from shardckpt.checkpoint.stateful.stateful import as_root
from shardckpt.checkpoint.stateful.walk import WITH_STATE, LeafKind, find_kind, walk
from shardckpt.manifest import Path, dotted, unflatten
from shardckpt.state.adapters.model_index import modules
from shardckpt.witness.records.step_records import Part

# Classes whose objects training changes, with the part of the state that they are.
_PARTS: tuple[tuple[type | tuple[type, ...], Part], ...] = (
    (nn.Module, "parameter"),
    (torch.optim.Optimizer, "optimizer"),
    (LRScheduler, "schedule"),
    (torch.amp.GradScaler, "state"),
)


@dataclass(frozen=True)
class TrainedObjects:
    """The objects in a state that training changes; all else in it belongs to the caller."""

    state: Any  # the state with these objects alone, in the dicts that they are in
    parts: Mapping[Path, Part] = field(default_factory=dict)  # path of each object, with its part
    models: Mapping[Path, nn.Module] = field(default_factory=dict)  # distinct models by their first paths
    optimizers: tuple[torch.optim.Optimizer, ...] = ()  # distinct optimizers
    # Random generators that are attributes of modules and of other objects in the state, by name.
    generators: Mapping[str, torch.Generator] = field(default_factory=dict)

    @property
    def style(self) -> str:
        """The models' sharding, for messages."""
        return ", ".join(map(_describe_style, self.models.values())) or "no model"

    def find_part(self, path: Path) -> Part | None:
        """Return which part of the state a path belongs to; None outside the objects."""
        return next((self.parts[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.parts), None)


def _describe_style(model: nn.Module) -> str:
    name = type(model).__name__
    meshes = {tuple(p.device_mesh.shape) for p in model.parameters() if isinstance(p, DTensor)}
    return name + "".join(f" on a mesh of {'x'.join(map(str, mesh))}" for mesh in sorted(meshes))


def find_trained_objects(state: Any) -> TrainedObjects:
    """Find a state's models, optimizers, schedules, scalers and tensors with gradients."""
    # Objects with their own `state_dict`, such as loaders, are not called: it may be slow, or change them. An optimizer
    # or a trained model in an attribute counts, and so does a schedule's optimizer.
    finder = _ObjectFinder()
    for path, kind, value in walk(as_root(state)):
        finder.add(value, path, kind)
    return finder.build()


class _ObjectFinder:
    """Finds the objects in one state that training changes."""

    def __init__(self) -> None:
        self._kept: dict[Path, Any] = {}
        self._parts: dict[Path, Part] = {}
        self._found: dict[int, tuple[Path, Any]] = {}
        self._others: dict[Path, Any] = {}

    def add(self, value: Any, path: Path, kind: LeafKind) -> None:
        """Add a leaf, if training changes it or if it has attributes that training may change."""
        part = next((part for known, part in _PARTS if isinstance(value, known)), None)
        if kind is LeafKind.TENSOR and value.requires_grad:  # such as the master of a parameter
            part = "parameter"
        if part is not None:
            self._kept[path], self._parts[path] = value, part
            self._found.setdefault(id(value), (path, value))
        elif path and kind in WITH_STATE:
            self._others[path] = value

    def _add_attributes(self) -> None:
        """Add optimizers, and the models that they train, from attributes of objects in the state."""
        attributes = list(_list_attributes(self._others))
        self._add_new((name, each) for name, each in attributes if isinstance(each, _OPTIMIZER))
        trained = {id(parameter) for optim in self._list_found(_OPTIMIZER) for parameter in _list_params(optim)}
        self._add_new(
            (name, each)
            for name, each in attributes
            if isinstance(each, nn.Module) and any(id(parameter) in trained for parameter in each.parameters())
        )
        if self._list_found(nn.Module):  # a fresh optimizer is a fault that its schedule shows
            schedules = {path: each for path, each in self._found.values() if self._parts[path] == "schedule"}
            self._add_new(
                (f"{dotted(path)}.optimizer", optim)
                for path, each in schedules.items()
                if isinstance(optim := getattr(each, "optimizer", None), _OPTIMIZER)
            )

    def _add_new(self, attributes: Iterator[tuple[str, Any]]) -> None:
        for name, value in {name: each for name, each in attributes if id(each) not in self._found}.items():
            self.add(value, (name,), find_kind(value))

    def _list_found(self, kind: type) -> list[Any]:
        return [each for _, each in self._found.values() if isinstance(each, kind)]

    def build(self) -> TrainedObjects:
        """Return the objects that were found."""
        if () not in self._kept:
            self._add_attributes()
        models = {path: each for path, each in self._found.values() if isinstance(each, nn.Module)}
        parts = {
            (*path, name) if name else path: part for path, model in models.items() for name, part in modules(model)
        }
        generators = {
            name: each
            for name, each in _list_attributes({**self._others, **parts})
            if isinstance(each, torch.Generator)
        }
        return TrainedObjects(
            unflatten(self._kept, has_lists=True), self._parts, models, tuple(self._list_found(_OPTIMIZER)), generators
        )


_OPTIMIZER = torch.optim.Optimizer


def _list_attributes(objects: Mapping[Path, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the objects' attributes, and the items of lists, by name."""
    for path, each in objects.items():
        for name, value in list(getattr(each, "__dict__", {}).items()):
            if isinstance(value, (list, tuple)):
                yield from ((f"{dotted((*path, name))}.{at}", item) for at, item in enumerate(value))
            else:
                yield dotted((*path, name)), value


def _list_params(optim: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optim.param_groups for parameter in group["params"]]
