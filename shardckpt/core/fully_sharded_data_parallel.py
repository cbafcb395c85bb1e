"""What users import from `torch.distributed.fsdp.fully_sharded_data_parallel`: the wrapper, and what configures it."""

from __future__ import annotations

from shardckpt.core.config import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    TrainingState,
)
from shardckpt.core.fsdp1.wrapper import FLAT_PARAM, FullyShardedDataParallel
from shardckpt.core.registration.base import FlatParameter
from shardckpt.core.wrap import CustomPolicy, ModuleWrapPolicy

__all__ = [
    "FLAT_PARAM",
    "BackwardPrefetch",
    "CPUOffload",
    "CustomPolicy",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "TrainingState",
]
