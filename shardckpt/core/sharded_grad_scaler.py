"""Public name from `torch.distributed.fsdp.sharded_grad_scaler`."""

from __future__ import annotations

from shardckpt.core.tools.grad_scaler import ShardedGradScaler

__all__ = ["ShardedGradScaler"]
