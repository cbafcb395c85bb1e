"""`--to torch`: what a conversion selects becomes files that torch's safe loader reads, ties and types included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.errors import UsageError
from shardckpt.readers.registry import open_checkpoint
from tests.kit.runs.cases import same_bits
from tests.kit.writers.samples import MODEL, OPTIM, SAMPLES


def safe(file: Path, **options: Any) -> Any:
    return torch.load(file, weights_only=True, **options)


def assert_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    assert [name for name in expected if not same_bits(found[name], expected[name])] == []


@pytest.mark.parametrize("verb", [shardckpt.consolidate, shardckpt.convert], ids=["consolidate", "convert"])
def test_model_and_optimizer_become_files_that_torch_loads(tmp_path: Path, verb: Any) -> None:
    source = SAMPLES["dcp"]["chunks"](tmp_path / "src")
    report = verb(str(source), str(tmp_path / "out"), to="torch", part="all")
    written = list((tmp_path / "out").glob("pytorch_model*.bin"))
    model = {name: tensor for file in sorted(written) for name, tensor in safe(file, mmap=True).items()}
    assert_tensors(dict(sorted(model.items())), dict(sorted(MODEL.items())))
    found = safe(tmp_path / "out" / "optimizer.bin")
    assert_tensors(found["state"]["a.w"], OPTIM["state"]["a.w"])
    assert found["param_groups"] == [{"lr": 0.1, "params": ["a.w"]}]
    assert {f.name: f.nbytes for f in report.files} == {
        file.name: file.stat().st_size for file in (tmp_path / "out").glob("*.bin")
    }
    assert shardckpt.verify(str(tmp_path / "out")).ok, "checksums are there, and right"


def test_a_split_model_has_an_index_and_tied_names_share_a_file(tmp_path: Path) -> None:
    weight = torch.arange(6.0).reshape(3, 2)
    state = {"z": torch.ones(4), "a": weight, "m": torch.zeros(9), "b": weight}
    torch.save(state, tmp_path / "src.pt")
    shardckpt.consolidate(str(tmp_path / "src.pt"), str(tmp_path / "out"), to="torch", max_shard_size=40)
    index = json.loads((tmp_path / "out" / "pytorch_model.bin.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * (4 + 6 + 9)
    assert index["weight_map"]["a"] == index["weight_map"]["b"]
    assert set(index["weight_map"]) == set(state)
    for name, file in index["weight_map"].items():
        assert torch.equal(safe(tmp_path / "out" / file)[name], state[name])
    both = safe(tmp_path / "out" / index["weight_map"]["a"])
    assert both["a"].data_ptr() == both["b"].data_ptr()
    assert open_checkpoint(str(tmp_path / "out")).manifest.aliases == {("b",): ("a",)}


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
def test_a_target_that_is_named_so_is_one_file(tmp_path: Path, suffix: str) -> None:
    source = str(SAMPLES["dcp"]["torch"](tmp_path / "src"))
    shardckpt.consolidate(source, str(tmp_path / f"m{suffix}"))
    assert_tensors(safe(tmp_path / f"m{suffix}"), MODEL)
    shardckpt.consolidate(source, str(tmp_path / f"o{suffix}"), part="optim")
    assert set(safe(tmp_path / f"o{suffix}")) == {"state", "param_groups"}
    shardckpt.consolidate(source, str(tmp_path / f"all{suffix}"), part="all")
    assert set(safe(tmp_path / f"all{suffix}")) == {"model", "optimizer"}
    assert {d.kind for d in shardckpt.diff(source, str(tmp_path / f"all{suffix}")).differences} == set()


def test_a_name_and_a_format_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    source = str(SAMPLES["dcp"]["torch"](tmp_path / "src"))
    with pytest.raises(UsageError, match="--to torch"):
        shardckpt.consolidate(source, str(tmp_path / "a.pt"), to="safetensors")
    with pytest.raises(UsageError, match="folder"):
        shardckpt.consolidate(source, str(tmp_path / "a.safetensors"), to="dcp")
    assert not (tmp_path / "a.pt").exists()


def trained(betas: tuple[float, float] = (0.8, 0.99)) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optim = torch.optim.AdamW(net.parameters(), lr=0.01, betas=betas)
    net(torch.ones(2, 3)).sum().backward()
    optim.step()
    return net, optim


def test_an_optimizer_by_ids_is_what_torch_optim_loads(tmp_path: Path) -> None:
    net, optim = trained()
    names = [name for name, _ in net.named_parameters()]
    saved = optim.state_dict()
    named = {
        "state": {names[i]: slots for i, slots in saved["state"].items()},
        "param_groups": [{**saved["param_groups"][0], "params": names}],
    }
    torch.save({"model": net.state_dict(), "optimizer": named}, tmp_path / "src.pt")
    shardckpt.consolidate(str(tmp_path / "src.pt"), str(tmp_path / "o.pt"), part="optim", optim_keys="ids")
    found = safe(tmp_path / "o.pt")
    assert found["param_groups"][0]["betas"] == (0.8, 0.99)
    assert type(found["param_groups"][0]["betas"]) is tuple
    fresh, other = trained((0.1, 0.2))
    other.load_state_dict(found)
    assert other.state_dict()["param_groups"][0]["betas"] == (0.8, 0.99)
    for mine, theirs in zip(fresh.parameters(), net.parameters(), strict=True):
        assert torch.equal(other.state[mine]["exp_avg"], optim.state[theirs]["exp_avg"])
        assert torch.equal(other.state[mine]["step"], optim.state[theirs]["step"])


def test_a_flattened_optimizer_has_one_key_a_value(tmp_path: Path) -> None:
    source = str(SAMPLES["dcp"]["torch"](tmp_path / "src"))
    shardckpt.consolidate(source, str(tmp_path / "o.pt"), part="optim", optim_keys="flat")
    found = safe(tmp_path / "o.pt")
    assert set(found) == {"state.a.w.exp_avg", "state.a.w.step", "param_groups.a.w.lr"}
    with pytest.raises(UsageError, match="optim-keys"):
        shardckpt.consolidate(source, str(tmp_path / "x.pt"), optim_keys="numbers")


def test_what_torch_cannot_load_safely_is_listed_and_needs_the_flag(tmp_path: Path) -> None:
    odd = {"state": {}, "param_groups": [{"params": ["a"], "lr": 0.1, "odd": frozenset([1])}]}
    shardckpt.save({"model": {"a": torch.ones(2)}, "optimizer": odd}, str(tmp_path / "src"))
    with pytest.raises(UsageError, match=r"param_groups\.0\.odd, of type frozenset.*--allow-loss"):
        shardckpt.consolidate(str(tmp_path / "src"), str(tmp_path / "out"), to="torch", part="all")
    assert not (tmp_path / "out").exists()
    report = shardckpt.consolidate(
        str(tmp_path / "src"), str(tmp_path / "out"), to="torch", part="all", allow_loss=True
    )
    assert any("left out: param_groups.0.odd" in warning for warning in report.warnings)
    assert safe(tmp_path / "out" / "optimizer.bin")["param_groups"] == [{"lr": 0.1, "params": ["a"]}]


def test_a_type_that_safetensors_lacks_is_listed_and_needs_the_flag(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "wide": torch.ones(2, dtype=torch.complex128)}, tmp_path / "src.pt")
    with pytest.raises(UsageError, match="wide, of type complex128"):
        shardckpt.consolidate(str(tmp_path / "src.pt"), str(tmp_path / "out"))
    report = shardckpt.consolidate(str(tmp_path / "src.pt"), str(tmp_path / "out"), allow_loss=True)
    assert report.tensor_count == 1
    shardckpt.consolidate(str(tmp_path / "src.pt"), str(tmp_path / "all.pt"))
    assert safe(tmp_path / "all.pt")["wide"].dtype == torch.complex128


def test_casts_and_a_dry_run(tmp_path: Path) -> None:
    source = str(SAMPLES["dcp"]["chunks"](tmp_path / "src"))
    report = shardckpt.consolidate(source, str(tmp_path / "m.pt"), dtype="bf16", keep_fp32=["s"], dry_run=True)
    assert not (tmp_path / "m.pt").exists()
    shardckpt.consolidate(source, str(tmp_path / "m.pt"), dtype="bf16", keep_fp32=["s"])
    found = safe(tmp_path / "m.pt")
    assert (found["a.w"].dtype, found["s"].dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(found["a.w"], MODEL["a.w"].bfloat16())
    assert report.files[0].nbytes == (tmp_path / "m.pt").stat().st_size


@pytest.mark.parametrize("keys", ["names", "ids", "flat"])
def test_slots_that_the_source_does_not_group_by_parameter_keep_their_values(keys: str, tmp_path: Path) -> None:
    """Storages are numbered by the tensors of the file, not by the order of the optimizer's dicts."""
    state = {
        n: {"exp_avg": torch.full((2,), float(i)), "step": torch.tensor(i, dtype=torch.float64)}
        for i, n in [(1, "a"), (2, "b")]
    }
    groups = [{"lr": 0.1, "params": ["a", "b"]}]
    model = {"a": torch.zeros(2), "b": torch.ones(2)}
    torch.save({"model": model, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "source.pt")
    shardckpt.consolidate(tmp_path / "source.pt", tmp_path / "folder", part="all")  # sorts by dtype: steps come first
    shardckpt.consolidate(tmp_path / "folder", tmp_path / "optim.pt", part="optim", optim_keys=keys)
    loaded = torch.load(tmp_path / "optim.pt", weights_only=True)
    for number, (name, slots) in enumerate(state.items()):
        for slot, value in slots.items():
            found = (
                loaded[f"state.{name}.{slot}"]
                if keys == "flat"
                else loaded["state"][number if keys == "ids" else name][slot]
            )
            assert torch.equal(found, value)
