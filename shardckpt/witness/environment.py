"""Versions, devices and flags that change a training step's result."""

from __future__ import annotations

import os
import platform

import numpy as np
import torch

from shardckpt.devices import is_gpu_used
from shardckpt.torch_features import find_accelerator
from shardckpt.witness.records.step_records import Environment
from shardckpt.witness.state_digests import StateOnRank, loss_rtol
from shardckpt.witness.trained_objects import TrainedObjects

_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "NCCL_ALGO", "NCCL_PROTO")


def describe_environment(
    world: int, objects: TrainedObjects, state: StateOnRank, *, deterministic: bool | None
) -> Environment:
    """Return a step's environment on this rank."""
    if deterministic is None:
        deterministic = not _has_accelerator() or torch.are_deterministic_algorithms_enabled()
    return Environment(
        world,
        state.layout,
        objects.style,
        deterministic,
        loss_rtol(state.factors),
        _read_versions(),
        _read_flags(),
    )


def _has_accelerator() -> bool:
    accelerator = find_accelerator()
    return accelerator is not None and bool(torch.get_device_module(accelerator).is_available())


def _read_versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__}
    versions["processor"] = torch.backends.cpu.get_cpu_capability()
    if is_gpu_used():
        versions["cuda"] = str(torch.version.cuda)
        name = getattr(torch.get_device_module(find_accelerator()), "get_device_name", None)
        versions["device"] = str(name()) if name is not None else str(find_accelerator())
    return versions


def _read_flags() -> dict[str, str]:
    flags = {
        "torch.use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.get_default_dtype": torch.get_default_dtype(),
        "torch.get_num_threads": torch.get_num_threads(),
        "torch.backends.cudnn.deterministic": torch.backends.cudnn.deterministic,
        "torch.backends.cudnn.benchmark": torch.backends.cudnn.benchmark,
        "torch.backends.cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
        **{name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }
    return {name: str(value) for name, value in flags.items()}
