"""The random number generators of a process as one object to save: python's, numpy's, torch's; each rank its own."""

from __future__ import annotations

import hashlib
import random
import warnings
from typing import Any

import numpy as np
import torch

from shardckpt.checkpoint.stateful.stateful import PerRank


class RNGState(PerRank):
    """The generators of this process: put one into the state, and every rank saves its own.

    On as many ranks as saved, each goes on exactly where it was. On another number no rank gets another's numbers: each
    starts a stream of its own, derived from what was saved, the number of ranks and its rank; a warning says so.
    """

    def __init__(self) -> None:
        super().__init__(self)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generators: `python`, `numpy`, `torch`, and `cuda` where it is in use."""
        kind, keys, at, has_gauss, gauss = np.random.get_state(legacy=True)
        state: dict[str, Any] = {
            "python": random.getstate(),
            "numpy": {"kind": kind, "keys": np.array(keys), "at": at, "has_gauss": has_gauss, "gauss": gauss},
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the states of the generators.

        Args:
            state: As `state_dict` returned it.
        """
        saved = state["numpy"]
        random.setstate(state["python"])
        np.random.set_state((saved["kind"], saved["keys"], saved["at"], saved["has_gauss"], saved["gauss"]))
        torch.set_rng_state(state["torch"].cpu())
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())

    def load_other_world(self, states: list[Any], rank: int, world: int) -> bool:
        """Begin a stream of this rank's own: none of the saved ones is its own. Arguments are those of `PerRank`."""
        digest = hashlib.sha256(f"{rank} of {world}".encode())
        for state in states:
            digest.update(state["torch"].cpu().numpy().tobytes())
        seed = int.from_bytes(digest.digest()[:8], "little")
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        torch.manual_seed(seed % (1 << 63))
        warnings.warn(
            f"random number generators were saved by {len(states)} ranks and there are {world}: every rank begins a "
            "stream of its own",
            stacklevel=7,  # the caller of `load`
        )
        return True
