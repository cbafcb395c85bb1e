"""The Lightning Trainer's state in a step, and the strategy's methods that load it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.apply_func import apply_to_collection

from shardckpt import Checkpointer, PerRank, RNGState, load, load_model_state_dict, ls, model_state_dict
from shardckpt.errors import SourceNotFoundError
from shardckpt.integrations.adapter_steps import AdapterSteps
from shardckpt.integrations.local_folders import list_steps, name_earlier_step, require_access

__all__ = [
    "COMMIT",
    "StepLoading",
    "build_state",
    "find_newest_path",
    "find_number",
    "has_hook",
    "list_pretrained",
    "move_paths",
    "pop_strange_hparams",
    "replace_methods",
]

COMMIT = "COMMIT"  # file in a step, for a store whose folders have no times

_LOADING = ("load_checkpoint", "load_model_state_dict", "load_optimizer_state_dict")
_LOADER_STATES = "_load_combined_loader_states"
_HPARAMS = ("hyper_parameters", "datamodule_hyper_parameters")
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def build_state(trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the state to save in a step. Collective."""
    strategy = trainer.strategy
    loaders = _LoaderStates(checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", []))
    state = {"model": strategy.model, "trainer": _Values(_from_rank0(strategy, checkpoint))}
    if "optimizer_states" in checkpoint:
        state |= {"optim": _one_or_all(strategy.optimizers), "rng": RNGState(), "loaders": loaders}
    return state


def list_pretrained(trainer: Trainer) -> tuple[list[Any], list[Any]]:
    """Return the module, and the attributes of it and of the data module, among them tokenizers."""
    module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    return [module], [*vars(module).values(), *([] if data is None else vars(data).values())]


def pop_strange_hparams(checkpoint: dict[str, Any]) -> list[str]:
    """Remove hyperparameters that are not plain values, and return their names; a resume does not need them."""
    checkpoint.pop("hparams_type", None)
    strange = []
    for part in _HPARAMS:
        given = checkpoint.get(part, {})
        strange += [f"{part}.{name}" for name, value in given.items() if not _is_plain(value)]
        if given:
            checkpoint[part] = {name: value for name, value in given.items() if _is_plain(value)}
    return strange


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(_is_plain(item) for pair in value.items() for item in pair)
    return all(map(_is_plain, value)) if type(value) in (list, tuple, set) else type(value) in _PLAIN


def find_newest_path(run: str) -> str:
    """Return the newest complete step's path; at a URL its `COMMIT` file; empty without one."""
    try:
        complete = ls(run).complete
    except SourceNotFoundError:
        return ""
    # Lightning asks when a folder last changed, which buckets do not know.
    return next((f"{step.path}/{COMMIT}" if "://" in step.path else step.path for step in complete[-1:]), "")


def find_number(checkpointer: Checkpointer, path: str) -> int | None:
    """Return a step's number; None for a path outside the run, such as a file that Lightning wrote."""
    digits = path.rpartition("-")[2]
    return int(digits) if digits.isdecimal() and path == checkpointer.path(int(digits)) else None


def move_paths(state: Mapping[str, Any], checkpointer: Checkpointer, folder: str) -> dict[str, Any]:
    """Return a callback's state with the steps' current paths: its run may have been copied or moved."""
    paths = [checkpointer.path(number) for number in list_steps(checkpointer)]
    moved = {os.path.join(state["dirpath"], os.path.basename(path)): path for path in paths}
    names = ("best_model_path", "kth_best_model_path", "last_model_path")
    best = {moved.get(path, path): score for path, score in state["best_k_models"].items()}
    return {**state, **{name: moved.get(state[name], state[name]) for name in names}} | {
        "best_k_models": best,
        "dirpath": folder,
    }


@contextmanager
def replace_methods(strategy: Strategy, **methods: Any) -> Iterator[None]:
    """Replace a strategy's methods until the context ends."""
    vars(strategy).update(methods)
    try:
        yield
    finally:
        for name in methods:
            del vars(strategy)[name]


class StepLoading:
    """Methods of a strategy that load, while the Trainer runs."""

    def __init__(self, trainer: Trainer, checkpointers: Sequence[Checkpointer], adapter_steps: AdapterSteps) -> None:
        self._adapter_steps = adapter_steps
        self._trainer, self._strategy, self._fit_loop = trainer, trainer.strategy, trainer.fit_loop
        self._checkpointers = checkpointers if trainer.state.fn == TrainerFn.FITTING else ()
        self._path = ""
        self._generators: dict[str, Any] | None = None

    @property
    def folder(self) -> str:
        """Folder with the loaded step; empty without one."""
        return os.path.dirname(self._path)

    def attach(self) -> None:
        """Replace the strategy's methods, and the loop's method that loads data loader states."""
        vars(self._strategy).update({name: getattr(self, name) for name in _LOADING})
        vars(self._fit_loop)[_LOADER_STATES] = self._load_loader_states

    def detach(self) -> None:
        """Put the strategy's and the loop's methods back."""
        for name in _LOADING:
            vars(self._strategy).pop(name, None)
        vars(self._fit_loop).pop(_LOADER_STATES, None)

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], weights_only: bool | None = None) -> Any:
        """Load the model, and with FSDP its optimizers; return the rest. Collective."""
        strategy, is_fitting = self._strategy, self._trainer.state.fn == TrainerFn.FITTING
        self._path = strategy.broadcast(_find_step(checkpoint_path))
        if not self._path:
            return type(strategy).load_checkpoint(strategy, checkpoint_path, weights_only=weights_only)
        self._adapter_steps.require_base([strategy.model], self._path)
        values, generators, loaders = _Values({}), RNGState(), _LoaderStates([])
        self._read({"trainer": values}, ignore_extra=True)
        checkpoint, state = values.held, {"model": strategy.model}
        has_progress = is_fitting and "optimizer_states" in checkpoint
        if has_progress:
            state |= {"rng": generators, "loaders": loaders}
            state |= {"optim": _one_or_all(strategy.optimizers)} if strategy.restore_checkpoint_after_setup else {}
        self._load(state, strict=self._trainer.lightning_module.strict_loading)
        if has_progress:
            self._generators = generators.state_dict()
            self.restore_generators()
        if loaders.held:
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = loaders.held
        if not strategy.restore_checkpoint_after_setup and has_hook(self._trainer, "on_load_checkpoint"):
            checkpoint.setdefault("state_dict", model_state_dict(strategy.model))
        return checkpoint

    def _load(self, state: dict[str, Any], **options: Any) -> None:
        """Load the step, through its `Checkpointer` if one has it, which then remembers the step."""
        for checkpointer in self._checkpointers:
            for number in list_steps(checkpointer):
                if checkpointer.path(number) == self._path:
                    with name_earlier_step(self._path, "ckpt_path"):
                        checkpointer.restore(state, step=number, ignore_extra=True, **options)
                    return
        self._read(state, ignore_extra=True, **options)

    def _read(self, state: dict[str, Any], **options: Any) -> None:
        with name_earlier_step(self._path, "ckpt_path"):
            load(state, self._path, **options)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load weights that a user's hook has changed; all others are loaded."""
        if not self._path:
            type(self._strategy).load_model_state_dict(self._strategy, checkpoint, strict=strict)
        elif "state_dict" in checkpoint:
            load_model_state_dict(self._strategy.model, checkpoint["state_dict"], strict=False)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers, which exist only now without FSDP."""
        strategy = self._strategy
        if not self._path:
            type(strategy).load_optimizer_state_dict(strategy, checkpoint)
            return
        state = {"model": strategy.model, "optim": _one_or_all(strategy.optimizers)}
        self._read(state, include=["optim"])
        self.restore_generators()

    def restore_generators(self, is_epoch_running: bool = False) -> None:
        """Restore the generators: before data loaders draw numbers for a new epoch, and after that in an epoch."""
        epoch = self._fit_loop.epoch_progress.current
        is_iterated_for_new_epoch = is_epoch_running and epoch.processed == epoch.ready
        if self._generators is not None and not is_iterated_for_new_epoch:
            RNGState().load_state_dict(self._generators)
        if is_epoch_running:
            self._generators = None  # from now on, training draws its own numbers

    def _load_loader_states(self) -> None:
        """Load the data loaders' states just before they are iterated. In place of the loop's method."""
        # By then Lightning has tried to iterate loaders that are not DataLoaders, which may draw numbers.
        type(self._fit_loop)._load_combined_loader_states(self._fit_loop)
        self.restore_generators()


class _Values:
    """A checkpoint's values and tensors, equal on all ranks."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return self.held

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.held = state


