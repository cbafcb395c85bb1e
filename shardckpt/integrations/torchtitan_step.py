"""A training step for torchtitan's trainer that can run again, on the same batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torchtitan.components.checkpointer import DATALOADER, LR_SCHEDULER, MODEL, OPTIMIZER, TRAIN_STATE

from shardckpt import PerRank
from shardckpt.errors import UsageError
from shardckpt.witness.framework_drill import drill_folder, require_proven, run_drill

__all__ = ["prove_first_step"]


def prove_first_step(states: Mapping[str, Any], run: str) -> None:
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
