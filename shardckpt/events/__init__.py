"""Events of saves, loads, restores, removals of steps and fallbacks that have ended.

`subscribe` sends all events of this process to a function; `on_event` of a `Checkpointer`, a save or a load sends those
of one run or call. The logger `shardckpt` gets a line from rank 0, of level INFO, or of level ERROR if the operation
failed; from other ranks one of level DEBUG.
`shardckpt.integrations.sinks` has functions for monitoring systems.
"""

from shardckpt.events.operations import (
    BackpressureEvent,
    FallbackEvent,
    LoadEvent,
    OperationEvent,
    PromotionEvent,
    PruneEvent,
    ReplicateEvent,
    RestoreEvent,
    ResumeEvent,
    SaveEvent,
    WithdrawalEvent,
)
from shardckpt.events.recorder import (
    OnEvent,
    Recorder,
    count_retry,
    deliver,
    emit,
    record_operation,
    require_on_event,
    subscribe,
)

__all__ = [
    "BackpressureEvent",
    "FallbackEvent",
    "LoadEvent",
    "OnEvent",
    "OperationEvent",
    "PromotionEvent",
    "PruneEvent",
    "Recorder",
    "ReplicateEvent",
    "RestoreEvent",
    "ResumeEvent",
    "SaveEvent",
    "WithdrawalEvent",
    "count_retry",
    "deliver",
    "emit",
    "record_operation",
    "require_on_event",
    "subscribe",
]
