"""Callbacks for `transformers.Trainer`: one saves steps and resumes from them, another publishes weights."""

from __future__ import annotations

from shardckpt.errors import require_packages

require_packages(
    "shardckpt.integrations.transformers", "torch", "transformers", "accelerate", install="'shardckpt[transformers]'"
)

from shardckpt.integrations.transformers.publish_callback import PublishCallback
from shardckpt.integrations.transformers.trainer_callback import ShardckptCallback

__all__ = ["PublishCallback", "ShardckptCallback"]
