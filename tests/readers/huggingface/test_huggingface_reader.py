"""Folders of safetensors files: which files make up a checkpoint, with an index and without."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file, save_model
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from shardckpt import verify
from shardckpt.boxes import Box
from shardckpt.errors import CheckpointError, FormatError, IncompleteError, OverlapError, UnsafeError
from shardckpt.readers.huggingface.index_files import read_json
from shardckpt.readers.registry import detect, open_checkpoint, open_source
from shardckpt.storage.resolve_url import open_store
from tests.kit.stores.counting import open_counted
from tests.kit.writers.materialise import assert_same, truth
from tests.kit.writers.share_writers import as_rank


def write(folder: Path, files: Mapping[str, Mapping[str, torch.Tensor]], index: object = None) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors), folder / name, {"format": "pt"})
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(folder)


def ones(n: int = 2) -> torch.Tensor:
    return torch.ones(n)


def paths(url: str) -> list[tuple[object, ...]]:
    return sorted(open_checkpoint(url).manifest.tensors, key=str)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("hf_pretrained_llama", "safetensors"),
        ("hf_dcp_writer_llama_w2", "safetensors"),
        ("peft_lora_llama", "adapter"),
    ],
)
def test_every_tensor_of_the_fixtures_is_found_bit_for_bit(name: str, form: str, fixtures: Path) -> None:
    reader = open_checkpoint(str(fixtures / name / "ckpt"))
    assert reader.manifest.format == form
    expected = truth(fixtures / name / "truth_model.safetensors")
    if name == "hf_pretrained_llama":
        expected.pop("lm_head.weight")  # of a tied pair the files hold one
    assert {path[0] for path in reader.manifest.tensors} == set(expected)
    for key, tensor in expected.items():
        assert_same(reader, (key,), tensor)


@pytest.mark.parametrize("name", ["hf_pretrained_llama", "hf_dcp_writer_llama_w2", "peft_lora_llama"])
def test_looking_reads_headers_and_indexes_only(name: str, fixtures: Path) -> None:
    folder = fixtures / name / "ckpt"
    reader, store = open_counted(str(folder))
    headers = {f: int.from_bytes((folder / f).read_bytes()[:8], "little") + 8 for f in reader.manifest.files}
    indexes = sum(p.stat().st_size for p in folder.glob("*.index.json"))
    assert store.nbytes <= sum(headers.values()) + indexes + 64
    for file, offset, size in store.ranges:
        assert file not in headers or offset + size <= max(headers[file], 64), "no byte of data"


def test_the_layout_of_torchs_writer_is_joined_from_ranks(fixtures: Path) -> None:
    """A16: chunks carry offsets in their header; two files a rank."""
    reader = open_checkpoint(str(fixtures / "hf_dcp_writer_llama_w2" / "ckpt"))
    cut = [e for e in reader.manifest.tensors.values() if len(e.pieces) > 1]
    assert cut
    assert all(sum(p.box.volume for p in e.pieces) == torch.Size(e.shape).numel() for e in cut)
    assert "DCP_SHARDING_INFO" not in reader.manifest.metadata


class TestOneFile:
    def test_a_file_is_a_checkpoint(self, tmp_path: Path) -> None:
        url = write(tmp_path, {"any name.safetensors": {"w": ones()}})
        reader = open_checkpoint(f"{url}/any name.safetensors")
        assert_same(reader, ("w",), ones())

    def test_structure_counts_more_than_the_name(self, tmp_path: Path) -> None:
        url = write(tmp_path, {"model.bin": {"w": ones()}})
        assert detect(open_source(f"{url}/model.bin")).name == "safetensors"

    def test_bytes_behind_the_data_are_refused_as_the_library_does(self, tmp_path: Path) -> None:
        url = write(tmp_path, {"a.safetensors": {"w": ones()}})
        with (tmp_path / "a.safetensors").open("ab") as file:
            file.write(b"tail")
        with pytest.raises(SafetensorError, match="not fully covered"):
            load_file(tmp_path / "a.safetensors")
        with pytest.raises(FormatError, match="bytes follow the tensors' data; found 108; expected 104"):
            open_checkpoint(url)

    def test_names_that_save_model_dropped_are_ties(self, tmp_path: Path) -> None:
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2, bias=False), "b": torch.nn.Linear(2, 2, bias=False)})
        model["b"].weight = model["a"].weight
        save_model(model, str(tmp_path / "m.safetensors"))
        manifest = open_checkpoint(str(tmp_path)).manifest
        assert sorted(manifest.tensors) == [("a.weight",), ("b.weight",)]
        assert len(manifest.aliases) == 1


class TestWithIndex:
    FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")

    def shards(self, folder: Path, **changes: object) -> str:
        files = {f: {f"t{i}": ones()} for i, f in enumerate(self.FILES)}
        index = {"metadata": {}, "weight_map": {f"t{i}": f for i, f in enumerate(self.FILES)}, **changes}
        return write(folder, files, index)

    def test_the_index_itself_may_be_named(self, tmp_path: Path) -> None:
        url = self.shards(tmp_path)
        assert paths(f"{url}/model.safetensors.index.json") == [("t0",), ("t1",)]

    def test_files_beside_the_index_are_left_and_named(self, tmp_path: Path) -> None:
        url = self.shards(tmp_path)
        write(tmp_path, {"consolidated.safetensors": {"t0": torch.zeros(9)}})
        reader = open_checkpoint(url)
        assert paths(url) == [("t0",), ("t1",)]
        assert "consolidated.safetensors" in reader.manifest.warnings[0]

    def test_torch_files_beside_are_named(self, tmp_path: Path) -> None:
        """A Trainer's folder without FSDP: the optimizer is a file of its own."""
        url = self.shards(tmp_path)
        for name in ("training_args.bin", "optimizer.pt", "rng_state_0.pth", "scheduler.pt"):
            torch.save({"a": 1}, tmp_path / name)
        assert open_checkpoint(url).manifest.warnings == (
            "torch files here are ignored, name one to read it: optimizer.pt, rng_state_0.pth, scheduler.pt",
        )

    def test_a_missing_file_is_a_gap_that_can_be_looked_at(self, tmp_path: Path) -> None:
        url = self.shards(tmp_path)
        (tmp_path / self.FILES[1]).unlink()
        manifest = open_checkpoint(url).manifest
        assert manifest.files[self.FILES[1]] == -1
        assert ("t1",) in manifest.tensors

    @pytest.mark.parametrize("is_torch", [False, True])
    def test_an_index_of_an_earlier_save_in_several_files_is_ignored(self, is_torch: bool, tmp_path: Path) -> None:
        """transformers removes the files of such an index, and keeps the index."""
        name = "pytorch_model.bin" if is_torch else "model.safetensors"
        stem, suffix = name.split(".")
        index = {"weight_map": {"a": f"{stem}-00001-of-00002.{suffix}", "b": f"{stem}-00002-of-00002.{suffix}"}}
        (tmp_path / f"{name}.index.json").write_text(json.dumps(index))
        tensors = {"a": ones(3)}
        torch.save(tensors, tmp_path / name) if is_torch else save_file(tensors, tmp_path / name, {"format": "pt"})
        manifest = open_checkpoint(str(tmp_path)).manifest
        assert [entry.shape for entry in manifest.tensors.values()] == [(3,)]
        assert manifest.warnings == (
            f"{name}.index.json is from an earlier save, all its files are missing, and it is ignored",
        )

    def test_an_index_with_one_of_its_files_counts(self, tmp_path: Path) -> None:
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
        url = write(
            tmp_path, {"model.safetensors": {"a": ones(3)}, "model-00001-of-00002.safetensors": {"a": ones()}}, index
        )
        assert open_checkpoint(url).manifest.files["model-00002-of-00002.safetensors"] == -1

    def test_an_index_that_names_a_tensor_its_file_lacks(self, tmp_path: Path) -> None:
        url = self.shards(tmp_path, weight_map={"t0": self.FILES[0], "gone": self.FILES[1]})
        with pytest.raises(IncompleteError, match="gone"):
            open_checkpoint(url)

    @pytest.mark.parametrize(
        "file", ["../up.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", ".", "a\\b", "a\0b"]
    )
    def test_an_index_that_leaves_its_folder_is_unsafe(self, tmp_path: Path, file: str) -> None:
        url = self.shards(tmp_path, weight_map={"t0": file})
        with pytest.raises(UnsafeError, match="outside its folder"):
            open_checkpoint(url)

    @pytest.mark.parametrize(
        "index",
        [[], "x", {}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": None}}, {"weight_map": None}],
    )
    def test_an_index_that_is_none(self, tmp_path: Path, index: object) -> None:
        url = write(tmp_path, {self.FILES[0]: {"t0": ones()}}, index)
        with pytest.raises(FormatError):
            open_checkpoint(url)

    def test_an_index_larger_than_any_is_not_read(self, tmp_path: Path) -> None:
        url = self.shards(tmp_path)
        os.truncate(tmp_path / "model.safetensors.index.json", 1 << 30)
        with pytest.raises(UnsafeError, match="too large"):
            open_checkpoint(url)
        with pytest.raises(UnsafeError):
            read_json(open_store(url), "model.safetensors.index.json")


class TestWithoutIndex:
    def test_numbered_files_are_one_checkpoint(self, tmp_path: Path) -> None:
        files = {f"model-0000{i}-of-00003.safetensors": {f"t{i}": ones()} for i in (1, 2, 3)}
        assert paths(write(tmp_path, files)) == [("t1",), ("t2",), ("t3",)]

    def test_a_number_that_is_not_there_is_missing(self, tmp_path: Path) -> None:
        files = {f"model-0000{i}-of-00003.safetensors": {f"t{i}": ones()} for i in (1, 3)}
        manifest = open_checkpoint(write(tmp_path, files)).manifest
        assert manifest.missing == ("model-00002-of-00003.safetensors",)

    def test_a_number_that_promises_the_world_is_no_loop(self, tmp_path: Path) -> None:
        manifest = open_checkpoint(write(tmp_path, {"model-00001-of-99999.safetensors": {"t": ones()}})).manifest
        assert len(manifest.missing) == 99_998

    def test_a_rank_that_is_not_there_is_missing(self, tmp_path: Path) -> None:
        files = {f"shard-0000{r}-model-00001-of-00001.safetensors": {f"t{r}": ones()} for r in (1, 3)}
        manifest = open_checkpoint(write(tmp_path, files)).manifest
        assert manifest.missing == ("shard-00002-model-00001-of-00001.safetensors",)

    def test_one_name_in_two_files_is_refused(self, tmp_path: Path) -> None:
        url = write(tmp_path, {"a.safetensors": {"w": ones()}, "b.safetensors": {"w": ones()}})
        with pytest.raises(FormatError, match="two files"):
            open_checkpoint(url)

    def test_the_usual_name_wins_over_others(self, tmp_path: Path) -> None:
        url = write(tmp_path, {"model.safetensors": {"w": ones()}, "copy.safetensors": {"w": ones()}})
        assert list(open_checkpoint(url).manifest.files) == ["model.safetensors"]


class TestTorchsWriter:
    def ranks(self, folder: Path, chunks: list[tuple[list[int], torch.Tensor]], names: str = "w") -> str:
        folder.mkdir(parents=True, exist_ok=True)
        for i, (offset, part) in enumerate(chunks):
            info = json.dumps({names: {"saved_offsets": offset}})
            save_file(
                {"w": part}, folder / f"shard-{i + 1:05d}-model-00001-of-00001.safetensors", {"DCP_SHARDING_INFO": info}
            )
        return str(folder)

    def test_chunks_lie_where_their_header_says(self, tmp_path: Path) -> None:
        array = torch.arange(12.0).reshape(3, 4)
        url = self.ranks(tmp_path, [([0, 0], array[:, :1].clone()), ([0, 1], array[:, 1:].clone())])
        reader = open_checkpoint(url)
        assert [p.box for p in reader.manifest.tensors["w",].pieces] == [Box((0, 0), (3, 1)), Box((0, 1), (3, 3))]
        assert_same(reader, ("w",), array)

    def test_a_replicated_chunk_counts_once(self, tmp_path: Path) -> None:
        reader = open_checkpoint(self.ranks(tmp_path, [([0], ones()), ([0], ones())]))
        assert_same(reader, ("w",), ones())

    def test_replicated_chunks_that_differ_are_refused_where_they_are_read(self, tmp_path: Path) -> None:
        reader = open_checkpoint(self.ranks(tmp_path, [([0], ones()), ([0], 2 * ones())]))
        with pytest.raises(OverlapError, match=r"shard-00002-.*: 'w' differs between ranks; .* than in shard-00001-"):
            assert_same(reader, ("w",), ones())
        assert [problem.kind for problem in verify(tmp_path).problems] == ["overlap"]

    @pytest.mark.parametrize("is_equal", [True, False])
    def test_shards_of_meshes_that_torchs_writer_does_not_know_are_compared(
        self, is_equal: bool, tmp_path: Path
    ) -> None:
        """Experts of two ranks under one name, each written by `HuggingFaceStorageWriter`."""
        for rank in range(2):
            with as_rank(rank, 2):
                mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "dp"))
                value = torch.full((2, 3), 0.0 if is_equal else float(rank))
                state = {"experts": DTensor.from_local(value, mesh["dp"], [Shard(0)]), f"own.{rank}": torch.ones(3)}
                writer = HuggingFaceStorageWriter(str(tmp_path / f"{rank}"), save_distributed=True)
                dcp.save(state, storage_writer=writer, no_dist=True)
            [file] = (tmp_path / f"{rank}").glob("*.safetensors")
            file.rename(tmp_path / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors")
            file.parent.rmdir()
        found = verify(tmp_path)
        assert found.ok is is_equal and found.tensor_count == 3
        assert [str(p).count("'experts' differs between ranks") for p in found.problems] == ([] if is_equal else [1])

    def test_an_empty_chunk_takes_no_part(self, tmp_path: Path) -> None:
        reader = open_checkpoint(self.ranks(tmp_path, [([0], ones()), ([2], ones(0))]))
        assert_same(reader, ("w",), ones())

    def test_consolidated_files_are_preferred_over_sharded_ones(self, tmp_path: Path) -> None:
        self.ranks(tmp_path / "sharded", [([0], ones())])
        assert_same(open_checkpoint(str(tmp_path)), ("w",), ones())
        write(tmp_path, {"model.safetensors": {"w": torch.zeros(3)}})
        assert_same(open_checkpoint(str(tmp_path)), ("w",), torch.zeros(3))

    @pytest.mark.parametrize(
        "info",
        [
            "[]",
            "5",
            '{"w": {}}',
            '{"w": {"saved_offsets": 5}}',
            '{"w": {"saved_offsets": [-1]}}',
            '{"w": {"saved_offsets": [1.0]}}',
            '{"w": {"saved_offsets": [true]}}',
            '{"w": {"saved_offsets": [1, 2]}}',
            '{"w": {"saved_offsets": ["0"]}}',
            '{"w": {"saved_offsets": [' + "9" * 30 + "]}}",
            '{"w": null}',
            "{",
            '{"w": {"saved_offsets": [0]}, "w": {"saved_offsets": [0]}}',
        ],
    )
    def test_offsets_that_are_none_are_a_format_error(self, tmp_path: Path, info: str) -> None:
        save_file({"w": ones()}, tmp_path / "shard-00001-model-00001-of-00001.safetensors", {"DCP_SHARDING_INFO": info})
        with pytest.raises(FormatError):
            open_checkpoint(str(tmp_path))

    @pytest.mark.parametrize("second", [torch.ones(2, dtype=torch.float16), torch.ones(2, 1)])
    def test_chunks_of_another_kind_are_refused(self, tmp_path: Path, second: torch.Tensor) -> None:
        url = self.ranks(tmp_path, [([0], ones()), ([2, 0][: second.dim()], second)])
        with pytest.raises(FormatError, match="differ"):
            open_checkpoint(url)


class TestOurOwnOptimizerFiles:
    def folder(self, root: Path) -> str:
        write(
            root,
            {
                "model.safetensors": {"a.w": ones()},
                "optimizer.safetensors": {"a.w/exp_avg": ones(), "a.w/step": torch.tensor(3.0)},
            },
        )
        (root / "param_groups.json").write_text(
            json.dumps({"param_groups": [{"lr": 1, "params": ["a.w"]}], "non_tensor_state": {}})
        )
        return str(root)

    def test_model_and_optimizer_are_told_apart(self, tmp_path: Path) -> None:
        manifest = open_checkpoint(self.folder(tmp_path)).manifest
        assert sorted(manifest.tensors) == [
            ("model", "a.w"),
            ("optimizer", "state", "a.w", "exp_avg"),
            ("optimizer", "state", "a.w", "step"),
        ]
        assert manifest.objects["optimizer", "param_groups"].value == [{"lr": 1, "params": ["a.w"]}]

    @pytest.mark.parametrize("text", ["[]", "{", '{"param_groups": NaN}'])
    def test_groups_that_cannot_be_read(self, tmp_path: Path, text: str) -> None:
        url = self.folder(tmp_path)
        (tmp_path / "param_groups.json").write_text(text)
        with pytest.raises(FormatError):
            open_checkpoint(url)


class TestLinks:
    def test_a_file_that_links_out_of_the_folder_is_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "elsewhere", {"model.safetensors": {"w": ones()}})
        (tmp_path / "src").mkdir()
        (tmp_path / "src" / "model.safetensors").symlink_to(tmp_path / "elsewhere" / "model.safetensors")
        with pytest.raises(UnsafeError):
            open_checkpoint(str(tmp_path / "src"))

    def test_a_snapshot_of_the_hub_cache_links_into_its_blobs(self, tmp_path: Path) -> None:
        root = tmp_path / "models--a--b"
        write(root / "blobs", {"0123abc": {"w": ones()}})
        snapshot = root / "snapshots" / "rev"
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").symlink_to("../../blobs/0123abc")
        assert_same(open_checkpoint(str(snapshot)), ("w",), ones())

    def test_a_name_with_a_newline_is_shown_escaped(self, tmp_path: Path) -> None:
        url = write(tmp_path, {"a\nb.safetensors": {"w\n": ones()}})
        reader = open_checkpoint(url)
        assert_same(reader, ("w\n",), ones())
        (tmp_path / "a\nb.safetensors").write_bytes(b"\xff" * 9)
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(url)
        assert str(caught.value).isprintable()


