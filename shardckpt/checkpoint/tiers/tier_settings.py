"""Check the tier settings of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from shardckpt.checkpoint.tiers.local_folder import Local
from shardckpt.checkpoint.tiers.peer_memory import PeerMemory
from shardckpt.errors import UsageError

TierSettings: TypeAlias = PeerMemory | Local

_KINDS = (PeerMemory, Local)  # kinds of tiers, the nearest first


def require_tiers(tiers: object, save_every: int | None) -> tuple[TierSettings, ...]:
    """Return a run's tiers, the nearest first."""
    kinds = [type(tier) for tier in tiers] if isinstance(tiers, Sequence) else [str]
    if kinds != [kind for kind in _KINDS if kind in kinds]:
        raise UsageError(
            "`tiers` must be a list of at most one PeerMemory and one Local, in this order", found=repr(tiers)[:200]
        )
    if kinds and save_every is None:
        raise UsageError("`tiers` need `save_every`, which names the steps for the root", fix="Pass save_every=1000.")
    return tuple(tiers)  # type: ignore[arg-type]
