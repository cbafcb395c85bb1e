"""State for models under torch's FullyShardedDataParallel, by its public functions."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardckpt.core.modules.dtensors import gather_full_tensor
from shardckpt.core.modules.fqn_and_params import clean
from shardckpt.errors import ShardckptError, StateMismatchError
from shardckpt.plan.optim.optim_keys import get_key_type, nest, to_names
from shardckpt.plan.optim.param_groups import match_settings
from shardckpt.state.adapters.flat_shard_check import FlatShards
from shardckpt.state.adapters.model_index import has_mixed_wrapper
from shardckpt.state.adapters.name_collision import clean_keys
from shardckpt.state.adapters.sharded_tensor import as_dtensor
from shardckpt.state.keys.kinds import StateKind, is_sharded_tensor
from shardckpt.state.keys.slots import copy_value
from shardckpt.state.keys.validation import check_form, digest, validate_input
from shardckpt.state.redistribute.rank_grid import Ranks


class ForeignShardingError(ShardckptError, NotImplementedError):
    """Only the library that sharded a model can do this with it."""


NEEDS_EVERY_RANK = "torch's own wrapper takes a state from every rank"

_WRAPPER = "FullyShardedDataParallel"
_HOME = "torch.distributed.fsdp.fully_sharded_data_parallel"


def find_torch_wrapper(kind: Any) -> Any:
    """Return torch's own wrapper among a class's bases, or None."""
    # It is recognized by its defining module: torch's modules may have been patched with another class, such as ours.
    wrappers = (base for base in kind.__mro__ if (base.__module__, base.__name__) == (_HOME, _WRAPPER))
    return next(wrappers, None)


def _find_wrappers(model: nn.Module) -> list[nn.Module]:
    """Return a model's modules that are instances of torch's wrapper."""
    if _HOME not in sys.modules:
        return []
    return [module for module in model.modules() if find_torch_wrapper(type(module)) is not None]


def is_foreign(model: nn.Module) -> bool:
    """Return True if torch's wrapper shards any part."""
    return bool(_find_wrappers(model))


def get_ranks(model: nn.Module) -> Ranks:
    """Return a model's ranks under torch's wrapper."""
    wrappers: list[Any] = _find_wrappers(model)
    # A hybrid wrapper's replicate group is private to torch.
    is_hybrid = any("HYBRID" in wrapper.sharding_strategy.name for wrapper in wrappers)
    return Ranks.from_groups([dist.group.WORLD] if is_hybrid else [wrapper.process_group for wrapper in wrappers])


def shapes_at_first(model: nn.Module) -> dict[str, Any]:
    """Return a full state's entries on rank 0, as meta tensors. Collective."""
    state = full_state(model, offload=True, first_only=True)
    return {name: value.to("meta") if isinstance(value, torch.Tensor) else value for name, value in state.items()}


def refuse_local(kind: StateKind) -> None:
    """Refuse kind LOCAL: torch's flat layout is private."""
    if kind is StateKind.LOCAL:
        raise ForeignShardingError(
            "a model under torch's FullyShardedDataParallel has no LOCAL state",
            found=kind.name,
            expected="FULL or SHARDED",
            fix="Use another kind, or shard the model with shardckpt.",
        )


@contextmanager
def _set_state_dict_type(
    model: nn.Module, kind: StateKind, *, offload: bool = False, first_only: bool = False
) -> Iterator[Any]:
    """Set the kind for torch's state dicts inside the context; restore it on exit."""
    fsdp = sys.modules["torch.distributed.fsdp.api"]  # defines the settings of torch's wrapper
    wrapper = find_torch_wrapper(type(_find_wrappers(model)[0]))
    _require_wrappers(model, wrapper)
    if has_mixed_wrapper(model):
        _require_distinct_names(model, wrapper)
    is_there = all(parameter.device.type == "cpu" for parameter in model.parameters())
    config: dict[str, bool] = {"offload_to_cpu": offload and not is_there}  # otherwise torch frees the returned tensors
    if kind is StateKind.FULL:
        configs = fsdp.FullStateDictConfig, fsdp.FullOptimStateDictConfig
        config["rank0_only"] = first_only
    else:
        configs = fsdp.ShardedStateDictConfig, fsdp.ShardedOptimStateDictConfig
    wanted_type = fsdp.StateDictType[f"{kind.name}_STATE_DICT"]
    before = _set(wrapper, model, (wanted_type, configs[0](**config), configs[1](**config)))
    try:
        yield wrapper
    finally:
        _set(wrapper, model, (before.state_dict_type, before.state_dict_config, before.optim_state_dict_config))


def _require_wrappers(model: nn.Module, wrapper: Any) -> None:
    """Refuse a module inside a wrapper: only wrappers inside the model would be gathered."""
    inside = {id(p) for module in model.modules() if isinstance(module, wrapper) for p in module.parameters()}
    FlatShards().require_none((name, p) for name, p in model.named_parameters() if id(p) not in inside)


def _require_distinct_names(model: nn.Module, wrapper: Any) -> None:
    """Refuse names that become equal without wrapper segments. Collective."""
    # Only a sharded state has its names on every rank.
    fsdp = sys.modules["torch.distributed.fsdp.api"]
    sharded = fsdp.StateDictType.SHARDED_STATE_DICT, fsdp.ShardedStateDictConfig(), fsdp.ShardedOptimStateDictConfig()
    before = _set(wrapper, model, sharded)
    try:
        clean_keys(model.state_dict())
    finally:
        _set(wrapper, model, (before.state_dict_type, before.state_dict_config, before.optim_state_dict_config))


