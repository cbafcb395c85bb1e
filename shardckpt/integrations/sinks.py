"""Functions that send events to monitoring systems: files, TensorBoard, Prometheus, OpenTelemetry, Weights & Biases.

Pass one to `shardckpt.events.subscribe`, or as `on_event` to a `Checkpointer`. A sink imports its library and opens its
file when it is created, since errors at an event are only logged. Threads may call a sink at the same time.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardckpt.errors import StorageError, UsageError, describe_with_class
from shardckpt.events import OperationEvent

__all__ = ["JSONLinesSink", "OpenTelemetrySink", "PrometheusSink", "TensorBoardSink", "WandbSink"]


class JSONLinesSink:
    """Append each event to a file, as a JSON line with the time when it ended.

    Args:
        path: File to append to; one for each process.

    Raises:
        StorageError: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path, self._lock = os.path.expanduser(path), threading.Lock()
        with _writing(self._path), open(self._path, "a", encoding="utf-8"):
            pass

    def __call__(self, event: OperationEvent) -> None:
        """Append an event."""
        line = json.dumps({"time": time.time(), **event.as_dict()})
        with self._lock, open(self._path, "a", encoding="utf-8") as file:
            file.write(f"{line}\n")


class TensorBoardSink:
    """Write each event's numbers to TensorBoard by step, as `shardckpt/save/seconds` and so on.

    Args:
        writer: A `SummaryWriter`, or the folder for a new one.

    Raises:
        UsageError: The package tensorboard is not installed.
        StorageError: The folder cannot be written.
    """

    def __init__(self, writer: Any) -> None:
        if isinstance(writer, (str, os.PathLike)):
            with _importing("tensorboard"):
                from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 (an optional library)

            folder = os.path.expanduser(writer)
            with _writing(folder):
                writer = SummaryWriter(folder)
        self._writer = writer

    def __call__(self, event: OperationEvent) -> None:
        """Write an event."""
        for name, value in _numbers(event).items():
            self._writer.add_scalar(f"shardckpt/{event.operation}/{name}", value, event.step)
        self._writer.flush()


class OpenTelemetrySink:
    """Record each event as an OpenTelemetry span, such as `shardckpt.save`.

    Its parent is the caller's current span; for a background save, the span that was current when you started it. The
    span starts and ends when the event arrives, with the times of the operation, so none is left open.

    Args:
        tracer_provider: Provider of the tracer; None for the global one.

    Raises:
        UsageError: The package opentelemetry-api is not installed.
    """

    def __init__(self, tracer_provider: Any = None) -> None:
        with _importing("opentelemetry", "opentelemetry-api"):
            from opentelemetry import trace  # noqa: PLC0415 (an optional library)

        self._failed = trace.StatusCode.ERROR
        self._tracer = trace.get_tracer("shardckpt", tracer_provider=tracer_provider)

    def __call__(self, event: OperationEvent) -> None:
        """Record an event."""
        end = time.time_ns()
        span = self._tracer.start_span(
            f"shardckpt.{event.operation}",
            attributes={f"shardckpt.{name}": value for name, value in _attributes(event).items()},
            start_time=end - int(event.seconds * 1e9),
        )
        for text in event.warnings:
            span.add_event("warning", {"message": text}, timestamp=end)
        if event.error is not None:
            span.record_exception(event.error, timestamp=end)
            span.set_status(self._failed, describe_with_class(event.error))
        span.end(end)


