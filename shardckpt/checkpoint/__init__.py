"""Save and load the state of a training run, on any number of ranks."""

from shardckpt.errors import require_torch

require_torch("shardckpt.checkpoint")
