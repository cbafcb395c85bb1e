"""FULL, LOCAL and SHARDED state of sharded models and their optimizers, by name."""

from __future__ import annotations

from shardckpt.state.agreement import StateMismatchError
from shardckpt.state.flat_keys import FlatUnit, flat_units, to_flat_parameters, to_original_parameters
from shardckpt.state.foreign import ForeignShardingError
from shardckpt.state.kinds import StateKind
from shardckpt.state.loading import Keys, load_model_state_dict
from shardckpt.state.model import iter_full_state_dict, model_state_dict
from shardckpt.state.optim_loading import load_optim_state_dict
from shardckpt.state.optimizer import ForeignParameterError, optim_state_dict
from shardckpt.state.param_groups import ConflictError
from shardckpt.state.rekey import flatten, nest, to_ids, to_names
from shardckpt.state.slots import OpaqueStateError

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
