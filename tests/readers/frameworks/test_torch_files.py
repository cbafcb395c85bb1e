"""Folders of torch.save files: Hugging Face shards and their index, and loose files side by side."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from shardckpt.errors import CheckpointError, FormatError, IncompleteError, UnsafeError, UnsupportedError
from shardckpt.reader import Evidence, Reader, Source
from shardckpt.readers.frameworks.torch_files import HF_FORMAT, LOOSE_FORMAT
from shardckpt.readers.registry import open_checkpoint
from shardckpt.storage.local import LocalStore
from tests.kit.writers.materialise import assert_same, truth

MODEL = {f"layer.{i}.weight": torch.arange(float(i + 1)) for i in range(6)}


def source(folder: Path, file: str | None = None) -> Source:
    return Source(LocalStore(str(folder)), file)


def hf(folder: Path, file: str | None = None) -> Reader:
    assert HF_FORMAT.recognize(source(folder, file))
    return HF_FORMAT.open(source(folder, file))


def loose(folder: Path) -> Reader:
    assert LOOSE_FORMAT.recognize(source(folder))
    return LOOSE_FORMAT.open(source(folder))


def write_shards(folder: Path, *, with_index: bool = True) -> dict[str, str]:
    weight_map = {name: f"pytorch_model-0000{1 + i // 3}-of-00002.bin" for i, name in enumerate(MODEL)}
    for file in set(weight_map.values()):
        torch.save({name: MODEL[name] for name, f in weight_map.items() if f == file}, folder / file)
    if with_index:
        write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    index = {"metadata": {"total_size": 84}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("with_index", [True, False])
def test_shards_share_one_space_of_names(tmp_path: Path, with_index: bool) -> None:
    write_shards(tmp_path, with_index=with_index)
    assert HF_FORMAT.recognize(source(tmp_path)) is Evidence.STRUCTURE
    reader = hf(tmp_path)
    assert set(reader.manifest.tensors) == {(name,) for name in MODEL}
    assert reader.manifest.format == "hf-torch"
    for name, expected in MODEL.items():
        assert_same(reader, (name,), expected)
    assert len(list(reader.checksums())) == len(MODEL)


def test_the_index_itself_can_be_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    reader = hf(tmp_path, "pytorch_model.bin.index.json")
    assert_same(reader, ("layer.5.weight",), MODEL["layer.5.weight"])


def test_one_whole_file_is_read_with_its_ties(tmp_path: Path) -> None:
    torch.save({**MODEL, "tied": MODEL["layer.2.weight"]}, tmp_path / "pytorch_model.bin")
    torch.save({"x": 1}, tmp_path / "optimizer.pt")
    (tmp_path / "training_args.bin").write_bytes(b"never read")
    reader = hf(tmp_path)
    assert reader.manifest.aliases == {("tied",): ("layer.2.weight",)}
    assert_same(reader, ("tied",), MODEL["layer.2.weight"])
    assert "optimizer.pt" in reader.manifest.warnings[0]
    assert "training_args" not in reader.manifest.warnings[0]


def test_the_index_says_which_copy_counts(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    stale = {"layer.0.weight": torch.full((1,), 9.0), **{n: MODEL[n] for n in list(MODEL)[3:]}}
    torch.save(stale, tmp_path / weight_map["layer.5.weight"])
    assert_same(hf(tmp_path), ("layer.0.weight",), MODEL["layer.0.weight"])
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(FormatError, match="two files"):
        hf(tmp_path)


def test_missing_shards_and_names_are_named(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    (tmp_path / weight_map["layer.5.weight"]).unlink()
    with pytest.raises(IncompleteError, match=r"pytorch_model-00002-of-00002\.bin is missing.*layer\.3\.weight"):
        hf(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    with pytest.raises(IncompleteError, match="00002-of-00002"):
        hf(tmp_path)
    write_shards(tmp_path)
    write_index(tmp_path, {**weight_map, "ghost": weight_map["layer.0.weight"]})
    with pytest.raises(IncompleteError, match="ghost"):
        hf(tmp_path)


@pytest.mark.parametrize("file", ["../x.bin", "/etc/passwd", "a/../../x", "..", "", "a\\b", "a\0b"])
def test_an_index_cannot_leave_its_folder(tmp_path: Path, file: str) -> None:
    weight_map = write_shards(tmp_path)
    write_index(tmp_path, {**weight_map, "layer.0.weight": file})
    with pytest.raises(UnsafeError, match="outside"):
        hf(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 1}}', '{"weight_map": NaN}']
)
def test_a_damaged_index_is_a_format_error(tmp_path: Path, text: str) -> None:
    write_shards(tmp_path)
    (tmp_path / "pytorch_model.bin.index.json").write_text(text)
    with pytest.raises(FormatError):
        hf(tmp_path)


def test_a_numbering_of_absurd_length_is_a_typed_error(tmp_path: Path) -> None:
    torch.save(MODEL, tmp_path / "pytorch_model-00001-of-99999.bin")
    with pytest.raises(IncompleteError, match="99998 files"):
        hf(tmp_path)


def test_loose_files_are_told_apart_by_name(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "v": torch.ones(2)}, tmp_path / "model.pt")
    torch.save({"state": {0: {"step": torch.ones(1)}}, "param_groups": [{"lr": 0.1}]}, tmp_path / "optim.pt")
    (tmp_path / "log.txt").write_text("not read")
    assert LOOSE_FORMAT.recognize(source(tmp_path)) is Evidence.STRUCTURE
    reader = loose(tmp_path)
    assert set(reader.manifest.tensors) == {("model.pt", "w"), ("model.pt", "v"), ("optim.pt", "state", 0, "step")}
    assert reader.manifest.objects["optim.pt", "param_groups"].value == [{"lr": 0.1}]
    assert set(reader.manifest.files) == {"model.pt", "optim.pt"}
    assert_same(reader, ("model.pt", "w"), torch.ones(2))


def test_one_loose_file_needs_no_prefix(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "anything.pth")
    assert set(loose(tmp_path).manifest.tensors) == {("w",)}


def test_full_folders_of_accelerate_are_read(fixtures: Path) -> None:
    for case in ("accelerate_fsdp1_full_gpt2_w2", "accelerate_fsdp2_full_llama_w2"):
        reader = loose(fixtures / case / "ckpt")
        for name, expected in truth(fixtures / case / "truth_model.safetensors").items():
            assert_same(reader, ("pytorch_model_fsdp.bin", name), expected)
        for name, expected in truth(fixtures / case / "truth_optim.safetensors").items():
            fqn, slot = name.rsplit("/", 1)
            assert_same(reader, ("optimizer.bin", "state", fqn, slot), expected)


def test_full_and_id_keyed_files_of_fsdp1_are_read_side_by_side(fixtures: Path) -> None:
    case = fixtures / "fsdp1_full_llama_w2"
    reader = loose(case / "ckpt")
    for name, expected in truth(case / "truth_model.safetensors").items():
        assert_same(reader, ("model.pt", name), expected)


@pytest.mark.parametrize(
    "case",
    [
        "dcp_fsdp2_llama_w2/ckpt",
        "fabric_fsdp_sharded_gpt2_w2/ckpt",
        "accelerate_fsdp2_sharded_gpt2_w2/ckpt",
        "deepspeed_zero1_bf16_gpt2_w2/ckpt/global_step3",
        "hf_pretrained_llama/ckpt",
        "peft_lora_llama/base",
    ],
)
def test_folders_of_other_formats_are_left_to_their_readers(fixtures: Path, case: str) -> None:
    assert LOOSE_FORMAT.recognize(source(fixtures / case)) is Evidence.NONE
    assert HF_FORMAT.recognize(source(fixtures / case)) is Evidence.NONE


def test_rank_folders_of_sharded_wrappers_are_one_checkpoint(fixtures: Path) -> None:
    reader = loose(fixtures / "fsdp2_dtensor_torchsave_llama_w2" / "ckpt")
    assert reader.manifest.format == "ranks"
    assert {path[0] for path in reader.manifest.tensors} == {"model", "optimizer"}


def test_a_share_where_whole_tensors_belong_is_refused(fixtures: Path, tmp_path: Path) -> None:
    raw = (fixtures / "fsdp2_dtensor_torchsave_llama_w2" / "ckpt" / "checkpoint_rank0.pt").read_bytes()
    (tmp_path / "pytorch_model.bin").write_bytes(raw)
    with pytest.raises(UnsupportedError, match="is a DTensor: this is one rank's shard"):
        open_checkpoint(str(tmp_path))


def test_a_folder_without_torch_files_is_not_recognized(tmp_path: Path) -> None:
    (tmp_path / "readme.md").write_text("x")
    assert LOOSE_FORMAT.recognize(source(tmp_path)) is Evidence.NONE
    assert HF_FORMAT.recognize(source(tmp_path)) is Evidence.NONE
    (tmp_path / "model.pt").write_bytes(b"")
    assert LOOSE_FORMAT.recognize(source(tmp_path)) is Evidence.NAME
    with pytest.raises(CheckpointError):
        loose(tmp_path)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    outside, inside = tmp_path / "secret.pt", tmp_path / "ckpt"
    torch.save({"w": torch.ones(1)}, outside)
    inside.mkdir()
    os.symlink(outside, inside / "model.pt")
    with pytest.raises(UnsafeError):
        loose(inside)


def test_the_source_is_not_touched(tmp_path: Path, fixtures: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(fixtures / "fsdp1_full_llama_w2" / "ckpt", folder)
    before = {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir()}
    reader = loose(folder)
    reader.resolve([p for e in reader.manifest.tensors.values() for p in e.pieces])
    assert {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir()} == before
