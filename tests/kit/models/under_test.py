"""The engine under test: ours, or torch's own with SHARDCKPT_TEST_ENGINE=torch, to show that the tests are right."""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

TORCH = os.environ.get("SHARDCKPT_TEST_ENGINE") == "torch"

if TORCH:
    from torch.distributed import fsdp as core
    from torch.distributed.fsdp import wrap
else:
    core = pytest.importorskip("shardckpt.core", exc_type=ImportError)
    wrap = pytest.importorskip("shardckpt.core.wrap", exc_type=ImportError)

FSDP = core.FullyShardedDataParallel
Strategy = core.ShardingStrategy
LOW = torch.bfloat16  # what `low` computes in; gradients are averaged in fp32


class Style(Enum):
    """What a user sees of a sharded model: a flat parameter a unit, the original parameters, or DTensors."""

    FLAT = "flat"
    ORIGINAL = "orig"
    EACH = "each"

    @property
    def wraps(self) -> bool:
        """Whether it is a wrapper's, not `fully_shard`'s."""
        return self is not Style.EACH


STYLES = pytest.mark.parametrize("style", list(Style), ids=[style.value for style in Style])


def shard(module: nn.Module, **settings: Any) -> Any:
    """`FSDP(module, ...)`; torch needs the CPU as an argument."""
    if TORCH:
        settings.setdefault("device_id", torch.device("cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FSDP(module, **settings)


@functools.cache  # of a rank: the parent has no mesh
def grid(replicas: int) -> DeviceMesh:
    """All ranks, in so many groups of which each holds the whole model."""
    sizes = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))


def sharder(
    style: Style, strategy: Strategy = Strategy.FULL_SHARD, *, low: bool = False, offload: bool = False, **settings: Any
) -> Callable[[nn.Module], Any]:
    """Settings that make units of modules, in the words of the wrapper; `fully_shard` has its own for the same.

    Args:
        style: Which front end, and what it shows.
        strategy: What is sharded and for how long it is whole; a hybrid one makes two groups.
        low: Compute in `LOW`, reduce in fp32.
        offload: Shards live on the CPU.
        settings: Other arguments of the front end.
    """
    if style.wraps:
        if strategy in (Strategy.HYBRID_SHARD, Strategy._HYBRID_SHARD_ZERO2):
            settings["device_mesh"] = grid(2)
        if low:
            settings["mixed_precision"] = core.MixedPrecision(param_dtype=LOW, reduce_dtype=torch.float32)
        if offload:
            settings["cpu_offload"] = core.CPUOffload(offload_params=True)
        return functools.partial(shard, sharding_strategy=strategy, use_orig_params=style is Style.ORIGINAL, **settings)
    if strategy in (Strategy.SHARD_GRAD_OP, Strategy._HYBRID_SHARD_ZERO2):
        settings.setdefault("reshard_after_forward", False)
    replicas = {Strategy.HYBRID_SHARD: 2, Strategy._HYBRID_SHARD_ZERO2: 2, Strategy.NO_SHARD: dist.get_world_size()}
    if strategy in replicas:
        settings["mesh"] = grid(replicas[strategy])
    if low:
        settings["mp_policy"] = core.MixedPrecisionPolicy(param_dtype=LOW, reduce_dtype=torch.float32)
    if offload:
        settings["offload_policy"] = core.CPUOffloadPolicy(pin_memory=False)
    return functools.partial(core.fully_shard, **settings)


@contextlib.contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """Inside, backward reduces nothing."""
    if isinstance(model, FSDP):
        with model.no_sync():
            yield
        return
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def is_unit(module: nn.Module) -> bool:
    """Whether a module is sharded as a unit, on either front end."""
    return isinstance(module, (FSDP, core.FSDPModule))


def torch_is_wrong(reason: str) -> pytest.MarkDecorator:
    """A test that torch's engine fails or hangs in: ours must pass."""
    return pytest.mark.skipif(TORCH, reason=f"torch is wrong: {reason}")
