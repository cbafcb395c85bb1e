"""Debug mode (`TORCH_DISTRIBUTED_DEBUG=DETAIL`): ranks compare initial parameters and their next collectives."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardckpt.core.comm.collectives import ShardGroup
from shardckpt.devices import is_device_error, is_out_of_memory
from shardckpt.errors import RankError


def is_debug_mode() -> bool:
    """Return True if debug mode is enabled, by torch's setting or by the environment."""
    is_set = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
    return is_set or bool(dist.get_debug_level() == dist.DebugLevel.DETAIL)  # type: ignore[attr-defined]


def _gather_from_all(group: ShardGroup, mine: Any, place: str) -> list[Any]:
    """Gather messages from a group and its replicas, in the same order on all ranks."""
    messages = [mine]
    for ranks in (group.shard, group.replicate):
        if ranks is None or dist.get_world_size(ranks) == 1:
            continue
        parts: list[Any] = [None] * dist.get_world_size(ranks)
        try:
            dist.all_gather_object(parts, messages, group=ranks)
        except RuntimeError as error:
            if is_out_of_memory(error) or is_device_error(error):
                raise
            raise RankError(
                f"rank {dist.get_rank()}, about to {place}, got no answer from the others: {error}",
                rank=dist.get_rank(),
                fix="Another rank left, or is busy with something else; its own log says why.",
            ) from error
        messages = [message for part in parts for message in part]
    return messages


# --------------------------------------------------------------------------------------------------------- order


class _Time(Enum):
    FORWARD = "forward"
    BACKWARD = "backward"
    ASIDE = "a call of its own"


class OrderCheck:
    """Check that all ranks run the units' collectives in the same order."""

    # Before each collective in a unit, ranks compare the unit, and all ranks report a difference. They also compare the
    # ends of forward and backward, so that a rank that has finished finds out about a rank that has not.

    def __init__(self, names: Sequence[str], groups: Sequence[ShardGroup | None]) -> None:
        self._names = tuple(names)
        self._groups = tuple(groups)
        self._time = _Time.ASIDE

    def forward_starts(self) -> None:
        """Record that the root starts its forward."""
        self._time = _Time.FORWARD

    def forward_ends(self) -> None:
        """Compare where ranks end forward. Collective."""
        self._end()

    def backward_starts(self) -> None:
        """Record that backward starts."""
        self._time = _Time.BACKWARD

    def backward_ends(self) -> None:
        """Compare where ranks end backward. Collective."""
        self._end()

    def forget(self) -> None:
        """Reset after a failed forward or backward."""
        self._time = _Time.ASIDE

    def check_unit(self, index: int, action: Literal["gather", "reduce"]) -> None:
        """Compare whose parameters ranks gather next, or whose gradients they reduce next. Collective."""
        # All ranks raise RankError if one runs something else.
        self._compare(self._groups[index], f"{action} {self._names[index]} in {self._time.value}", self._time)

    def _end(self) -> None:
        time, self._time = self._time, _Time.ASIDE
        for group in dict.fromkeys(each for each in self._groups if each is not None):
            self._compare(group, f"end its {time.value}", time)

    def _compare(self, group: ShardGroup | None, place: str, time: _Time) -> None:
        if group is None:
            return
        messages = _gather_from_all(group, (dist.get_rank(), time.value, place), place)
        if len({message[2] for message in messages}) > 1:
            raise RankError(_describe_difference(messages), rank=dist.get_rank(), fix=_SAME)


_SAME = "Run the same units in the same order on every rank, with made-up inputs on ranks that have none."


def _describe_difference(messages: Sequence[tuple[int, str, str]]) -> str:
    places: dict[str, list[int]] = {}
    for rank, _, place in messages:
        places.setdefault(place, []).append(rank)
    times = {time for _, time, _ in messages}
    prefix = {_Time.FORWARD.value: "Forward order", _Time.BACKWARD.value: "Backward order"}
    what = prefix.get(times.pop(), "Order") if len(times) == 1 else "Order"
    actions = "; ".join(f"{_ranks(ranks)} about to {place}" for place, ranks in places.items())
    return f"{what} differs across ranks: {actions}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {', '.join(map(str, sorted(ranks)))} are"


# ---------------------------------------------------------------------------------------------- initial params


