"""The three kinds of state: FULL, SHARDED and LOCAL."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.modules.autograd_hooks import leave_inference_mode
from shardckpt.errors import UsageError

KEY = "shardckpt"  # key in a state dict's `_metadata` for its kind and layout
VERSION = 1  # version of the metadata under `KEY`
_FLAT = "_flat_param"  # flat parameters' name in torch's wrapper

_Call = TypeVar("_Call", bound=Callable[..., Any])


class LocalStateError(UsageError):
    """A LOCAL state is given to a save in which all ranks save one state."""


class StateKind(Enum):
    """A state dict's kind.

    FULL contains full tensors, SHARDED a DTensor per sharded tensor, LOCAL this rank's stored shards.
    """

    FULL = "FULL"
    LOCAL = "LOCAL"
    SHARDED = "SHARDED"

    @classmethod
    def parse(cls, value: StateKind | str) -> StateKind:
        """Return the kind with a name, in upper or lower case.

        Raises:
            UsageError: The kind is unknown.
        """
        if isinstance(value, StateKind):
            return value
        kind = cls.__members__.get(value.upper()) if isinstance(value, str) else None
        if kind is None:
            raise UsageError("unknown kind of state", found=value, expected=", ".join(cls.__members__))
        return kind


def parse_kind_to_take(kind: StateKind | str, *, rank0_only: bool) -> StateKind:
    """Check the arguments, and return the kind to get."""
    parsed = StateKind.parse(kind)
    if rank0_only and parsed is not StateKind.FULL:
        raise UsageError("rank0_only needs the kind FULL", found=parsed.name)
    return parsed


def get_metadata(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state dict's metadata on its kind and layout; empty without metadata."""
    metadata = getattr(state, "_metadata", None)
    entry = metadata.get(KEY) if isinstance(metadata, Mapping) else None
    return entry if isinstance(entry, Mapping) else {}


def require_not_local(value: Any, where: str) -> None:
    """Raise an error if a value contains a LOCAL state: ranks have different elements."""
    if not isinstance(value, Mapping):
        return
    if get_metadata(value).get("kind") == StateKind.LOCAL.name:
        raise LocalStateError(
            "a LOCAL state has only this rank's elements, and other ranks have others under its names",
            where=where,
            fix="Take it as SHARDED or FULL, or let each rank save its own (`torch.save`, `shardckpt.PerRank`).",
        )
    for key, item in value.items():
        require_not_local(item, f"{where}.{key}" if where else str(key))


def detect_kind(state: Mapping[str, Any]) -> StateKind:
    """Return a state dict's kind, from its metadata or else from its values."""
    kind = get_metadata(state).get("kind")
    if isinstance(kind, str) and kind in StateKind.__members__:
        return StateKind[kind]
    return StateKind.LOCAL if any(is_flat_part(name, value) for name, value in state.items()) else guess_kind(state)


def guess_kind(state: Mapping[str, Any]) -> StateKind:
    """Return a state's kind, from its values."""
    is_sharded = any(isinstance(value, DTensor) or is_sharded_tensor(value) for value in tensors(state))
    return StateKind.SHARDED if is_sharded else StateKind.FULL


def is_sharded_tensor(value: Any) -> bool:
    """Return True for torch's ShardedTensor, by its public methods: the class is private."""
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
        and callable(getattr(value, "local_shards", None))
        and callable(getattr(value, "metadata", None))
    )


def is_flat_part(name: str, value: Any) -> bool:
    """Return True for a flat parameter's shard in a torch LOCAL state."""
    return name.rpartition(".")[2].startswith(_FLAT) and is_sharded_tensor(value)


def tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def outside_inference_mode(function: _Call) -> _Call:
    """Make a function leave inference mode first, unless its model was made there."""
    # Tensors that are made in inference mode cannot be written after it, so an optimizer could not use such a state.
    # Views of DTensors raise there. If the model itself was made in inference mode, its parameters can be written only
    # there.

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        model: nn.Module = args[0] if args else kwargs["model"]
        if any(parameter.is_inference() for parameter in model.parameters()):
            return function(*args, **kwargs)
        with leave_inference_mode():
            return function(*args, **kwargs)

    return cast("_Call", call)
