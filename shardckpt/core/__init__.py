"""The sharding engine, with the names, arguments and behaviour of `torch.distributed.fsdp`."""

from __future__ import annotations

from shardckpt.core.clip import clip_grad_norm_
from shardckpt.core.composable import (
    FSDPModule,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
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
)
from shardckpt.core.exposure import FlatParameter
from shardckpt.core.materialize import sync_module_states
from shardckpt.core.placement import DataParallelMeshDims, FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from shardckpt.core.policies import AllGather, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, ReduceScatter
from shardckpt.core.scaler import ShardedGradScaler
from shardckpt.core.statics import StateProviderMissing
from shardckpt.core.summon import iter_full_params
from shardckpt.core.traverse import mark_incompatible
from shardckpt.core.unit import UnshardHandle
from shardckpt.core.wrapper import FullyShardedDataParallel

__all__ = [
    "AllGather",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "HSDPMeshInfo",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ReduceScatter",
    "ShardPlacementResult",
    "ShardedGradScaler",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "StateProviderMissing",
    "UnshardHandle",
    "clip_grad_norm_",
    "fully_shard",
    "iter_full_params",
    "mark_incompatible",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "sync_module_states",
]
