"""Each sink hands events to its library, which reads them back."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardckpt.errors import StorageError, UsageError
from shardckpt.events import OperationEvent, PruneEvent, SaveEvent
from shardckpt.integrations.sinks import (
    JSONLinesSink,
    OpenTelemetrySink,
    PrometheusSink,
    TensorBoardSink,
    WandbSink,
)

SAVE = SaveEvent("s3://bucket/run/step-6", 2.0, 6, nbytes=10**9, phases={"write": 1.5}, retries=1, warnings=("odd",))
FAILED = SaveEvent("s3://bucket/run/step-7", 1.0, 7, error=OSError("full"))
PRUNE = PruneEvent("s3://bucket/run", 0.5, removed=(1, 2))


def send(sink: Any) -> None:
    for event in (SAVE, FAILED, PRUNE):
        sink(event)


def new_registry() -> Any:
    return pytest.importorskip("prometheus_client").CollectorRegistry()


def test_json_lines_are_appended(tmp_path: Path) -> None:
    send(JSONLinesSink(tmp_path / "events.jsonl"))
    JSONLinesSink(tmp_path / "events.jsonl")(OperationEvent("again"))
    lines = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [(line["operation"], line["path"]) for line in lines[:3]] == [
        ("save", SAVE.path),
        ("save", FAILED.path),
        ("prune", PRUNE.path),
    ]
    assert lines[1]["error"] == "OSError: full"
    assert lines[2]["removed"] == [1, 2]
    assert 0 < lines[0]["time"] <= lines[3]["time"]


def test_files_are_made_in_the_home_folder_for_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    JSONLinesSink("~/events.jsonl")(OperationEvent("save"))
    PrometheusSink(new_registry(), "~/events.prom")(OperationEvent("save"))
    pytest.importorskip("tensorboard")
    TensorBoardSink(Path("~/scalars"))(OperationEvent("save", step=1))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["events.jsonl", "events.prom", "scalars"]


def test_prometheus_counts_events_and_replaces_a_textfile(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    registry = client.CollectorRegistry()
    send(PrometheusSink(registry, tmp_path / "shardckpt.prom"))
    text = (tmp_path / "shardckpt.prom").read_text()
    samples = {
        (
            sample.name,
            *(value for name, value in sorted(sample.labels.items()) if name not in {"store", "rank"}),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["shardckpt_operations_total", "save", "success"] == 1
    assert samples["shardckpt_operations_total", "save", "failure"] == 1
    assert samples["shardckpt_bytes_total", "save"] == 10**9
    assert samples["shardckpt_retries_total", "save"] == 1
    assert samples["shardckpt_warnings_total", "save"] == 1
    assert samples["shardckpt_last_seconds", "save"] == 1.0
    assert samples["shardckpt_last_phase_seconds", "save", "write"] == 1.5
    assert samples["shardckpt_last_success_step", "save"] == 6
    assert (
        registry.get_sample_value("shardckpt_last_seconds", {"operation": "prune", "store": "s3", "rank": "0"}) == 0.5
    )
    assert [path.name for path in tmp_path.iterdir()] == ["shardckpt.prom"]


def test_a_second_sink_of_a_prometheus_registry_is_refused() -> None:
    registry = pytest.importorskip("prometheus_client").CollectorRegistry()
    PrometheusSink(registry)(SAVE)
    with pytest.raises(UsageError, match="Use that sink for both"):
        PrometheusSink(registry)
    labels = {"operation": "save", "store": "s3", "rank": "0"}
    assert registry.get_sample_value("shardckpt_last_seconds", labels) == SAVE.seconds


def test_textfiles_of_two_ranks_have_no_sample_in_common_and_none_of_the_process(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    for rank in range(2):
        sink = PrometheusSink(textfile=tmp_path / f"rank{rank}.prom")
        for event in (SAVE, FAILED, PRUNE):
            sink(replace(event, rank=rank))
    texts = [(tmp_path / f"rank{rank}.prom").read_text() for rank in range(2)]
    families = [family for text in texts for family in text_string_to_metric_families(text)]
    assert {family.name.partition("_")[0] for family in families} == {"shardckpt"}
    assert len({(family.name, family.type, family.documentation) for family in families}) * 2 == len(families)
    samples = [(sample.name, *sorted(sample.labels.items())) for family in families for sample in family.samples]
    assert len(set(samples)) == len(samples), "the exporter refuses a sample that two files have"
    assert {dict(labels)["rank"] for _, *labels in samples} == {"0", "1"}


def test_tensorboard_reads_scalars_by_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    send(TensorBoardSink(tmp_path))
    written = EventAccumulator(str(tmp_path)).Reload()
    assert [(each.step, each.value) for each in written.Scalars("shardckpt/save/seconds")] == [(6, 2.0), (7, 1.0)]
    assert [each.value for each in written.Scalars("shardckpt/save/seconds/write")] == [1.5]
    assert [each.value for each in written.Scalars("shardckpt/save/gb_per_second")] == [0.5]
    assert [each.value for each in written.Scalars("shardckpt/save/failed")] == [0.0, 1.0]


def test_wandb_logs_numbers_over_the_step(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    with wandb.init(mode="offline", dir=str(tmp_path), project="test") as run:
        send(WandbSink())
        summary = dict(run.summary)
    assert summary["shardckpt/step"] == 7
    assert summary["shardckpt/save/gb_per_second"] == 0.5
    assert summary["shardckpt/prune/seconds"] == 0.5


@pytest.mark.parametrize(
    "make",
    [
        JSONLinesSink,
        lambda path: PrometheusSink(textfile=path, registry=new_registry()),
        pytest.param(TensorBoardSink, id="TensorBoardSink"),
    ],
)
def test_a_path_that_cannot_be_written_is_an_error_of_the_constructor(make: Any, tmp_path: Path) -> None:
    if make is TensorBoardSink:
        pytest.importorskip("tensorboard")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="events cannot be written here; found ") as caught:
        make(tmp_path / "file" / "events")
    assert str(tmp_path / "file" / "events") in str(caught.value)


def test_a_missing_folder_is_named_and_a_textfile_exists_before_the_first_event(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"found No such file or directory\. Make its folder first\."):
        JSONLinesSink(tmp_path / "missing" / "events.jsonl")
    registry = new_registry()
    with pytest.raises(StorageError):
        PrometheusSink(registry, tmp_path / "missing" / "shardckpt.prom")
    PrometheusSink(registry, tmp_path / "shardckpt.prom")
    assert (tmp_path / "shardckpt.prom").exists(), "the registry has no metrics of the sink that failed"


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("tensorboard", TensorBoardSink),
        ("prometheus_client", PrometheusSink),
        ("wandb", WandbSink),
        ("opentelemetry", OpenTelemetrySink),
    ],
)
def test_a_missing_library_is_named(package: str, make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=f"the package {package} cannot be imported.* Run pip install {package}"):
        make(*([tmp_path] if make is TensorBoardSink else []))


def test_the_libraries_are_imported_by_their_sinks_only() -> None:
    names = ("prometheus_client", "tensorboard", "wandb", "opentelemetry", "torch")
    code = f"import sys, shardckpt.integrations.sinks; print([n for n in {names} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
