"""Events for finished operations, how they are measured, and who gets them."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar, NamedTuple

from shardckpt.errors import UsageError, describe_with_class

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)(?:::|://)")


@dataclass(frozen=True)
class OperationEvent:
    """A finished operation in this process.

    Attributes:
        path: Path or URL of the checkpoint or run.
        seconds: Duration.
        step: Step number; None if the path does not belong to a step.
        rank: This process's rank.
        nbytes: Bytes in the files that this rank wrote or removed, or in the tensors that a load filled on this rank.
        phases: Phase durations in seconds, by name.
        retries: Store requests that this process repeated meanwhile.
        warnings: Faults that did not make the operation fail.
        error: Error that made the operation fail; None without an error.
    """

    operation: ClassVar[str] = ""
    """Operation name; each event class sets it."""

    path: str
    seconds: float = 0.0
    step: int | None = None
    rank: int = 0
    nbytes: int = 0
    phases: Mapping[str, float] = field(default_factory=dict)
    retries: int = 0
    warnings: tuple[str, ...] = ()
    error: BaseException | None = None

    @property
    def store(self) -> str:
        """The store's scheme: `file` for a path, `s3`, `gs`, and so on."""
        match = _SCHEME.match(self.path)
        return match[1] if match else "file"

    @property
    def gb_per_second(self) -> float:
        """Gigabytes (10**9 bytes) per second on this rank; 0 without bytes."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    def describe_result(self) -> str:
        """Return the result to log that only this event class has; empty without one."""
        return ""

    def as_dict(self) -> dict[str, Any]:
        """Return all values as JSON types; an error as its class and message."""
        error = None if self.error is None else f"{type(self.error).__name__}: {self.error}"
        derived = {"operation": self.operation, "store": self.store, "gb_per_second": self.gb_per_second}
        return {**derived, **vars(self), "phases": dict(self.phases), "warnings": [*self.warnings], "error": error}


@dataclass(frozen=True)
class SaveEvent(OperationEvent):
    """A save.

    Phases: `waiting` for the previous save, `capture` (flatten and plan), `staging` in the background, `write`,
    `publish`.

    Attributes:
        is_background: Whether `async_save` ran the save.
        has_left: Whether this rank, which has a notice, left before the commit. The other ranks emit the result.
    """

    operation: ClassVar[str] = "save"
    is_background: bool = False
    has_left: bool = False


@dataclass(frozen=True)
class LoadEvent(OperationEvent):
    """A load, with the phases `plan` and `read`; a load without a state has only `read`."""

    operation: ClassVar[str] = "load"


_LOG = logging.getLogger("shardckpt")
_STEP = re.compile(r"(?:^|[/\\])step-([0-9]{1,18})[/\\]?$")

OnEvent = Callable[[OperationEvent], object]
"""A function for events. Its exceptions are logged. Background saves call it on their own thread."""


class Call(NamedTuple):
    """A public call that all ranks make; ranks that wait for each other name it."""

    name: str = ""  # empty outside of such a call
    path: str = ""  # of the checkpoint or the run
    on_event: OnEvent | None = None
    detail: str = ""  # what must be equal on all ranks, as text
    number: int = 0  # of the call in this process

    def __str__(self) -> str:
        return f"`{self.name}` ({self.detail})" if self.detail else f"`{self.name}`"


_NO_CALL = Call()
_NUMBERS = count(1)
_CALL: ContextVar[Call] = ContextVar("call", default=_NO_CALL)


def get_current_call() -> Call:
    """Return the outermost call that this thread is in."""
    return _CALL.get()


@contextmanager
def enter_call(name: str, path: str = "", on_event: OnEvent | None = None, detail: str = "") -> Iterator[None]:
    """Name a call during a block, unless it is a part of another call."""
    if _CALL.get() is not _NO_CALL:
        yield
        return
    token = _CALL.set(Call(name, path, on_event if callable(on_event) else None, detail, next(_NUMBERS)))
    try:
        yield
    finally:
        _CALL.reset(token)


_SUBSCRIBED: list[OnEvent] = []

# Whether the caller continues after an operation's error.
_TOLERATED: ContextVar[bool] = ContextVar("tolerated", default=False)


def subscribe(on_event: OnEvent) -> Callable[[], None]:
    """Send all events in this process to a function, and return a function that ends this.

    Args:
        on_event: Called with each event.

    Raises:
        UsageError: The argument is not a function.

    Examples:
        >>> seen = []
        >>> unsubscribe = subscribe(seen.append)
        >>> unsubscribe()
    """
    require_on_event(on_event, may_be_none=False)
    _SUBSCRIBED.append(on_event)

    def unsubscribe() -> None:
        if on_event in _SUBSCRIBED:
            _SUBSCRIBED.remove(on_event)

    return unsubscribe


def require_on_event(on_event: object, *, may_be_none: bool = True) -> None:
    """Raise UsageError unless `on_event` is a function, or None."""
    if not (callable(on_event) or (may_be_none and on_event is None)):
        raise UsageError("`on_event` must be a function that takes an OperationEvent", found=repr(on_event))


def emit(event: OperationEvent, *on_event: OnEvent | None, is_tolerated: bool = False) -> None:
    """Log an event, and send it to subscribers and to further functions.

    Args:
        event: The event.
        on_event: Further functions to send it to.
        is_tolerated: Whether the caller continues after its error, and warns about the first one in a row.
    """
    is_failure = event.error is not None and not (is_tolerated or _TOLERATED.get())
    level = logging.DEBUG if event.rank else logging.ERROR if is_failure else logging.INFO
    # Until logging is configured, Python prints errors on stderr. This error is also raised, so it would show twice.
    if _LOG.isEnabledFor(level) and _LOG.hasHandlers():
        _LOG.log(level, "%s", _describe(event))
    send_event(event, *on_event)


def send_event(event: OperationEvent, *on_event: OnEvent | None) -> None:
    """Send an event to subscribers and to further functions."""
    deliver(event, *_SUBSCRIBED, *on_event)


@contextmanager
def tolerated_errors() -> Iterator[None]:
    """Do not log ERROR for this thread's failed operations, as `emit` with `is_tolerated`."""
    token = _TOLERATED.set(True)
    try:
        yield
    finally:
        _TOLERATED.reset(token)


