"""Checkpoints for an `accelerate.Accelerator`: `save_state` and `load_state` go through shardckpt."""

from __future__ import annotations

from shardckpt.errors import require_packages

require_packages("shardckpt.integrations.accelerate", "torch", "accelerate", install="'shardckpt[accelerate]'")

from shardckpt.integrations.accelerate.accelerator_checkpoints import AcceleratorCheckpoints, register

__all__ = ["AcceleratorCheckpoints", "register"]
