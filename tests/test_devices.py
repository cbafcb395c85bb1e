"""Which devices have streams."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


class TwoDevices:
    """`torch.cuda` with two devices: each thread has a current one, which is the first until it is set."""

    def __init__(self) -> None:
        self.set_devices: list[int] = []  # by all threads but the first
        self._first = threading.get_ident()
        self._current = threading.local()

    def Stream(self, device: torch.device, priority: int = 0) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(device=device)

    def current_device(self) -> int:
        return getattr(self._current, "index", 0)

    def current_stream(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(device=device)

    def set_device(self, device: torch.device) -> None:
        if threading.get_ident() != self._first:
            self.set_devices.append(device.index)
        self._current.index = device.index

    @contextlib.contextmanager
    def stream(self, stream: SimpleNamespace) -> Iterator[None]:
        """Choose a stream and its device; at the end the former stream of the device that was current."""
        before = torch.device("cuda", self.current_device())
        self.set_device(stream.device)
        yield
        self.set_device(before)


def test_a_thread_that_takes_over_streams_never_chooses_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """To choose a device opens a context on it, which takes half a gigabyte of its memory."""
    module = TwoDevices()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    streams = devices.CurrentStreams([torch.device("cuda", 1)])

    def work() -> None:
        with streams.use():
            assert module.current_device() == 1

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    assert set(module.set_devices) == {1}
    with streams.use():
        pass
    assert module.current_device() == 0  # the user's own thread keeps its device
