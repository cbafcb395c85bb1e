"""Checkpoints for torchtitan: a manager that saves steps, selected by the trainer's config.

Torchtitan's manager decides when to save and what to load. Here it saves with `shardckpt.integrations.dcp`.
"""

from __future__ import annotations

from shardckpt.errors import require_packages

require_packages("shardckpt.integrations.torchtitan", "torch", "torchtitan", install="'shardckpt[torchtitan]'")

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpointer import MODEL, AsyncMode
from torchtitan.components.checkpointer import CheckpointManager as TitanCheckpointManager
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from shardckpt import ShardckptError, ls, prune
from shardckpt.errors import UnsupportedError, UsageError
from shardckpt.integrations import dcp
from shardckpt.integrations.torchtitan_step import prove_first_step

__all__ = ["CheckpointManager"]

_REPLACED = ("dcp_save", "dcp_load", "_find_load_step", "_purge_stale_checkpoints")


class CheckpointManager(TitanCheckpointManager):  # type: ignore[misc]  # torchtitan is not typed
    """Manager that saves the steps of torchtitan's trainer.

    Use `CheckpointManager.Config` in place of torchtitan's: its fields and their meaning are the same. A folder with
    checkpoints from torchtitan's own manager resumes too; `keep_latest_k` never removes these.

    Args:
        config: The manager's config.
        **components: As for torchtitan's manager.

    Raises:
        UnsupportedError: This version of torchtitan lacks a method that is replaced.
        UsageError: A drill needs a trainer among the states.

    Examples:
        >>> config.checkpoint = CheckpointManager.Config(enable=True, interval=500)  # doctest: +SKIP
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanCheckpointManager.Config):  # type: ignore[misc]
        """Torchtitan's config, which builds this manager."""

        drill: bool = False
        """Whether to train the first step's batches twice from one saved state before it, and compare all bits. If they
        differ, `train` raises a ResumeDivergence, which names the values that the state lacks."""

    def __init__(self, config: Config, **components: Any) -> None:
        missing = [name for name in _REPLACED if not hasattr(TitanCheckpointManager, name)]
        if missing:
            found = f"a CheckpointManager without {', '.join(missing)}"
            raise UnsupportedError("this version of torchtitan is not supported", found=found)
        if not isinstance(config.drill, bool):
            raise UsageError("`drill` must be True or False", found=repr(config.drill))
        super().__init__(config, **components)
        if config.drill and self.enable:
            prove_first_step(self.states, self.folder)

    @torch.no_grad()
    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Any:
        """Save a state as a step; as Hugging Face's files if `to_hf`, as torchtitan does."""
        if to_hf:
            return super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf)
        saved: Any
        if async_mode == AsyncMode.DISABLED:
            saved = dcp.save(state_dict, checkpoint_id=checkpoint_id)
        elif async_mode == AsyncMode.ASYNC:
            saved = dcp.async_save(state_dict, checkpoint_id=checkpoint_id, process_group=self.pg)
        else:
            saved = dcp.async_save(
                state_dict,
                checkpoint_id=checkpoint_id,
                process_group=self.pg,
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self.stager,
            )
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return saved

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load a step, or a checkpoint from torchtitan's own manager; Hugging Face's files as torchtitan does."""
        if from_hf:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        dcp.load(state_dict, checkpoint_id=checkpoint_id)
        if MODEL in self.states:  # its tensors are entries of the state, which torch does not load by the wrapper
            self.states[MODEL].load_state_dict(state_dict)

    def _find_load_step(self, folder: str = "") -> int:
        """Return the newest complete step, or torchtitan's newest checkpoint if its number is larger."""
        try:
            numbers = [step.number for step in ls(folder or self.folder).complete]
        except UsageError:  # the folder has no steps
            numbers = []
        return max([int(super()._find_load_step(folder)), *numbers])

    def _purge_stale_checkpoints(self) -> None:
        """Remove old steps, in the background once the current save has succeeded."""
        if not self._should_purge():
            return
        if self.save_future is None:
            self._prune()
        else:
            self.save_future.add_done_callback(self._prune)

    def _prune(self, saved: Future[Any] | None = None) -> None:
        """Remove old steps; a failure is only logged, and the training continues."""
        if saved is not None and saved.exception() is not None:
            return
        try:
            prune(self.folder, keep_last=self.keep_latest_k)
        except ShardckptError as error:
            logger.warning("Checkpointer failed to remove old steps of %s: %s", self.folder, error)
