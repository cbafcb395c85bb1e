"""FULL, SHARDED and LOCAL state for sharded models and their optimizers, by FQN.

Names are loaded on first use, so that nothing imports more than it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import require_torch

require_torch("shardckpt.state")

from shardckpt.core.lazy_names import load_on_first_use

if TYPE_CHECKING:
    from shardckpt.errors import StateMismatchError
    from shardckpt.plan.optim.optim_keys import FlatUnit, flatten, nest, to_ids, to_names
    from shardckpt.plan.optim.param_groups import ConflictError
    from shardckpt.state.adapters.torch_fsdp1 import ForeignShardingError
    from shardckpt.state.keys.flat_param_keys import flat_units, to_flat_parameters, to_original_parameters
    from shardckpt.state.keys.kinds import StateKind
    from shardckpt.state.keys.slots import OpaqueStateError
    from shardckpt.state.model.load_model_state_dict import Keys, load_model_state_dict
    from shardckpt.state.model.model_state_dict import iter_full_state_dict, model_state_dict
    from shardckpt.state.optim.load_optim_state_dict import load_optim_state_dict
    from shardckpt.state.optim.optim_state_dict import ForeignParameterError, optim_state_dict

_HOMES = {
    "shardckpt.plan.optim.optim_keys": ("FlatUnit", "flatten", "nest", "to_ids", "to_names"),
    "shardckpt.plan.optim.param_groups": ("ConflictError",),
    "shardckpt.state.adapters.torch_fsdp1": ("ForeignShardingError",),
    "shardckpt.state.keys.flat_param_keys": ("flat_units", "to_flat_parameters", "to_original_parameters"),
    "shardckpt.state.keys.kinds": ("StateKind",),
    "shardckpt.state.keys.slots": ("OpaqueStateError",),
    "shardckpt.state.keys.validation": ("StateMismatchError",),
    "shardckpt.state.model.load_model_state_dict": ("Keys", "load_model_state_dict"),
    "shardckpt.state.model.model_state_dict": ("iter_full_state_dict", "model_state_dict"),
    "shardckpt.state.optim.load_optim_state_dict": ("load_optim_state_dict",),
    "shardckpt.state.optim.optim_state_dict": ("ForeignParameterError", "optim_state_dict"),
}

__all__ = [
    "ConflictError",
    "FlatUnit",
    "ForeignParameterError",
    "ForeignShardingError",
    "Keys",
    "OpaqueStateError",
    "StateKind",
    "StateMismatchError",
    "flat_units",
    "flatten",
    "iter_full_state_dict",
    "load_model_state_dict",
    "load_optim_state_dict",
    "model_state_dict",
    "nest",
    "optim_state_dict",
    "to_flat_parameters",
    "to_ids",
    "to_names",
    "to_original_parameters",
]

if not TYPE_CHECKING:  # type checkers would let every name pass
    __getattr__, __dir__ = load_on_first_use(__name__, _HOMES)
