"""Sharding engine with the API and behavior of `torch.distributed.fsdp`.

Names are loaded on first use, so that using one part does not import the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardckpt.errors import require_torch

require_torch("shardckpt.core")

from shardckpt.core.lazy_names import load_on_first_use

if TYPE_CHECKING:
    from shardckpt.core.api import (
        BackwardPrefetch,
        CPUOffload,
        FullOptimStateDictConfig,
        FullStateDictConfig,
        LocalOptimStateDictConfig,
        LocalStateDictConfig,
        MixedPrecision,
        OptimStateDictConfig,
        ShardedOptimStateDictConfig,
        ShardedStateDictConfig,
        ShardingStrategy,
        StateDictConfig,
        StateDictSettings,
        StateDictType,
    )
    from shardckpt.core.config import OptimStateKeyType
    from shardckpt.core.errors import StateProviderMissing
    from shardckpt.core.fsdp1.wrapper import FullyShardedDataParallel
    from shardckpt.core.fsdp2.fully_shard import FSDPModule, fully_shard, register_fsdp_forward_method, share_comm_ctx
    from shardckpt.core.materialize import sync_module_states
    from shardckpt.core.modules.fqn_and_params import clean_tensor_name, mark_incompatible
    from shardckpt.core.params.mesh_placement import (
        DataParallelMeshDims,
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )
    from shardckpt.core.policies import AllGather, CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, ReduceScatter
    from shardckpt.core.registration.base import FlatParameter
    from shardckpt.core.runtime.fsdp_unit import UnshardHandle
    from shardckpt.core.runtime.root_state import GradientReductionHandle
    from shardckpt.core.tools.clip_grad_norm import clip_grad_norm_
    from shardckpt.core.tools.grad_scaler import ShardedGradScaler
    from shardckpt.core.tools.replace_torch_fsdp import replace_torch_fsdp
    from shardckpt.core.tools.summon_full_params import iter_full_params

_HOMES = {
    "shardckpt.core.api": (
        "BackwardPrefetch",
        "CPUOffload",
        "FullOptimStateDictConfig",
        "FullStateDictConfig",
        "LocalOptimStateDictConfig",
        "LocalStateDictConfig",
        "MixedPrecision",
        "OptimStateDictConfig",
        "ShardedOptimStateDictConfig",
        "ShardedStateDictConfig",
        "ShardingStrategy",
        "StateDictConfig",
        "StateDictSettings",
        "StateDictType",
    ),
    "shardckpt.core.config": ("OptimStateKeyType",),
    "shardckpt.core.errors": ("StateProviderMissing",),
    "shardckpt.core.fsdp1.wrapper": ("FullyShardedDataParallel",),
    "shardckpt.core.fsdp2.fully_shard": ("FSDPModule", "fully_shard", "register_fsdp_forward_method", "share_comm_ctx"),
    "shardckpt.core.modules.fqn_and_params": ("clean_tensor_name", "mark_incompatible"),
    "shardckpt.core.params.mesh_placement": (
        "DataParallelMeshDims",
        "FSDPMeshInfo",
        "HSDPMeshInfo",
        "ShardPlacementResult",
    ),
    "shardckpt.core.policies": (
        "AllGather",
        "CPUOffloadPolicy",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "ReduceScatter",
    ),
    "shardckpt.core.registration.base": ("FlatParameter",),
    "shardckpt.core.runtime.fsdp_unit": ("UnshardHandle",),
    "shardckpt.core.runtime.root_state": ("GradientReductionHandle",),
    "shardckpt.core.materialize": ("sync_module_states",),
    "shardckpt.core.tools.clip_grad_norm": ("clip_grad_norm_",),
    "shardckpt.core.tools.grad_scaler": ("ShardedGradScaler",),
    "shardckpt.core.tools.replace_torch_fsdp": ("replace_torch_fsdp",),
    "shardckpt.core.tools.summon_full_params": ("iter_full_params",),
}

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
    "GradientReductionHandle",
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
    "clean_tensor_name",
    "clip_grad_norm_",
    "fully_shard",
    "iter_full_params",
    "mark_incompatible",
    "register_fsdp_forward_method",
    "replace_torch_fsdp",
    "share_comm_ctx",
    "sync_module_states",
]

if not TYPE_CHECKING:  # type checkers would let every name pass
    __getattr__, __dir__ = load_on_first_use(__name__, _HOMES)
