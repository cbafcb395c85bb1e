"""Checkpoints for Lightning's Trainer: a `ModelCheckpoint` whose checkpoints are steps in a run.

`ModelCheckpoint` decides when to save, and what to keep; the Trainer calls its strategy to save and load. So the
strategy's methods are replaced: during a save the methods that save, while the Trainer runs the methods that load.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from typing_extensions import Unpack

from shardckpt import Checkpointer, ShardckptError, model_state_dict
from shardckpt.checkpoint.run.step_finder import parse_root
from shardckpt.checkpoint.save.async_save import StepSaveParams, require_known_options
from shardckpt.checkpoint.save.render_model_files import collect_model_files
from shardckpt.errors import UsageError, require_bools
from shardckpt.events.warn_user import warn_user
from shardckpt.integrations.adapter_steps import AdapterSteps
from shardckpt.integrations.lightning.lightning_state import (
    StepLoading,
    build_state,
    find_newest_path,
    find_number,
    has_hook,
    list_pretrained,
    move_paths,
    pop_strange_hparams,
    replace_methods,
)
from shardckpt.integrations.lightning.lightning_step import (
    LightningStep,
    ModelCheckpointParams,
    find_ranking,
    require_methods,
    require_steps_for_drill,
    require_supported_strategy,
    require_unnamed,
)
from shardckpt.integrations.local_folders import StepRemoval, list_steps
from shardckpt.integrations.stop_signal import StopSignal
from shardckpt.results import SaveHandle

__all__ = ["ShardckptModelCheckpoint"]


class ShardckptModelCheckpoint(ModelCheckpoint):  # type: ignore[misc]  # lightning is not typed
    """Save a Lightning `Trainer`'s steps with shardckpt, and resume from them.

    It is a `ModelCheckpoint` whose checkpoints are steps in a run; each rank writes its part. A step has all that
    Lightning's checkpoints have, and each rank's random number generators and data loaders. If the module has one
    transformers model, a step has the files of its configs, and of the module's or data module's only tokenizer.

    `trainer.fit(model, ckpt_path=...)` takes `"last"` for the newest step, `"best"`, a step's path, and a checkpoint
    that Lightning wrote. The number of ranks and the strategy may change between save and load.

    Args:
        root: Run directory: a path, or a URL that fsspec supports.
        background: Save in the background. The next save, or the end of training, then raises an error.
        save_on_signal: On SIGTERM, save a step after the running batch on all ranks, and stop the training.
        drill: Before the first step of each `fit`, train its batch twice from one saved state, and compare all bits. If
            they differ, `fit` raises a `ResumeDivergence` that names the first difference and the values that a step
            lacks. The drill does not change the training.
        adapter_only: Save what a PEFT model trains, and refer to its frozen base; False to save the base in each step.
        options: Options for `Checkpointer.async_save`; without `background`, for `Checkpointer.save`. `model_files`
            adds files; None stores none.
        **arguments: Arguments for `ModelCheckpoint`, except those that name files.

    Attributes:
        checkpointer: Manager for the steps.

    Raises:
        UsageError: An argument would name files, or has an invalid value.
        TypeError: An argument or an option is unknown.
        UnsupportedError: This version of Lightning lacks a method that must be replaced.

    Examples:
        >>> checkpoint = ShardckptModelCheckpoint("runs/a", monitor="val_loss", save_last=True)  # doctest: +SKIP
        >>> Trainer(callbacks=[checkpoint], strategy="fsdp").fit(model, ckpt_path="last")
    """

    FILE_EXTENSION = ""
    last_model_path: str

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        background: bool = True,
        save_on_signal: bool = False,
        drill: bool = False,
        adapter_only: bool = True,
        options: StepSaveParams | None = None,
        **arguments: Unpack[ModelCheckpointParams],
    ) -> None:
        require_unnamed(arguments)
        require_bools(background=background, save_on_signal=save_on_signal, drill=drill)
        require_known_options(f"{type(self).__name__}.options", options or {}, background=background, has_metrics=True)
        require_methods()
        super().__init__(
            parse_root(root),
            "step-{step:08d}",
            auto_insert_metric_name=False,
            enable_version_counter=False,
            **arguments,
        )
        self._removal = StepRemoval(self.dirpath)
        self.checkpointer = Checkpointer(self.dirpath, on_event=self._removal.take_event, **find_ranking(self))
        self._background, self._last_found = background, ""
        self._options: StepSaveParams = {**options} if options else {}
        self._adapter_steps = AdapterSteps(adapter_only)
        self._handle: SaveHandle | None = None
        self._has_drill, self._is_drill_due, self._has_warned = drill, False, False
        self._loading: StepLoading | None = None
        self._stop_signal = StopSignal(is_watched=save_on_signal)
        self._unlasting: set[str] = set()  # steps that could go when the newest step was saved
        self._unremoved: set[int] = set()  # steps that were no longer kept when the step to resume from was saved

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_handle": None, "_loading": None}  # both belong to this process

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace the strategy's methods that load, until the Trainer ends.

        Raises:
            UnsupportedError: The strategy is not supported.
            UsageError: Another callback saves into the same run.
        """
        require_supported_strategy(trainer.strategy)
        checkpointers = [e.checkpointer for e in trainer.callbacks if isinstance(e, ShardckptModelCheckpoint)]
        if len({each.root for each in checkpointers}) < len(checkpointers):
            raise UsageError("two callbacks save into one run", where=self.dirpath, fix="Give each its own folder.")
        super().setup(trainer, pl_module, stage)
        self._loading = StepLoading(trainer, checkpointers, self._adapter_steps)
        self._loading.attach()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the generators that data loaders have used, and remove steps that a killed training left.

        Raises:
            UsageError: Training would start in a run that has steps, or its steps cannot have a drill.
        """
        super().on_train_start(trainer, pl_module)
        if self._has_drill:
            require_steps_for_drill(trainer)
            self._is_drill_due = True
        self._stop_signal.start()
        assert self._loading is not None, "`setup` comes first"
        self._loading.restore_generators(is_epoch_running=True)
        is_new = not (trainer.ckpt_path or trainer.global_step or trainer.fast_dev_run)
        numbers = list_steps(self.checkpointer)
        if not is_new:  # otherwise a step is saved again while gradients accumulate, which no step has
            self._last_global_step_saved = max((each for each in numbers if each <= trainer.global_step), default=0)
            self._remove_steps(trainer, self._unremoved.intersection(numbers))
        elif numbers:
            raise UsageError(
                "training from the start would replace the steps of this run",
                where=self.checkpointer.root,
                found=f"step {numbers[-1]}",
                fix='Call fit(..., ckpt_path="last"), or choose another folder.',
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, *args: Any
    ) -> None:
        """Prove a resume before the first step. Raises ResumeDivergence."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx, *args)
        if self._is_drill_due:
            self._is_drill_due = False
            LightningStep(trainer, batch, batch_idx).prove_resume(pl_module, self.checkpointer.root)

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Save as `ModelCheckpoint` does, and after a signal once more; then stop the training."""
        super().on_train_batch_end(trainer, *args)
        if self._stop_signal.is_requested_after(trainer.global_step):
            if self._last_global_step_saved != trainer.global_step:
                self.last_model_path = self.format_checkpoint_name(self._monitor_candidates(trainer))
                self._save_checkpoint(trainer, self.last_model_path)
            trainer.should_stop = True

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wait for the last save, and raise its error if it failed."""
        super().on_train_end(trainer, pl_module)
        self._stop_signal.close()  # before Lightning restores the handler before its own
        if self._handle is not None:
            self._handle.result()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Wait for the last save; its error becomes a warning in addition to the exception."""
        super().on_exception(trainer, pl_module, exception)
        self.teardown()
        try:
            if self._handle is not None:
                self._handle.result()
        except ShardckptError as error:
            if trainer.is_global_zero:
                warn_user(f"the last save failed: {error}")

    def teardown(self, *_args: Any, **_: Any) -> None:
        """Put the strategy's methods back."""
        self._last_found = ""
        self._stop_signal.close()
        if self._loading is not None:
            self._loading.detach()

    def state_dict(self) -> dict[str, Any]:
        """Return `ModelCheckpoint`'s state, and the steps to remove once this save is complete."""
        return {**super().state_dict(), "unremoved": self._removal.numbers}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load `ModelCheckpoint`'s state, and the steps that the earlier training may not have removed."""
        if self._loading is not None and self._loading.folder == self.dirpath != state_dict.get("dirpath"):
            state_dict = move_paths(state_dict, self.checkpointer, self.dirpath)  # the run is a copy, or was moved
        super().load_state_dict(state_dict)
        _, self._unlasting = self._list_kept()
        self.last_model_path = self.last_model_path if self.save_last else ""  # a signal had requested its step
        self._unremoved = set(state_dict.get("unremoved", ()) if state_dict.get("dirpath") == self.dirpath else ())

    def _find_last_checkpoints(self, _trainer: Trainer) -> set[str]:
        """Return the newest step's path, for `ckpt_path="last"`."""
        self._last_found = find_newest_path(self.dirpath)
        return {self._last_found} if self._last_found else set()

    def _monitor_candidates(self, trainer: Trainer) -> dict[str, torch.Tensor]:
        """Return the metrics by name; a metric `step` does not name steps."""
        return {**super()._monitor_candidates(trainer), "step": torch.tensor(trainer.global_step)}

    def _save_last_checkpoint(self, trainer: Trainer, monitor_candidates: dict[str, torch.Tensor]) -> None:
        """Save the step, unless it is already saved as a best one."""
        path = self.format_checkpoint_name(monitor_candidates)
        if self.save_last and self._last_checkpoint_saved != path:
            self._save_checkpoint(trainer, path)

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Save a step with what Lightning's checkpoint has, without full weights."""
        strategy = trainer.strategy
        if self._handle is not None:
            self._handle.result()  # its event comes before this save starts
        self._removal.start_save(trainer.global_step)
        self.last_model_path = filepath if self.save_last else self.last_model_path
        self._choose_removed(trainer, filepath)  # before the state is collected, which names them
        weights = model_state_dict(strategy.model, kind="sharded") if has_hook(trainer, "on_save_checkpoint") else {}
        with replace_methods(
            strategy,
            lightning_module_state_dict=lambda: dict(weights),
            optimizer_state=lambda _: {},
            save_checkpoint=partial(self._save_step, trainer, weights),
        ):
            super()._save_checkpoint(trainer, filepath)

    def _save_step(self, trainer: Trainer, weights: Mapping[str, Any], checkpoint: Any, *_args: Any, **_: Any) -> None:
        """Save a step. In place of `Strategy.save_checkpoint`."""
        given, number = checkpoint.pop("state_dict"), trainer.global_step
        if given.keys() != weights.keys() or any(given[name] is not weights[name] for name in given):
            checkpoint["state_dict"] = given  # a user's hook has changed it
        strange = pop_strange_hparams(checkpoint)
        if strange and trainer.is_global_zero and not self._has_warned:
            self._has_warned = True
            warn_user(f"these hyperparameters are not plain values, and are not saved: {', '.join(strange)}")
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        arguments: dict[str, Any] = {
            "overwrite": True,  # steps after the one that training resumed from
            **self._options,
            "model_files": collect_model_files(*list_pretrained(trainer), self._options),
            "metrics": {**metrics, **(self._options.get("metrics") or {})},
        }
        save: Any = self.checkpointer.async_save if self._background else self.checkpointer.save
        save = partial(save, number, build_state(trainer, checkpoint))
        models = {"model": trainer.strategy.model}
        self._handle = self._adapter_steps.save(save, models, self.checkpointer.root, arguments)

    def _list_kept(self) -> tuple[set[str], set[str]]:
        """Return the paths of the steps that are kept now, and which may go later."""
        best, last = {*self.best_k_models, self.best_model_path, ""}, {self.last_model_path}
        return best | last, last - best if self.save_top_k == -1 else best | last

    def _choose_removed(self, trainer: Trainer, filepath: str) -> None:
        """Choose steps that were kept until now; each goes once the current save is complete."""
        earlier, (kept, self._unlasting) = self._unlasting, self._list_kept()
        paths = [path for path in earlier - kept if self._should_remove_checkpoint(trainer, path, filepath)]
        numbers = [find_number(self.checkpointer, path) for path in paths]
        self._remove_steps(trainer, [number for number in numbers if number is not None])

    def _should_remove_checkpoint(self, trainer: Trainer, previous: str, current: str) -> bool:
        """Return whether a step may go. The step for `ckpt_path="last"` may: in Lightning, it is a separate file."""
        is_last = previous == self._last_found == trainer.ckpt_path
        return previous != current if is_last else super()._should_remove_checkpoint(trainer, previous, current)

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Do nothing: the step was chosen when the next save started, and goes when that save is complete."""

    def _remove_steps(self, trainer: Trainer, numbers: Collection[int]) -> None:
        for number in sorted(numbers) if trainer.is_global_zero else ():
            self._removal.add(number)
