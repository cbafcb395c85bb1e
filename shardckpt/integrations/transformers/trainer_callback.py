"""Checkpoints for `transformers.Trainer`: a callback that saves steps and resumes from them.

The Trainer calls a callback after it has written its own folder, and too late to resume. So `Trainer.train` is wrapped:
while a trainer with the callback trains, its methods that save and load are replaced. The Trainer still decides when to
save, when to evaluate and which step is the best.
"""

from __future__ import annotations

import functools
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from typing_extensions import Unpack

from shardckpt import Checkpointer, RNGState
from shardckpt.checkpoint.save.async_save import StepSaveParams, require_known_options
from shardckpt.checkpoint.save.render_model_files import collect_model_files
from shardckpt.errors import UnsupportedError, UsageError, require_bools
from shardckpt.integrations.adapter_steps import AdapterSteps
from shardckpt.integrations.local_folders import StepRemoval, list_steps
from shardckpt.integrations.transformers.jit_checkpoint import replace_jit_checkpoint
from shardckpt.integrations.transformers.trainer_folder import (
    TrainerStep,
    choose_removed,
    collect_metrics,
    dump_state,
    find_newest_folder,
    find_ranking,
    finish_without_removal,
    has_fsdp_model,
    is_trainer_folder,
    load_step,
    load_trainer_folder,
    load_weights,
    note_best_step,
    require_attached,
    require_methods,
    require_resume_from,
    require_steps_for_drill,
    unwrap_optimizer,
    wrap_train,
)
from shardckpt.results import SaveHandle

__all__ = ["ShardckptCallback"]


class ShardckptCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not typed
    """Save a `transformers.Trainer`'s steps with shardckpt, and resume from them.

    The Trainer writes no folders `checkpoint-N`. Its arguments `save_strategy`, `save_steps`, `save_total_limit`,
    `save_only_model`, `load_best_model_at_end` and `metric_for_best_model` keep their meaning. A step has model,
    optimizer, scheduler, gradient scaler, each rank's random number generators, the Trainer's state, and the files of
    the model's configs and of the tokenizer or processor.

    `trainer.train(resume_from_checkpoint=True)` resumes from the newest step, or from the newest folder in `output_dir`
    that the Trainer wrote, whichever has the larger number; without both it trains from the start. A path names a step
    or such a folder. The number of ranks and the kind of sharding may change between save and load.

    Args:
        root: Run directory: a path, or a URL that fsspec supports.
        background: Save in the background. The next save, or the end of training, then raises an error.
        drill: Before the first step of each `train`, train its batch twice from one saved state, and compare all bits.
            If they differ, `train` raises a `ResumeDivergence` that names the first difference and the values that a
            step lacks. The drill does not change the training.
        adapter_only: Save what a PEFT model trains, and refer to its frozen base; False to save the base in each step.
        save_optimizer: Save what a resume needs although `save_only_model` is True, which the Trainer demands for a
            model with a `tp_plan`.
        **options: Options for `Checkpointer.async_save`; without `background`, for `Checkpointer.save`. `model_files`
            adds files; None stores none.

    Raises:
        UsageError: An argument has an invalid value.
        TypeError: An option is unknown.

    Examples:
        >>> trainer = Trainer(model, args, callbacks=[ShardckptCallback("runs/a")])  # doctest: +SKIP
        >>> trainer.train(resume_from_checkpoint=True)
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        background: bool = True,
        drill: bool = False,
        adapter_only: bool = True,
        save_optimizer: bool = False,
        **options: Unpack[StepSaveParams],
    ) -> None:
        self._removal = StepRemoval(root)
        self.checkpointer = Checkpointer(root, on_event=self._removal.take_event)
        require_bools(background=background, drill=drill, save_optimizer=save_optimizer)
        require_known_options(type(self).__name__, options, background=background, has_metrics=True)
        self._background, self._has_drill, self._options = background, drill, options
        self._is_drill_due, self._saves_optimizer = False, save_optimizer
        self._adapter_steps = AdapterSteps(adapter_only)
        self._trainer: Any = None
        self._restore: Callable[[], object] | None = None
        self._generators: dict[str, Any] | None = None
        self._handle: SaveHandle | None = None
        wrap_train(ShardckptCallback)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_trainer": None, "_restore": None, "_generators": None, "_handle": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        wrap_train(ShardckptCallback)  # the process may be another one
        self.__dict__.update(state)

    @contextmanager
    def attach(self, trainer: Any) -> Iterator[None]:
        """Replace a trainer's methods that save and load, until the context ends.

        Args:
            trainer: A `transformers.Trainer`.

        Raises:
            UnsupportedError: The trainer uses DeepSpeed, or this version of transformers lacks a method.
            UsageError: A drill needs steps without gradient accumulation, whose optimizer is saved.
        """
        if trainer.is_deepspeed_enabled:
            fix = "Remove the callback: `shardckpt` reads the checkpoints that DeepSpeed writes."
            raise UnsupportedError("ShardckptCallback does not support DeepSpeed", fix=fix)
        methods = {
            "_save_checkpoint": self._save,
            "_load_from_checkpoint": self._load_model,
            "_load_optimizer_and_scheduler": self._load_all,
            "_load_rng_state": self._load_generators,
            "_load_best_model": self._load_best_model,
        }
        if self._has_drill:
            require_steps_for_drill(trainer.args)
            methods["training_step"] = self._train_step
        require_methods(trainer, methods)
        if ranking := find_ranking(trainer.args):  # steps store it for `RUN@best`
            self.checkpointer = Checkpointer(self.checkpointer.root, on_event=self._removal.take_event, **ranking)
        if hasattr(trainer, "_finalize_training"):  # not in early versions
            methods["_finalize_training"] = functools.partial(finish_without_removal, trainer.args)
        earlier = {name: vars(trainer)[name] for name in methods if name in vars(trainer)}
        vars(trainer).update({name: functools.partial(new, getattr(trainer, name)) for name, new in methods.items()})
        self._trainer, self._is_drill_due = trainer, self._has_drill
        try:
            with replace_jit_checkpoint(trainer, self.checkpointer):
                yield
        finally:
            for name in methods:
                del vars(trainer)[name]
            vars(trainer).update(earlier)
            self._trainer = self._restore = self._generators = None

    @contextmanager
    def find_resume_folder(self, resume_from: str | bool | None) -> Iterator[str | None]:
        """Yield the folder that the Trainer resumes from; None to train from the start. Collective.

        For a step, this is a temporary folder with the Trainer's state; `_load_all` loads everything else.

        Args:
            resume_from: Argument `resume_from_checkpoint` of `Trainer.train`.

        Raises:
            UsageError: Training would start in a run that has steps, or the argument is neither a bool nor a path.
        """
        require_resume_from(resume_from, self.checkpointer)
        numbers = list_steps(self.checkpointer)
        if not resume_from and numbers:
            raise UsageError(
                "training from the start would replace the steps of this run",
                where=self.checkpointer.root,
                found=f"step {numbers[-1]}",
                fix="Call train(resume_from_checkpoint=True), or choose another folder.",
            )
        if resume_from is True:
            number, folder = find_newest_folder(self._trainer.args.output_dir)
            if numbers and numbers[-1] >= number:
                folder = self.checkpointer.path(numbers[-1])
        else:
            folder = resume_from or ""
        if not folder:
            yield None
        elif is_trainer_folder(folder):
            if self._trainer.is_fsdp_enabled or has_fsdp_model(folder):
                self._restore = functools.partial(load_trainer_folder, self._trainer, folder)
            yield folder
        else:
            text = load_step(self.checkpointer, folder, {"trainer": ""})["trainer"]
            self._restore = functools.partial(self._restore_step, folder)
            with tempfile.TemporaryDirectory(prefix="shardckpt-") as temporary:
                Path(temporary, TRAINER_STATE_NAME).write_text(text, encoding="utf-8")
                yield temporary

    def on_train_begin(self, _args: TrainingArguments, state: TrainerState, _control: TrainerControl, **_: Any) -> None:
        """Find the run's best step; the run may have moved, or be at a URL."""
        require_attached(self._trainer)
        note_best_step(state, self.checkpointer)

    def on_train_end(self, *_args: Any, **_: Any) -> None:
        """Wait for the last save, and raise its error if it failed."""
        if self._handle is not None:
            self._handle.result()

    def _restore_step(self, path: str) -> None:
        self._adapter_steps.require_base([self._trainer.model], path)
        generators, is_model_alone = RNGState(), self._saves_model_alone
        if is_model_alone:  # for the next saves: the loaded step may have everything
            is_model_alone = not load_step(self.checkpointer, path, {"schedule": {}}, strict=False)["schedule"]
        earlier = generators.state_dict()
        load_step(self.checkpointer, path, self._build_state("", generators, is_model_alone=is_model_alone))
        self._generators = None if is_model_alone else generators.state_dict()
        generators.load_state_dict(earlier)  # a sampler may draw the order of the running epoch again

    @property
    def _saves_model_alone(self) -> bool:
        return self._trainer.args.save_only_model and not self._saves_optimizer

    def _build_state(self, text: str, generators: RNGState, *, is_model_alone: bool) -> dict[str, Any]:
        """Return the trainer's objects to save, or to load into."""
        trainer = self._trainer
        state = {"model": trainer.model, "trainer": text}
        if not is_model_alone:
            state |= {"optim": unwrap_optimizer(trainer.optimizer), "schedule": trainer.lr_scheduler, "rng": generators}
            if (scaler := getattr(trainer.accelerator, "scaler", None)) is not None:
                state["scaler"] = scaler
        return state

    def _save(self, _original: Callable[..., object], *_args: Any, **_: Any) -> None:
        """Save a step. In place of `Trainer._save_checkpoint`."""
        trainer, state, step = self._trainer, self._trainer.state, self._trainer.state.global_step
        trainer.store_flos()
        if self._handle is not None:
            self._handle.result()  # its step exists, and its event comes before this save starts
        note_best_step(state, self.checkpointer, step)
        arguments: dict[str, Any] = {
            "overwrite": True,  # steps after the one that training resumed from
            **self._options,
            "model_files": collect_model_files([trainer.model], [trainer.processing_class], self._options),
            "metrics": {**(self._options.get("metrics") or {}), **collect_metrics(state)},
        }
        saved = self._build_state(dump_state(trainer), RNGState(), is_model_alone=self._saves_model_alone)
        self._removal.start_save(step)
        self._remove_steps(step)
        save: Any = self.checkpointer.async_save if self._background else self.checkpointer.save
        save = functools.partial(save, step, saved)
        self._handle = self._adapter_steps.save(save, {"model": trainer.model}, self.checkpointer.root, arguments)

    def _remove_steps(self, step: int) -> None:
        """Remove the steps above `save_total_limit`, once the current save is complete. Collective."""
        state, limit = self._trainer.state, self._trainer.args.save_total_limit
        if limit is None:
            return
        numbers = [*(each for each in list_steps(self.checkpointer) if each != step), step]
        best = next((each for each in numbers if self.checkpointer.path(each) == state.best_model_checkpoint), None)
        if state.is_world_process_zero:
            for number in choose_removed(numbers, limit, best):
                self._removal.add(number)

    def _train_step(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Prove a resume before the first step. In place of `Trainer.training_step`."""
        if self._is_drill_due:
            self._is_drill_due = False
            step = TrainerStep(self._trainer, functools.partial(original, model), inputs, args, kwargs)
            step.prove_resume(model, self._build_state("", RNGState(), is_model_alone=False), self.checkpointer.root)
        return original(model, inputs, *args, **kwargs)

    def _load_model(self, original: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Load as the Trainer does, unless `_load_all` loads. In place of `Trainer._load_from_checkpoint`."""
        if self._restore is None:
            original(*args, **kwargs)

    def _load_all(self, original: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Load all before callbacks start. In place of `Trainer._load_optimizer_and_scheduler`. Collective."""
        if self._restore is None:
            original(*args, **kwargs)
        else:
            self._restore()

    def _load_generators(self, original: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        """Restore the generators once the data loader has used them. In place of `Trainer._load_rng_state`."""
        if self._generators is None:
            original(*args, **kwargs)
        else:
            RNGState().load_state_dict(self._generators)

    def _load_best_model(self, original: Callable[..., object]) -> None:
        """Load the best step's weights. In place of `Trainer._load_best_model`."""
        best = self._trainer.state.best_model_checkpoint
        if is_trainer_folder(best) and not (self._trainer.is_fsdp_enabled or has_fsdp_model(best)):
            original()
            return
        if self._handle is not None:
            self._handle.result()
        load_weights(self._trainer.model, best)
