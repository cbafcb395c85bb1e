"""The state of a Trainer in a step: its text, its metrics and the path of its best step."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerState
from transformers.trainer_callback import ExportableState

from shardckpt import Checkpointer, UnsupportedError

__all__ = ["collect_metrics", "dump_state", "note_best_step", "require_attached"]


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


def note_best_step(state: TrainerState, checkpointer: Checkpointer, saved: int | None = None) -> None:
    """Note the path of the best step if it exists or is being saved: its evaluation may come after its save.

    Args:
        state: State of the Trainer.
        checkpointer: Manager of the run, which may have been moved since the path was noted.
        saved: Number of the step that is being saved; None without one.
    """
    best = state.best_global_step
    path = None if best is None else checkpointer.path(best)
    if path is not None and path != state.best_model_checkpoint and (best == saved or best in checkpointer.steps()):
        state.best_model_checkpoint = path


def require_attached(trainer: object) -> None:
    """Require that the callback saves the steps of the training that begins.

    Args:
        trainer: Trainer that the callback is attached to; None for a subclass whose `train` does not call the original.

    Raises:
        UnsupportedError: The callback is not attached.
    """
    if trainer is None:
        raise UnsupportedError(
            "ShardckptCallback saves nothing in a Trainer whose own `train` does not call that of transformers.Trainer",
            fix="Remove the callback, or use `shardckpt.Checkpointer` in that loop.",
        )
