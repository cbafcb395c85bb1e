"""Values that a verb computes one by one: in this process, or in the tasks of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeAlias


class ComputedPart(NamedTuple):
    """A part of a result that can be computed by itself.

    Attributes:
        name: Name of a file, tensor or step.
        nbytes: Bytes that are read for it, at most; 0 if unknown.
        compute: Returns its records, which `encodings.typed_json` takes.
        counts: How many records there may be.
    """

    name: str
    nbytes: int
    compute: Callable[[], tuple[Any, ...]]
    counts: range = range(1, 2)


Compute: TypeAlias = "Callable[[Iterable[ComputedPart], type], Iterator[tuple[Any, ...]]]"

Announce: TypeAlias = "Callable[[Any], object]"

_given: ContextVar[Compute | None] = ContextVar("given", default=None)
_announced: ContextVar[Announce | None] = ContextVar("announced", default=None)


@contextmanager
def compute_by(compute: Compute | None, announce: Announce | None = None) -> Iterator[None]:
    """Let verbs in this context take the values of parts from a function; None computes them.

    `announce` gets each record before what it describes is published.
    """
    token, announced = _given.set(compute), _announced.set(announce)
    try:
        yield
    finally:
        _given.reset(token)
        _announced.reset(announced)


def announce_record(record: object) -> None:
    """Hand over a record of what is published next: if the process is killed then, somebody must know of it."""
    announce = _announced.get()
    if announce is not None:
        announce(record)


def compute_parts(parts: Iterable[ComputedPart], record: type) -> Iterator[tuple[Any, ...]]:
    """Yield the records of each part, in order.

    Args:
        parts: All parts.
        record: Class of the records.
    """
    compute = _given.get()
    return (part.compute() for part in parts) if compute is None else compute(parts, record)