def checksum(tensor: torch.Tensor) -> int:
    """Return a checksum over elements and their positions; not cryptographically secure."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = torch.nn.functional.pad(data, (0, -data.numel() % 8)).view(torch.int64)
    odd = torch.arange(words.numel(), device=words.device) * 0x5851F42D4C957F2D + 0x14057B7EF767814F
    return int(((words ^ (words >> 29)) * (odd | 1)).sum()) if words.numel() else 0


@dataclass(frozen=True)
class InitialChecksums:
    """Checksums for a new bucket's parameters."""

    names: tuple[str, ...]  # parameter FQNs below the unit
    full: tuple[int, ...] | None  # for this rank's full values; None if parameters were on the meta device
    parts: tuple[int, ...]  # for this rank's shards

    @staticmethod
    def compute(
        names: Iterable[str], values: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]
    ) -> InitialChecksums | None:
        """Compute a bucket's checksums; None outside debug mode."""
        if not is_debug_mode() or any(part.is_meta for part in parts):
            return None
        full = None if any(value.is_meta for value in values) else tuple(map(checksum, values))
        return InitialChecksums(tuple(names), full, tuple(map(checksum, parts)))


class Sharded(Protocol):
    """Bucket with initial checksums."""

    @property
    def group(self) -> ShardGroup:
        """Ranks that shard the bucket."""

    @property
    def initial_checksums(self) -> InitialChecksums | None:
        """Checksums for the initial values; None outside debug mode."""

    @property
    def local_shards(self) -> list[torch.Tensor]:
        """This rank's shard of each parameter."""


class ReplicaCheck:
    """Check that ranks have equal initial parameters, before the first iteration."""

    # Outside debug mode, different models are not detected.

    def __init__(self, buckets: Sequence[tuple[str, Sharded]], others: Mapping[str, torch.Tensor]) -> None:
        self._buckets = tuple(buckets)
        self._others = dict(others)

    def compare(self) -> None:
        """Compare the parameters. Collective; all ranks raise RankError if some differ."""
        wrong: list[str] = []
        differing: list[str] = []
        for group in dict.fromkeys(bucket.group for _, bucket in self._buckets):
            mine = [(prefix, bucket) for prefix, bucket in self._buckets if bucket.group == group]
            messages = _gather_from_all(group, (_sum_buckets(mine), self._sums()), "compare initial parameters")
            wrong += _find_differing_params([message[0] for message in messages], group)
            differing += _find_differing([message[1] for message in messages])
        if wrong:
            raise RankError(
                f"ranks start with different parameters: {_join_names(wrong)}",
                rank=dist.get_rank(),
                fix="Initialise with one seed, or use sync_module_states, or load one checkpoint everywhere.",
            )
        if differing:
            warnings.warn(
                f"ranks start with different buffers or parameters that are not sharded: {_join_names(differing)}",
                stacklevel=2,
            )

    def _sums(self) -> dict[str, int]:
        return {name: checksum(value) for name, value in self._others.items() if not value.is_meta}


@dataclass(frozen=True)
class _Sum:
    full: int | None
    changed: bool
    part: int


def _sum_buckets(buckets: Sequence[tuple[str, Sharded]]) -> dict[str, _Sum]:
    sums = {}
    for prefix, bucket in buckets:
        initial = bucket.initial_checksums
        if initial is None:
            continue
        for index, (name, part) in enumerate(zip(initial.names, bucket.local_shards, strict=True)):
            now = checksum(part)
            full = None if initial.full is None else initial.full[index]
            sums[f"{prefix}.{name}" if prefix else name] = _Sum(full, now != initial.parts[index], now)
    return sums


def _find_differing_params(messages: Sequence[Mapping[str, _Sum]], group: ShardGroup) -> list[str]:
    """Return the names of parameters whose initial values or replicas differ."""
    # After a load or an initialization of the shards, only replicas are compared.
    wrong = []
    for name in messages[0]:
        sums = [message[name] for message in messages]
        full = {each.full for each in sums}
        parts = [{each.part for each in sums[rank :: group.size]} for rank in range(group.size)]
        if (len(full) > 1 and not any(each.changed for each in sums)) or any(len(each) > 1 for each in parts):
            wrong.append(name)
    return wrong


def _find_differing(messages: Sequence[Mapping[str, int]]) -> list[str]:
    return [name for name in messages[0] if len({message.get(name) for message in messages}) > 1]


def _join_names(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


@dataclass
class RankComparison:
    """Comparisons between ranks in debug mode."""

    order: OrderCheck  # collectives
    replicas: ReplicaCheck | None  # initial parameters; None after the check has run

    def forward_starts(self) -> None:
        """Check initial parameters before the root's first forward. Collective."""
        if self.replicas is not None:
            self.replicas.compare()
            self.replicas = None
        self.order.forward_starts()
