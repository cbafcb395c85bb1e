"""The engine under test: ours, or torch's own with SHARDCKPT_TEST_ENGINE=torch, to show that the tests are right."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
from torch import nn

TORCH = os.environ.get("SHARDCKPT_TEST_ENGINE") == "torch"

if TORCH:
    from torch.distributed import fsdp as core
    from torch.distributed.fsdp import wrap
else:
    core = pytest.importorskip("shardckpt.core", exc_type=ImportError)
    wrap = pytest.importorskip("shardckpt.core.wrap", exc_type=ImportError)

FSDP = core.FullyShardedDataParallel
Strategy = core.ShardingStrategy


def shard(module: nn.Module, **settings: Any) -> Any:
    """`FSDP(module, ...)`; torch needs to be told that the CPU will do."""
    if TORCH:
        settings.setdefault("device_id", torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FSDP(module, **settings)


def torch_is_wrong(reason: str) -> pytest.MarkDecorator:
    """A test that torch's engine fails or hangs in: ours must pass."""
    return pytest.mark.skipif(TORCH, reason=f"torch is wrong: {reason}")


def engine_lacks(reason: str) -> pytest.MarkDecorator:
    """A test that our engine does not pass yet; torch's is asked all the same."""
    return pytest.mark.xfail(not TORCH, reason=reason, strict=True)
