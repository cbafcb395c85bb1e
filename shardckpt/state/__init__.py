"""FULL, SHARDED and LOCAL state of sharded models and their optimizers, by FQN."""

from __future__ import annotations

from shardckpt.errors import require_torch

require_torch("shardckpt.state")

from shardckpt.plan.optim.flat_params import FlatUnit
from shardckpt.plan.optim.optim_keys import flatten, nest, to_ids, to_names
from shardckpt.plan.optim.param_groups import ConflictError
from shardckpt.state.adapters.torch_fsdp1 import ForeignShardingError
from shardckpt.state.keys.flat_param_keys import flat_units, to_flat_parameters, to_original_parameters
from shardckpt.state.keys.kinds import StateKind
from shardckpt.state.keys.slots import OpaqueStateError
from shardckpt.state.keys.validation import StateMismatchError
from shardckpt.state.model.load_model_state_dict import Keys, load_model_state_dict
from shardckpt.state.model.model_state_dict import iter_full_state_dict, model_state_dict
from shardckpt.state.optim.load_optim_state_dict import load_optim_state_dict
from shardckpt.state.optim.optim_state_dict import ForeignParameterError, optim_state_dict

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
