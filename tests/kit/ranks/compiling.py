"""Models that are compiled in tests; what a compiler imports at its first call is imported once for all ranks."""

from __future__ import annotations

import functools

import torch
from torch import nn


def compiled(module: nn.Module) -> nn.Module:
    """Trace forward and backward, and run what was traced as it is."""
    made: nn.Module = torch.compile(module, backend="aot_eager")
    return made


@functools.cache
def warm_up() -> None:
    """Compile once in this process, before ranks that compile are forked from it: a second."""
    compiled(nn.Linear(1, 1))(torch.ones(1, 1)).sum().backward()
