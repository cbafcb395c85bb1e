"""Digests of a state: its models, optimizers, schedules and scalers on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from shardckpt.checkpoint.resume.digests import digest_bytes, digest_tensors
from shardckpt.checkpoint.stateful.flatten import FlattenedState, flatten_state
from shardckpt.checkpoint.stateful.stateful import as_root, dtype_name
from shardckpt.format.encodings.tagged_json import path_key
from shardckpt.format.opened.state_tree import TensorRef
from shardckpt.manifest import Path, dotted
from shardckpt.plan.resume.step_records import Part, Setting, StateDigests, TensorDigest
from shardckpt.plan.resume.tolerance import LossFactors
from shardckpt.state.local.local_shards import TensorShards

_RATES = ("lr", "initial_lr")
"""Settings of param groups that a schedule changes."""

_PARTS: tuple[tuple[type | tuple[type, ...], Part], ...] = (
    (nn.Module, "parameter"),
    (torch.optim.Optimizer, "optimizer"),
    (LRScheduler, "schedule"),
    (torch.amp.GradScaler, "state"),
)
"""Classes whose objects training changes, with the part of the state that they are."""


@dataclass(frozen=True)
class TrainedObjects:
    """The objects in a state that training changes; all else in it belongs to the caller.

    Attributes:
        state: The state with these objects alone, in the dicts that they are in.
        parts: Path of each object, with its part.
        models: Distinct models.
        optimizers: Distinct optimizers.
    """

    state: Any
    parts: Mapping[Path, Part] = field(default_factory=dict)
    models: tuple[nn.Module, ...] = ()
    optimizers: tuple[torch.optim.Optimizer, ...] = ()

    @property
    def style(self) -> str:
        """Sharding of the models, for messages."""
        return ", ".join(map(_describe_style, self.models)) or "no model"

    def find_part(self, path: Path) -> Part | None:
        """Return the part of the state that a path belongs to; None outside of the objects."""
        return next((self.parts[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.parts), None)


def find_trained_objects(state: Any) -> TrainedObjects:
    """Find the models, optimizers, schedules and scalers of a state.

    Loaders and other objects are left out: their `state_dict` may be slow, or change them. The optimizer of a schedule
    counts too if it is not in the state.

    Args:
        state: State as the user passed it.
    """
    parts: dict[Path, Part] = {}
    found: dict[int, Any] = {}

    def visit(value: Any, path: Path) -> Any:
        part = next((part for kind, part in _PARTS if isinstance(value, kind)), None)
        if part is not None:
            parts[path] = part
            found.setdefault(id(value), value)
            return value
        if isinstance(value, Mapping):
            inner = {key: visit(item, (*path, path_key(key))) for key, item in value.items()}
            return {key: item for key, item in inner.items() if item is not None} or None
        if isinstance(value, (list, tuple)):
            listed = [visit(item, (*path, at)) for at, item in enumerate(value)]
            return listed if any(item is not None for item in listed) else None
        return None

    kept = visit(as_root(state), ())
    models = tuple(each for each in found.values() if isinstance(each, nn.Module))
    for path, part in list(parts.items()) if models and isinstance(kept, dict) else ():
        optim = getattr(_get_at(kept, path), "optimizer", None) if part == "schedule" else None
        if isinstance(optim, torch.optim.Optimizer) and id(optim) not in found:
            name = f"{dotted(path)}.optimizer"  # a fresh one is a fault that its schedule shows
            kept[name], parts[name,], found[id(optim)] = optim, "optimizer", optim
    optimizers = tuple(each for each in found.values() if isinstance(each, torch.optim.Optimizer))
    return TrainedObjects({} if kept is None else kept, parts, models, optimizers)


def _get_at(value: Any, path: Path) -> Any:
    """Return the value at a path of nested dicts and lists."""
    for key in path:
        value = value[key]
    return value


def _describe_style(model: nn.Module) -> str:
    name = type(model).__name__
    meshes = {tuple(p.device_mesh.shape) for p in model.parameters() if isinstance(p, torch.distributed.tensor.DTensor)}
    return name + "".join(f" on a mesh of {'x'.join(map(str, mesh))}" for mesh in sorted(meshes))


@dataclass(frozen=True)
class StateOnRank:
    """Digests of a state on this rank.

    Attributes:
        digests: Digests of this rank's shards, and plain values.
        layout: Digest of the boxes of parameters that this rank holds; an optimizer may be missing.
        factors: Properties of the parameters that the tolerance of the loss depends on.
    """

    digests: StateDigests
    layout: int
    factors: LossFactors


def digest_state(objects: TrainedObjects, rank: int, world: int, *, is_deep: bool) -> StateOnRank:
    """Return digests of the objects of a state.

    Args:
        objects: Objects to digest.
        rank: Index of this rank.
        world: Number of ranks.
        is_deep: Whether to digest the elements of tensors; otherwise only the layout and plain values.

    Raises:
        UnsupportedError: A value cannot be saved; the message contains its dotted path.
    """
    flat = flatten_state(objects.state, rank, world)
    settings = dict(_settings(flat, objects))
    arrays = {dotted(path): (path, array) for path, array in flat.arrays.items()}
    named = {name: array for name, (path, array) in arrays.items() if _part(flat, objects, path) == "parameter"}
    layout = repr([(name, array.shape, [shard.box for shard in array.shards]) for name, array in named.items()])
    tensors = dict(_digest_arrays(flat, objects, arrays)) if is_deep else {}
    steps = _join_equal_steps({name: each for name, each in settings.items() if name.endswith(".step")})
    others = {name: each for name, each in settings.items() if not name.endswith(".step")}
    return StateOnRank(
        StateDigests(tensors, {**others, **steps}), digest_bytes(layout.encode()), _describe_params(named.values())
    )


def _part(flat: FlattenedState, objects: TrainedObjects, path: Path) -> Part:
    return "buffer" if path in flat.buffers else objects.find_part(path) or "state"


def _is_step_count(array: TensorShards, path: Path) -> bool:
    return path[-1] == "step" and not array.shape and all(shard.tensor.is_cpu for shard in array.shards)


def _digest_arrays(
    flat: FlattenedState, objects: TrainedObjects, arrays: Mapping[str, tuple[Path, TensorShards]]
) -> Iterator[tuple[str, TensorDigest]]:
    held = {name: pair for name, pair in arrays.items() if pair[1].shards and not _is_step_count(pair[1], pair[0])}
    digests = iter(digest_tensors([shard.tensor for _, array in held.values() for shard in array.shards]))
    for name, (path, array) in held.items():
        of_shards = [next(digests) for _ in array.shards]
        digest = of_shards[0] if len(of_shards) == 1 else digest_bytes(repr(of_shards).encode())
        yield name, TensorDigest(_part(flat, objects, path), dtype_name(array.dtype), digest)


def _settings(flat: FlattenedState, objects: TrainedObjects) -> Iterator[tuple[str, Setting]]:
    """Yield the plain values of optimizers, schedules and scalers."""
    for path, array in flat.arrays.items():
        if _is_step_count(array, path):
            for shard in array.shards:
                yield dotted(path), Setting("optimizer", repr(shard.tensor.item()))
    for path, value in flat.optional_values.items():
        yield dotted(path), Setting("optimizer", repr(value))
    for path, value in _leaves(flat.tree, ()):
        part = objects.find_part(path)
        if part in ("optimizer", "schedule", "state") and "params" not in path:  # a model's extra state is its own
            is_rate = part == "optimizer" and path[-1] in _RATES
            yield dotted(path), Setting("schedule" if is_rate else part, repr(value))


def _leaves(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(tree, TensorRef):  # a tuple, too
        return
    if isinstance(tree, (Mapping, list, tuple)):
        items: Iterable[tuple[Any, Any]] = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, item in items:
            yield from _leaves(item, (*path, path_key(key)))
    elif tree is None or isinstance(tree, (bool, int, float, str)):
        yield path, tree


def _join_equal_steps(steps: dict[str, Setting]) -> dict[str, Setting]:
    """Return one value for the step counts of an optimizer that are equal: a thousand parameters have one each."""
    by_optimizer: dict[str, dict[str, Setting]] = {}
    for name, setting in steps.items():
        by_optimizer.setdefault(name.partition(".state.")[0], {})[name] = setting
    joined: dict[str, Setting] = {}
    for optimizer, of_one in by_optimizer.items():
        if len(set(of_one.values())) == 1:
            joined[f"{optimizer}.state.*.step"] = next(iter(of_one.values()))
        else:
            joined.update(of_one)
    return joined


def _describe_params(params: Iterable[TensorShards]) -> LossFactors:
    dtypes, largest, count = set(), 1, 0
    for array in params:
        dtypes.add(dtype_name(array.dtype))
        largest, count = max(largest, *array.shape, 1), count + 1
    return LossFactors(tuple(sorted(dtypes)), largest, count)