class PrometheusSink:
    """Count events as Prometheus metrics, for its client or for the node exporter's textfile collector.

    Args:
        registry: Registry for the metrics; None for the default one, which the client serves, or with `textfile` for a
            new one.
        textfile: File that each event replaces with the registry's metrics, such as
            `/var/lib/node/shardckpt-rank0.prom`; one for each rank.

    Raises:
        UsageError: The registry has another sink's metrics, or the package prometheus_client is not installed.
        StorageError: The textfile cannot be written.
    """

    def __init__(self, registry: Any = None, textfile: str | os.PathLike[str] | None = None) -> None:
        with _importing("prometheus_client"):
            import prometheus_client  # noqa: PLC0415 (an optional library)

        if registry is None:  # a textfile has no process metrics: the exporter and the other ranks have their own
            registry = prometheus_client.REGISTRY if textfile is None else prometheus_client.CollectorRegistry()
        self._registry = registry
        self._write = prometheus_client.write_to_textfile
        self._textfile = None if textfile is None else os.path.expanduser(textfile)
        self._lock = threading.Lock()
        if textfile is not None:  # before the registry gets metrics: an error must leave it unchanged
            with _writing(os.path.expanduser(textfile)):
                self._write(os.path.expanduser(textfile), self._registry)

        def add(kind: Any, name: str, text: str, *labels: str) -> Any:
            return kind(f"shardckpt_{name}", text, ["operation", "store", "rank", *labels], registry=self._registry)

        counter, gauge = prometheus_client.Counter, prometheus_client.Gauge
        try:
            self._operations = add(counter, "operations_total", "Operations that have ended.", "outcome")
        except ValueError as error:
            raise UsageError(
                f"the registry has another PrometheusSink's metrics: {error}",
                fix="Use that sink for both, since one sink counts all events; or give this one its own registry.",
            ) from error
        self._bytes = add(counter, "bytes_total", "Tensor bytes that this rank wrote, read or removed.")
        self._retries = add(counter, "retries_total", "Repeated requests.")
        self._warnings = add(counter, "warnings_total", "Faults that did not make an operation fail.")
        self._seconds = add(gauge, "last_seconds", "Seconds that the last operation took.")
        self._phases = add(gauge, "last_phase_seconds", "Seconds for each phase in the last operation.", "phase")
        self._succeeded = add(gauge, "last_success_timestamp_seconds", "Time when an operation last succeeded.")
        self._step = add(gauge, "last_success_step", "Step in the last operation that succeeded.")

    def __call__(self, event: OperationEvent) -> None:
        """Count an event."""
        labels = (event.operation, event.store, event.rank)
        self._operations.labels(*labels, "success" if event.error is None else "failure").inc()
        self._bytes.labels(*labels).inc(event.nbytes)
        self._retries.labels(*labels).inc(event.retries)
        self._warnings.labels(*labels).inc(len(event.warnings))
        self._seconds.labels(*labels).set(event.seconds)
        for name, seconds in event.phases.items():
            self._phases.labels(*labels, name).set(seconds)
        if event.error is None:
            self._succeeded.labels(*labels).set_to_current_time()
            if event.step is not None:
                self._step.labels(*labels).set(event.step)
        if self._textfile is not None:
            with self._lock:
                self._write(self._textfile, self._registry)


class WandbSink:
    """Log each event's numbers to a Weights & Biases run, as `shardckpt/save/seconds` and so on.

    They are drawn over `shardckpt/step`: a wandb run's own steps only grow, but a background save ends later.

    Args:
        run: `wandb` run; None for the current one.

    Raises:
        UsageError: The package wandb is not installed.
    """

    def __init__(self, run: Any = None) -> None:
        if run is None:
            with _importing("wandb"):
                import wandb  # noqa: PLC0415 (an optional library)

            run = wandb.run if wandb.run is not None else wandb.init()
        self._run = run
        run.define_metric("shardckpt/step")
        run.define_metric("shardckpt/*", step_metric="shardckpt/step")

    def __call__(self, event: OperationEvent) -> None:
        """Log an event."""
        numbers = {f"shardckpt/{event.operation}/{name}": value for name, value in _numbers(event).items()}
        if event.step is not None:
            numbers["shardckpt/step"] = event.step
        self._run.log(numbers)


@contextmanager
def _importing(package: str, distribution: str = "") -> Iterator[None]:
    """Name the package to install if an import fails."""
    try:
        yield
    except ImportError as error:
        raise UsageError(
            f"the package {package} cannot be imported", found=error, fix=f"Run pip install {distribution or package}."
        ) from error


@contextmanager
def _writing(path: str) -> Iterator[None]:
    """Name the path if it cannot be written."""
    try:
        yield
    except OSError as error:
        fix = "Make its folder first." if isinstance(error, FileNotFoundError) else ""
        raise StorageError("events cannot be written here", where=path, found=error.strerror, fix=fix) from error


def _attributes(event: OperationEvent) -> dict[str, Any]:
    """Return an event's values by name, as attributes of a span."""
    values = {**event.as_dict(), **{f"phases.{name}": seconds for name, seconds in event.phases.items()}}
    elsewhere = {"operation", "seconds", "phases", "warnings", "error"}
    kinds = (str, int, float, list, tuple)
    return {name: value for name, value in values.items() if name not in elsewhere and isinstance(value, kinds)}


def _numbers(event: OperationEvent) -> dict[str, float]:
    """Return an event's numbers by name."""
    phases = {f"seconds/{name}": seconds for name, seconds in event.phases.items()}
    rate = {"gb_per_second": event.gb_per_second} if event.nbytes else {}
    counts = {"bytes": event.nbytes, "retries": event.retries, "warnings": len(event.warnings)}
    return {"seconds": event.seconds, **phases, **rate, **counts, "failed": float(event.error is not None)}
