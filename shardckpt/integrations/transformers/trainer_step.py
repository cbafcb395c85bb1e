"""A training step for `transformers.Trainer` that can run again, on one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from shardckpt.errors import UsageError
from shardckpt.witness.framework_drill import drill_folder, require_proven, run_drill

__all__ = ["TrainerStep", "require_steps_for_drill"]


class TrainerStep:
    """A step with one batch: forward, backward, clipping, optimizer and schedule; no callbacks, logs or counts."""

    __slots__ = ("_args", "_inputs", "_kwargs", "_train", "_trainer")  # a drill does not look into its attributes

    def __init__(
        self, trainer: Any, train: Callable[..., Any], inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._trainer, self._train, self._inputs, self._args, self._kwargs = trainer, train, inputs, args, kwargs

    def prove_resume(self, model: Any, state: dict[str, Any], run: str) -> None:
        """Train the step from one saved state twice, and compare all bits; then restore the state. Collective."""
        require_proven(run_drill(lambda: self.run(model), state, drill_folder(run)))

    def run(self, model: Any) -> dict[str, Any]:
        """Train a step, and return its results."""
        trainer, limit = self._trainer, self._trainer.args.max_grad_norm
        loss = self._train(dict(self._inputs), *self._args, **self._kwargs)
        results = {"loss": loss, "batch": dict(self._inputs)}
        if limit:
            results["grad_norm"] = trainer.accelerator.clip_grad_norm_(model.parameters(), limit)
        trainer.optimizer.step()
        schedule = trainer.lr_scheduler
        if not (trainer.accelerator.optimizer_step_was_skipped or isinstance(schedule, ReduceLROnPlateau)):
            schedule.step()
        model.zero_grad()
        return results


def require_steps_for_drill(args: Any) -> None:
    """Require that a Trainer's batches are steps, and that its optimizer is saved."""
    if args.gradient_accumulation_steps > 1:
        found = f"gradient_accumulation_steps={args.gradient_accumulation_steps}"
        raise UsageError("a drill needs steps of one batch", found=found, fix="Run it once with 1.")
    if args.save_only_model:
        raise UsageError("a drill needs an optimizer that is saved", found="save_only_model=True")
