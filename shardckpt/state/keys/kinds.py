"""The three forms of state, by name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardckpt.deprecation import warn_renamed
from shardckpt.errors import UsageError

KEY = "shardckpt"
"""Under this key of a state dict's `_metadata` stands what is known of how it was taken."""

VERSION = 1
"""Version of what stands under `KEY`."""

_FLAT = "_flat_param"
"""How torch's wrapper calls flat parameters."""


class LocalStateError(UsageError):
    """A LOCAL state is given where ranks save one state together."""


class StateKind(Enum):
    """What a state dict holds.

    FULL has full tensors, SHARDED a DTensor for each sharded tensor, LOCAL the stored shards of this rank.
    """

    FULL = "FULL"
    LOCAL = "LOCAL"
    SHARDED = "SHARDED"

    @classmethod
    def parse(cls, value: StateKind | str) -> StateKind:
        """Return the kind of a name, in any case.

        Raises:
            UsageError: The kind is unknown.
        """
        if isinstance(value, StateKind):
            return value
        kind = cls.__members__.get(value.upper()) if isinstance(value, str) else None
        if kind is None:
            raise UsageError("the kind of state is unknown", found=value, expected=", ".join(cls.__members__))
        return kind

    @classmethod
    def of(cls, value: StateKind | str) -> StateKind:
        """Do what `parse` does, under its earlier name."""
        warn_renamed("StateKind.of", "StateKind.parse")
        return cls.parse(value)


def parse_kind_to_take(kind: StateKind | str, *, rank0_only: bool) -> StateKind:
    """Return the kind of a state that is to be taken.

    Args:
        kind: The kind or its name.
        rank0_only: Rank 0 alone gets the state.

    Raises:
        UsageError: The kind is unknown, or `rank0_only` with another kind than FULL.
    """
    parsed = StateKind.parse(kind)
    if rank0_only and parsed is not StateKind.FULL:
        raise UsageError("rank0_only goes with FULL alone", found=parsed.name)
    return parsed


def get_metadata(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a state dict says of how it was taken; empty where it says nothing."""
    metadata = getattr(state, "_metadata", None)
    entry = metadata.get(KEY) if isinstance(metadata, Mapping) else None
    return entry if isinstance(entry, Mapping) else {}


def require_not_local(value: Any, where: str) -> None:
    """Raise if a value contains a LOCAL state: under its names, each rank has other elements.

    Args:
        value: Anything.
        where: Its dotted name.

    Raises:
        LocalStateError: There is one.
    """
    if not isinstance(value, Mapping):
        return
    if get_metadata(value).get("kind") == StateKind.LOCAL.name:
        raise LocalStateError(
            "a LOCAL state has what this rank holds, and other ranks have other elements under its names",
            where=where,
            fix="Take it as SHARDED or FULL, or let each rank save its own (`torch.save`, `shardckpt.PerRank`).",
        )
    for key, item in value.items():
        require_not_local(item, f"{where}.{key}" if where else str(key))


def detect_kind(state: Mapping[str, Any]) -> StateKind:
    """Return the kind of a state dict: as it says itself, else by what is in it.

    Args:
        state: Names to tensors; `_metadata` as `torch.nn.Module` sets it.
    """
    kind = get_metadata(state).get("kind")
    if isinstance(kind, str) and kind in StateKind.__members__:
        return StateKind[kind]
    return StateKind.LOCAL if any(is_flat_part(name, value) for name, value in state.items()) else guess_kind(state)


def guess_kind(state: Mapping[str, Any]) -> StateKind:
    """Return the kind by what is in a state, of a model or of an optimizer."""
    is_sharded = any(isinstance(value, DTensor) or is_sharded_tensor(value) for value in tensors(state))
    return StateKind.SHARDED if is_sharded else StateKind.FULL


def is_sharded_tensor(value: Any) -> bool:
    """Return True if a value is torch's ShardedTensor, known by its public methods: the class is private to torch."""
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
        and callable(getattr(value, "local_shards", None))
        and callable(getattr(value, "metadata", None))
    )


def is_flat_part(name: str, value: Any) -> bool:
    """Return True if a value is this rank's part of a flat parameter, as LOCAL states of torch's wrapper have it."""
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
