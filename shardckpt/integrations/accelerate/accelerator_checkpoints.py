"""Checkpoints for an `accelerate.Accelerator`: `save_state` and `load_state` go through shardckpt.

Accelerate has no interface for that, so `register` replaces these methods on one accelerator. Everything else stays as
Accelerate documents it, including hooks and folder names.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list
from typing_extensions import Unpack

import shardckpt
from shardckpt import RNGState
from shardckpt.checkpoint.save.async_save import AsyncSaveParams, require_known_options
from shardckpt.checkpoint.save.render_model_files import collect_model_files
from shardckpt.errors import UnsupportedError, UsageError
from shardckpt.integrations.accelerate.state_folders import (
    STEP,
    Folder,
    LoaderPosition,
    LoopState,
    NumberedFolders,
    as_text,
    await_ranks,
    describe_missing,
    find_earlier_folder,
    find_parent,
    is_complete,
    is_url,
    make_folder,
    number_objects,
)
from shardckpt.integrations.adapter_steps import AdapterSteps
from shardckpt.integrations.local_folders import list_names, name_earlier
from shardckpt.integrations.stop_signal import StopSignal
from shardckpt.results import ResumeReport, SaveHandle
from shardckpt.witness.prove_resume import run_drill

__all__ = ["AcceleratorCheckpoints", "register"]

_REFUSED = {DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA}
_METHODS = ("save_state", "load_state", "end_training")
_LISTS = ("_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects")
_HOOKS = ("_save_model_state_pre_hook", "_load_model_state_pre_hook")


def register(
    accelerator: Accelerator, *, background: bool = False, adapter_only: bool = True, **options: Unpack[AsyncSaveParams]
) -> AcceleratorCheckpoints:
    """Make an accelerator's `save_state` and `load_state` save and load with shardckpt.

    A checkpoint has everything that Accelerate saves; every rank writes its shards. If one transformers model is
    prepared, it has the files of its configs too; pass `model_files=tokenizer` for the tokenizer's. `load_state` also
    loads folders that Accelerate wrote. The number of ranks and the kind of sharding may change between save and load.

    Args:
        accelerator: Accelerator, before or after `prepare`. If it is registered with the same options, the result is
            that registration.
        background: Save in the background. The next `save_state`, `load_state` or `end_training` then raises an error.
        adapter_only: Save what a PEFT model trains, and refer to its frozen base; False to save the base each time.
        **options: Options for `shardckpt.async_save`; without `background`, for `shardckpt.save`. `model_files`
            adds files; None stores none.

    Raises:
        UnsupportedError: The accelerator uses DeepSpeed, Megatron-LM or XLA, or this version of Accelerate differs.
        UsageError: `background` is not a bool, the accelerator is another object, or it is registered with other
            options.
        TypeError: An option is unknown.

    Examples:
        >>> register(accelerator)  # doctest: +SKIP
        >>> accelerator.save_state("runs/a/epoch-1")
    """
    if not isinstance(background, bool):
        raise UsageError("`background` must be True or False", found=repr(background))
    require_known_options("register", options, background=background)
    if not hasattr(accelerator, "distributed_type"):
        raise UsageError("the accelerator must be an accelerate.Accelerator", found=repr(accelerator))
    if isinstance(accelerator, type):
        fix = f"Pass an instance: accelerator = {accelerator.__name__}()."
        raise UsageError("the accelerator must be an instance", found=f"the class {accelerator.__name__}", fix=fix)
    if accelerator.distributed_type in _REFUSED:
        raise UnsupportedError(
            f"register does not support {accelerator.distributed_type.value}",
            fix="Leave the call out: shardckpt reads checkpoints of DeepSpeed and Megatron-LM.",
        )
    missing = [name for name in (*_METHODS, *_LISTS, *_HOOKS) if not hasattr(accelerator, name)]
    if missing:
        raise UnsupportedError(
            "this version of Accelerate is not supported", found=f"an Accelerator without {', '.join(missing)}"
        )
    earlier = getattr(accelerator.save_state, "__self__", None)
    if not isinstance(earlier, AcceleratorCheckpoints):
        return AcceleratorCheckpoints(accelerator, background, {**options}, adapter_only)
    if not earlier.has_options(background, {**options}, adapter_only):
        fix = "Keep the object that `register` returned the first time, or call its `remove()` before."
        raise UsageError("this accelerator is registered with other options", fix=fix)
    return earlier


class AcceleratorCheckpoints:
    """New methods for an accelerator; `register` creates it."""

    def __init__(self, accelerator: Accelerator, background: bool, options: dict[str, Any], adapter_only: bool) -> None:
        self._accelerator, self._background, self._options = accelerator, background, options
        self._is_fsdp = accelerator.distributed_type == DistributedType.FSDP
        self._adapter_steps = AdapterSteps(adapter_only)
        self._handle: SaveHandle | None = None
        self._newest = ""  # the last save's folder
        self._numbered = NumberedFolders(accelerator)
        self._stop_signal = StopSignal()
        self._original = {name: getattr(accelerator, name) for name in _METHODS}
        vars(accelerator).update({name: getattr(self, name) for name in _METHODS})

    def has_options(self, background: bool, options: dict[str, Any], adapter_only: bool = True) -> bool:
        """Return whether `register` was called with these options.

        Args:
            background: Whether to save in the background.
            options: Options for the save.
            adapter_only: Whether a PEFT model's base is referred to.
        """
        return (self._background, self._options, self._adapter_steps.is_on) == (background, options, adapter_only)

    def remove(self) -> None:
        """Wait for the last save, and restore the accelerator's methods, unless others replaced them."""
        self.wait()
        if getattr(self._accelerator.save_state, "__self__", None) is self:
            vars(self._accelerator).update(self._original)

    def wait(self) -> None:
        """Wait for the last save in the background, and raise its error if it failed."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.result()
            self._numbered.remove_old(self._newest)

    def save_on_signal(self, *numbers: int) -> AbstractContextManager[None]:
        """Make signals request the end of the training in the block, instead of ending the process.

        Args:
            numbers: Signal numbers; SIGTERM by default.

        Raises:
            UsageError: An argument is not a signal number; or the block starts outside the main thread.
        """
        return self._stop_signal.watch(*numbers)

    def is_stop_requested(self) -> bool:
        """Return True if any rank has got a signal: then save, and end the loop. Collective inside `save_on_signal`.

        Call it after each step on all ranks; it costs a message to rank 0 and back.
        """
        return self._stop_signal.is_requested()

    def prove_resume(self, train_step: Callable[[], Any], folder: Folder, *, steps: int = 2) -> ResumeReport:
        """Save, train, restore, train again, and compare all bits; then restore the state as it was. Collective.

        Call it after `prepare` and before the first step. It does not change the training.

        Args:
            train_step: Function that trains a step and updates the optimizer, as for `shardckpt.prove_resume`.
            folder: Folder or URL for the drill's checkpoints, which are removed.
            steps: Number of steps to train each time.

        Returns:
            The first difference, and the values that `save_state` does not save.

        Raises:
            ShardckptError: As for `shardckpt.prove_resume`.
        """
        self.wait()
        return run_drill(train_step, self._build_state(self._name_models()), as_text(folder), steps=steps)

    def end_training(self) -> None:
        """Wait for the last save, then end training. In place of `Accelerator.end_training`."""
        self.wait()
        self._original["end_training"]()

    def save_state(self, output_dir: Folder = None, *_args: Any, **_: Any) -> str | Path:
        """Save the state. Collective. In place of `Accelerator.save_state`, whose other arguments are ignored.

        Args:
            output_dir: Folder, or a URL that fsspec supports. A checkpoint that an earlier call wrote there is
                replaced. Ignored if `automatic_checkpoint_naming` is on.

        Raises:
            UsageError: The folder is a file; with `automatic_checkpoint_naming`, it has a checkpoint or is not local; a
                hook changed weights.
            StorageError: The folder cannot be made.
            ShardckptError: As for `shardckpt.save`.
        """
        self.wait()
        await_ranks("save_state")
        project = self._accelerator.project_configuration
        folder = self._numbered.find_new() if project.automatic_checkpoint_naming else as_text(output_dir)
        make_folder(folder)
        models, path = self._call_save_hooks(folder), f"{folder}/{STEP}"
        files = collect_model_files(self._accelerator._models, (), self._options)
        self._newest, options = folder, {"overwrite": True, **self._options, "model_files": files}
        save = partial(shardckpt.async_save if self._background else shardckpt.save, self._build_state(models), path)
        self._handle = self._adapter_steps.save(save, models, find_parent(folder), options)
        if self._handle is None:
            self._numbered.remove_old(self._newest)
        project.iteration += 1
        return folder if is_url(folder) else Path(folder)

    def load_state(self, input_dir: Folder = None, load_kwargs: Any = None, **model_kwargs: Any) -> None:
        """Load what `save_state` saved, with or without shardckpt. Collective. In place of `Accelerator.load_state`.

        Args:
            input_dir: Folder or URL. None for the newest folder with `automatic_checkpoint_naming`.
            load_kwargs: Only for folders that Accelerate wrote, as for `Accelerator.load_state`.
            **model_kwargs: Likewise; `strict` is for all folders.

        Raises:
            SourceNotFoundError: The folder is missing or has no complete checkpoint.
            StorageError: The folder cannot be read.
            ShardckptError: As for `shardckpt.load`; or `register_for_checkpointing` has some objects, but fewer than
                were saved.
        """
        self.wait()
        await_ranks("load_state")
        is_named = input_dir is None and self._accelerator.project_configuration.automatic_checkpoint_naming
        folder = self._numbered.find_newest() if is_named else as_text(input_dir)
        is_step = is_url(folder) or os.path.isdir(f"{folder}/{STEP}")
        is_step, is_found = broadcast_object_list([(is_step, is_step or is_complete(folder))])[0]
        if not is_found:
            raise describe_missing(folder)
        if not is_step:
            self._load_folder(folder, load_kwargs, model_kwargs)
            return
        self._adapter_steps.require_base(self._accelerator._models, f"{folder}/{STEP}")
        models = [] if self._is_fsdp else list(self._accelerator._models)
        for hook in self._accelerator._load_model_state_pre_hook.values():
            hook(models, folder)  # it removes the models that it loads
        state = self._build_state(number_objects("model", self._accelerator._models, None if self._is_fsdp else models))
        with name_earlier(lambda: find_earlier_folder(folder), 'remove this folder, and call load_state("{}")'):
            shardckpt.load(state, f"{folder}/{STEP}", include=list(state), strict=model_kwargs.get("strict", True))

    def _load_folder(self, folder: str, load_kwargs: Any, model_kwargs: dict[str, Any]) -> None:
        """Load a folder that Accelerate wrote; if one side is FSDP, its models and optimizers with shardckpt."""
        accelerator, held = self._accelerator, {}
        if self._is_fsdp or any(name.startswith("pytorch_model_fsdp") for name in list_names(folder)):
            held = {name: vars(accelerator)[name] for name in ("_models", "_optimizers")}
            optimizers = number_objects("optimizer", (each.optimizer for each in held["_optimizers"]))
            state = {**number_objects("model", held["_models"]), **optimizers}
            shardckpt.load(state, folder, include=list(state))
        vars(accelerator).update({name: [] for name in held})  # so that Accelerate loads everything else
        try:
            self._original["load_state"](folder, load_kwargs, **model_kwargs)
        finally:
            vars(accelerator).update(held)

    def _build_state(self, models: dict[str, Any]) -> dict[str, Any]:
        """Return the objects to save, or to load into. Collective."""
        held = self._accelerator
        loaders = number_objects("dataloader", held._dataloaders).items()
        return {
            "loop": LoopState(held),
            **models,
            **number_objects("optimizer", (each.optimizer for each in held._optimizers)),
            **number_objects("scheduler", held._schedulers),
            **number_objects("custom", held._custom_objects),
            **{name: LoaderPosition(each) for name, each in loaders if getattr(each, "use_stateful_dataloader", False)},
            **({} if held.scaler is None else {"scaler": held.scaler}),
            "rng": RNGState(),
        }

    def _name_models(self) -> dict[str, Any]:
        return number_objects("model", self._accelerator._models)

    def _call_save_hooks(self, folder: str) -> dict[str, Any]:
        """Call the hooks from `register_save_state_pre_hook`; return the models to save by name. Collective."""
        models, hooks = self._accelerator._models, self._accelerator._save_model_state_pre_hook
        if not hooks:
            return number_objects("model", models)
        # As in Accelerate, hooks get no weights under FSDP, and rank 0's result decides.
        given = [] if self._is_fsdp else [self._accelerator.get_state_dict(model, unwrap=False) for model in models]
        weights, names = list(given), list(map(list, given))
        for hook in hooks.values():
            hook(models, weights, folder)
        kept = [i for i, each in enumerate(given) if any(each is left for left in weights)]
        is_changed = len(weights) != len(kept) or names != list(map(list, given))
        kept, is_changed = broadcast_object_list([(kept, is_changed)])[0]
        if is_changed:
            raise UsageError(
                "a hook of register_save_state_pre_hook changed the weights",
                where=folder,
                fix="Save other weights in the hook, and remove the model's weights from the list.",
            )
        return number_objects("model", models, None if self._is_fsdp else [models[i] for i in kept])
