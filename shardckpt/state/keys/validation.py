"""What ranks agree on before a state is put: that it fits on each, that all were given the same, or the first alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

from shardckpt.errors import RankError, ShardckptError
from shardckpt.groups import Group
from shardckpt.state.redistribute.rank_grid import Ranks

_DIGEST = 16


class StateMismatchError(ShardckptError, RuntimeError):
    """A state does not fit the model: names, shapes, types, or the ranks it was taken on."""


class DistributedInput:
    """A state that every rank was given, or rank 0 alone.

    Args:
        given: Whether this rank was given a state.
        is_first: Whether this is rank 0.

    Attributes:
        digest: What has to be equal on all ranks that were given a state, in short.
        broadcast_error: Why a state on rank 0 alone cannot be broadcast; None if it can.
        from_rank0: Whether rank 0 alone was given a state; known at the end.
    """

    def __init__(self, given: bool, is_first: bool) -> None:
        self._given = given
        self._is_first = is_first
        self.digest = b""
        self.broadcast_error: ShardckptError | None = None
        self.from_rank0 = False

    @property
    def has_to_check(self) -> bool:
        """Return True if this rank checks the state: one that was given none waits for rank 0."""
        return self._given or self._is_first

    def encode(self) -> bytes:
        """Encode this rank's input for the others."""
        why = str(self.broadcast_error).encode("utf-8", "replace") if self.broadcast_error is not None else b""
        return (b"1" if self._given else b"0") + self.digest.ljust(_DIGEST, b"\0") + why

    def decide(self, group: Group, what: str, rows: list[bytes], *, compare: bool) -> None:
        """Decide from the inputs of all ranks.

        Raises:
            StateMismatchError: Ranks were given different states, or some of them none.
            RankError: Rank 0 alone has a state, which cannot be sent to the others.
        """
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
    """Check a state inside; a failure on one rank is raised on all. One collective, at the end.

    Args:
        ranks: Who has the model.
        what: The work, for the messages.
        given: Whether this rank was given a state.

    Raises:
        StateMismatchError: Ranks were given different states, or some of them none.
        RankError: Another rank failed.
    """
    with ranks.group.collective(what) as piggyback:
        agreed = DistributedInput(given, ranks.is_first)
        yield agreed
        piggyback.local = agreed.encode()
    agreed.decide(ranks.group, what, piggyback.gathered, compare=not ranks.guessed)


def digest(value: Any) -> bytes:
    """Return a short digest of plain JSON values; of others their type counts."""
    text = json.dumps(value, default=lambda item: type(item).__name__, separators=(",", ":"))
    return blake2b(text.encode(), digest_size=_DIGEST).digest()


def check_form(given: Any) -> None:
    """Raise unless a value has the form of an optimizer's state.

    Raises:
        StateMismatchError: It is none.
    """
    state: Any = given.get("state", {}) if isinstance(given, Mapping) else None
    groups: Any = given.get("param_groups", []) if isinstance(given, Mapping) else None
    fits = isinstance(state, Mapping) and isinstance(groups, (list, tuple))
    fits = fits and all(isinstance(slots, Mapping) for slots in state.values())
    if not fits or not all(isinstance(g, Mapping) and isinstance(g.get("params"), (list, tuple)) for g in groups):
        raise StateMismatchError(
            "this is not a state of an optimizer",
            found=sorted(map(str, given))[:5] if isinstance(given, Mapping) else type(given).__name__,
            expected='{"state": {name: {slot: value}}, "param_groups": [{"params": [name, ...], ...}]}',
        )