def _set(wrapper: Any, model: nn.Module, settings: tuple[Any, Any, Any]) -> Any:
    """Set the type for torch's state dicts without warnings; return the old settings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return wrapper.set_state_dict_type(model, *settings)


def full_state(model: nn.Module, *, offload: bool, first_only: bool) -> dict[str, Any]:
    """Return a model's full state by FQN. Collective."""
    with _set_state_dict_type(model, StateKind.FULL, offload=offload, first_only=first_only):
        return clean_keys(model.state_dict())


def sharded_state(model: nn.Module, *, offload: bool) -> dict[str, Any]:
    """Return a model's state by FQN, with DTensors for sharded tensors. Collective."""
    with _set_state_dict_type(model, StateKind.SHARDED, offload=offload):
        return {name: _to_dtensor(name, value) for name, value in clean_keys(model.state_dict()).items()}


def _to_dtensor(name: str, value: Any) -> Any:
    return as_dtensor(clean(name), value, None) if is_sharded_tensor(value) else value


def _to_full(name: str, value: Any) -> Any:
    """Gather a sharded value. Collective."""
    tensor = _to_dtensor(name, value)
    return gather_full_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def put_state(model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> tuple[list[str], list[str]]:
    """Load a state that every rank has into a model. Collective. Returns missing and unexpected names."""
    with _set_state_dict_type(model, StateKind.FULL):
        keys = model.load_state_dict({clean(name): _to_full(name, v) for name, v in state.items()}, strict=strict)
    return [clean(name) for name in keys.missing_keys], [clean(name) for name in keys.unexpected_keys]


def full_optim_state(
    model: nn.Module, optim: torch.optim.Optimizer, *, offload: bool, first_only: bool
) -> dict[str, Any]:
    """Return an optimizer's full state. Collective."""
    with _set_state_dict_type(model, StateKind.FULL, offload=offload, first_only=first_only) as wrapper:
        return _clean_names(wrapper.optim_state_dict(model, optim))


def sharded_optim_state(model: nn.Module, optim: torch.optim.Optimizer, *, offload: bool) -> dict[str, Any]:
    """Return an optimizer's state, with sharded tensors as DTensors. Collective."""
    with _set_state_dict_type(model, StateKind.SHARDED, offload=offload) as wrapper:
        return _clean_names(wrapper.optim_state_dict(model, optim))


def _clean_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy an optimizer's state, with FQNs in the unsharded model as keys."""
    return {
        "state": {
            clean(name): {slot: copy_value(_to_dtensor(f"{name}/{slot}", value)) for slot, value in slots.items()}
            for name, slots in state.get("state", {}).items()
        },
        "param_groups": [
            {**group, "params": [clean(name) for name in group["params"]]} for group in state.get("param_groups", [])
        ],
    }


def _refuse_unknown(names: Iterable[str], known: Mapping[str, Any]) -> None:
    unknown = [name for name in dict.fromkeys(map(clean, names)) if name not in known]
    if unknown:
        raise StateMismatchError(
            "the state does not fit the optimizer: " + "; ".join(f"Unexpected key: {name}" for name in unknown[:50]),
            fix="Nothing was changed.",
        )


def _by_name(state: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> Mapping[str, Any]:
    """Return a nested optimizer state with FQNs as keys."""
    if state and all(str(key).startswith(("state.", "param_groups.")) for key in state):
        return nest(state, groups)
    check_form(state)
    if get_key_type(state) is not int:
        return state
    return to_names(state, None if all("param_names" in group for group in state["param_groups"]) else groups)


def put_optim_state(model: nn.Module, optim: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a state that every rank has into a model's optimizer, by FQN. Collective."""
    # torch matches param groups by position, so the groups are rebuilt in the optimizer's order.
    live = full_optim_state(model, optim, offload=True, first_only=False)["param_groups"]
    known = shapes_at_first(model)
    ranks = get_ranks(model)
    with validate_input(ranks, "fit a state to the optimizer", given=bool(state)) as agreed:
        state = _by_name(state, [group["params"] for group in live])
        check_form(state)
        groups = state.get("param_groups", [])
        saved = [{**group, "params": [clean(name) for name in group["params"]]} for group in groups]
        changes = match_settings([group["params"] for group in live], saved)
        states = state.get("state", {})
        slots = [[n, s, list(getattr(v, "shape", ()))] for n, of in states.items() for s, v in of.items()]
        agreed.digest = digest([sorted(states), sorted(slots), changes])
        agreed.broadcast_error = StateMismatchError(NEEDS_EVERY_RANK, found="one on rank 0 alone")
        if ranks.is_first:
            _refuse_unknown([*states, *(name for group in saved for name in group["params"])], known)
    groups = [{**group, **settings} for group, settings in zip(live, changes, strict=True)]
    names = {name for group in groups for name in group["params"]}
    kept = {
        clean(name): {slot: copy_value(_to_full(f"{name}/{slot}", value)) for slot, value in slots.items()}
        for name, slots in state.get("state", {}).items()
        if clean(name) in names
    }
    with _set_state_dict_type(model, StateKind.FULL) as wrapper:
        optim.load_state_dict(wrapper.optim_state_dict_to_load(model, optim, {"state": kept, "param_groups": groups}))
