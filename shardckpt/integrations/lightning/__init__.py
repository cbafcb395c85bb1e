"""Checkpoints for Lightning's Trainer: a `ModelCheckpoint` whose checkpoints are steps in a run."""

from __future__ import annotations

from shardckpt.errors import require_packages

require_packages("shardckpt.integrations.lightning", "torch", "lightning", install="'shardckpt[lightning]'")

from shardckpt.integrations.lightning.lightning_step import ModelCheckpointParams
from shardckpt.integrations.lightning.model_checkpoint import ShardckptModelCheckpoint

__all__ = ["ModelCheckpointParams", "ShardckptModelCheckpoint"]
