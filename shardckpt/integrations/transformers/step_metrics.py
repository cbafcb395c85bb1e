"""Metrics that a step has of a Trainer, and the rules of retention that use them."""

from __future__ import annotations

from typing import Any

from transformers import TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

__all__ = ["build_retention", "collect_metrics"]

_BEST = "trainer.best_step"
"""Metric for retention: the number of a step that was the best one when it was saved, -1 for other steps."""


def build_retention(args: TrainingArguments) -> dict[str, Any]:
    """Return the rules for `save_total_limit`: as documented, the best step is one of those that it counts.

    Args:
        args: Arguments of the Trainer.

    Returns:
        Arguments of `Checkpointer`.
    """
    limit = args.save_total_limit
    if limit is None or limit <= 0:
        return {}
    if args.metric_for_best_model is None or args.save_strategy == SaveStrategy.BEST:
        return {"keep_last": limit}
    return {"keep_last": max(limit - 1, 1), "keep_best": 1, "metric": _BEST, "mode": "max"}


def collect_metrics(args: TrainingArguments, state: TrainerState) -> dict[str, float]:
    """Return the metrics of the evaluation at the current step, and whether the step is the best one.

    Args:
        args: Arguments of the Trainer.
        state: State of the Trainer.
    """
    step = state.global_step
    logged = (item for log in state.log_history if log.get("step") == step for item in log.items())
    metrics = {name: value for name, value in logged if name.startswith("eval_") and isinstance(value, (int, float))}
    if args.metric_for_best_model is None:
        return metrics
    return {**metrics, _BEST: step if state.best_global_step == step else -1}
