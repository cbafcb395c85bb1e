"""Checks before a load: the state fits on every rank; all or only rank 0 have it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import torch

from shardckpt.errors import RankError, ShardckptError, StateMismatchError
from shardckpt.ranks.group import Group
from shardckpt.state.redistribute.rank_grid import Ranks

_DIGEST = 16


_TUPLE, _DICT, _TENSOR = "tuple", "dict", "tensor"


class DistributedInput:
    """A load's input on all ranks: every rank has a state, or only rank 0."""

    def __init__(self, given: bool, is_first: bool) -> None:
        self._given = given
        self._is_first = is_first
        self.digest = b""  # over data that must be equal on all ranks with a state
        # Why rank 0 cannot broadcast the state; None if it can.
        self.broadcast_error: ShardckptError | None = None
        self.from_rank0 = False  # whether only rank 0 has a state; set by `decide`

    @property
    def has_to_check(self) -> bool:
        """Return True if this rank has to check the state; others wait for rank 0."""
        return self._given or self._is_first

    def encode(self) -> bytes:
        """Encode this rank's input for the others."""
        why = str(self.broadcast_error).encode("utf-8", "replace") if self.broadcast_error is not None else b""
        return (b"1" if self._given else b"0") + self.digest.ljust(_DIGEST, b"\0") + why

    def decide(self, group: Group, what: str, rows: list[bytes], *, compare: bool) -> None:
        """Decide from all ranks' inputs."""
        has = [row[:1] == b"1" for row in rows]
        if all(has) or not any(has):
            if compare:
                _compare(group, [row[1 : 1 + _DIGEST] for row in rows])
            return
        if has.index(True) > 0 or any(has[1:]):
            raise StateMismatchError(
                "some ranks were given a state and some none",
                found=f"none on rank {_numbers(group, [rank for rank, is_given in enumerate(has) if not is_given])}",
                expected="one on every rank, or on rank 0 alone",
            )
        self.from_rank0 = True
        why = rows[0][1 + _DIGEST :].rstrip(b"\0").decode("utf-8", "replace")
        if self.broadcast_error is not None:
            raise self.broadcast_error
        if why:
            first = group.global_rank(0)
            raise RankError(f"{what} failed on rank {first}: {why}", rank=first)


def _compare(group: Group, digests: list[bytes]) -> None:
    odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
    if odd:
        raise StateMismatchError(
            "ranks were given states that differ in names, shapes, types or settings",
            found=f"another one on rank {_numbers(group, odd)} than on rank {group.global_rank(0)}",
            fix="Nothing was changed. Give every rank the same state, or rank 0 alone one.",
        )


def _numbers(group: Group, ranks: list[int]) -> str:
    return ", ".join(str(group.global_rank(rank)) for rank in ranks)


@contextmanager
def validate_input(ranks: Ranks, what: str, *, given: bool) -> Iterator[DistributedInput]:
    """Check a state inside the context; an error on one rank is raised on all ranks. One collective at the end."""
    with ranks.group.collective(what) as piggyback:
        agreed = DistributedInput(given, ranks.is_first)
        yield agreed
        piggyback.local = agreed.encode()
    agreed.decide(ranks.group, what, piggyback.gathered, compare=not ranks.guessed)


def digest(value: Any) -> bytes:
    """Digest plain JSON values; other values count by their type."""
    text = json.dumps(value, default=lambda item: type(item).__name__, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=_DIGEST).digest()


def check_form(given: Any) -> None:
    """Check that a value is structured like an optimizer's state."""
    state: Any = given.get("state", {}) if isinstance(given, Mapping) else None
    groups: Any = given.get("param_groups", []) if isinstance(given, Mapping) else None
    fits = isinstance(state, Mapping) and isinstance(groups, (list, tuple))
    fits = fits and all(isinstance(slots, Mapping) for slots in state.values())
    if not fits or not all(isinstance(g, Mapping) and isinstance(g.get("params"), (list, tuple)) for g in groups):
        raise StateMismatchError(
            "this is not an optimizer's state",
            found=sorted(map(str, given))[:5] if isinstance(given, Mapping) else type(given).__name__,
            expected='{"state": {name: {slot: value}}, "param_groups": [{"params": [name, ...], ...}]}',
        )


def encode(value: Any) -> bytes:
    """Return a value as JSON."""
    return json.dumps(_to_json(value)).encode()


def decode(data: bytes) -> Any:
    """Invert `encode`, with tensors on the CPU."""
    return _from_json(json.loads(data))


def _to_json(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [_to_json(item) for item in value]}
    if isinstance(value, dict):
        return {_DICT: [[_to_json(key), _to_json(item)] for key, item in value.items()]}
    if isinstance(value, torch.Tensor):
        return {_TENSOR: value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    raise TypeError(f"an object with class {type(value).__name__} is not a plain value")


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _TUPLE in value:
        return tuple(_from_json(item) for item in value[_TUPLE])
    if _TENSOR in value:
        return torch.tensor(value[_TENSOR], dtype=getattr(torch, value["dtype"]))
    return {_from_json(key): _from_json(item) for key, item in value[_DICT]}
