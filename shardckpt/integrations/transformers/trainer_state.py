"""The state of a Trainer in a step: its text and its metrics."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerState
from transformers.trainer_callback import ExportableState

__all__ = ["collect_metrics", "dump_state"]


def collect_metrics(state: TrainerState) -> dict[str, float]:
    """Return the metrics of the evaluation at the current step.

    Args:
        state: State of the Trainer.
    """
    logged = (item for log in state.log_history if log.get("step") == state.global_step for item in log.items())
    return {name: value for name, value in logged if name.startswith("eval_") and isinstance(value, (int, float))}


def dump_state(trainer: Any) -> str:
    """Return the state of a Trainer and of its callbacks as JSON. Collective.

    The states of the ranks differ, in timings for instance. As in the Trainer's folders, that of rank 0 is saved.

    Args:
        trainer: A `transformers.Trainer`.
    """
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    kept = [each for each in callbacks if isinstance(each, ExportableState)]
    exported = replace(trainer.state, stateful_callbacks=kept)
    return broadcast_object_list([json.dumps(asdict(exported))])[0]  # type: ignore[no-any-return]
