"""Files with a few changed bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator


def change_bytes(raw: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Yield so many copies, each with one to three bytes changed."""
    rng = random.Random(seed)
    for _ in range(count):
        changed = bytearray(raw)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(raw))] = rng.randrange(256)
        yield bytes(changed)
