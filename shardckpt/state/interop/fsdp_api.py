"""State dict functions from `torch.distributed.fsdp`, which `shardckpt.core` calls."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn

from shardckpt.core.api import FullOptimStateDictConfig, FullStateDictConfig, StateDictSettings, StateDictType
from shardckpt.core.config import OptimStateKeyType
from shardckpt.core.fsdp1.state_dict_api import StateStatics
from shardckpt.core.fsdp1.wrapper import FullyShardedDataParallel
from shardckpt.core.modules.fqn_and_params import clean
from shardckpt.errors import ShardckptError
from shardckpt.plan.optim import optim_keys
from shardckpt.plan.optim.param_groups import settings
from shardckpt.state.adapters import sharded_tensor
from shardckpt.state.adapters.model_index import index_model
from shardckpt.state.keys.kinds import StateKind, get_metadata, is_sharded_tensor, outside_inference_mode
from shardckpt.state.model import nn_module_hooks
from shardckpt.state.model.load_model_state_dict import refuse_other_layout
from shardckpt.state.optim import load_optim_state_dict
from shardckpt.state.optim import optim_state_dict as optimizer


class SharedParameterError(ShardckptError, RuntimeError):
    """A parameter has several names, but exactly one is required."""


# ------------------------------------------------------------------------------------------------------- models

_LOADING: WeakKeyDictionary[nn.Module, nn_module_hooks.Loading] = WeakKeyDictionary()


@outside_inference_mode
def module_state_dict(module: FullyShardedDataParallel, *args: Any, **kwargs: Any) -> MutableMapping[str, Any]:
    """Return the state for a wrapped module and its submodules. Collective."""
    return nn_module_hooks.module_state_dict(module, module.sharding_unit, *args, **kwargs)


@outside_inference_mode
def before_load(module: FullyShardedDataParallel, state: MutableMapping[str, Any], prefix: str) -> None:
    """Register a unit's tensors on the wrapped module for torch's load. Collective."""
    stale = _LOADING.pop(module, None)
    if stale is not None:  # an exception ended an outer module's load
        stale.abandon()
    nn_module_hooks.require_distinct_names(module)
    kind = nn_module_hooks.KINDS[module.state_dict_settings.state_dict_type]
    if not prefix and kind is StateKind.LOCAL:
        refuse_other_layout(get_metadata(state), module)
    if any(map(is_sharded_tensor, state.values())):
        _take_sharded_tensors(module, state, prefix, kind)
    nn_module_hooks.prepare_state(state, prefix, module.sharding_unit)
    _LOADING[module] = nn_module_hooks.Loading(module, module.sharding_unit)


def _take_sharded_tensors(module: nn.Module, state: MutableMapping[str, Any], prefix: str, kind: StateKind) -> None:
    """Replace ShardedTensors from torch's wrapper, in torch's copy of the user's state."""
    below = {name: clean(name[len(prefix) :]) for name in state if name.startswith(prefix)}
    taken = sharded_tensor.to_local_parts if kind is StateKind.LOCAL else sharded_tensor.to_dtensors
    converted = taken({plain: state[name] for name, plain in below.items()}, index_model(module))
    for name, plain in below.items():
        if plain in converted:
            state[name] = converted[plain]
        else:
            del state[name]


def abandon_load(module: nn.Module) -> None:
    """Undo registrations for loads that an exception ended."""
    for submodule in module.modules():
        loading = _LOADING.pop(submodule, None)
        if loading is not None:
            loading.abandon()


@outside_inference_mode
def after_load(module: FullyShardedDataParallel, incompatible: Any) -> None:
    """Store the loaded tensors in the unit, and report keys by FQN. Collective for sharded states."""
    _LOADING.pop(module).finish()
    for names in (incompatible.missing_keys, incompatible.unexpected_keys):
        names[:] = [clean(name) for name in names]


# --------------------------------------------------------------------------------------------------- optimizers


