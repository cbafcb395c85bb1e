"""Checkpoints inside Ray Train: a `Checkpointer` below the experiment's folder, which reports its steps to Ray."""

from __future__ import annotations

from shardckpt.errors import require_packages

require_packages("shardckpt.integrations.ray", "torch", "ray", install="'shardckpt[ray]'")

from shardckpt.integrations.ray.ray_checkpointer import RayCheckpointer

__all__ = ["RayCheckpointer"]
