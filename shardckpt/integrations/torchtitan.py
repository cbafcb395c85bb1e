"""Checkpoints for torchtitan: a manager that saves steps, selected by the trainer's config.

Torchtitan's manager decides when to save and what to load. Here it saves with `shardckpt.integrations.dcp`.
"""

from __future__ import annotations

from shardckpt.errors import require_packages

require_packages("shardckpt.integrations.torchtitan", "torch", "torchtitan", install="'shardckpt[torchtitan]'")


from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpointer import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER, TRAIN_STATE, AsyncMode
from torchtitan.components.checkpointer import CheckpointManager as TitanCheckpointManager
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection

from shardckpt import PerRank, ShardckptError, ls, prune
from shardckpt.errors import UnsupportedError, UsageError
from shardckpt.integrations import dcp
from shardckpt.witness.prove_resume import drill_folder, require_proven, run_drill

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
            _prove_first_step(self.states, self.folder)

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


def _prove_first_step(states: Mapping[str, Any], run: str) -> None:
    """Prove a resume in the first call of a trainer's `train_step`, which then trains as without a drill.

    Args:
        states: Objects that the manager saves, with the trainer as `train_state`.
        run: Path or URL of the run.

    Raises:
        UsageError: The trainer is missing, or has no `train_step`.
    """
    trainer = states.get(TRAIN_STATE)
    train = getattr(trainer, "train_step", None)
    if trainer is None or not callable(train):
        raise UsageError(
            "a drill needs a trainer whose method `train_step` gets an iterator over batches",
            found=f"states[{TRAIN_STATE!r}] = {trainer!r}",
            fix="Pass torchtitan's Trainer there, or use drill=False.",
        )

    def train_first_step(batches: Iterator[Any], *args: Any, **kwargs: Any) -> Any:
        trainer.train_step = train
        step = _TitanStep(trainer, batches, lambda own: train(own, *args, **kwargs))
        step.prove_resume(states, run)
        return train(step.list_batches(), *args, **kwargs)

    trainer.train_step = train_first_step


class _TitanStep:
    """A step with all its microbatches: forward, backward, clipping, optimizers and schedules; nothing is logged."""

    __slots__ = ("_batches", "_taken", "_train", "_trainer")  # a drill does not look into its attributes

    def __init__(self, trainer: Any, batches: Iterator[Any], train: Callable[[Iterator[Any]], Any]) -> None:
        self._trainer, self._batches, self._train = trainer, batches, train
        self._taken: list[Any] = []

    def prove_resume(self, states: Mapping[str, Any], run: str) -> None:
        """Train the step from one saved state twice, and compare all bits; then restore the state. Collective."""
        parts = list(self._trainer.model_parts)
        model = parts[0] if len(parts) == 1 else nn.ModuleList(parts)
        require_proven(run_drill(lambda: self.run(model), self._build_state(states), drill_folder(run)))

    def _build_state(self, states: Mapping[str, Any]) -> dict[str, Any]:
        """Return the objects that the manager saves, except the data loader, which a step does not use."""
        state: dict[str, Any] = {}
        for name, each in states.items():
            if name == MODEL:
                state[name] = each.model
            elif name == OPTIMIZER:
                state[name] = each.optimizers
            elif name == LR_SCHEDULER:
                state[name] = each.schedulers
            elif name != DATALOADER:
                state[name] = PerRank(_SavedState(each))
        return state

    def run(self, model: nn.Module) -> dict[str, Any]:  # noqa: ARG002
        """Train the step, and return its results."""
        trainer, metrics = self._trainer, self._trainer.metrics_processor
        seen = trainer.metrics_processor = _SeenMetrics(metrics)
        try:
            self._train(self.list_batches())
        finally:
            trainer.metrics_processor = metrics
        return {**seen.results, "batch": [_copy_batch(batch) for batch in self._taken]}

    def list_batches(self) -> Iterator[Any]:
        """Yield the batches that were taken, then take others."""
        yield from map(_copy_batch, tuple(self._taken))
        for batch in self._batches:
            self._taken.append(_copy_batch(batch))
            yield batch


class _SavedState:
    """An object's state without its attributes, in which the drill would look for models and optimizers."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        self._of = of

    def state_dict(self) -> Any:
        """Return the object's state."""
        return self._of.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Load a state into the object."""
        self._of.load_state_dict(state)


class _SeenMetrics:
    """Metrics for the drill's steps: they are computed, and not logged."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics
        self.results: dict[str, float] = {}  # loss and gradient norm, if the step has computed them

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metrics, name)

    def should_log(self, step: int) -> bool:  # noqa: ARG002
        """Return True: only steps that are logged compute their loss."""
        return True

    def log(self, step: int, global_avg_loss: float, global_max_loss: float, grad_norm: float, **_: Any) -> None:  # noqa: ARG002
        """Keep the step's results."""
        self.results = {"loss": global_avg_loss, "grad_norm": grad_norm}


def _copy_batch(batch: Any) -> Any:
    """Return a batch with copied dicts: the trainer puts tensors on the device into them."""
    if isinstance(batch, Mapping):
        return {name: _copy_batch(each) for name, each in batch.items()}
    return tuple(map(_copy_batch, batch)) if isinstance(batch, (list, tuple)) else batch
