"""Checkpoint engine `shardckpt` for verl: the actor publishes to a stream, and rollouts load the version from it.

verl imports it for `checkpoint_engine.custom_backend_module: shardckpt.integrations.verl`.
"""

from __future__ import annotations

from shardckpt.errors import require_packages

require_packages("shardckpt.integrations.verl", "torch", "verl", install="verl")

from shardckpt.integrations.verl.checkpoint_engine import StreamCheckpointEngine

__all__ = ["StreamCheckpointEngine"]
