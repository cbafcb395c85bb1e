"""`torch.manual_seed` without the stack traces that torch keeps for devices that are not there."""

from __future__ import annotations

import sys
from types import SimpleNamespace

DEVICES = ("cuda", "xpu", "mtia")


def seed_without_traces() -> None:
    """Let torch, if it is imported, note seeds for these devices without the stacks that asked for them.

    They are for messages of a device that starts later. Three stacks of pytest took 0.3 to 2 ms a seed, and half of the
    states in tests begin with one.
    """
    for device in DEVICES:
        module = sys.modules.get(f"torch.{device}")
        if hasattr(module, "traceback"):
            module.traceback = SimpleNamespace(format_stack=list)
