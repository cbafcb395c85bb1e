"""Models that are compiled in tests; what a compiler imports at its first call is imported here, once for all ranks."""

from __future__ import annotations

import harness  # noqa: F401  # starts autograd before torch compiles
import torch
from torch import nn


def compiled(module: nn.Module) -> nn.Module:
    """Trace forward and backward, and run what was traced as it is."""
    made: nn.Module = torch.compile(module, backend="aot_eager")
    return made


compiled(nn.Linear(1, 1))(torch.ones(1, 1)).sum().backward()
