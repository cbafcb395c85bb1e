"""`enable_jit_checkpoint`: save a step on SIGTERM, after the same training step on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shardckpt import Checkpointer

__all__ = ["replace_jit_checkpoint"]


class _StopCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Saves and ends the training when any rank has got the signal."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer

    def on_step_end(self, _args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Agree with the other ranks. Collective."""
        if not self._checkpointer.stop_requested:
            self._checkpointer.should_save(state.global_step)
            if self._checkpointer.stop_requested:
                control.should_save = control.should_training_stop = True


@contextmanager
def replace_jit_checkpoint(trainer: Any, checkpointer: Checkpointer) -> Iterator[None]:
    """Handle SIGTERM in place of the Trainer's `JITCheckpointCallback`, until the context ends."""
    # That one saves on each rank when its own signal has come, so ranks would save different steps or wait for each
    # other. It also makes a folder for each save. Earlier versions of transformers have no such argument.
    if not getattr(trainer.args, "enable_jit_checkpoint", False):
        yield
        return
    replaced = [(each, each.jit_manager) for each in trainer.callback_handler.callbacks if hasattr(each, "jit_manager")]
    stopping = _StopCallback(checkpointer)
    trainer.add_callback(stopping)
    try:
        for each, _ in replaced:
            each.jit_manager = None
        with checkpointer.save_on_signal():
            yield
    finally:
        trainer.remove_callback(stopping)
        for each, manager in replaced:
            each.jit_manager = manager
            each.on_train_end(trainer.args, trainer.state, trainer.control)  # it restores the handler before its own
