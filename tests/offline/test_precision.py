"""The contract of `--dtype` (U17): floats only, exceptions by name, no silent infinity, the source's type on record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import shardckpt
from shardckpt.errors import PrecisionError
from tests.kit.runs.cases import assert_same, load_folder, metadata_of, same_bits

TENSORS = {
    "norm.weight": torch.tensor([1.0, 1 / 3]),
    "proj.weight": torch.tensor([[1 / 3, -2.5]]),
    "half": torch.tensor([1 / 3], dtype=torch.float16),
    "double": torch.tensor([1 / 3], dtype=torch.float64),
    "ids": torch.tensor([1, 2]),
    "mask": torch.tensor([True]),
    "fp8": torch.tensor([1.5]).to(torch.float8_e4m3fn),
    "wave": torch.tensor([1 + 2j]),
}
FLOATS = {"norm.weight", "proj.weight", "half", "double"}


@pytest.fixture
def src(tmp_path: Path) -> str:
    save_file(TENSORS, tmp_path / "src.safetensors")
    return str(tmp_path / "src.safetensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_floats_are_cast_as_torch_casts_and_the_rest_is_left(src: str, dtype: torch.dtype, tmp_path: Path) -> None:
    report = shardckpt.consolidate(src, str(tmp_path / "out"), dtype=str(dtype).removeprefix("torch."))
    assert_same(load_folder(tmp_path / "out"), {n: t.to(dtype) if n in FLOATS else t for n, t in TENSORS.items()})
    assert sum(report.cast.values()) == sum(TENSORS[n].dtype != dtype for n in FLOATS)


def test_globs_keep_tensors_as_they_are(src: str, tmp_path: Path) -> None:
    shardckpt.consolidate(src, str(tmp_path / "out"), dtype="bf16", keep_fp32=["norm.*", "double"])
    found = load_folder(tmp_path / "out")
    assert same_bits(found["norm.weight"], TENSORS["norm.weight"])
    assert same_bits(found["double"], TENSORS["double"])
    assert found["proj.weight"].dtype is torch.bfloat16


def test_the_type_of_the_source_is_recorded(src: str, tmp_path: Path) -> None:
    shardckpt.consolidate(src, str(tmp_path / "out"), dtype="bf16")
    recorded = json.loads(metadata_of(tmp_path / "out" / "model.safetensors")["source_dtype"])
    assert recorded == {n: str(TENSORS[n].dtype).removeprefix("torch.") for n in FLOATS}
    shardckpt.consolidate(src, str(tmp_path / "one"), dtype="bf16", include=["*.weight"])
    assert metadata_of(tmp_path / "one" / "model.safetensors")["source_dtype"] == "float32"
    shardckpt.consolidate(src, str(tmp_path / "plain"))
    assert "source_dtype" not in metadata_of(tmp_path / "plain" / "model.safetensors")


def test_a_value_that_would_become_infinite_stops_the_work(tmp_path: Path) -> None:
    save_file({"ok": torch.ones(4), "big": torch.full((300, 300), 1e5)}, tmp_path / "a.safetensors")
    src = str(tmp_path / "a.safetensors")
    with pytest.raises(PrecisionError, match=r"'big'.*float16.*--keep-fp32"):
        shardckpt.consolidate(src, str(tmp_path / "out"), dtype="fp16")
    assert not (tmp_path / "out").exists()
    shardckpt.consolidate(src, str(tmp_path / "kept"), dtype="fp16", keep_fp32=["big"])
    shardckpt.consolidate(src, str(tmp_path / "inf"), dtype="fp16", allow_overflow=True)
    assert load_folder(tmp_path / "inf")["big"].isinf().all()


def test_the_optimizer_is_not_cast(fixtures: Path, tmp_path: Path) -> None:
    source = fixtures / "dcp_fsdp2_llama_w2" / "ckpt"
    shardckpt.consolidate(str(source), str(tmp_path / "out"), dtype="bf16", part="all")
    optim = load_folder(tmp_path / "out", "optimizer*.safetensors")
    truth = fixtures / "dcp_fsdp2_llama_w2" / "truth_optim.safetensors"
    assert_same(optim, load_folder(truth.parent, truth.name))


def test_transformers_loads_the_cast_model_in_its_new_type(fixtures: Path, tmp_path: Path) -> None:
    source = fixtures / "hf_pretrained_llama"
    shardckpt.consolidate(str(source / "ckpt"), str(tmp_path / "out"), dtype="bf16")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    truth = load_folder(source, "truth_model.safetensors")
    assert_same(loaded, {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in truth.items()})


def test_a_large_tensor_is_cast_block_by_block(tmp_path: Path) -> None:
    big = torch.randn(3000, 1100, generator=torch.Generator().manual_seed(1))
    save_file({"w": big}, tmp_path / "a.safetensors")
    shardckpt.consolidate(str(tmp_path / "a.safetensors"), str(tmp_path / "out"), dtype="bf16", max_memory="24MiB")
    assert_same(load_folder(tmp_path / "out"), {"w": big.to(torch.bfloat16)})
