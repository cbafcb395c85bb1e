"""`diff` compares across formats and world sizes, by canonical names, bit by bit."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest
import torch
from cases import NAMES, read_case
from safetensors.torch import load_file, save_file

import shardckpt
from shardckpt.convert.report import TensorDifference


def files(folder: Path, a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[str, str]:
    for name, tensors in (("a", a), ("b", b)):
        save_file(tensors, folder / f"{name}.safetensors")
    return str(folder / "a.safetensors"), str(folder / "b.safetensors")


def only(folder: Path, a: torch.Tensor, b: torch.Tensor) -> TensorDifference:
    found = shardckpt.diff(*files(folder, {"w": a}, {"w": b}))
    assert not found.same
    [difference] = found.differences
    return difference


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith(("torch_save", "fsdp1_full"))])
def test_a_checkpoint_equals_what_was_made_of_it(name: str, fixtures: Path, tmp_path: Path) -> None:
    """Across formats: the sharded source and the safetensors that consolidate wrote."""
    case = read_case(fixtures, name, tmp_path)
    shardckpt.consolidate(str(case.source), str(tmp_path / "out"), part="all")
    found = shardckpt.diff(str(case.source), str(tmp_path / "out"))
    assert [d for d in found.differences if d.kind != "only in a"] == []
    assert found.compared == found.equal >= len(case.optim)


def test_the_same_run_at_another_world_size_has_the_same_names(fixtures: Path) -> None:
    a, b = (str(fixtures / n / "ckpt") for n in ("accelerate_fsdp1_sharded_llama_w2", "accelerate_fsdp2_full_llama_w2"))
    found = shardckpt.diff(a, b)
    assert found.compared > 50


def test_a_changed_value_is_measured(tmp_path: Path) -> None:
    found = only(tmp_path, torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.5, 4.0]))
    assert (found.kind, found.max_abs, found.max_rel, found.nans) == ("values", 0.5, 0.2, (0, 0))


def test_the_largest_difference_of_many_blocks_is_found(tmp_path: Path) -> None:
    a = torch.zeros(3 << 20)
    b = a.clone()
    b[5], b[-1] = 1e-3, 7.0
    assert only(tmp_path, a, b).max_abs == 7.0


def test_nans_are_counted_and_equal_to_themselves(tmp_path: Path) -> None:
    a = torch.tensor([math.nan, 1.0, 2.0])
    assert shardckpt.diff(*files(tmp_path, {"w": a}, {"w": a.clone()})).same
    found = only(tmp_path, a, torch.tensor([math.nan, math.nan, 2.0]))
    assert found.nans == (1, 2)
    assert found.max_abs == math.inf


def test_bits_count_and_not_values(tmp_path: Path) -> None:
    found = only(tmp_path, torch.tensor([0.0]), torch.tensor([-0.0]))
    assert (found.kind, found.max_abs) == ("values", 0.0)


@pytest.mark.parametrize(
    ("a", "b", "gap"),
    [
        (torch.tensor([1, 2]), torch.tensor([1, 5]), 3.0),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 3j]), 2.0),
        (torch.tensor([math.inf]), torch.tensor([1.0]), math.inf),
        (torch.tensor([math.inf, 1.0]), torch.tensor([math.inf, 2.0]), 1.0),
        (torch.tensor([1.0]).to(torch.float8_e4m3fn), torch.tensor([2.0]).to(torch.float8_e4m3fn), 1.0),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([2.0], dtype=torch.bfloat16), 1.0),
    ],
)
def test_every_kind_of_number_is_measured(a: torch.Tensor, b: torch.Tensor, gap: float, tmp_path: Path) -> None:
    assert only(tmp_path, a, b).max_abs == gap


def test_another_type_is_a_difference_with_a_distance(tmp_path: Path) -> None:
    a = torch.tensor([1.0, 1 / 3])
    found = only(tmp_path, a, a.to(torch.bfloat16))
    assert (found.kind, found.a, found.b) == ("dtype", "float32 [2]", "bfloat16 [2]")
    assert found.max_abs is not None
    assert 0 < found.max_abs < 1e-3


def test_another_shape_is_not_compared(tmp_path: Path) -> None:
    found = only(tmp_path, torch.zeros(2, 3), torch.zeros(3, 2))
    assert (found.kind, found.max_abs) == ("shape", None)


def test_what_only_one_side_has_is_listed(tmp_path: Path) -> None:
    found = shardckpt.diff(
        *files(tmp_path, {"both": torch.ones(1), "x": torch.ones(1)}, {"both": torch.ones(1), "y": torch.ones(1)})
    )
    assert [(d.name, d.kind) for d in found.differences] == [("x", "only in a"), ("y", "only in b")]
    assert (found.compared, found.equal) == (1, 1)


def test_wrapper_prefixes_do_not_count(tmp_path: Path) -> None:
    a = {"_orig_mod.module.w": torch.ones(2), "_orig_mod.module.b": torch.ones(1)}
    assert shardckpt.diff(*files(tmp_path, a, {"w": torch.ones(2), "b": torch.ones(1)})).same


def test_ids_and_names_of_an_optimizer_are_matched_where_groups_tell(tmp_path: Path) -> None:
    layer = torch.nn.Linear(3, 2)
    adam = torch.optim.AdamW(layer.named_parameters(), lr=0.1)
    layer(torch.ones(3)).sum().backward()
    adam.step()
    torch.save({"model": layer.state_dict(), "optim": adam.state_dict()}, tmp_path / "a.pt")
    shardckpt.consolidate(str(tmp_path / "a.pt"), str(tmp_path / "out"), part="all")
    found = shardckpt.diff(str(tmp_path / "a.pt"), str(tmp_path / "out"))
    assert found.same
    assert found.compared == 2 + 6


def test_one_flipped_bit_of_a_shard_is_found(fixtures: Path, tmp_path: Path) -> None:
    source = fixtures / "hf_pretrained_llama" / "ckpt"
    shutil.copytree(source, tmp_path / "b")
    shard = tmp_path / "b" / "model-00002-of-00004.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-100] ^= 0x40
    shard.write_bytes(raw)
    found = shardckpt.diff(str(source), str(tmp_path / "b"))
    assert len(found.differences) == 1
    assert found.differences[0].name in load_file(shard)
