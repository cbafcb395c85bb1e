"""A Trainer's state in a step: its text, its metrics its best step's path, and the steps that it removes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from shardckpt import Checkpointer
from shardckpt.errors import UnsupportedError, UsageError

__all__ = [
    "choose_removed",
    "collect_metrics",
    "dump_state",
    "finish_without_removal",
    "note_best_step",
    "require_attached",
    "require_methods",
    "require_resume_from",
]


def collect_metrics(state: TrainerState) -> dict[str, float]:
    """Return the current step's evaluation metrics."""
    logged = (item for log in state.log_history if log.get("step") == state.global_step for item in log.items())
    return {name: value for name, value in logged if name.startswith("eval_") and isinstance(value, (int, float))}


def dump_state(trainer: Any) -> str:
    """Return the state of a Trainer and its callbacks as JSON. Collective."""
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    kept = [each for each in callbacks if isinstance(each, ExportableState)]
    exported = replace(trainer.state, stateful_callbacks=kept)
    # States differ between ranks, for instance in timings. As in the Trainer's folders, rank 0's is saved.
    return broadcast_object_list([json.dumps(asdict(exported))])[0]  # type: ignore[no-any-return]


def note_best_step(state: TrainerState, checkpointer: Checkpointer, saved: int | None = None) -> None:
    """Note the best step's path if it exists or is being saved: its evaluation may come after its save."""
    best = state.best_global_step
    path = None if best is None else checkpointer.path(best)
    if path is not None and path != state.best_model_checkpoint and (best == saved or best in checkpointer.steps()):
        state.best_model_checkpoint = path


def require_attached(trainer: object) -> None:
    """Require that the callback is attached to the trainer that starts to train."""
    if trainer is None:
        raise UnsupportedError(
            "ShardckptCallback saves nothing in a Trainer whose `train` does not call `transformers.Trainer.train`",
            fix="Remove the callback, or use `shardckpt.Checkpointer` in that loop.",
        )


def require_methods(trainer: object, names: Iterable[str]) -> None:
    """Require that a Trainer has the methods to replace."""
    missing = [name for name in names if not hasattr(trainer, name)]
    if missing:
        found = f"a Trainer without {', '.join(missing)}"
        raise UnsupportedError("this version of transformers is not supported", found=found)


def require_resume_from(resume_from: object, checkpointer: Checkpointer) -> None:
    """Require a value that `Trainer.train` may resume from."""
    if not isinstance(resume_from, (str, os.PathLike, bool, type(None))):
        raise UsageError(
            "resume_from_checkpoint must be True or a checkpoint's path",
            where=checkpointer.root,
            found=repr(resume_from),
            fix="Pass `callback.checkpointer.path(step)` for a step in this run.",
        )


def finish_without_removal(
    arguments: TrainingArguments, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Finish a training without removing folders. In place of `Trainer._finalize_training`."""
    # The Trainer would compare folders with the best step's path, which may be a URL, or not be complete yet.
    limit, arguments.save_total_limit = arguments.save_total_limit, None
    try:
        return original(*args, **kwargs)
    finally:
        arguments.save_total_limit = limit


def choose_removed(numbers: Sequence[int], limit: int | None, best: int | None) -> list[int]:
    """Return the steps to remove, oldest first, as the Trainer chooses its folders: never the newest or the best."""
    if limit is None or limit <= 0:
        return []
    protected = {best, *numbers[-1:]}.intersection(numbers)  # both stay with a limit of 1, too
    others = [number for number in numbers if number not in protected]
    return others[: max(len(numbers) - max(limit, len(protected)), 0)]
