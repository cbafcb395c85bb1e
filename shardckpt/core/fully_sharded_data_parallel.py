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
from shardckpt.core.exposure import FlatParameter
from shardckpt.core.wrap import CustomPolicy, ModuleWrapPolicy
from shardckpt.core.wrapper import FLAT_PARAM, FullyShardedDataParallel

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
