"""Folders for `save_state` and `load_state`: named by a call, or by `automatic_checkpoint_naming`; the loop's state."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import broadcast_object_list, gather_object

from shardckpt import PerRank
from shardckpt.checkpoint.run.step_finder import parse_root
from shardckpt.errors import SourceNotFoundError, StorageError, TargetExistsError, UsageError
from shardckpt.events.warn_user import warn_user
from shardckpt.integrations.local_folders import list_names, require_access
from shardckpt.ranks.process_group import get_ranks

__all__ = [
    "STEP",
    "Folder",
    "LoaderPosition",
    "LoopState",
    "NumberedFolders",
    "as_text",
    "await_ranks",
    "describe_missing",
    "find_earlier_folder",
    "find_parent",
    "is_complete",
    "is_url",
    "make_folder",
    "number_objects",
]

Folder = str | os.PathLike[str] | None

STEP = "shardckpt"  # the checkpoint's name in the folder for `save_state`, next to files from hooks and users
_SHOWN = 8  # maximum folders in a message

_NAME_AND_NUMBER = re.compile(r"(.*?)(\d+)")
_NUMBERED = re.compile(r"checkpoint_(\d+)")


def is_url(folder: str) -> bool:
    """Return True if a folder is a URL."""
    return "://" in folder


def as_text(folder: Folder) -> str:
    """Return a folder as text, with the home for `~`."""
    if folder is None:
        raise UsageError("no folder is given", fix="Pass one, or set project_dir and automatic_checkpoint_naming.")
    if not isinstance(folder, (str, os.PathLike)):
        raise UsageError("the folder must be a path or a URL", found=repr(folder))
    text = parse_root(folder)
    return text if is_url(text) else os.path.expanduser(text)


def make_folder(folder: str) -> None:
    """Make a local folder unless it exists; nothing for a URL. Collective: one rank's error is raised on all."""
    if is_url(folder):
        return
    number, text = 0, ""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        number, text = error.errno or -1, str(error.strerror)
    for rank, (found, why) in enumerate(gather_object([(number, text)])):
        if found in (errno.EEXIST, errno.ENOTDIR):
            raise TargetExistsError("a file is in place of the folder", where=folder)
        if found:
            raise StorageError(f"rank {rank} cannot make the folder", where=folder, found=why)


def describe_missing(folder: str) -> SourceNotFoundError:
    """Return the error for a folder without a complete checkpoint; it names checkpoints nearby."""
    path = os.path.abspath(folder)
    parent, name = os.path.split(path)
    require_access(f"{path}/{STEP}")
    if os.path.isfile(f"{path}/COMMIT"):
        what = "this is a checkpoint, not a folder of save_state"
        fix = f"Pass its folder, {parent}." if name == STEP else "Load it with `shardckpt.load`."
        return SourceNotFoundError(what, where=folder, fix=fix)
    what, around = "this folder has no complete checkpoint", path
    if not os.path.isdir(path):
        what, around = "this is a file" if os.path.exists(path) else "this folder does not exist", parent
    near = sorted(each for each in list_names(around) if is_complete(f"{around}/{each}"))
    shown = ", ".join(near[-_SHOWN:])
    fix = f"Complete checkpoints in {around}: {shown}." if near else "Check the path."
    return SourceNotFoundError(what, where=folder, fix=fix)


def find_earlier_folder(folder: str) -> str:
    """Return the complete folder before a local one whose name ends with a number; empty without one."""
    parent, name = os.path.split(folder.rstrip("/"))
    given = _NAME_AND_NUMBER.fullmatch(name)
    if given is None or is_url(folder):
        return ""
    found = filter(None, map(_NAME_AND_NUMBER.fullmatch, list_names(parent or ".")))
    numbers = {int(each[2]): os.path.join(parent, each[0]) for each in found if each[1] == given[1]}
    earlier = [number for number, path in numbers.items() if number < int(given[2]) and is_complete(path)]
    return numbers[max(earlier)] if earlier else ""


def find_parent(folder: str) -> str:
    """Return the folder above; the folder itself if it is the first one of a URL."""
    parent = os.path.dirname(folder.rstrip("/") if is_url(folder) else os.path.abspath(folder))
    return parent if is_url(parent) == is_url(folder) else folder


def is_complete(folder: str) -> bool:
    """Return True if a folder has a checkpoint by shardckpt, or by Accelerate, which writes generators last."""
    return os.path.isfile(f"{folder}/{STEP}/COMMIT") or os.path.isfile(f"{folder}/random_states_0.pkl")


