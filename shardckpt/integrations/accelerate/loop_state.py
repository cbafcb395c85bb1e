"""An accelerator's counters and data positions in a checkpoint."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import broadcast_object_list

from shardckpt import PerRank
from shardckpt.errors import UsageError
from shardckpt.events.warn_user import warn_user

__all__ = ["LoaderPosition", "LoopState"]


class LoopState:
    """Rank 0's counters and data order, as an object with `state_dict`."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._project = accelerator, accelerator.project_configuration
        order = [[loader.iteration, sampler.initial_seed, sampler.epoch] for loader, sampler in self._samplers()]
        self._custom = len(accelerator._custom_objects)
        values = {"step": accelerator.step, "iteration": self._project.iteration, "order": order}
        self._values: dict[str, Any] = {**broadcast_object_list([values])[0], "custom": self._custom}

    def _samplers(self) -> list[tuple[Any, Any]]:
        """Return the data loaders whose order is known by a seed, with their samplers."""
        loaders = self._accelerator._dataloaders
        pairs = [(each, each.get_sampler()) for each in loaders if hasattr(each, "get_sampler")]
        return [(loader, sampler) for loader, sampler in pairs if isinstance(sampler, SeedableRandomSampler)]

    def state_dict(self) -> dict[str, Any]:
        """Return rank 0's values."""
        return self._values

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue at saved values, which do not include gradients."""
        if 0 < self._custom < saved.get("custom", 0):
            expected, fix = saved["custom"], "Register the same objects, in the same order."
            raise UsageError("too few objects are registered", found=self._custom, expected=expected, fix=fix)
        self._accelerator.step = saved["step"]
        self._project.iteration = max(self._project.iteration, saved["iteration"] + 1)
        for (loader, sampler), order in zip(self._samplers(), saved["order"], strict=False):
            loader.iteration, sampler.initial_seed, sampler.epoch = order


class LoaderPosition(PerRank):
    """Position in a stateful data loader, which counts one rank's batches."""

    def load_other_world(self, states: list[Any], rank: int, world: int) -> bool:
        """Leave the loader at the start of its epoch, with a warning."""
        if rank == 0:
            warn_user(f"a data loader was saved by {len(states)} ranks, not by {world}: it starts its epoch again")
        return True