def test_all_kinds_of_elements_are_found(tmp_path: Path) -> None:
    tensors = {
        str(kind): torch.arange(6).to(kind).reshape(2, 3)
        for kind in (
            torch.bool,
            torch.uint8,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.complex64,
            torch.float8_e5m2,
        )
    }
    tensors |= {"empty": torch.empty(0, 5), "scalar": torch.tensor(3.5)}
    reader = open_checkpoint(write(tmp_path, {"model.safetensors": tensors}))
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert_same(reader, (name,), tensor)


@pytest.mark.parametrize("has_index", [False, True])
def test_a_slot_and_a_parameter_of_one_name_are_both_read(has_index: bool, tmp_path: Path) -> None:
    index = {"weight_map": {"x/m": "model.safetensors"}, "metadata": {"optimizer_files": ["optimizer.safetensors"]}}
    files = {"model.safetensors": {"x/m": ones(1)}, "optimizer.safetensors": {"x/m": ones(2)}}
    url = write(tmp_path, files, index if has_index else None)
    shapes = {path: entry.shape for path, entry in open_checkpoint(url).manifest.tensors.items()}
    assert shapes == {("model", "x/m"): (1,), ("optimizer", "state", "x", "m"): (2,)}


def test_files_that_are_left_out_without_an_index_are_not_missing_from_one(tmp_path: Path) -> None:
    url = write(tmp_path, {"model.safetensors": {"w": ones()}, "consolidated.safetensors": {"v": ones()}})
    [warning] = open_checkpoint(url).manifest.warnings
    assert warning == "1 safetensors file is no part of model.safetensors and is ignored: consolidated.safetensors"