@dataclass
class _Groups:
    """Stand-in for an optimizer if only parameters or a custom state are given."""

    param_groups: list[dict[str, Any]]
    state: dict[nn.Parameter, Any] = field(default_factory=dict)

    @classmethod
    def from_input(cls, model: nn.Module, given: Any) -> _Groups:
        """Build it from parameters, param groups, or None for all of the model's parameters."""
        items: list[Any] = list(model.parameters() if given is None else given)
        if items and isinstance(items[0], Mapping):
            return cls([{**group, "params": list(group["params"])} for group in items])
        return cls([{"params": items}])


def _deprecated(name: str, instead: str = "optim_state_dict") -> None:
    warnings.warn(
        f"``FullyShardedDataParallel.{name}`` is being deprecated and is replaced by "
        f"``FullyShardedDataParallel.{instead}``.",
        FutureWarning,
        stacklevel=4,
    )


def _warn_of_input(optim_input: Any) -> None:
    if optim_input is not None:
        warnings.warn(
            "The `optim_input` argument is deprecated: the optimizer itself has more information",
            FutureWarning,
            stacklevel=4,
        )


def full_optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, optim_input: Any, rank0_only: bool, group: Any
) -> dict[str, Any]:
    """Return an optimizer's full state by FQN, on the CPU. Collective."""
    del group
    _deprecated("full_optim_state_dict")
    _warn_of_input(optim_input)
    taken = optimizer.optim_state_dict(model, optim, StateKind.FULL, offload_to_cpu=True, rank0_only=rank0_only)
    return dict(taken) if taken["param_groups"] else {}


def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any) -> dict[str, Any]:
    """Return an optimizer's state by FQN, as DTensors. Collective."""
    del group
    _deprecated("sharded_optim_state_dict")
    return dict(optimizer.optim_state_dict(model, optim, StateKind.SHARDED))


