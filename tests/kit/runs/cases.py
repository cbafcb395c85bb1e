"""The checkpoints of the fixtures that can be read, what they hold, and bit-exact comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

READABLE = ("dcp_", "hf_", "peft_", "torch_save_", "accelerate_", "fabric_", "fsdp1_", "fsdp2_", "deepspeed_")
NAMES = [
    "accelerate_fsdp1_full_gpt2_w2",
    "accelerate_fsdp1_sharded_llama_w2",
    "accelerate_fsdp2_full_llama_w2",
    "accelerate_fsdp2_sharded_gpt2_w2",
    "dcp_fsdp1_sharded_nasty_w2",
    "dcp_fsdp2_flat_optim_nasty_w3",
    "dcp_fsdp2_llama_w2",
    "dcp_hsdp_fsdp2_gpt2_w4",
    "dcp_plain_nasty_w1",
    "dcp_tp2_fsdp2_w4",
    "deepspeed_zero1_bf16_gpt2_w2",
    "deepspeed_zero2_bf16_nasty_w2",
    "deepspeed_zero3_bf16_llama_w2",
    "fabric_fsdp_full_nasty_w2",
    "fabric_fsdp_sharded_gpt2_w2",
    "fsdp1_full_llama_w2",
    "fsdp1_local_gpt2_w2",
    "fsdp1_sharded_optim_nasty_w2",
    "fsdp2_dtensor_torchsave_llama_w2",
    "hf_dcp_writer_llama_w2",
    "hf_pretrained_llama",
    "peft_lora_llama",
    "torch_save_legacy_nasty",
    "torch_save_zip_nasty",
]
"""Every case of the formats that can be read; a test compares it with the folder."""


@dataclass(frozen=True)
class Case:
    name: str
    source: Path
    model: Mapping[str, torch.Tensor]
    optim: Mapping[str, torch.Tensor]
    groups: Mapping[str, Any] | None
    facts: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)


def read_case(fixtures: Path, name: str, scratch: Path) -> Case:
    """Return one case, with the options that its optimizer's ids need."""
    folder = fixtures / name
    facts = json.loads((folder / "case.json").read_text())
    source = folder / "ckpt" if (folder / "ckpt").exists() else folder / "ckpt.ckpt"
    options: dict[str, Any] = {}
    if name.startswith("fsdp1_full_"):
        options = {"model_key": "model.pt", "optim_key": "optim_param_name.pt"}
    elif "optimizer_id_to_fqn" in facts:
        names = scratch / "param_names.json"
        names.write_text(json.dumps(facts["optimizer_id_to_fqn"]))
        options = {"param_names": str(names)}
    optim, groups = folder / "truth_optim.safetensors", folder / "truth_param_groups.json"
    state = load_file(optim) if optim.exists() else {}
    if name.startswith("deepspeed_"):  # its truth holds the moments; each case was taken after three steps
        state |= {f"{key.rpartition('/')[0]}/step": torch.tensor(3.0) for key in list(state)}
    return Case(
        name=name,
        source=source,
        model=load_file(folder / "truth_model.safetensors"),
        optim=state,
        groups=json.loads(groups.read_text()) if groups.exists() else None,
        facts=facts,
        options=options,
    )


def load_folder(folder: Path, glob: str = "*.safetensors") -> dict[str, torch.Tensor]:
    """Return every tensor of a folder as safetensors itself reads it."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob(glob)):
        part = load_file(file)
        assert not found.keys() & part.keys(), "no name is in two files"
        found |= part
    return found


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, "pt") as opened:
        return dict(opened.metadata() or {})


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors have one type, one shape and the same bits: NaN equals itself, 0.0 is not -0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(raw[0], raw[1])


def assert_same(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare two sets of tensors by name, bit by bit."""
    assert sorted(found) == sorted(expected)
    different = [name for name in expected if not same_bits(found[name], expected[name])]
    assert different == []
