"""Digest a state: its models, optimizers, schedules and scalers on this rank, also when it is first used."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from operator import is_
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from shardckpt.checkpoint.stateful.flatten import FlattenedState, flatten_state
from shardckpt.checkpoint.stateful.stateful import dtype_name
from shardckpt.checkpoint.stateful.walk import Leaf, LeafKind, map_leaves
from shardckpt.encodings.tagged_json import path_key
from shardckpt.manifest import Path, dotted
from shardckpt.plan.optim.param_groups import NAMES
from shardckpt.readers.opened.state_tree import TensorRef
from shardckpt.state.adapters.model_index import modules
from shardckpt.state.local.tensor_shards import TensorShards
from shardckpt.witness.digests import digest_bytes, digest_tensors
from shardckpt.witness.records.step_records import Part, Setting, StateDigests, TensorDigest
from shardckpt.witness.trained_objects import TrainedObjects

_RATES = ("lr", "initial_lr")  # settings of param groups that a schedule changes

_LAMBDA = 4.0
_UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_ACCUMULATED = 2.0**-24  # kernels sum in float32 or better


@dataclass(frozen=True)
class StateOnRank:
    """A state's digests on this rank."""

    digests: StateDigests  # digests of this rank's shards, and plain values
    layout: int  # digest of the boxes of parameters that this rank holds; an optimizer may be missing
    factors: LossFactors  # properties of the parameters that the tolerance of the loss depends on


class StateReader:
    """Reads a state's digests on this rank."""

    # Flattening a state costs far more than reading its plain values. So the flattened state is kept, and reused for
    # digests without tensors, while models and optimizers have the same tensors.

    def __init__(self, objects: TrainedObjects, rank: int, world: int) -> None:
        self._objects, self._rank, self._world = objects, rank, world
        self._kept: _Flattened | None = None

    def digest(self, *, is_deep: bool) -> StateOnRank:
        """Return the objects' digests."""
        objects, values = self._objects, list(_list_values(self._objects))
        if is_deep or self._kept is None or not self._kept.has_same(values):
            self._kept = _Flattened(flatten_state(objects.state, self._rank, self._world), objects, values)
            tree = self._kept.flat.tree
        else:
            tree = flatten_state(_replace_tensors(objects.state), self._rank, self._world).tree
        return self._kept.digest(tree, is_deep=is_deep)


class _Flattened:
    """A flattened state, with the parts that last while its models and optimizers have the same tensors."""

    def __init__(self, flat: FlattenedState, objects: TrainedObjects, values: Sequence[object]) -> None:
        self.flat, self._objects, self._values = flat, objects, values
        paths = [path for path, part in objects.parts.items() if part == "optimizer"]
        self._is_readable = all((*path, "state") in flat.slots for path in paths)  # not gathered, nor of another class
        self._arrays = {dotted(path): (path, array) for path, array in flat.arrays.items()}
        named = {name: array for name, (path, array) in self._arrays.items() if self._part(path) == "parameter"}
        layout = repr([(name, array.shape, [shard.box for shard in array.shards]) for name, array in named.items()])
        self._layout = digest_bytes(layout.encode())
        self._factors = _describe_params(named.values())
        self._ties = dict(_find_ties(flat, objects))

    def has_same(self, values: Sequence[object]) -> bool:
        """Return True if these are the parameters and slots, so that tensors are views of the same memory."""
        is_same = len(values) == len(self._values) and all(map(is_, values, self._values))
        return self._is_readable and is_same

    def _part(self, path: Path) -> Part:
        return _part(self.flat, self._objects, path)

    def digest(self, tree: Any, *, is_deep: bool) -> StateOnRank:
        """Return the state's digests as it is now."""
        flat, objects = self.flat, self._objects
        settings = dict(_settings(flat, tree, objects))
        arrays = self._arrays
        tensors = {**dict(_digest_arrays(flat, objects, arrays)), **_digest_unsaved(flat, objects)} if is_deep else {}
        steps = _join_equal_steps({name: each for name, each in settings.items() if name.endswith(".step")})
        others = {name: each for name, each in settings.items() if not name.endswith(".step")}
        digests = StateDigests(tensors, {**others, **steps}, self._ties)
        return StateOnRank(digests, self._layout, self._factors)


