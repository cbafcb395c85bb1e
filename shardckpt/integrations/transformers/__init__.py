"""Checkpoints for `transformers.Trainer`: a callback that saves steps and resumes from them."""

from __future__ import annotations

from shardckpt.errors import require_packages

require_packages(
    "shardckpt.integrations.transformers", "torch", "transformers", "accelerate", install="'shardckpt[transformers]'"
)

from shardckpt.integrations.transformers.trainer_callback import ShardckptCallback

__all__ = ["ShardckptCallback"]
