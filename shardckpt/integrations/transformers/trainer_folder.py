"""Load steps, and folders `checkpoint-N` that `transformers.Trainer` wrote, under any sharding."""

from __future__ import annotations

import os
from typing import Any

from accelerate.utils import broadcast_object_list
from transformers.trainer import FSDP_MODEL_NAME, OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import get_last_checkpoint

from shardckpt import Checkpointer, load, load_optim_state_dict
from shardckpt.integrations.damaged_step import name_earlier_step
from shardckpt.integrations.local_folders import list_names, raise_storage_errors

__all__ = [
    "find_newest_folder",
    "has_fsdp_model",
    "is_trainer_folder",
    "load_step",
    "load_trainer_folder",
    "load_weights",
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
        for number in checkpointer.steps():
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
