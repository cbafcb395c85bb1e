"""The streams that copy a state from its devices beside the training loop, one a device, and what they wait for."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from shardckpt.devices import Event, Stream, get_current_stream, has_streams, make_stream, use_stream

_side_streams: dict[torch.device, Stream] = {}
"""Of this process, kept from save to save."""

os.register_at_fork(after_in_child=_side_streams.clear)


def wait_for_side_streams() -> None:
    """Block until no copy is under way: one of a save that failed may still be writing to a buffer."""
    for stream in _side_streams.values():
        stream.synchronize()


class SideStreams:
    """The side streams of one copy of a state.

    Args:
        devices: Where the state is; those without streams are ignored.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._streams = {device: _side_stream(device) for device in devices if has_streams(device)}

    @contextmanager
    def copying(self) -> Iterator[None]:
        """Queue on the side streams: after what is queued now on the current ones, before what is queued there later.

        The second is so however the context ends. The host waits for nothing.
        """
        current = {device: get_current_stream(device) for device in self._streams}
        for device, stream in self._streams.items():
            stream.wait_stream(current[device])
        try:
            with ExitStack() as stack:
                for device, stream in self._streams.items():
                    stack.enter_context(use_stream(stream, device))
                yield
        finally:
            for device, stream in self._streams.items():
                current[device].wait_event(stream.record_event())

    def record_events(self) -> tuple[Event, ...]:
        """Return an event behind what is queued now on each."""
        return tuple(stream.record_event() for stream in self._streams.values())


def _side_stream(device: torch.device) -> Stream:
    if device not in _side_streams:
        _side_streams[device] = make_stream(device)
    return _side_streams[device]
