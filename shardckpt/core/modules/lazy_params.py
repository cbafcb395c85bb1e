"""Lazy modules' parameters, which have no shape before the first forward."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from shardckpt.errors import UsageError


def require_initialized(name: str, tensor: torch.Tensor) -> None:
    """Raise UsageError if a tensor belongs to a lazy module without a forward: it has no shape."""
    if is_lazy(tensor):
        what = "this tensor of a lazy module has no shape yet"
        raise UsageError(what, where=name, found=type(tensor).__name__, fix="Run one forward first.")