class NumberedFolders:
    """The folders `checkpoint_N` in an accelerator's `project_dir`, with `automatic_checkpoint_naming`."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def find_new(self) -> str:
        """Return the next folder. Collective."""
        folder = f"{self._parent}/checkpoint_{self._accelerator.save_iteration}"
        if broadcast_object_list([is_complete(folder)])[0]:
            raise UsageError("this folder has a checkpoint", where=folder, fix="Set project_configuration.iteration.")
        return folder

    def find_newest(self) -> str:
        """Return the newest complete folder; `checkpoint_0` without one. Collective."""
        numbers = [number for number, folder in self._list() if is_complete(folder)]
        return f"{self._parent}/checkpoint_{broadcast_object_list([max(numbers, default=0)])[0]}"

    def remove_old(self, newest: str) -> None:
        """Remove the folders that exceed `total_limit`; `COMMIT` goes first. On rank 0."""
        project = self._accelerator.project_configuration
        if not project.automatic_checkpoint_naming or not project.total_limit or not self._accelerator.is_main_process:
            return
        folders = sorted(self._list())
        oldest = [number for number, folder in folders if is_complete(folder)][-project.total_limit :][0]
        for number, folder in folders:
            if number < oldest and folder != newest:
                try:
                    Path(folder, STEP, "COMMIT").unlink(missing_ok=True)
                    shutil.rmtree(folder)
                except OSError as error:
                    warn_user(f"an old checkpoint could not be removed: {error}")

    @property
    def _parent(self) -> str:
        folder = as_text(self._accelerator.project_dir)
        if is_url(folder):
            fix = "Pass the URL to save_state, without automatic_checkpoint_naming."
            raise UsageError("automatic_checkpoint_naming needs a local project_dir", found=folder, fix=fix)
        return os.path.join(folder, "checkpoints")

    def _list(self) -> list[tuple[int, str]]:
        """Return each folder's number and path."""
        parent = self._parent
        return [
            (int(found[1]), f"{parent}/{name}") for name in list_names(parent) if (found := _NUMBERED.fullmatch(name))
        ]


class LoopState:
    """Rank 0's counters and data order, as an object with `state_dict`."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator, self._project = accelerator, accelerator.project_configuration
        order = [[loader.iteration, sampler.initial_seed, sampler.epoch] for loader, sampler in self._samplers()]
        self._custom = len(accelerator._custom_objects)
        values = {"step": accelerator.step, "iteration": self._project.iteration, "order": order}
        self._values: dict[str, Any] = {**broadcast_object_list([values])[0], "custom": self._custom}

    def _samplers(self) -> list[tuple[Any, Any]]:
        """Return the data loaders whose order is known by a seed, with their samplers."""
        loaders = self._accelerator._dataloaders
        pairs = [(each, each.get_sampler()) for each in loaders if hasattr(each, "get_sampler")]
        return [(loader, sampler) for loader, sampler in pairs if isinstance(sampler, SeedableRandomSampler)]

    def state_dict(self) -> dict[str, Any]:
        """Return rank 0's values."""
        return self._values

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continue at saved values, which do not include gradients."""
        if 0 < self._custom < saved.get("custom", 0):
            expected, fix = saved["custom"], "Register the same objects, in the same order."
            raise UsageError("too few objects are registered", found=self._custom, expected=expected, fix=fix)
        self._accelerator.step = saved["step"]
        self._project.iteration = max(self._project.iteration, saved["iteration"] + 1)
        for (loader, sampler), order in zip(self._samplers(), saved["order"], strict=False):
            loader.iteration, sampler.initial_seed, sampler.epoch = order


class LoaderPosition(PerRank):
    """Position in a stateful data loader, which counts one rank's batches."""

    def load_other_world(self, states: list[Any], rank: int, world: int) -> bool:
        """Leave the loader at the start of its epoch, with a warning."""
        if rank == 0:
            warn_user(f"a data loader was saved by {len(states)} ranks, not by {world}: it starts its epoch again")
        return True


def await_ranks(method: str) -> None:
    """Wait until all ranks have called a method: Accelerate's may be called on rank 0 alone under DDP. Collective."""
    # Collectives of the default group would meet the training's on other ranks.
    get_ranks(None).ask_rank0(f"accelerator.{method}", b"", lambda each: each)


def number_objects(kind: str, objects: Iterable[Any], kept: list[Any] | None = None) -> dict[str, Any]:
    """Return all objects, or the kept ones, by Accelerate's names: `model`, `model_1`, ..."""
    named = {f"{kind}_{i}" if i else kind: each for i, each in enumerate(objects)}
    return {name: each for name, each in named.items() if kept is None or any(each is one for one in kept)}
