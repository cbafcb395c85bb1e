"""Spans of saves and loads, read back by OpenTelemetry's own SDK."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt import Checkpointer
from shardckpt.errors import ShardckptError
from shardckpt.events import LoadEvent, SaveEvent, subscribe
from shardckpt.integrations import dcp
from shardckpt.integrations.sinks import OpenTelemetrySink

sdk = pytest.importorskip("opentelemetry.sdk.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
trace = pytest.importorskip("opentelemetry.trace")

STATE = {"w": torch.zeros(100)}


class OpenSpans(sdk.SpanProcessor):
    """Counts spans that were started and not ended."""

    def __init__(self) -> None:
        self.count = 0

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        self.count += 1

    def on_end(self, span: Any) -> None:
        self.count -= 1


class FailingExporter(export.SpanExporter):
    """Refuses every span."""

    def export(self, spans: Any) -> Any:
        raise OSError("the collector is gone")


@pytest.fixture
def provider() -> Any:
    return sdk.TracerProvider()


@pytest.fixture
def exporter(provider: Any) -> Any:
    kept = memory.InMemorySpanExporter()
    provider.add_span_processor(export.SimpleSpanProcessor(kept))
    return kept


@pytest.fixture
def is_open(provider: Any) -> Iterator[OpenSpans]:
    counted = OpenSpans()
    provider.add_span_processor(counted)
    yield counted
    assert counted.count == 0, "a span was left open"


@pytest.fixture
def subscribed(provider: Any) -> Iterator[None]:
    unsubscribe = subscribe(OpenTelemetrySink(provider))
    yield
    unsubscribe()


def spans_of(exporter: Any) -> dict[str, Any]:
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.usefixtures("subscribed", "is_open")
def test_saves_and_loads_are_children_of_the_trainings_span(tmp_path: Path, provider: Any, exporter: Any) -> None:
    with provider.get_tracer("training").start_as_current_span("step") as step:
        shardckpt.save(STATE, tmp_path / "c")
        shardckpt.load(tmp_path / "c")
    found = spans_of(exporter)
    assert found.keys() == {"shardckpt.save", "shardckpt.load", "step"}
    for name in ("shardckpt.save", "shardckpt.load"):
        assert found[name].parent.span_id == step.get_span_context().span_id
        assert found["step"].start_time <= found[name].start_time <= found[name].end_time <= found["step"].end_time
        assert found[name].attributes["shardckpt.path"] == str(tmp_path / "c")
        assert found[name].status.is_ok or found[name].status.status_code is trace.StatusCode.UNSET


@pytest.mark.usefixtures("subscribed", "is_open")
def test_a_background_save_is_a_child_of_the_span_that_started_it(tmp_path: Path, provider: Any, exporter: Any) -> None:
    tracer = provider.get_tracer("training")
    checkpointer = Checkpointer(tmp_path)
    with tracer.start_as_current_span("step") as step:
        handle = checkpointer.async_save(1, STATE)
    with tracer.start_as_current_span("next step"):
        handle.result()
    save = spans_of(exporter)["shardckpt.save"]
    assert save.parent.span_id == step.get_span_context().span_id
    assert save.attributes["shardckpt.is_background"] is True
    assert save.attributes["shardckpt.step"] == 1


@pytest.mark.usefixtures("subscribed", "is_open")
def test_a_background_save_of_dcp_is_a_child_too(tmp_path: Path, provider: Any, exporter: Any) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with provider.get_tracer("training").start_as_current_span("step") as step:
            saving = dcp.async_save(STATE, checkpoint_id=tmp_path / "c")
        saving.result()
    finally:
        torch.distributed.destroy_process_group()
    assert spans_of(exporter)["shardckpt.save"].parent.span_id == step.get_span_context().span_id


@pytest.mark.usefixtures("subscribed", "is_open")
def test_without_a_span_of_the_training_spans_have_no_parent(tmp_path: Path, exporter: Any) -> None:
    shardckpt.save(STATE, tmp_path / "c")
    assert spans_of(exporter)["shardckpt.save"].parent is None


@pytest.mark.usefixtures("subscribed", "is_open")
def test_a_failed_save_is_a_failed_span_with_its_exception(tmp_path: Path, exporter: Any) -> None:
    shardckpt.save(STATE, tmp_path / "c")
    exporter.clear()
    with pytest.raises(ShardckptError):
        shardckpt.save(STATE, tmp_path / "c")
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is trace.StatusCode.ERROR
    assert "TargetExistsError" in span.status.description
    (exception,) = span.events
    assert exception.name == "exception"
    assert exception.attributes["exception.type"].endswith("TargetExistsError")


def test_attributes_are_the_values_of_the_event(provider: Any, exporter: Any, is_open: OpenSpans) -> None:
    sink = OpenTelemetrySink(provider)
    sink(SaveEvent("s3://b/run/step-6", 2.0, 6, 3, 10**9, {"write": 1.5}, 1, ("odd",)))
    sink(LoadEvent("run/step-7", step=None))
    save, load = exporter.get_finished_spans()
    assert dict(save.attributes) == {
        "shardckpt.path": "s3://b/run/step-6",
        "shardckpt.store": "s3",
        "shardckpt.step": 6,
        "shardckpt.rank": 3,
        "shardckpt.nbytes": 10**9,
        "shardckpt.gb_per_second": 0.5,
        "shardckpt.retries": 1,
        "shardckpt.is_background": False,
        "shardckpt.has_left": False,
        "shardckpt.phases.write": 1.5,
    }
    assert save.end_time - save.start_time == 2 * 10**9
    assert [(event.name, dict(event.attributes)) for event in save.events] == [("warning", {"message": "odd"})]
    assert "shardckpt.step" not in load.attributes
    assert is_open.count == 0


@pytest.mark.parametrize("fault", ["exporter", "processor"])
def test_a_failing_exporter_never_stops_a_save(tmp_path: Path, provider: Any, monkeypatch: Any, fault: str) -> None:
    processor = export.SimpleSpanProcessor(FailingExporter())
    if fault == "processor":
        monkeypatch.setattr(processor, "on_end", FailingExporter().export)
    provider.add_span_processor(processor)
    shardckpt.save(STATE, tmp_path / "c", on_event=OpenTelemetrySink(provider))
    shardckpt.async_save(STATE, tmp_path / "d", on_event=OpenTelemetrySink(provider)).result()
    for name in ("c", "d"):
        assert torch.equal(shardckpt.load(tmp_path / name)["w"], STATE["w"])


@pytest.mark.usefixtures("is_open")
def test_threads_may_send_events_at_once(provider: Any, exporter: Any) -> None:
    sink = OpenTelemetrySink(provider)
    threads = [threading.Thread(target=sink, args=(SaveEvent(str(n)),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    paths = {span.attributes["shardckpt.path"] for span in exporter.get_finished_spans()}
    assert paths == {str(n) for n in range(8)}


def test_without_an_sdk_the_sink_records_nothing_and_harms_nothing() -> None:
    OpenTelemetrySink(trace.NoOpTracerProvider())(SaveEvent("x", error=OSError("full"), warnings=("odd",)))
