"""`--to native`: what a conversion selects becomes a step, which is a Hugging Face folder too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardckpt
from shardckpt.encodings.tagged_json import ArrayRef
from shardckpt.errors import PrecisionError, UsageError
from shardckpt.native.reader import NativeReader
from shardckpt.readers.registry import open_checkpoint
from tests.kit.writers.materialise import assert_same
from tests.kit.writers.samples import MODEL, OPTIM, SAMPLES


@pytest.mark.parametrize("verb", [shardckpt.consolidate, shardckpt.convert], ids=["consolidate", "convert"])
def test_the_model_becomes_a_step(tmp_path: Path, verb: object) -> None:
    source = SAMPLES["dcp"]["chunks"](tmp_path / "src")
    report = verb(str(source), str(tmp_path / "out"), to="native")  # type: ignore[operator]
    reader = open_checkpoint(str(tmp_path / "out"))
    assert set(reader.manifest.tensors) == {("model", name) for name in MODEL}
    for name, tensor in MODEL.items():
        assert_same(reader, ("model", name), tensor)
    assert shardckpt.verify(str(tmp_path / "out")).ok
    assert {d.kind for d in shardckpt.diff(str(source), str(tmp_path / "out")).differences} == {"only_in_a"}
    verb(str(source), str(tmp_path / "all"), to="native", part="all")  # type: ignore[operator]
    found = shardckpt.diff(str(source), str(tmp_path / "all"))
    assert [d.name for d in (*found.differences, *found.value_differences)] == ["epoch.n"]
    assert set(report.carried) <= {file.name for file in (tmp_path / "out").iterdir()}


def test_it_is_a_hugging_face_folder_too(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    save_file(MODEL, tmp_path / "src" / "model.safetensors", {"format": "pt"})
    (tmp_path / "src" / "config.json").write_text('{"torch_dtype": "float32"}')
    shardckpt.consolidate(str(tmp_path / "src"), str(tmp_path / "out"), to="native", dtype="bf16", keep_fp32=["s"])
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    [name] = set(index["weight_map"].values())
    found = load_file(tmp_path / "out" / name)
    assert set(found) == set(MODEL)
    assert (found["a.w"].dtype, found["s"].dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(found["a.w"], MODEL["a.w"].bfloat16())
    assert "bfloat16" in (tmp_path / "out" / "config.json").read_text()


def test_its_config_files_are_model_files_of_the_step(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    save_file(MODEL, tmp_path / "src" / "model.safetensors", {"format": "pt"})
    (tmp_path / "src" / "config.json").write_text('{"torch_dtype": "float32"}')
    (tmp_path / "src" / "merges.txt").write_text("a b")
    shardckpt.consolidate(tmp_path / "src", tmp_path / "step", to="native", dtype="bf16")
    assert set(open_checkpoint(str(tmp_path / "step")).model_files) == {"config.json", "merges.txt"}
    shardckpt.reshard(tmp_path / "step", tmp_path / "two", world_size=2)
    shardckpt.consolidate(tmp_path / "two", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"torch_dtype": "bfloat16"}
    assert (tmp_path / "out" / "merges.txt").read_text() == "a b"
    shardckpt.convert(tmp_path / "two", tmp_path / "step", to="native", overwrite=True)
    assert shardckpt.verify(tmp_path / "step").ok
    assert set(open_checkpoint(str(tmp_path / "step")).model_files) == {"config.json", "merges.txt"}


def test_the_optimizer_comes_by_name(tmp_path: Path) -> None:
    source = SAMPLES["dcp"]["torch"](tmp_path / "src")
    shardckpt.consolidate(str(source), str(tmp_path / "out"), to="native", part="all")
    reader = open_checkpoint(str(tmp_path / "out"))
    assert isinstance(reader, NativeReader)
    assert_same(reader, ("optim", "state", "a.w", "exp_avg"), OPTIM["state"]["a.w"]["exp_avg"])
    paths = [record.path for record in reader.contents.arrays]
    nest = reader.decode_state(lambda ref: paths[ref.number] if isinstance(ref, ArrayRef) else ref)
    assert nest["optim"]["param_groups"] == OPTIM["param_groups"]  # type: ignore[index]
    assert set(nest) == {"model", "optim"}  # type: ignore[call-overload]


def test_the_memory_orders_of_a_step_stay(tmp_path: Path) -> None:
    columns = torch.arange(12.0).view(4, 3).T
    model = torch.nn.Linear(4, 3, bias=False)
    optim = torch.optim.SGD(model.parameters(), momentum=0.9)
    optim.state[model.weight]["momentum_buffer"] = columns
    shardckpt.save({"model": model, "optim": optim}, tmp_path / "step")
    shardckpt.convert(tmp_path / "step", tmp_path / "all", to="native", part="all")
    shardckpt.reshard(tmp_path / "all", tmp_path / "two", world_size=2)
    for name in ("all", "two"):
        again = torch.optim.SGD(model.parameters(), momentum=0.9)
        shardckpt.load({"model": model, "optim": again}, tmp_path / name)
        found = again.state[model.weight]["momentum_buffer"]
        assert torch.equal(found, columns)
        assert found.stride() == columns.stride()


def test_ties_stay_tied(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    weight = torch.arange(6.0).reshape(3, 2)
    torch.save({"model": {"a": weight, "b": weight}}, tmp_path / "src" / "a.pt")
    shardckpt.consolidate(str(tmp_path / "src" / "a.pt"), str(tmp_path / "out"), to="native")
    manifest = open_checkpoint(str(tmp_path / "out")).manifest
    assert manifest.aliases == {("model", "b"): ("model", "a")}


def test_files_are_cut_and_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    source = str(SAMPLES["safetensors"]["file"](tmp_path / "src"))
    report = shardckpt.consolidate(source, str(tmp_path / "out"), to="native", max_shard_size=60, dry_run=True)
    assert len(report.files) > 1
    assert not (tmp_path / "out").exists()
    shardckpt.consolidate(source, str(tmp_path / "out"), to="native", max_shard_size=60)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == len(report.files)


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    save_file({"w": torch.tensor([1e30])}, tmp_path / "src" / "model.safetensors")
    with pytest.raises(PrecisionError):
        shardckpt.consolidate(str(tmp_path / "src"), str(tmp_path / "out"), to="native", dtype="fp16")
    assert not (tmp_path / "out").exists()
    with pytest.raises(UsageError, match="folder"):
        shardckpt.consolidate(str(tmp_path / "src"), str(tmp_path / "out.safetensors"), to="native")
