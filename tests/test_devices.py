"""Which devices have streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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


@pytest.mark.parametrize(
    ("kind", "properties", "expected"),
    [
        ("cpu", None, True),
        ("mps", None, False),
        ("cuda", {"major": 9}, True),
        ("xpu", {"has_fp64": True}, True),
        ("xpu", {"has_fp64": False}, False),
        ("hpu", None, True),
    ],
)
def test_a_device_computes_in_float64_unless_it_says_that_it_cannot(
    monkeypatch: pytest.MonkeyPatch, kind: str, properties: dict[str, Any] | None, expected: bool
) -> None:
    read = {} if properties is None else {"get_device_properties": lambda device: SimpleNamespace(**properties)}
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**read))
    assert devices.has_float64.__wrapped__(torch.device(kind)) is expected
