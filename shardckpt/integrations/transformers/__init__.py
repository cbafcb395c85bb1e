"""Checkpoints of `transformers.Trainer`: a callback that saves steps and resumes from them."""

from __future__ import annotations

from shardckpt.integrations.transformers.trainer_callback import ShardckptCallback

__all__ = ["ShardckptCallback"]