def shard_full_optim_state_dict(
    full: Mapping[str, Any], model: nn.Module, optim_input: Any, optim: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Return this rank's shard of a full state that every rank has, for `optim.load_state_dict`."""
    _deprecated("shard_full_optim_state_dict", "optim_state_dict_to_load")
    _warn_of_input(optim_input)
    return _numbered(model, optim or _Groups.from_input(model, optim_input), full, StateKind.FULL)


def flatten_sharded_optim_state_dict(
    sharded: Mapping[str, Any], model: nn.Module, optim: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return this rank's shard of a sharded state, for `optim.load_state_dict`. Collective."""
    _deprecated("flatten_sharded_optim_state_dict", "optim_state_dict_to_load")
    return _numbered(model, optim, sharded, StateKind.SHARDED)


def scatter_full_optim_state_dict(
    full: Mapping[str, Any] | None, model: nn.Module, optim_input: Any, optim: Any, group: Any
) -> dict[str, Any]:
    """Return this rank's shard of a full state that only rank 0 has. Collective."""
    del group
    _deprecated("scatter_full_optim_state_dict", "optim_state_dict_to_load")
    _warn_of_input(optim_input)
    given = full if full is not None and index_model(model).ranks.is_first else {}
    return _numbered(model, optim or _Groups.from_input(model, optim_input), given, StateKind.FULL)


def rekey_optim_state_dict(
    state: dict[str, Any], key_type: OptimStateKeyType, model: nn.Module, optim_input: Any, optim: Any
) -> dict[str, Any]:
    """Return an optimizer state with FQNs instead of ids as keys, or the reverse."""
    _warn_of_input(optim_input)
    kind = optim_keys.get_key_type(state)
    if kind is None or (kind is str) == (key_type is OptimStateKeyType.PARAM_NAME):
        return state
    index = index_model(model)
    shared = sorted(index.aliases)
    if shared:
        raise SharedParameterError(
            "a parameter has several names, so names and numbers do not match",
            found=", ".join(f"{name} is {index.aliases[name]}" for name in shared[:5]),
        )
    live = optim or _Groups.from_input(model, optim_input)
    groups = optimizer.map_optimizer_params(index, live).groups
    if kind is int:
        return optim_keys.to_names(state, groups)
    rekeyed = optim_keys.to_ids(state, groups)
    pairs = zip(live.param_groups, rekeyed["param_groups"], strict=True)
    return {**rekeyed, "param_groups": [{**settings(own), **group} for own, group in pairs]}


@outside_inference_mode
def optim_state_dict(
    model: nn.Module, optim: torch.optim.Optimizer, given: Mapping[str, Any] | None, group: Any
) -> dict[str, Any]:
    """Return optimizer state in the kind that `state_dict_type` sets. Collective."""
    del group
    current = _settings(model)
    config = current.optim_state_dict_config
    first_only = isinstance(config, FullOptimStateDictConfig) and config.rank0_only
    source: Any = optim if given is None else _own_state(model, optim, given)
    taken = optimizer.optim_state_dict(
        model,
        source,
        nn_module_hooks.KINDS[current.state_dict_type],
        offload_to_cpu=config.offload_to_cpu,
        rank0_only=first_only,
    )
    if given is not None and "param_groups" not in given:
        del taken["param_groups"]
    return taken if taken.get("param_groups", True) else {}


@outside_inference_mode
def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    state: Mapping[str, Any] | None,
    is_named_optimizer: bool,
    load_directly: bool,
    group: Any,
) -> dict[str, Any]:
    """Return the state that the optimizer's `load_state_dict` accepts. Collective."""
    del group
    kind = nn_module_hooks.KINDS[_settings(model).state_dict_type]
    # If only rank 0 has a FULL state, the other ranks may pass None, as Accelerate does.
    if state is None and kind is StateKind.FULL and not index_model(model).ranks.is_first:
        state = {}
    converted = _numbered(model, optim, cast("Mapping[str, Any]", state), kind)  # refuses None, on all ranks
    if is_named_optimizer:
        names = {id(p): name for name, p in model.named_parameters()}  # such optimizers use these names
        order = [names[id(p)] for live in optim.param_groups for p in live["params"]]
        converted = optim_keys.to_names(converted, _split(order, [len(live["params"]) for live in optim.param_groups]))
    if load_directly:
        optim.load_state_dict(converted)
    return converted


def _split(items: Sequence[str], sizes: Sequence[int]) -> list[list[str]]:
    groups, at = [], 0
    for size in sizes:
        groups.append(list(items[at : at + size]))
        at += size
    return groups


def _settings(model: nn.Module) -> StateDictSettings:
    current = StateStatics.get_state_dict_type(model)
    if current is None:
        return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())
    return current


def _own_state(model: nn.Module, optim: torch.optim.Optimizer, given: Mapping[str, Any]) -> _Groups:
    """Return a stand-in for an optimizer, from a state with ids or names as keys."""
    known: dict[Any, nn.Parameter] = {clean(name): p for name, p in model.named_parameters(remove_duplicate=False)}
    known |= dict(enumerate(parameter for group in optim.param_groups for parameter in group["params"]))
    kept = {known[clean(key) if isinstance(key, str) else key]: state for key, state in given["state"].items()}
    groups = [
        {**{k: v for k, v in saved.items() if k != "params"}, "params": live["params"]}
        for saved, live in zip(given.get("param_groups", optim.param_groups), optim.param_groups, strict=True)
    ]
    return _Groups(groups, kept)


def _numbered(model: nn.Module, optim: Any, state: Mapping[str, Any], kind: StateKind) -> dict[str, Any]:
    """Return a state with ids in the order that an optimizer's groups have. Collective."""
    fitted = load_optim_state_dict.fit(model, optim, state, kind=kind)
    kept, groups, number = {}, [], 0
    for live, change in zip(optim.param_groups, fitted.settings, strict=True):
        numbers = []
        for parameter in live["params"]:
            if fitted.state.get(parameter):
                kept[number] = fitted.state[parameter]
            numbers.append(number)
            number += 1
        own = {key: value for key, value in live.items() if key != "params"}
        groups.append({**own, **change, "params": numbers})
    return {"state": kept, "param_groups": groups} if "param_groups" in state or not state else {"state": kept}
