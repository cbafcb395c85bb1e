"""Random number generators in Python, numpy and torch as per-rank state."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from shardckpt.checkpoint.stateful.stateful import PerRank
from shardckpt.devices import find_generators
from shardckpt.events.warn_user import warn_user

_HOST = ("python", "numpy", "torch")


class RNGState(PerRank):
    """This process's random number generators, to put into a state; saved per rank.

    With the same number of ranks, each rank continues its saved random stream exactly. With another number, each rank
    starts a new stream, derived from the saved states, the number of ranks and its rank. So ranks do not share
    streams. A warning on rank 0 reports this.
    """

    def __init__(self) -> None:
        super().__init__(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the generators' states: `python`, `numpy`, `torch`, and the accelerator in use (`cuda`)."""
        kind, keys, at, has_gauss, gauss = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": {"kind": kind, "keys": np.array(keys), "at": at, "has_gauss": has_gauss, "gauss": gauss},
            "torch": torch.get_rng_state(),
        }
        return state | {name: module.get_rng_state() for name, module in find_generators(in_use=True).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generators' states.

        Args:
            state: Result of `state_dict`.
        """
        saved = state["numpy"]
        random.setstate(state["python"])
        np.random.set_state((saved["kind"], saved["keys"], saved["at"], saved["has_gauss"], saved["gauss"]))
        torch.set_rng_state(state["torch"].cpu())
        there, used = find_generators(in_use=False), find_generators(in_use=True)
        for name, module in there.items():
            if name in state:
                module.set_rng_state(state[name].cpu())
        lost = [f"{name} is not available here" for name in state if name not in {*_HOST, *there}]
        lost += [f"{name} was not saved" for name in used if name not in state]
        if lost:
            warn_user(f"not every random number generator continues where it was saved: {', '.join(lost)}")

    def load_other_world(self, states: list[Any], rank: int, world: int) -> bool:
        """Start a new stream on this rank. For the arguments see `PerRank`."""
        digest = hashlib.sha256(f"{rank} of {world}".encode())
        for state in states:
            digest.update(state["torch"].cpu().numpy().tobytes())
        seed = int.from_bytes(digest.digest()[:8], "little")
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        torch.manual_seed(seed % (1 << 63))
        if rank == 0:
            warn_user(
                f"random number generators were saved by {len(states)} ranks and are loaded on {world}: each rank "
                "starts its own stream"
            )
        return True