def deliver(event: OperationEvent, *on_event: OnEvent | None) -> None:
    """Send an event to functions; log a function's exception, and call the next one."""
    for sink in on_event:
        if sink is not None:
            try:
                sink(event)
            except Exception:  # noqa: BLE001  (monitoring that fails must not fail a save)
                _LOG.exception("on_event failed at the %s of %s", event.operation, event.path)


def _describe(event: OperationEvent) -> str:
    """Return an event as one line."""
    line = f"{event.operation} {event.path}: {event.seconds:.2f} s"
    if event.nbytes:
        line += f", {event.nbytes / 1e9:.3f} GB on this rank, {event.gb_per_second:.2f} GB/s"
    line += f", {result}" if (result := event.describe_result()) else ""
    if event.phases:
        line += f" ({', '.join(f'{name} {seconds:.2f} s' for name, seconds in event.phases.items())})"
    line += f", {event.retries} {'retry' if event.retries == 1 else 'retries'}" if event.retries else ""
    line += "".join(f"; warning: {text}" for text in event.warnings)
    return line if event.error is None else f"{line}; failed: {describe_with_class(event.error)}"


_RETRIES = 0
_COUNTING = threading.Lock()


def count_retry() -> None:
    """Count a repeated store request."""
    global _RETRIES  # noqa: PLW0603
    with _COUNTING:
        _RETRIES += 1


@dataclass
class Recorder:
    """Measures a running operation, and builds its event.

    Attributes:
        kind: Event class.
        path: As in `OperationEvent`.
        values: Further event attributes.
        phases: Durations in seconds for finished phases, by name.
        context: Variables of the caller, such as its tracing span, for an event that another thread emits.
    """

    kind: type[OperationEvent]
    path: str
    values: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    context: Context = field(default_factory=copy_context)
    _began: float = field(default_factory=time.monotonic)
    _retries: int = field(default_factory=lambda: _RETRIES)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure a phase."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = time.monotonic() - began

    def build(self, error: BaseException | None) -> OperationEvent:
        """Return the operation's event; the operation ends now."""
        match = _STEP.search(self.path)
        values = {"step": int(match[1]) if match else None, **self.values}
        seconds, retries = time.monotonic() - self._began, _RETRIES - self._retries
        phases = dict(self.phases)
        return self.kind(self.path, seconds, phases=phases, retries=retries, error=error, **values)


@contextmanager
def record_operation(
    kind: type[OperationEvent], path: str, *on_event: OnEvent | None, is_tolerated: bool = False, **values: Any
) -> Iterator[Recorder]:
    """Measure an operation, and emit its event when the context ends.

    Args:
        kind: Event class.
        path: Path or URL of the checkpoint or the run.
        on_event: Further functions to send the event to.
        is_tolerated: As for `emit`.
        values: Event attributes; the recorder's `values` take more.
    """
    recorder, failure = Recorder(kind, path, values), None
    try:
        yield recorder
    except BaseException as error:
        failure = error
        raise
    finally:
        emit(recorder.build(failure), *on_event, is_tolerated=is_tolerated)
