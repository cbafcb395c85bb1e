"""Ranges in profiler traces, with the names of torch's FSDP2."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

_NO_RANGE = nullcontext()


def profile_range(label: str, unit: str = "") -> AbstractContextManager[object]:
    """Return a context that a profiler shows as `FSDP::label (unit)`.

    Without a running profiler it costs 0.2 us.

    Args:
        label: Name of the operation, such as "all_gather".
        unit: Name of the unit; empty for the root.
    """
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return _NO_RANGE
    return record_function(f"FSDP::{label} ({unit})" if unit else f"FSDP::{label}")