def _list_values(objects: TrainedObjects) -> Iterator[object]:
    """Yield model parameters and optimizer slots; for a value that may change in place, a separate object."""
    for model in objects.models.values():
        for _, parameter in model.named_parameters(remove_duplicate=False):
            yield parameter
    for optim in objects.optimizers:
        for group in optim.param_groups:
            for parameter in group["params"]:
                yield parameter
                for value in optim.state.get(parameter, {}).values():
                    yield value if isinstance(value, _FIXED) else object()


_FIXED = (torch.Tensor, bool, int, float, str, type(None))


def _replace_tensors(state: Any) -> Any:
    """Return a state's objects without models, and with optimizers' settings in their place."""

    def take(leaf: Leaf) -> Any:
        if leaf.kind is LeafKind.MODULE:
            return None
        if leaf.kind is LeafKind.OPTIMIZER:
            groups = leaf.value.param_groups
            return {"param_groups": [{k: v for k, v in group.items() if k not in NAMES} for group in groups]}
        return leaf.value

    return map_leaves(state, take)


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
    """Return digests for buffers that a model's `state_dict` leaves out."""
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
    """Yield the names of parameters that share another's memory, each with the other's name."""
    for path, first in flat.ties.items():
        if _part(flat, objects, path) == _part(flat, objects, first) == "parameter":
            yield dotted(path), dotted(first)


def _settings(flat: FlattenedState, tree: Any, objects: TrainedObjects) -> Iterator[tuple[str, Setting]]:
    """Yield the plain values in optimizers, schedules and scalers, from the tree and from slots."""
    for path, array in flat.arrays.items():
        if _is_step_count(array, path):
            for shard in array.shards:
                yield dotted(path), Setting("optimizer", repr(shard.tensor.item()))
    for path, value in flat.optional_values.items():
        yield dotted(path), Setting("optimizer", repr(value))
    for path, value in _leaves(tree, ()):
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
    """Return one value for an optimizer's equal step counts: a thousand parameters have one each."""
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


class LossFactors(NamedTuple):
    """Model properties on which rounding errors depend."""

    dtypes: tuple[str, ...] = ()  # parameter dtypes
    largest: int = 1  # largest parameter dimension
    number: int = 0  # parameters


def loss_rtol(params: LossFactors) -> float:
    """Return the relative loss difference that reordered sums explain in one step."""
    # Summing n terms in any order has a relative error up to about `lambda * sqrt(n) * u` (Higham and Mary, "A new
    # approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4). Each sum
    # exceeds it with probability `2 * exp(-lambda**2 / 2)`. Here n is a layer's longest sum (the largest parameter
    # dimension) times the number of parameters, as each feeds the next. Layers round their results once more to the
    # parameters' dtype.
    stored = max(
        (_UNIT_ROUNDOFF.get(dtype, _UNIT_ROUNDOFF["bfloat16"]) for dtype in params.dtypes), default=_ACCUMULATED
    )
    count = max(params.number, 1)
    sums = min(stored, _ACCUMULATED) * sqrt(params.largest * count)
    rounding = stored * sqrt(count) if stored > _ACCUMULATED else 0.0
    return _LAMBDA * (sums + rounding)


class FirstUse:
    """A restored state's digests when its optimizer takes the first step."""

    # At that time parameters are as in the forward pass, and settings as in the step.

    def __init__(self, objects: TrainedObjects, digest: Callable[[], StateOnRank]) -> None:
        self._digest = digest
        self._has_looked = False
        self._digests: StateDigests | None = None
        self._fault: Exception | None = None
        self._hooks = [
            optim.register_step_pre_hook(self._look) for optim in map(_unwrap, objects.optimizers) if optim is not None
        ]

    def _look(self, *_args: object) -> None:
        if self._has_looked or torch.compiler.is_compiling():  # a compiled step cannot digest
            return
        self._has_looked = True
        try:
            self._digests = self._digest().digests
        except Exception as error:  # noqa: BLE001  (sent to every rank with the step)
            self._fault = error

    def end(self) -> StateDigests | None:
        """Stop waiting for the step; return its digests, or raise the error."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._fault is not None:
            raise self._fault
        return self._digests


def _unwrap(optim: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return the optimizer that has hooks, which wrappers such as accelerate's may lack; None without one."""
    inner = optim if hasattr(optim, "_optimizer_step_pre_hooks") else getattr(optim, "optimizer", None)
    return inner if hasattr(inner, "_optimizer_step_pre_hooks") else None
