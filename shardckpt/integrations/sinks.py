"""Functions that send events to monitoring systems: JSON lines, TensorBoard, Prometheus, Weights & Biases.

Each is an argument for `shardckpt.events.subscribe`, or `on_event` of a `Checkpointer`. When it is made, its library is
imported and its file is opened, since an error at an event is only logged. Threads may call them at the same time.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shardckpt import OperationEvent, StorageError, UsageError

__all__ = ["JSONLinesSink", "PrometheusSink", "TensorBoardSink", "WandbSink"]


class JSONLinesSink:
    """Append each event to a file, as a line of JSON with the time at which it ended.

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
    """Write the numbers of each event to TensorBoard, as `shardckpt/save/seconds` and the like, by step.

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


class PrometheusSink:
    """Count events as metrics of Prometheus, for its client or for the textfile collector of the node exporter.

    Args:
        registry: Registry for the metrics; None for the default one, which the client serves, or with `textfile` for a
            new one.
        textfile: File that is replaced with the metrics of the registry after each event, such as
            `/var/lib/node/shardckpt-rank0.prom`; one for each rank.

    Raises:
        UsageError: The registry has the metrics of another sink, or the package prometheus_client is not installed.
        StorageError: The textfile cannot be written.
    """

    def __init__(self, registry: Any = None, textfile: str | os.PathLike[str] | None = None) -> None:
        with _importing("prometheus_client"):
            import prometheus_client  # noqa: PLC0415 (an optional library)

        if registry is None:  # a textfile has no metrics of the process: the exporter has its own, other ranks theirs
            registry = prometheus_client.REGISTRY if textfile is None else prometheus_client.CollectorRegistry()
        self._registry = registry
        self._write = prometheus_client.write_to_textfile
        self._textfile = None if textfile is None else os.path.expanduser(textfile)
        self._lock = threading.Lock()
        if textfile is not None:  # before the registry has metrics of a sink that is not made
            with _writing(os.path.expanduser(textfile)):
                self._write(os.path.expanduser(textfile), self._registry)

        def add(kind: Any, name: str, text: str, *labels: str) -> Any:
            return kind(f"shardckpt_{name}", text, ["operation", "store", "rank", *labels], registry=self._registry)

        counter, gauge = prometheus_client.Counter, prometheus_client.Gauge
        try:
            self._operations = add(counter, "operations_total", "Operations that have ended.", "outcome")
        except ValueError as error:
            raise UsageError(
                f"the registry has the metrics of another PrometheusSink: {error}",
                fix="Give that sink to both, as one counts the events of all; or give this one a registry of its own.",
            ) from error
        self._bytes = add(counter, "bytes_total", "Bytes of tensors that this rank wrote, read or removed.")
        self._retries = add(counter, "retries_total", "Repeated requests.")
        self._warnings = add(counter, "warnings_total", "Faults that did not make an operation fail.")
        self._seconds = add(gauge, "last_seconds", "Duration of the last operation.")
        self._phases = add(gauge, "last_phase_seconds", "Durations of the phases of the last operation.", "phase")
        self._succeeded = add(gauge, "last_success_timestamp_seconds", "Time of the last operation that did not fail.")
        self._step = add(gauge, "last_success_step", "Step of the last operation that did not fail.")

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
    """Log the numbers of each event to a run of Weights & Biases, as `shardckpt/save/seconds` and the like.

    They are drawn over `shardckpt/step`, since the steps of a run only grow, and a background save ends later.

    Args:
        run: Run of `wandb`; None for the current one.

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
def _importing(package: str) -> Iterator[None]:
    """Name the package to install if an import fails."""
    try:
        yield
    except ImportError as error:
        raise UsageError(
            f"the package {package} cannot be imported", found=error, fix=f"Run pip install {package}."
        ) from error


@contextmanager
def _writing(path: str) -> Iterator[None]:
    """Name the path if it cannot be written."""
    try:
        yield
    except OSError as error:
        fix = "Make its folder first." if isinstance(error, FileNotFoundError) else ""
        raise StorageError("events cannot be written here", where=path, found=error.strerror, fix=fix) from error


def _numbers(event: OperationEvent) -> dict[str, float]:
    """Return the numbers of an event by name."""
    phases = {f"seconds/{name}": seconds for name, seconds in event.phases.items()}
    rate = {"gb_per_second": event.gb_per_second} if event.nbytes else {}
    counts = {"bytes": event.nbytes, "retries": event.retries, "warnings": len(event.warnings)}
    return {"seconds": event.seconds, **phases, **rate, **counts, "failed": float(event.error is not None)}
