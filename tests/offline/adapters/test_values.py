"""Values of merged tensors do not depend on the blocks in which they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import shardckpt
from shardckpt.errors import PrecisionError
from tests.kit.runs.cases import load_folder

WIDE = 40_000  # a row is larger than the smaller batch


def merge(
    folder: Path, base: dict[str, torch.Tensor], own: dict[str, torch.Tensor], **config: Any
) -> dict[str, torch.Tensor]:
    """Merge an adapter without a model; return the result."""
    for name, tensors in (("base", base), ("adapter", {f"base_model.model.{k}": v for k, v in own.items()})):
        (folder / name).mkdir(parents=True)
        save_file(tensors, folder / name / ("model.safetensors" if name == "base" else "adapter_model.safetensors"))
    told = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, **config}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(told))
    shardckpt.merge_adapter(folder / "base", folder / "adapter", folder / "out", jobs=4)
    return load_folder(folder / "out")


@pytest.fixture(params=[1 << 16, 1 << 20], ids=["small", "large"], autouse=True)
def _blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the size of the blocks that are written."""
    from shardckpt.offline.write import stream

    monkeypatch.setattr(stream, "_LOCAL_BATCH_BYTES", request.param)


@pytest.mark.parametrize("size", [(3, WIDE), (700, 90)], ids=["wide", "high"])
@pytest.mark.parametrize("is_turned", [False, True], ids=["rows", "columns"])
def test_norms_are_those_of_full_rows_and_columns(size: tuple[int, int], is_turned: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    w, a, b, m = torch.randn(size), torch.randn(2, size[1]), torch.randn(size[0], 2), torch.rand(size[0]) + 1
    total = w + 3 * (b @ a)
    expected = m[:, None] * total / total.norm(dim=1, keepdim=True)
    own = {"m.lora_A.weight": a, "m.lora_B.weight": b, "m.lora_magnitude_vector": m}
    base = {"m.weight": w.T.contiguous() if is_turned else w}
    found = merge(tmp_path, base, own, use_dora=True, fan_in_fan_out=is_turned)["m.weight"]
    torch.testing.assert_close(found, expected.T if is_turned else expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(2, WIDE), (300, 90), (5, 7)], ids=["wide", "high", "small"])
@pytest.mark.parametrize("is_turned", [False, True], ids=["out x in", "in x out"])
def test_each_expert_gets_its_own_product(sizes: tuple[int, int], is_turned: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    rows, columns = sizes
    outs, ins = (columns, rows) if is_turned else (rows, columns)
    w = torch.randn(4, rows, columns)
    a, b = torch.randn(4, 2, ins), torch.randn(outs, 2, 4)
    added = torch.einsum("ore,eri->eoi", b, a)
    own = {"x.experts.lora_A.weight": a.reshape(8, ins), "x.experts.lora_B.weight": b.reshape(outs, 8)}
    found = merge(tmp_path, {"x.experts.w": w}, own, target_parameters=["experts.w"])["x.experts.w"]
    torch.testing.assert_close(found, w + 3 * (added.mT if is_turned else added), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_single_rows_are_replaced_and_the_others_keep_their_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    w, rows = torch.randn(5, WIDE).to(dtype), torch.randn(2, WIDE)
    own = {"embed_tokens.token_adapter.trainable_tokens_delta": rows}
    found = merge(tmp_path, {"embed_tokens.weight": w}, own, trainable_token_indices=[3, 0])["embed_tokens.weight"]
    expected = w.clone()
    expected[[3, 0]] = rows.to(dtype)
    assert torch.equal(found, expected)


def test_a_row_of_zeros_is_refused_by_its_number(tmp_path: Path) -> None:
    own = {"m.lora_A.weight": torch.ones(2, 4), "m.lora_B.weight": torch.tensor([[1.0, 1.0], [0.0, 0.0]])}
    own["m.lora_magnitude_vector"] = torch.ones(2)
    with pytest.raises(PrecisionError, match=r"m\.weight: DoRA divides by a norm that is zero; found row 1 of the sum"):
        merge(tmp_path, {"m.weight": torch.zeros(2, 4)}, own, use_dora=True)
    assert not (tmp_path / "out").exists()
