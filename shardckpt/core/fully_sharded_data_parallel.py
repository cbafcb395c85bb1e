"""Public names from `torch.distributed.fsdp.fully_sharded_data_parallel`."""

from __future__ import annotations

from shardckpt.core import api
from shardckpt.core.api import *  # noqa: F403  (names of `api.__all__`, which is a list of strings for type checkers too)
from shardckpt.core.config import OptimStateKeyType, TrainingState
from shardckpt.core.fsdp1.wrapper import FLAT_PARAM, FullyShardedDataParallel
from shardckpt.core.registration.base import FlatParameter
from shardckpt.core.wrap import CustomPolicy, ModuleWrapPolicy

__all__ = [
    "FLAT_PARAM",
    "CustomPolicy",
    "FlatParameter",
    "FullyShardedDataParallel",
    "ModuleWrapPolicy",
    "OptimStateKeyType",
    "TrainingState",
]
__all__ += api.__all__
