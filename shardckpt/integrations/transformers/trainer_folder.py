"""Steps of a Trainer: folders `checkpoint-N`, the state in a step, removal, a training step that can run again."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from accelerate.utils import broadcast_object_list
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Trainer, TrainerState, TrainingArguments
from transformers.trainer import FSDP_MODEL_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from shardckpt import Checkpointer, load, load_optim_state_dict
from shardckpt.errors import UnsupportedError, UsageError
from shardckpt.integrations.local_folders import list_names, list_steps, name_earlier_step, raise_storage_errors
from shardckpt.witness.prove_resume import drill_folder, require_proven, run_drill

__all__ = [
    "TrainerStep",
    "choose_removed",
    "collect_metrics",
    "dump_state",
    "find_newest_folder",
    "finish_without_removal",
    "has_fsdp_model",
    "is_trainer_folder",
    "load_step",
    "load_trainer_folder",
    "load_weights",
    "note_best_step",
    "require_attached",
    "require_methods",
    "require_resume_from",
    "require_steps_for_drill",
    "unwrap_optimizer",
]


def is_trainer_folder(path: str) -> bool:
    """Return True if the Trainer wrote a folder."""
    return os.path.isfile(os.path.join(path, TRAINER_STATE_NAME))


def has_fsdp_model(folder: str) -> bool:
    """Return True if FSDP saved the model in a Trainer's folder."""
    return any(name.startswith(FSDP_MODEL_NAME) for name in list_names(folder))


def find_newest_folder(output_dir: str) -> tuple[int, str]:
    """Return number and path of the Trainer's newest folder, as rank 0 sees it; -1 and "" without one. Collective."""
    with raise_storage_errors("cannot list", output_dir):
        folder: str = (os.path.isdir(output_dir) and get_last_checkpoint(output_dir)) or ""
    found = (int(folder.rpartition("-")[2]), folder) if is_trainer_folder(folder) else (-1, "")
    return broadcast_object_list([found])[0]  # type: ignore[no-any-return]


def load_step(checkpointer: Checkpointer, path: str, state: dict[str, Any], *, strict: bool = True) -> dict[str, Any]:
    """Load a step into a state, and return it. Collective."""
    with name_earlier_step(path, "resume_from_checkpoint"):
        for number in list_steps(checkpointer):
            if os.path.abspath(checkpointer.path(number)) == os.path.abspath(path):
                checkpointer.restore(state, step=number, ignore_extra=True, strict=strict)
                return state
        return load(state, path, ignore_extra=True, strict=strict)  # type: ignore[no-any-return]


def load_trainer_folder(trainer: Any, folder: str) -> None:
    """Load a folder that the Trainer wrote with another sharding, or with FSDP. Collective."""
    optimizer = unwrap_optimizer(trainer.optimizer)
    if not os.path.isfile(os.path.join(folder, SCHEDULER_NAME)):  # it was saved with `save_only_model`
        load_weights(trainer.model, folder)
        return
    if has_fsdp_model(folder):
        load({"model": trainer.model, "optimizer": optimizer}, folder, ignore_extra=True)
    else:
        load_weights(trainer.model, folder)
        saved = load(os.path.join(folder, OPTIMIZER_NAME))
        names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
        ordered = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        slots = {ordered[number]: values for number, values in saved["state"].items()}
        groups = [{**group, "params": [ordered[at] for at in group["params"]]} for group in saved["param_groups"]]
        load_optim_state_dict(trainer.model, optimizer, {"state": slots, "param_groups": groups})
    trainer.lr_scheduler.load_state_dict(load(os.path.join(folder, SCHEDULER_NAME)))


def load_weights(model: Any, path: str) -> None:
    """Load a model from a step, or from a folder that the Trainer wrote. Collective."""
    if is_trainer_folder(path) and not has_fsdp_model(path):
        load(model, path)
    else:
        load({"model": model}, path, ignore_extra=True)


def unwrap_optimizer(optimizer: Any) -> Any:
    """Return an optimizer without Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


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


def collect_metrics(state: TrainerState) -> dict[str, float]:
    """Return the current step's evaluation metrics."""
    logged = (item for log in state.log_history if log.get("step") == state.global_step for item in log.items())
    return {name: value for name, value in logged if name.startswith("eval_") and isinstance(value, (int, float))}


def find_ranking(args: TrainingArguments) -> dict[str, Any]:
    """Return the metric and the mode by which a Trainer ranks steps, as `Checkpointer` takes them; empty without."""
    name = args.metric_for_best_model
    if not name:
        return {}
    metric = name if name.startswith("eval_") else f"eval_{name}"
    return {"metric": metric, "mode": "max" if args.greater_is_better else "min"}


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
    if path is not None and path != state.best_model_checkpoint and (best == saved or best in list_steps(checkpointer)):
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


@functools.cache
def wrap_train(kind: type) -> None:
    """Wrap `Trainer.train`, once in a process, to attach a trainer's callback of a class."""
    original = Trainer.train

    @functools.wraps(original)
    def train(self: Any, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        callbacks: list[Any] = [each for each in self.callback_handler.callbacks if isinstance(each, kind)]
        if not callbacks:
            return original(self, resume_from_checkpoint, *args, **kwargs)
        if len(callbacks) > 1:
            raise UsageError(
                f"a Trainer saves with one {kind.__name__}",
                found=f"callbacks for {', '.join(each.checkpointer.root for each in callbacks)}",
                fix="Remove the others: `trainer.remove_callback(callback)`.",
            )
        with callbacks[0].attach(self), callbacks[0].find_resume_folder(resume_from_checkpoint) as folder:
            return original(self, folder, *args, **kwargs)

    Trainer.train = train
