"""Checkpoints of Lightning's Trainer: a `ModelCheckpoint` whose checkpoints are steps of a run."""

from __future__ import annotations

from shardckpt.integrations.lightning.model_checkpoint import ModelCheckpointParams, ShardckptModelCheckpoint

__all__ = ["ModelCheckpointParams", "ShardckptModelCheckpoint"]
