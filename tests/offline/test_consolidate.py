"""The main job on checkpoints that real frameworks wrote: bit by bit against the truth, and read by other libraries."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

import shardckpt
from shardckpt.errors import (
    AmbiguousError,
    FormatError,
    IncompleteError,
    OverlapError,
    TargetExistsError,
    TruncatedError,
    UnsafeError,
    UsageError,
)
from tests.kit.runs.cases import NAMES, READABLE, Case, assert_same, load_folder, metadata_of, read_case, same_bits

Snapshot = dict[str, bytes]
FLOATS = (torch.float32, torch.bfloat16)


@pytest.fixture(params=NAMES)
def case(request: pytest.FixtureRequest, fixtures: Path, tmp_path: Path) -> Case:
    return read_case(fixtures, request.param, tmp_path)


@pytest.fixture
def named(fixtures: Path, tmp_path: Path) -> Callable[[str], Case]:
    return lambda name: read_case(fixtures, name, tmp_path)


def bytes_below(folder: Path) -> Snapshot:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_every_case_of_the_readable_formats_is_here(fixtures: Path) -> None:
    assert sorted(p.name for p in fixtures.iterdir() if p.name.startswith(READABLE)) == NAMES


def test_model_optimizer_and_groups_come_out_bit_for_bit(case: Case, tmp_path: Path) -> None:
    report = shardckpt.consolidate(str(case.source), str(tmp_path / "out"), part="all", **case.options)
    out = tmp_path / "out"
    optim = load_folder(out, "optimizer*.safetensors")
    model = {k: v for k, v in load_folder(out).items() if k not in optim}
    assert_same(optim, case.optim)
    written = {name for name in case.model if name not in report.ties}
    if case.name.startswith("hf_pretrained"):
        written -= {"lm_head.weight"}  # the source itself holds one name of the tied pair
    assert_same(model, {name: case.model[name] for name in written})
    for dropped, kept in report.ties.items():
        assert same_bits(case.model[dropped], case.model[kept])
    if case.groups is not None:
        said = json.loads((out / "param_groups.json").read_text())
        assert {key: said[key] for key in ("param_groups", "non_tensor_state")} == case.groups


def test_the_model_alone_is_what_transformers_expects(case: Case, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shardckpt.consolidate(str(case.source), str(out), **{k: v for k, v in case.options.items() if k == "model_key"})
    stem = "adapter_model" if case.name.startswith("peft") else "model"
    assert [p.name for p in sorted(out.glob("*.safetensors"))] == [f"{stem}.safetensors"]
    assert metadata_of(out / f"{stem}.safetensors")["format"] == "pt"
    assert not list(out.glob("optimizer*"))


def test_the_result_reads_back_as_the_same_checkpoint(case: Case, tmp_path: Path) -> None:
    """A second pass over our own output changes no bit."""
    first, second = tmp_path / "first", tmp_path / "second"
    shardckpt.consolidate(str(case.source), str(first), part="all", **case.options)
    shardckpt.consolidate(str(first), str(second), part="all")
    payload = [p.name for p in first.iterdir()]
    assert sorted(payload) == sorted(p.name for p in second.iterdir())
    assert bytes_below(first) == bytes_below(second)
    assert shardckpt.verify(str(first)).ok


def test_the_source_is_left_as_it_was(named: Callable[[str], Case], tmp_path: Path) -> None:
    source = named("dcp_fsdp2_llama_w2").source
    before = bytes_below(source)
    shardckpt.consolidate(str(source), str(tmp_path / "out"), part="all")
    assert bytes_below(source) == before


def test_saved_views_come_out_as_torch_sees_them(named: Callable[[str], Case], fixtures: Path, tmp_path: Path) -> None:
    """Slices, transposes, expanded tensors and odd types, from both containers."""
    for name in ("torch_save_zip_nasty", "torch_save_legacy_nasty"):
        shardckpt.consolidate(str(named(name).source), str(tmp_path / name), model_key="views")
        found = load_folder(tmp_path / name)
        truth = load_file(fixtures / name / "truth_views.safetensors")
        ties = shardckpt.consolidate(
            str(named(name).source), str(tmp_path / "dry"), model_key="views", dry_run=True
        ).ties
        assert_same({**found, **{old: found[kept] for old, kept in ties.items()}}, truth)


class TestForTransformers:
    def test_a_pretrained_model_loads_from_what_was_written(self, named: Callable[[str], Case], tmp_path: Path) -> None:
        case = named("hf_pretrained_llama")
        report = shardckpt.consolidate(str(case.source), str(tmp_path / "out"))
        assert set(report.carried) >= {"config.json", "generation_config.json"}
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
        assert_same(loaded, case.model)

    def test_shards_and_index_load_too(self, named: Callable[[str], Case], tmp_path: Path) -> None:
        case = named("hf_pretrained_llama")
        out = tmp_path / "out"
        shardckpt.consolidate(str(case.source), str(out), max_shard_size="40KB")
        index = json.loads((out / "model.safetensors.index.json").read_text())
        theirs = json.loads((case.source / "model.safetensors.index.json").read_text())
        assert list(index["weight_map"]) == list(theirs["weight_map"])
        assert max(p.stat().st_size for p in out.glob("*.safetensors")) < 45_000
        assert index["metadata"]["total_size"] == theirs["metadata"]["total_size"]
        assert_same(AutoModelForCausalLM.from_pretrained(out).state_dict(), case.model)

    @pytest.mark.parametrize("name", ["dcp_fsdp2_llama_w2", "hf_dcp_writer_llama_w2"])
    def test_a_training_checkpoint_loads_with_a_config_from_elsewhere(
        self, name: str, named: Callable[[str], Case], fixtures: Path, tmp_path: Path
    ) -> None:
        """The tie that the config states is known: one name is written, both are loaded."""
        case = named(name)
        config = tmp_path / "config"
        embedding = case.model["model.embed_tokens.weight"]
        layers = len({k.split(".")[2] for k in case.model if k.startswith("model.layers.")})
        hidden = embedding.shape[1]
        key = case.model["model.layers.0.self_attn.k_proj.weight"].shape[0]
        base = LlamaConfig.from_pretrained(fixtures / "hf_pretrained_llama" / "ckpt")
        head = hidden // base.num_attention_heads
        LlamaConfig(
            vocab_size=embedding.shape[0],
            hidden_size=hidden,
            intermediate_size=case.model["model.layers.0.mlp.gate_proj.weight"].shape[0],
            num_hidden_layers=layers,
            num_attention_heads=hidden // head,
            num_key_value_heads=key // head,
            tie_word_embeddings=True,
            architectures=["LlamaForCausalLM"],
        ).save_pretrained(config)
        out = tmp_path / "out"
        report = shardckpt.consolidate(str(case.source), str(out), config_from=str(config))
        assert report.ties == {"lm_head.weight": "model.embed_tokens.weight"}
        assert "lm_head.weight" not in load_folder(out)
        assert_same(AutoModelForCausalLM.from_pretrained(out, config=str(config)).state_dict(), case.model)

    def test_an_adapter_keeps_its_name_and_its_config(self, named: Callable[[str], Case], tmp_path: Path) -> None:
        case = named("peft_lora_llama")
        out = tmp_path / "out"
        shardckpt.consolidate(str(case.source), str(out))
        assert sorted(p.name for p in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        assert (out / "adapter_config.json").read_bytes() == (case.source / "adapter_config.json").read_bytes()


class TestWherePeersFail:
    """The faults A5 to A18 of other tools: ours must be right or say what is wrong."""

    @pytest.fixture(params=["dcp_fsdp2_llama_w2", "hf_dcp_writer_llama_w2", "hf_pretrained_llama"])
    def sharded(
        self, request: pytest.FixtureRequest, named: Callable[[str], Case], tmp_path: Path
    ) -> tuple[Path, Path]:
        """Return a copy of a checkpoint, and its last shard."""
        source = copied(named(request.param).source, tmp_path / "src")
        return source, max(p for p in source.iterdir() if p.suffix in {".distcp", ".safetensors"})

    def test_a5_a_deleted_shard_is_named_and_nothing_is_written(
        self, sharded: tuple[Path, Path], tmp_path: Path
    ) -> None:
        source, shard = sharded
        shard.unlink()
        with pytest.raises(IncompleteError) as caught:
            shardckpt.consolidate(str(source), str(tmp_path / "out"))
        assert shard.name in str(caught.value)
        assert not (tmp_path / "out").exists()
        shardckpt.inspect(str(source))
        assert not shardckpt.verify(str(source)).ok

    def test_a5_a_truncated_shard_is_named_with_tensor_and_box(
        self, sharded: tuple[Path, Path], tmp_path: Path
    ) -> None:
        source, shard = sharded
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size * 2 // 3])
        with pytest.raises(TruncatedError, match=r"\[.*\d+:\d+\]") as caught:
            shardckpt.consolidate(str(source), str(tmp_path / "out"), part="all")
        assert shard.name in str(caught.value)
        assert not (tmp_path / "out").exists()
        assert any(shard.name in p.message for p in shardckpt.inspect(str(source)).problems)

    def test_a5_a_missing_last_rank_does_not_shrink_a_tensor_unseen(
        self, named: Callable[[str], Case], tmp_path: Path
    ) -> None:
        """The layout stores no global shape: with the last rank gone, only other shapes can tell."""
        case = named("hf_dcp_writer_llama_w2")
        source = copied(case.source, tmp_path / "src")
        for file in source.glob("shard-00002-*"):
            file.unlink()
        with pytest.raises(IncompleteError, match="shapes-from"):
            shardckpt.consolidate(str(source), str(tmp_path / "out"), shapes_from=str(case.source))
        assert not (tmp_path / "out").exists()
        assert any("--shapes-from" in w for w in shardckpt.verify(str(source)).warnings)
        report = shardckpt.consolidate(str(source), str(tmp_path / "out"))
        assert any("--shapes-from" in w for w in report.warnings), "who cannot prove it says so"

    def test_a6_a_scalar_keeps_its_value(self, tmp_path: Path) -> None:
        rank_files(tmp_path / "src", {"scale": [((), torch.tensor(3.5))]})
        shardckpt.consolidate(str(tmp_path / "src"), str(tmp_path / "out"))
        assert_same(load_folder(tmp_path / "out"), {"scale": torch.tensor(3.5)})

    def test_a7_integers_and_booleans_are_tensors_like_others(self, tmp_path: Path) -> None:
        truth = {
            "ids": torch.arange(12).reshape(4, 3),
            "mask": torch.tensor([True, False, True, True]),
            "small": torch.tensor([-1, 2], dtype=torch.int8),
        }
        rank_files(tmp_path / "src", {n: halves(t) for n, t in truth.items()})
        shardckpt.consolidate(str(tmp_path / "src"), str(tmp_path / "out"), dtype="bf16")
        assert_same(load_folder(tmp_path / "out"), truth)

    def test_a8_values_that_are_not_tensors_do_not_break_a_file(
        self, named: Callable[[str], Case], tmp_path: Path
    ) -> None:
        """What is not a tensor in the state dict is named as left out; the tensors beside it are written as ever."""
        model = {"w": torch.ones(3), "lr": 0.5, "block._extra_state": {"scale": 2.0}}
        torch.save({"model": model, "step": 7}, tmp_path / "a.pt")
        report = shardckpt.consolidate(str(tmp_path / "a.pt"), str(tmp_path / "out"))
        assert_same(load_folder(tmp_path / "out"), {"w": torch.ones(3)})
        assert report.left_out == ("model.lr", "model.block._extra_state.scale", "step")

    def test_a9_headers_are_aligned_and_name_their_format(self, case: Case, tmp_path: Path) -> None:
        shardckpt.consolidate(str(case.source), str(tmp_path / "out"), part="all", **case.options)
        for file in (tmp_path / "out").glob("*.safetensors"):
            length = struct.unpack("<Q", file.read_bytes()[:8])[0]
            assert length % 8 == 0
            assert metadata_of(file)["format"] == "pt"

    def test_a12_what_is_not_taken_is_said(self, named: Callable[[str], Case], tmp_path: Path) -> None:
        case = named("dcp_fsdp2_llama_w2")
        report = shardckpt.consolidate(str(case.source), str(tmp_path / "out"))
        assert set(report.left_out) >= {"optim", "trainer"}

    def test_a14_a_checkpoint_that_would_run_code_is_refused(self, tmp_path: Path) -> None:
        canary = tmp_path / "canary"

        class Bad:
            def __reduce__(self) -> tuple[object, ...]:
                return os.system, (f"touch {canary}",)

        torch.save({"model": {"w": torch.ones(3)}, "extra": Bad()}, tmp_path / "a.pt")
        with pytest.raises(UnsafeError, match="system"):
            shardckpt.consolidate(str(tmp_path / "a.pt"), str(tmp_path / "out"))
        assert not canary.exists()
        assert not (tmp_path / "out").exists()

    def test_a16_two_chunks_of_a_tensor_in_one_rank_are_both_there(self, tmp_path: Path) -> None:
        truth = torch.arange(24.0).reshape(6, 4)
        chunks = [((0, 0), truth[:2]), ((2, 0), truth[2:5]), ((5, 0), truth[5:])]
        rank_files(tmp_path / "src", {"w": chunks}, ranks=3)
        shardckpt.consolidate(str(tmp_path / "src"), str(tmp_path / "out"))
        assert_same(load_folder(tmp_path / "out"), {"w": truth})

    def test_a18_sources_and_targets_may_be_in_a_bucket(
        self, named: Callable[[str], Case], s3_bucket: str, tmp_path: Path
    ) -> None:
        import fsspec

        case = named("dcp_fsdp2_llama_w2")
        fs = fsspec.filesystem("s3")
        fs.put(str(case.source), f"{s3_bucket}/src", recursive=True)
        shardckpt.consolidate(f"{s3_bucket}/src", f"{s3_bucket}/out", part="all", max_shard_size="30kB")
        assert sorted(p.name for p in tmp_path.iterdir()) == [], "no local copy"
        fs.get(f"{s3_bucket}/out", str(tmp_path / "out"), recursive=True)
        assert_same(load_folder(tmp_path / "out"), {**case.model, **case.optim})


class TestDamage:
    def test_an_overlap_is_refused(self, tmp_path: Path) -> None:
        rank_files(tmp_path / "src", {"w": [((0,), torch.zeros(3)), ((2,), torch.zeros(2))]})
        with pytest.raises(OverlapError, match=r"w \[2:3\]"):
            shardckpt.consolidate(str(tmp_path / "src"), str(tmp_path / "out"))
        assert not (tmp_path / "out").exists()

    def test_a_hole_is_refused(self, tmp_path: Path) -> None:
        rank_files(tmp_path / "src", {"w": [((0,), torch.zeros(3)), ((5,), torch.zeros(2))]})
        with pytest.raises(IncompleteError, match=r"w \[3:5\]"):
            shardckpt.consolidate(str(tmp_path / "src"), str(tmp_path / "out"))
        assert any("[3:5]" in p.message for p in shardckpt.inspect(str(tmp_path / "src")).problems)
        assert any("[3:5]" in p.message for p in shardckpt.verify(str(tmp_path / "src")).problems)

    def test_damage_in_a_part_that_nobody_wants_is_a_warning(
        self, named: Callable[[str], Case], tmp_path: Path
    ) -> None:
        case = named("accelerate_fsdp1_sharded_llama_w2")
        source = copied(case.source, tmp_path / "src")
        shard = source / "optimizer_0" / "__1_0.distcp"
        shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
        report = shardckpt.consolidate(str(source), str(tmp_path / "out"))
        assert_same(load_folder(tmp_path / "out"), case.model)
        assert any("__1_0.distcp" in w for w in report.warnings)
        with pytest.raises(TruncatedError):
            shardckpt.consolidate(str(source), str(tmp_path / "out2"), part="all")

    def test_a_lying_header_is_refused(self, tmp_path: Path) -> None:
        save_file({"w": torch.zeros(4)}, tmp_path / "a.safetensors")
        raw = (tmp_path / "a.safetensors").read_bytes()
        (tmp_path / "a.safetensors").write_bytes(raw.replace(b"[0,16]", b"[0,20]"))
        with pytest.raises(FormatError, match="data_offsets"):
            shardckpt.consolidate(str(tmp_path / "a.safetensors"), str(tmp_path / "out"))


class TestTargets:
    def test_a_target_that_holds_something_is_left_alone(self, named: Callable[[str], Case], tmp_path: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        (out / "mine.txt").write_text("mine")
        with pytest.raises(TargetExistsError):
            shardckpt.consolidate(str(named("hf_pretrained_llama").source), str(out))
        assert bytes_below(out) == {"mine.txt": b"mine"}

    def test_overwriting_replaces_all_of_it(self, named: Callable[[str], Case], tmp_path: Path) -> None:
        out = tmp_path / "out"
        out.mkdir()
        save_file({"old": torch.ones(3)}, out / "adapter_model-00001-of-00001.safetensors")
        shardckpt.consolidate(str(named("peft_lora_llama").source), str(out), overwrite=True)
        assert sorted(p.name for p in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]

    def test_a_source_inside_the_target_is_refused(self, named: Callable[[str], Case], tmp_path: Path) -> None:
        source = copied(named("hf_pretrained_llama").source, tmp_path / "src")
        for target in (source, source / "inside", tmp_path):
            with pytest.raises(UsageError):
                shardckpt.consolidate(str(source), str(target), overwrite=True)
        assert (source / "config.json").exists()

    def test_one_file_is_written_where_one_is_named(self, named: Callable[[str], Case], tmp_path: Path) -> None:
        case = named("dcp_fsdp2_llama_w2")
        shardckpt.consolidate(str(case.source), str(tmp_path / "all.safetensors"))
        assert_same(load_file(tmp_path / "all.safetensors"), case.model)
        with pytest.raises(UsageError, match="one file"):
            shardckpt.consolidate(str(case.source), str(tmp_path / "b.safetensors"), part="all")

    def test_a_dry_run_writes_nothing_and_says_what_it_would(
        self, named: Callable[[str], Case], tmp_path: Path
    ) -> None:
        case = named("dcp_fsdp2_llama_w2")
        target = tmp_path / "deep" / "out"
        planned = shardckpt.consolidate(str(case.source), str(target), part="all", dry_run=True, max_shard_size="30kB")
        assert list(tmp_path.iterdir()) == []
        done = shardckpt.consolidate(str(case.source), str(target), part="all", max_shard_size="30kB")
        assert planned.files == done.files
        assert {f.name: f.nbytes for f in done.files} == {
            p.name: p.stat().st_size for p in target.glob("*.safetensors")
        }

    def test_jobs_side_by_side_write_the_same_bytes(self, named: Callable[[str], Case], tmp_path: Path) -> None:
        case = named("dcp_fsdp2_flat_optim_nasty_w3")
        one, four = tmp_path / "one", tmp_path / "four"
        for target, jobs in ((one, 1), (four, 4)):
            shardckpt.consolidate(str(case.source), str(target), part="all", max_shard_size="2kB", jobs=jobs)
        assert bytes_below(one) == bytes_below(four)
        assert len(bytes_below(one)) > 4


class TestConvert:
    def test_shards_stay_as_they_are(self, named: Callable[[str], Case], tmp_path: Path) -> None:
        case = named("hf_pretrained_llama")
        shardckpt.convert(str(case.source), str(tmp_path / "out"))
        for file in case.source.glob("*.safetensors"):
            assert_same(load_file(tmp_path / "out" / file.name), load_file(file))
        assert_same(AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict(), case.model)

    def test_a_cut_tensor_is_joined(self, named: Callable[[str], Case], tmp_path: Path) -> None:
        case = named("hf_dcp_writer_llama_w2")
        shardckpt.convert(str(case.source), str(tmp_path / "out"))
        assert_same(load_folder(tmp_path / "out"), case.model)


def test_progress_ends_at_the_total_and_can_stop_the_work(named: Callable[[str], Case], tmp_path: Path) -> None:
    case = named("dcp_fsdp2_llama_w2")
    seen: list[shardckpt.results.Progress] = []
    report = shardckpt.consolidate(str(case.source), str(tmp_path / "out"), on_progress=seen.append)
    assert seen[-1].done_bytes == seen[-1].total_bytes == report.nbytes
    assert list(report.seconds) == ["open", "plan", "copy", "publish"]

    def stop(_: shardckpt.results.Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shardckpt.consolidate(str(case.source), str(tmp_path / "out2"), on_progress=stop, jobs=2, part="all")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_several_optimizers_need_a_choice(tmp_path: Path) -> None:
    state = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).state_dict()
    torch.save({"model": {"w": torch.ones(2)}, "optim_a": state, "optim_b": state}, tmp_path / "a.pt")
    with pytest.raises(AmbiguousError, match="--optim-key"):
        shardckpt.consolidate(str(tmp_path / "a.pt"), str(tmp_path / "out"), part="all")
    shardckpt.consolidate(str(tmp_path / "a.pt"), str(tmp_path / "model"))


def test_an_optimizer_that_is_not_there_cannot_be_asked_for(named: Callable[[str], Case], tmp_path: Path) -> None:
    source = str(named("hf_pretrained_llama").source)
    with pytest.raises(IncompleteError, match="no optimizer"):
        shardckpt.consolidate(source, str(tmp_path / "out"), part="optim")
    assert shardckpt.consolidate(source, str(tmp_path / "all"), part="all").tensor_count == 29


@settings(max_examples=30)
@given(data=st.data())
def test_any_sharding_is_joined_whatever_is_asked_for_besides(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Random tensors cut in any dimension over ranks, into files of any size, cast or not: each as torch has it."""
    folder = tmp_path_factory.mktemp("any")
    tensors, chunks = {}, {}
    for i in range(data.draw(st.integers(1, 4))):
        shape = data.draw(st.lists(st.integers(1, 5), max_size=3))
        kind = data.draw(st.sampled_from([torch.float32, torch.int64, torch.bfloat16, torch.bool, torch.float8_e5m2]))
        tensor = torch.arange(math.prod(shape)).reshape(shape).to(kind)
        tensors[f"t{i}"] = tensor
        dim = data.draw(st.integers(0, max(len(shape) - 1, 0)))
        parts = tensor.tensor_split(data.draw(st.integers(1, 3)), dim) if shape else [tensor]
        starts = [sum(p.shape[dim] for p in parts[:n]) if shape else 0 for n in range(len(parts))]
        chunks[f"t{i}"] = [
            (tuple(start if d == dim else 0 for d in range(len(shape))), part)
            for start, part in zip(starts, parts, strict=True)
        ]
    rank_files(folder / "src", chunks, ranks=3)
    dtype = data.draw(st.sampled_from(["", "float32", "bfloat16"]))
    shard = data.draw(st.integers(1, 200))
    shardckpt.consolidate(str(folder / "src"), str(folder / "out"), dtype=dtype, max_shard_size=shard)
    cast = {n: t.to(getattr(torch, dtype)) if dtype and t.dtype in FLOATS else t for n, t in tensors.items()}
    assert_same(load_folder(folder / "out"), cast)


def copied(source: Path, target: Path) -> Path:
    target.mkdir(parents=True)
    for name, content in bytes_below(source).items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes(content)
    return target


def halves(tensor: torch.Tensor) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    cut = tensor.shape[0] // 2
    rest = (0,) * (tensor.dim() - 1)
    return [((0, *rest), tensor[:cut].clone()), ((cut, *rest), tensor[cut:].clone())]


def rank_files(folder: Path, chunks: dict[str, list[tuple[tuple[int, ...], torch.Tensor]]], ranks: int = 2) -> None:
    """Write chunks in the layout of torch's HuggingFaceStorageWriter: the i-th chunk of a tensor into rank i's file."""
    folder.mkdir()
    for rank in range(ranks):
        mine = {name: parts[rank] for name, parts in chunks.items() if rank < len(parts)}
        info = json.dumps({name: {"saved_offsets": list(offset)} for name, (offset, _) in mine.items()})
        save_file(
            {name: part.clone() for name, (_, part) in mine.items()},
            folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors",
            {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0", "format": "pt"},
        )
