"""Side streams, which copy a state from devices during the training loop."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from shardckpt.devices import Event, Stream, get_current_stream, has_streams, make_stream, use_stream

_side_streams: dict[torch.device, Stream] = {}  # side stream of each device, kept between saves

os.register_at_fork(after_in_child=_side_streams.clear)


def wait_for_side_streams() -> None:
    """Block until no copy is running: a failed save may still be writing to a buffer."""
    for stream in _side_streams.values():
        stream.record_event().synchronize()


class SideStreams:
    """Side streams for copying one state."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._streams = {device: _side_stream(device) for device in devices if has_streams(device)}

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Queue the context's copies on the side streams; the host does not wait."""
        # Copies run after the work queued on the current streams so far.
        current = {device: get_current_stream(device) for device in self._streams}
        for device, stream in self._streams.items():
            stream.wait_stream(current[device])
        try:
            with ExitStack() as stack:
                for device, stream in self._streams.items():
                    stack.enter_context(use_stream(stream, device))
                yield
        finally:
            # Work queued later runs after the copies, also if the context raises.
            for device, stream in self._streams.items():
                current[device].wait_event(stream.record_event())

    def record_events(self) -> tuple[Event, ...]:
        """Return one event per stream, recorded after its queued copies."""
        return tuple(stream.record_event() for stream in self._streams.values())


def _side_stream(device: torch.device) -> Stream:
    if device not in _side_streams:
        _side_streams[device] = make_stream(device)
    return _side_streams[device]
