"""Models under torch's own FullyShardedDataParallel: their whole state, taken and put through its public functions."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardckpt.core.traverse import clean
from shardckpt.errors import ShardckptError
from shardckpt.state.kinds import StateKind
from shardckpt.state.param_groups import wanted


class ForeignShardingError(ShardckptError, NotImplementedError):
    """What is asked of a model that something else has sharded can be had of that alone."""


def torchs_wrapper() -> Any:
    """Return `torch.distributed.fsdp` where somebody has imported it; None where no model can be sharded by it."""
    return sys.modules.get("torch.distributed.fsdp")


def is_foreign(model: nn.Module) -> bool:
    """Tell whether torch's wrapper has sharded a part of a model."""
    fsdp = torchs_wrapper()
    return fsdp is not None and any(isinstance(each, fsdp.FullyShardedDataParallel) for each in model.modules())


def refuse_other(kind: StateKind) -> None:
    """Refuse every kind but FULL.

    Raises:
        ForeignShardingError: It is another one.
    """
    if kind is not StateKind.FULL:
        raise ForeignShardingError(
            "of a model under torch's FullyShardedDataParallel only whole states are taken and put",
            found=kind.name,
            expected=StateKind.FULL.name,
            fix="Ask for FULL, or shard the model with shardckpt.",
        )


@contextmanager
def _whole(model: nn.Module, *, offload: bool = False, first_only: bool = False) -> Iterator[Any]:
    """Let torch's state dicts be whole inside; on any exit its settings are what they were."""
    fsdp = torchs_wrapper()
    wrapper = fsdp.FullyShardedDataParallel
    is_there = all(parameter.device.type == "cpu" for parameter in model.parameters())
    config = {"offload_to_cpu": offload and not is_there, "rank0_only": first_only}  # or torch frees what it returns
    whole = (
        fsdp.StateDictType.FULL_STATE_DICT,
        fsdp.FullStateDictConfig(**config),
        fsdp.FullOptimStateDictConfig(**config),
    )
    before = _set(wrapper, model, whole)
    try:
        yield wrapper
    finally:
        _set(wrapper, model, (before.state_dict_type, before.state_dict_config, before.optim_state_dict_config))


def _set(wrapper: Any, model: nn.Module, settings: tuple[Any, Any, Any]) -> Any:
    """Tell torch's wrappers what their state dicts hold, without what it says against that; return what it was."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return wrapper.set_state_dict_type(model, *settings)


def whole_state(model: nn.Module, *, offload: bool, first_only: bool) -> dict[str, Any]:
    """Return the whole state of a model by the names it has unsharded. Collective.

    Args:
        model: The model.
        offload: Give tensors on the CPU.
        first_only: Give them to the first rank alone.
    """
    with _whole(model, offload=offload, first_only=first_only):
        return {clean(name): value for name, value in model.state_dict().items()}


def put_state(model: nn.Module, state: Mapping[str, Any], *, strict: bool) -> tuple[list[str], list[str]]:
    """Put a whole state that every rank has into a model, and return the missing and the unexpected names. Collective.

    Args:
        model: The model.
        state: It is not changed.
        strict: Names that differ are errors.
    """
    with _whole(model):
        told = model.load_state_dict({clean(name): value for name, value in state.items()}, strict=strict)
    return [clean(name) for name in told.missing_keys], [clean(name) for name in told.unexpected_keys]


def whole_optim_state(
    model: nn.Module, optim: torch.optim.Optimizer, *, offload: bool, first_only: bool
) -> dict[str, Any]:
    """Return the whole state of an optimizer of such a model. Collective.

    Args:
        model: The model.
        optim: The optimizer.
        offload: Give tensors on the CPU.
        first_only: Give them to the first rank alone.
    """
    with _whole(model, offload=offload, first_only=first_only) as wrapper:
        found = wrapper.optim_state_dict(model, optim)
    return {
        "state": {
            clean(name): {slot: _own(value) for slot, value in slots.items()}
            for name, slots in found.get("state", {}).items()
        },
        "param_groups": [
            {**group, "params": [clean(name) for name in group["params"]]} for group in found.get("param_groups", [])
        ],
    }


def _own(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def put_optim_state(model: nn.Module, optim: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Put a whole state that every rank has into an optimizer of such a model, by name. Collective.

    torch matches groups by their position: it is given groups that are those of the optimizer.

    Args:
        model: The model.
        optim: The optimizer.
        state: With names for keys; it is not changed.

    Raises:
        ConflictError: Parameters of one group were saved with different settings.
    """
    live = whole_optim_state(model, optim, offload=True, first_only=False)["param_groups"]
    saved = [{**group, "params": [clean(name) for name in group["params"]]} for group in state["param_groups"]]
    changes = wanted([group["params"] for group in live], saved)
    groups = [{**group, **settings} for group, settings in zip(live, changes, strict=True)]
    names = {name for group in groups for name in group["params"]}
    kept = {
        clean(name): {slot: _own(value) for slot, value in slots.items()}
        for name, slots in state["state"].items()
        if clean(name) in names
    }
    with _whole(model) as wrapper:
        optim.load_state_dict(wrapper.optim_state_dict_to_load(model, optim, {"state": kept, "param_groups": groups}))
