"""Support for our wrapper in `torch.distributed.checkpoint.state_dict`.

These functions search for torch's own wrapper and call its static methods. Our wrapper has equivalent static methods,
so the functions only have to find either class. Models without our wrapper use torch's code alone.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import default_planner, state_dict_saver
from torch.distributed.checkpoint import state_dict as functions
from torch.distributed.fsdp import api as theirs

from shardckpt.core import api
from shardckpt.core.fsdp1.wrapper import FLAT_PARAM, FullyShardedDataParallel
from shardckpt.core.modules.fqn_and_params import clean
from shardckpt.core.registration.flat_param import FlatParamRegistration
from shardckpt.state.adapters.flat_shard_check import has_peers
from shardckpt.state.adapters.model_index import EXTRA
from shardckpt.state.adapters.torch_fsdp1 import find_torch_wrapper
from shardckpt.state.keys.kinds import require_not_local


class _EitherMeta(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, FullyShardedDataParallel) or find_torch_wrapper(type(instance)) is not None


class _Either(metaclass=_EitherMeta):
    """Class for which torch's functions search; it forwards their calls to torch's or our wrapper."""

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> Any:
        ours = FullyShardedDataParallel.fsdp_modules(module, root_only)
        return ours or _theirs_in(module).fsdp_modules(module, root_only)

    @staticmethod
    def state_dict_type(module: nn.Module, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        if not _is_ours(module):
            entered: AbstractContextManager[None] = _theirs_in(module).state_dict_type(module, *args, **kwargs)
            return entered
        return FullyShardedDataParallel.state_dict_type(
            module, *map(_translated, args), **{key: _translated(value) for key, value in kwargs.items()}
        )

    @staticmethod
    def optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return _of(model).optim_state_dict(model, optim, *args, **kwargs)

    @staticmethod
    def optim_state_dict_to_load(model: nn.Module, optim: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return _of(model).optim_state_dict_to_load(model, optim, *args, **kwargs)


def _is_ours(module: nn.Module) -> bool:
    return any(isinstance(submodule, FullyShardedDataParallel) for submodule in module.modules())


def _of(module: nn.Module) -> Any:
    return FullyShardedDataParallel if _is_ours(module) else _theirs_in(module)


def _theirs_in(module: nn.Module) -> Any:
    """Return a model's own torch wrapper, even with patched torch modules."""
    wrappers = (find_torch_wrapper(type(item)) for item in module.modules())
    return next((item for item in wrappers if item is not None), FullyShardedDataParallel)


def _translated(given: Any) -> Any:
    """Return our equivalent to torch's state dict type or configuration."""
    if isinstance(given, theirs.StateDictType):
        return api.StateDictType[given.name]
    if isinstance(given, (theirs.StateDictConfig, theirs.OptimStateDictConfig)):
        fields = {field.name: getattr(given, field.name) for field in dataclasses.fields(given)}
        return getattr(api, type(given).__name__)(**fields)
    return given


_torch_names: Any = getattr(functions, "_get_fqns", None)
_torch_state: Any = getattr(functions, "_get_module_fsdp_state_if_fully_sharded_module", None)


def _names(model: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    """Return a name's FQNs in the model; a flat parameter has several."""
    path, _, attribute = name.rpartition(".")
    if attribute == EXTRA and _is_ours(model):
        return {clean(name)}
    members = _members(model, path, attribute) if attribute.startswith(FLAT_PARAM) else []
    if not members:
        return _torch_names(model, name, *args, **kwargs)
    if kwargs.get("skip_ddp_prefix", True):  # only names for loading keep the compiler's prefix
        kwargs = {**kwargs, "skip_compiler_prefix": True}
    return {fqn for member in members for fqn in _torch_names(model, member, *args, **kwargs)}


def _members(model: nn.Module, path: str, attribute: str) -> list[str]:
    """Return paths to a flat parameter's members; empty if it is not ours."""
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        above = model.get_submodule(".".join(parts[:depth]))
        if isinstance(above, FullyShardedDataParallel):
            return [
                ".".join([*parts[:depth], member.fqn])
                for registration in above.sharding_unit.registrations
                if isinstance(registration, FlatParamRegistration) and registration.home.attribute == attribute
                for member in registration.bucket.members
            ]
    return []


def _state(module: nn.Module) -> Any:
    """Return a module's wrapper, as its sharding state."""
    return module if isinstance(module, FullyShardedDataParallel) else _torch_state(module)


_torch_saved: Any = getattr(state_dict_saver, "_stateful_to_state_dict", None)


def _saved(state_dict: Any) -> Any:
    """Return the state that `dcp.save` writes; refuse a LOCAL state, whose values it would keep from one rank only."""
    saved = _torch_saved(state_dict)
    if has_peers():
        for key, value in [("", state_dict), *saved.items()]:
            require_not_local(value, str(key))
    return saved


_torch_set_up: Any = getattr(default_planner.DefaultSavePlanner, "set_up_planner", None)


def _set_up(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> None:
    """Set up torch's planner, through which every save goes; refuse a LOCAL state."""
    if has_peers():
        require_not_local(state_dict, "")
    _torch_set_up(self, state_dict, *args, **kwargs)


# Names in torch's module that its functions look up, with their replacements.
_KNOWN = {
    "FSDP": _Either,
    "_get_fqns": _names,
    "_get_module_fsdp_state_if_fully_sharded_module": _state,
}


def register_with_torch_dcp() -> None:
    """Make torch's functions find our wrapper, and its saver refuse LOCAL states. A second call does nothing."""
    if _torch_saved is not None:
        state_dict_saver._stateful_to_state_dict = _saved
    if _torch_set_up is not None:
        planner: Any = default_planner.DefaultSavePlanner
        planner.set_up_planner = functools.wraps(_torch_set_up)(_set_up)
    lacking = [name for name in _KNOWN if not hasattr(functions, name)]
    if lacking:
        warnings.warn(
            "torch.distributed.checkpoint.state_dict in this torch cannot find shardckpt's wrapper: use "
            f"shardckpt.model_state_dict and its like ({', '.join(lacking)} not found)",
            stacklevel=2,
        )
        return
    for name, known in _KNOWN.items():
        setattr(functions, name, known)
