"""Order an epoch's samples by a seed, in constant memory."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from shardckpt.errors import UsageError

Indices = np.ndarray[Any, np.dtype[np.int64]]

# Names in stored positions; another algorithm needs another name.
SHUFFLED, SEQUENTIAL = "swap-or-not-32", "sequential"

_ROUNDS = 32
_MAX_SAMPLES = 1 << 62
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(63))


@dataclass(frozen=True)
class SampleOrder:
    """Each epoch's order; it depends only on these values and the epoch."""

    # The shuffle is swap-or-not (Hoang, Morris, Rogaway 2012) with 32 rounds. Each place is computed by itself, so no
    # permutation is in memory. It is specified here, so every torch version gives the same order.

    samples: int
    seed: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.samples < _MAX_SAMPLES:
            raise UsageError(f"the number of samples must be from 1 to 2**62, got {self.samples}")

    @property
    def name(self) -> str:
        """Name in stored positions."""
        return SHUFFLED if self.shuffle else SEQUENTIAL

    def take(self, epoch: int, parts: Sequence[range]) -> list[list[int]]:
        """Return sample indices for ranges of places in an epoch's order."""
        places = np.concatenate([np.arange(part.start, part.stop, dtype=np.int64) for part in parts])
        found = _shuffle(places, self.samples, self.seed, epoch) if self.shuffle else places
        ends = np.cumsum([len(part) for part in parts])[:-1]
        return [batch.tolist() for batch in np.split(found, ends)]


def _shuffle(places: Indices, samples: int, seed: int, epoch: int) -> Indices:
    """Apply an epoch's permutation to places."""
    for pivot, key in _derive_keys(samples, seed, epoch):
        partners = pivot - places
        partners[partners < 0] += samples
        places = np.where(_toss(np.maximum(places, partners), key), partners, places)
    return places


@lru_cache(maxsize=8)
def _derive_keys(samples: int, seed: int, epoch: int) -> list[tuple[int, np.uint64]]:
    """Return each round's pivot and key."""
    stream = hashlib.shake_128(f"shardckpt {samples} {seed} {epoch}".encode()).digest(16 * _ROUNDS)
    keys = np.frombuffer(stream, "<u8").reshape(_ROUNDS, 2)
    return list(zip((keys[:, 0] % np.uint64(samples)).tolist(), keys[:, 1], strict=True))


def _toss(places: Indices, key: np.uint64) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return one random bit for each place: the top bit of splitmix64's output."""
    mixed = places.astype(np.uint64) ^ key
    mixed = (mixed ^ (mixed >> _SHIFTS[0])) * _MIX[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _MIX[1]
    tossed: np.ndarray[Any, np.dtype[np.bool_]] = (mixed >> _SHIFTS[2]).astype(np.bool_)
    return tossed
