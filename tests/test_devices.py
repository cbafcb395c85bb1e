"""Which devices have streams."""

from __future__ import annotations

import pytest
import torch

from shardckpt import devices
from shardckpt.checkpoint.save.staging import SideStreams


@pytest.mark.parametrize(
    ("kind", "expected"), [("cuda", True), ("xpu", True), ("mps", False), ("cpu", False), ("meta", False)]
)
def test_a_device_has_streams_where_torch_has_functions_for_them(kind: str, expected: bool) -> None:
    assert devices.has_streams(torch.device(kind)) is expected


def test_nothing_is_asked_of_a_device_without_streams() -> None:
    """torch has no `torch.mps.current_stream`."""
    mps = torch.device("mps")
    assert devices.record_event(mps) is None
    assert devices.CurrentStreams([mps]).record_events() == ()
    assert SideStreams([mps]).record_events() == ()
    with SideStreams([mps]).copying(), devices.use_stream(None, mps):  # type: ignore[arg-type]
        pass
