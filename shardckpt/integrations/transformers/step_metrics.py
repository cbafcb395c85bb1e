"""Metrics that a step has of a Trainer."""

from __future__ import annotations

from transformers import TrainerState

__all__ = ["collect_metrics"]


def collect_metrics(state: TrainerState) -> dict[str, float]:
    """Return the metrics of the evaluation at the current step.

    Args:
        state: State of the Trainer.
    """
    logged = (item for log in state.log_history if log.get("step") == state.global_step for item in log.items())
    return {name: value for name, value in logged if name.startswith("eval_") and isinstance(value, (int, float))}
