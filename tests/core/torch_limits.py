"""What the installed torch cannot do that newer ones can: a test in which torch itself fails for that is skipped."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import _StridedShard


def find_limits() -> dict[str, str]:
    """Return the errors of torch's own code that are no fault of ours here: a part of the message, and the reason."""
    found = {}
    if not hasattr(torch.cpu.Stream, "record_event"):
        found["Cannot use ReduceOp.AVG with Gloo"] = "gloo of this torch computes no means"
    if not hasattr(DeviceMesh, "_concatenate"):
        found["data parallelism must come before the others"] = "this torch joins meshes in their order alone"
    try:
        _StridedShard(0, split_factor=2)._split_tensor(torch.ones(6), 2)
    except AssertionError:
        found["_StridedShard requires even sharding"] = "this torch gathers no uneven rows of two mesh dimensions"
    return found


def complete_cpu_streams() -> None:
    """Give the CPU's streams the two methods without which torch 2.6's own `fully_shard` runs on GPUs only.

    They do nothing with newer versions, too. So tests compare with it, and save and load its states.
    """
    if not hasattr(torch.cpu.Stream, "record_event"):
        torch.cpu.Stream.record_event = torch.cpu.Stream.wait_event = lambda self, event=None: None


LIMITS = find_limits()
complete_cpu_streams()

compares_with_newer_torch = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"), reason="this torch has fewer names and arguments"
)
"""Of tests that compare our names and arguments with torch's."""


def find_reason(messages: list[str]) -> str | None:
    """Return why a test cannot run, if each of some ranks' errors is a limit of the installed torch.

    Args:
        messages: Of the ranks that raised.
    """
    reasons = {next((why for part, why in LIMITS.items() if part in message), None) for message in messages}
    return reasons.pop() if len(reasons) == 1 else None
