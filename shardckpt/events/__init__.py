"""Events for finished operations: saves, loads, restores, prunes and fallbacks.

`subscribe` sends all events in this process to a function. The `on_event` argument sends the events from one
`Checkpointer`, save or load. The logger `shardckpt` gets one line per event. Rank 0 logs at level INFO, or ERROR if the
operation failed; other ranks log at level DEBUG.
`shardckpt.integrations.sinks` has functions for monitoring systems.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardckpt.events.progress import show_progress
    from shardckpt.events.recorder import (
        LoadEvent,
        OnEvent,
        OperationEvent,
        Recorder,
        SaveEvent,
        count_retry,
        deliver,
        emit,
        record_operation,
        require_on_event,
        subscribe,
    )
    from shardckpt.events.run_events import (
        BackpressureEvent,
        FallbackEvent,
        PreemptionEvent,
        PromotionEvent,
        PruneEvent,
        PublishEvent,
        ReceiveEvent,
        ReplicateEvent,
        RestoreEvent,
        ResumeEvent,
        WaitEvent,
        WithdrawalEvent,
    )

__all__ = [
    "BackpressureEvent",
    "FallbackEvent",
    "LoadEvent",
    "OnEvent",
    "OperationEvent",
    "PreemptionEvent",
    "PromotionEvent",
    "PruneEvent",
    "PublishEvent",
    "ReceiveEvent",
    "Recorder",
    "ReplicateEvent",
    "RestoreEvent",
    "ResumeEvent",
    "SaveEvent",
    "WaitEvent",
    "WithdrawalEvent",
    "count_retry",
    "deliver",
    "emit",
    "record_operation",
    "require_on_event",
    "show_progress",
    "subscribe",
]

_HOMES = ("shardckpt.events.progress", "shardckpt.events.recorder", "shardckpt.events.run_events")


def __getattr__(name: str) -> Any:
    """Load a name from its module; commands that only count their progress import neither."""
    for home in _HOMES if name in __all__ else ():
        if hasattr(import_module(home), name):
            globals()[name] = getattr(import_module(home), name)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted({*globals(), *__all__})
