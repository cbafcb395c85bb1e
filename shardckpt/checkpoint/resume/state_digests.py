"""Digests of a state: its models, optimizers, schedules and scalers on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardckpt.checkpoint.resume.digests import digest_bytes, digest_tensors
from shardckpt.checkpoint.resume.trained_objects import TrainedObjects
from shardckpt.checkpoint.stateful.flatten import FlattenedState, flatten_state
from shardckpt.checkpoint.stateful.stateful import dtype_name
from shardckpt.format.encodings.tagged_json import path_key
from shardckpt.format.opened.state_tree import TensorRef
from shardckpt.manifest import Path, dotted
from shardckpt.plan.resume.step_records import Part, Setting, StateDigests, TensorDigest
from shardckpt.plan.resume.tolerance import LossFactors
from shardckpt.state.adapters.model_index import modules
from shardckpt.state.local.local_shards import TensorShards

_RATES = ("lr", "initial_lr")
"""Settings of param groups that a schedule changes."""


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
    tensors = {**dict(_digest_arrays(flat, objects, arrays)), **_digest_unsaved(flat, objects)} if is_deep else {}
    steps = _join_equal_steps({name: each for name, each in settings.items() if name.endswith(".step")})
    others = {name: each for name, each in settings.items() if not name.endswith(".step")}
    return StateOnRank(
        StateDigests(tensors, {**others, **steps}, dict(_find_ties(flat, objects))),
        digest_bytes(layout.encode()),
        _describe_params(named.values()),
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


def _digest_unsaved(flat: FlattenedState, objects: TrainedObjects) -> dict[str, TensorDigest]:
    """Return digests of the buffers that the `state_dict` of a model leaves out."""
    left_out: dict[str, torch.Tensor] = {}
    for path, model in objects.models.items():
        for prefix, module in modules(model):
            for attribute, buffer in module.named_buffers(recurse=False):
                place = (*path, f"{prefix}.{attribute}" if prefix else attribute)
                own = buffer.to_local() if isinstance(buffer, DTensor) else buffer
                if place not in flat.arrays and place not in flat.ties and not own.is_meta:
                    left_out[dotted(place)] = own
    digests = digest_tensors(list(left_out.values()))
    return {
        name: TensorDigest("unsaved", dtype_name(own.dtype), digest)
        for (name, own), digest in zip(left_out.items(), digests, strict=True)
    }


def _find_ties(flat: FlattenedState, objects: TrainedObjects) -> Iterator[tuple[str, str]]:
    """Yield the names of parameters that share the memory of another, with the name of that."""
    for path, first in flat.ties.items():
        if _part(flat, objects, path) == _part(flat, objects, first) == "parameter":
            yield dotted(path), dotted(first)


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
