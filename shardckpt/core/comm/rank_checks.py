"""Debug mode, `TORCH_DISTRIBUTED_DEBUG=DETAIL`: ranks compare what they begin with and what they are about to do."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardckpt.core.comm.collectives import ShardGroup
from shardckpt.errors import RankError


def detailed() -> bool:
    """Tell whether debug mode is on, by torch's own setting or by the environment."""
    told = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
    return told or bool(dist.get_debug_level() == dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]


def _everyones(group: ShardGroup, mine: Any, place: str) -> list[Any]:
    """Return what every rank of a group has to say, those of all replicas too, in one order on all of them."""
    told = [mine]
    for ranks in (group.shard, group.replicate):
        if ranks is None or dist.get_world_size(ranks) == 1:
            continue
        parts: list[Any] = [None] * dist.get_world_size(ranks)
        try:
            dist.all_gather_object(parts, told, group=ranks)
        except RuntimeError as error:
            raise RankError(
                f"rank {dist.get_rank()}, about to {place}, waited in vain for the others: {error}",
                rank=dist.get_rank(),
                fix="Another rank left, or is busy with something else; its own log says why.",
            ) from error
        told = [each for part in parts for each in part]
    return told


# --------------------------------------------------------------------------------------------------------- order


class _Time(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    ASIDE = "a call of its own"


class OrderCheck:
    """Before each collective of a unit, all ranks compare whose it is: one that went its own way is told everywhere.

    Ends of forward and backward are compared too, so that a rank that is done learns of one that is not.

    Args:
        names: Names of the units, in the order of all ranks.
        groups: For each, who shares its parameters.
    """

    def __init__(self, names: Sequence[str], groups: Sequence[ShardGroup | None]) -> None:
        self._names = tuple(names)
        self._groups = tuple(groups)
        self._time = _Time.ASIDE

    def forward_begins(self) -> None:
        """The root is about to compute."""
        self._time = _Time.FORWARD

    def forward_ends(self) -> None:
        """The root has computed. Collective."""
        self._end()

    def backward_begins(self) -> None:
        """The first gradient is there."""
        self._time = _Time.BACKWARD

    def backward_ends(self) -> None:
        """Everything is reduced. Collective."""
        self._end()

    def forget(self) -> None:
        """What was under way has failed."""
        self._time = _Time.ASIDE

    def gathers(self, index: int) -> None:
        """A unit is about to be gathered. Collective.

        Args:
            index: Its place among the units.

        Raises:
            RankError: Some rank is about to do something else; raised on all of them.
        """
        self._compare(self._groups[index], f"gather {self._names[index]} in {self._time.value}", self._time)

    def reduces(self, index: int) -> None:
        """A unit's gradients are about to be reduced. Collective.

        Args:
            index: Its place among the units.

        Raises:
            RankError: Some rank is about to do something else; raised on all of them.
        """
        self._compare(self._groups[index], f"reduce {self._names[index]} in {self._time.value}", self._time)

    def _end(self) -> None:
        time, self._time = self._time, _Time.ASIDE
        for group in dict.fromkeys(each for each in self._groups if each is not None):
            self._compare(group, f"end its {time.value}", time)

    def _compare(self, group: ShardGroup | None, place: str, time: _Time) -> None:
        if group is None:
            return
        told = _everyones(group, (dist.get_rank(), time.value, place), place)
        if len({each[2] for each in told}) > 1:
            raise RankError(_difference(told), rank=dist.get_rank(), fix=_SAME)


_SAME = "Let every rank run the same units in the same order, with made-up inputs where it has none."


def _difference(told: Sequence[tuple[int, str, str]]) -> str:
    places: dict[str, list[int]] = {}
    for rank, _, place in told:
        places.setdefault(place, []).append(rank)
    times = {time for _, time, _ in told}
    prefix = {_Time.FORWARD.value: "Forward order", _Time.BACKWARD.value: "Backward order"}
    what = prefix.get(times.pop(), "Order") if len(times) == 1 else "Order"
    said = "; ".join(f"{_ranks(ranks)} about to {place}" for place, ranks in places.items())
    return f"{what} differs across ranks: {said}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))} are"


# ------------------------------------------------------------------------------------------------------ beginning


def checksum(tensor: torch.Tensor) -> int:
    """Return a number that differs, almost surely, when a bit or the place of an element does; no security."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(data, (0, -data.numel() % 8)).view(torch.int64)
    odd = torch.arange(words.numel(), device=words.device) * 0x5851F42D4C957F2D + 0x14057B7EF767814F
    return int(((words ^ (words >> 29)) * (odd | 1)).sum()) if words.numel() else 0


@dataclass(frozen=True)
class InitialChecksums:
    """Checksums of the parameters that a bucket was made from.

    Attributes:
        names: Names of its parameters below the unit.
        whole: Checksums of the whole values that this rank was given; None where they had none yet.
        parts: Checksums of this rank's part of each.
    """

    names: tuple[str, ...]
    whole: tuple[int, ...] | None
    parts: tuple[int, ...]

    @staticmethod
    def compute(
        names: Iterable[str], values: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
    ) -> InitialChecksums | None:
        """Compute the checksums of a bucket's parameters; None outside debug mode.

        Args:
            names: Names of its parameters below the unit.
            values: Their whole values.
            parts: This rank's part of each.
        """
        if not detailed() or any(part.is_meta for part in parts):
            return None
        whole = None if any(value.is_meta for value in values) else tuple(map(checksum, values))
        return InitialChecksums(tuple(names), whole, tuple(map(checksum, parts)))


class Sharded(Protocol):
    """A bucket, as far as its beginning goes."""

    @property
    def group(self) -> ShardGroup:
        """Who shares it."""

    @property
    def beginning(self) -> InitialChecksums | None:
        """What it was made from; None where that was not noted."""

    @property
    def local_shards(self) -> list[torch.Tensor]:
        """This rank's part of each parameter."""


class ReplicaCheck:
    """Before the first iteration, ranks compare what they begin with: nothing else tells of models that differ.

    Args:
        buckets: The buckets, each with the prefix of its parameters' names.
        others: What every rank has whole, by name: buffers, and parameters that are not sharded.
    """

    def __init__(self, buckets: Sequence[tuple[str, Sharded]], others: Mapping[str, torch.Tensor]) -> None:
        self._buckets = tuple(buckets)
        self._others = dict(others)

    def compare(self) -> None:
        """Compare. Collective.

        Raises:
            RankError: Parameters differ between ranks; raised on all of them.
        """
        wrong: list[str] = []
        differing: list[str] = []
        for group in dict.fromkeys(bucket.group for _, bucket in self._buckets):
            mine = [(prefix, bucket) for prefix, bucket in self._buckets if bucket.group == group]
            told = _everyones(group, (_state(mine), self._sums()), "compare what ranks begin with")
            wrong += _differing_parameters([each[0] for each in told], group)
            differing += _differing([each[1] for each in told])
        if wrong:
            raise RankError(
                f"ranks begin with different parameters: {_listed(wrong)}",
                rank=dist.get_rank(),
                fix="Initialise with one seed, or use sync_module_states, or load one checkpoint everywhere.",
            )
        if differing:
            warnings.warn(
                f"ranks begin with different buffers or parameters that are not sharded: {_listed(differing)}",
                stacklevel=2,
            )

    def _sums(self) -> dict[str, int]:
        return {name: checksum(value) for name, value in self._others.items() if not value.is_meta}


@dataclass(frozen=True)
class _Sum:
    whole: int | None
    changed: bool
    part: int


def _state(buckets: Sequence[tuple[str, Sharded]]) -> dict[str, _Sum]:
    found = {}
    for prefix, bucket in buckets:
        noted = bucket.beginning
        if noted is None:
            continue
        for index, (name, part) in enumerate(zip(noted.names, bucket.local_shards, strict=True)):
            now = checksum(part)
            whole = None if noted.whole is None else noted.whole[index]
            found[f"{prefix}.{name}" if prefix else name] = _Sum(whole, now != noted.parts[index], now)
    return found


def _differing_parameters(told: Sequence[Mapping[str, _Sum]], group: ShardGroup) -> list[str]:
    """Return the names of parameters that ranks made from different values, or whose replicas differ now.

    What was loaded or initialised after it was cut is not what it was made from: there only replicas tell.
    """
    wrong = []
    for name in told[0]:
        sums = [each[name] for each in told]
        made = {each.whole for each in sums}
        parts = [{each.part for each in sums[rank :: group.size]} for rank in range(group.size)]
        if (len(made) > 1 and not any(each.changed for each in sums)) or any(len(each) > 1 for each in parts):
            wrong.append(name)
    return wrong


def _differing(told: Sequence[Mapping[str, int]]) -> list[str]:
    return [name for name in told[0] if len({each.get(name) for each in told}) > 1]


def _listed(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


@dataclass
class Comparison:
    """All that ranks compare in debug mode.

    Attributes:
        order: What each is about to do.
        beginning: What each begins with; None once that was compared.
    """

    order: OrderCheck
    beginning: ReplicaCheck | None

    def forward_begins(self) -> None:
        """The root is about to compute: before the first time, compare what ranks begin with. Collective.

        Raises:
            RankError: Parameters differ between ranks; raised on all of them.
        """
        if self.beginning is not None:
            self.beginning.compare()
            self.beginning = None
        self.order.forward_begins()
