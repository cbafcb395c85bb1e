"""Samplers and loaders for training data whose position is exact after a resume on any number of ranks."""

from __future__ import annotations

from shardckpt.errors import require_torch

require_torch("shardckpt.data")

from shardckpt.data.batch_sampler import ElasticBatchSampler
from shardckpt.data.stream_loader import DatasetStreams, ElasticStreamLoader
from shardckpt.plan.data_positions import DataPosition, InexactPositionError

__all__ = ["DataPosition", "DatasetStreams", "ElasticBatchSampler", "ElasticStreamLoader", "InexactPositionError"]