class _LoaderStates(PerRank):
    """States for each rank's data loaders; if the number of ranks differs, rank 0's, as in Lightning."""

    def load_other_world(self, states: list[Any], rank: int, world: int) -> bool:
        del rank, world
        self.held = states[0]
        return True


def _find_step(path: str | os.PathLike[str]) -> str:
    """Return a step's path or URL; empty for what Lightning wrote. Raises StorageError."""
    found = str(path).removesuffix(f"/{COMMIT}").rstrip("/")
    if "://" not in found:
        require_access(found)  # for fsspec, a folder that this user may not enter is empty
    files = get_filesystem(found)
    files.invalidate_cache()  # listings from before the step was saved
    if not files.isdir(found) or files.exists(f"{found}/meta.pt"):
        return ""
    return found if "://" in found else os.path.realpath(found)


def _one_or_all(optimizers: Sequence[Any]) -> Any:
    return optimizers[0] if len(optimizers) == 1 else list(optimizers)


def has_hook(trainer: Trainer, name: str) -> bool:
    """Return True if the module or a callback has a hook that may change a checkpoint."""
    return any(is_overridden(name, each) for each in (trainer.lightning_module, *trainer.callbacks))


class _OwnTensor(int):
    """Index into each rank's own tensors."""


def _from_rank0(strategy: Strategy, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return rank 0's values, as in Lightning's checkpoints, with this rank's tensors except scalars and buffers."""
    tensors: list[torch.Tensor] = []
    weights, names = checkpoint.get("state_dict", {}), dict(strategy.lightning_module.named_buffers())
    # Averages of buffers, as in batch normalization, differ between ranks like the buffers.
    own = {id(weights[name]) for name, buffer in names.items() if name in weights and weights[name] is not buffer}

    def take(tensor: torch.Tensor) -> Any:
        if not tensor.dim() or id(tensor) in own:
            return tensor.cpu()
        tensors.append(tensor)
        return _OwnTensor(len(tensors) - 1)

    values = strategy.broadcast(apply_to_collection(checkpoint, torch.Tensor, take))
    return apply_to_collection(values, _OwnTensor, tensors.__getitem__)  # type: ignore[no-any-return]
