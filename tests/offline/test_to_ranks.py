"""`reshard --to torch`: files of ranks with torch's DTensors, which torch loads into FSDP2 models on so many ranks."""

from __future__ import annotations

import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

import shardckpt
from shardckpt.errors import UsageError
from tests.kit.ranks.harness import run
from tests.kit.runs.cases import assert_same, load_folder, read_case
from tests.kit.writers.rank_writers import built, in_place, truth, two_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of what two ranks of FSDP2 saved."""
    folder = tmp_path_factory.mktemp("ranks")
    run(2, two_ranks, folder, timeout=120)
    return folder / "fsdp2"


def whole(value: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found.detach()


reads_meshes_of_today = pytest.mark.skipif(
    find_spec("torch.distributed._mesh_layout") is None, reason="torch must read meshes that torch 2.13 pickles"
)


@reads_meshes_of_today
def test_the_mesh_has_the_field_that_torch_2_15_reads(ranks: Path, tmp_path: Path) -> None:
    shardckpt.reshard(ranks, tmp_path / "one", world_size=1, to="torch")
    state = torch.load(tmp_path / "one" / "rank0.pt", weights_only=True)
    assert state["model"]["head.weight"].device_mesh._preserve_rank_order is False


@reads_meshes_of_today
@pytest.mark.parametrize("weights_only", [True, False])
def test_torch_loads_them_into_a_sharded_model(weights_only: bool, ranks: Path, tmp_path: Path) -> None:
    """Model and optimizer of two ranks go to three; every bit is that of the two."""
    shardckpt.reshard(ranks, tmp_path / "three", world_size=3, to="torch")

    def body(rank: int, world: int) -> list[str]:
        model = in_place(built(), init_device_mesh("cpu", (world,)))
        for parameter in model.parameters():
            parameter.data.zero_()
        state = torch.load(tmp_path / "three" / f"rank{rank}.pt", weights_only=weights_only)
        model.load_state_dict(state["model"])
        optim = torch.optim.AdamW(model.parameters())
        optim.load_state_dict(state["optim"])
        names = {parameter: name for name, parameter in model.named_parameters()}
        found = {name: whole(value) for name, value in model.state_dict().items()}
        for parameter, slots in optim.state.items():
            found |= {f"{names[parameter]}/{slot}": whole(value) for slot, value in slots.items()}
        assert state["step"] == 3 and [group["lr"] for group in optim.param_groups] == [0.1]
        expected = truth()
        wrong = sorted(expected.keys() ^ found.keys())
        return wrong + [name for name in expected if name in found and not torch.equal(found[name], expected[name])]

    assert run(3, body, timeout=120) == [[], [], []]


@pytest.mark.parametrize("name", ["dcp_fsdp2_llama_w2", "fsdp1_sharded_optim_nasty_w2", "torch_save_zip_nasty"])
@pytest.mark.parametrize("world", [1, 4])
def test_no_value_changes(name: str, world: int, fixtures: Path, tmp_path: Path) -> None:
    """Cut tensors, plain ones, scalars, empty ones and odd types, for more ranks than there are rows."""
    case = read_case(fixtures, name, tmp_path)
    report = shardckpt.reshard(case.source, tmp_path / "ranks", world_size=world, to="torch", allow_loss=True)
    assert sorted(file.name for file in (tmp_path / "ranks").iterdir()) == [f"rank{r}.pt" for r in range(world)]
    assert {file.name: file.nbytes for file in report.files} == {
        file.name: file.stat().st_size for file in (tmp_path / "ranks").iterdir()
    }
    shardckpt.consolidate(tmp_path / "ranks", tmp_path / "again", part="all", **case.options)
    optim = load_folder(tmp_path / "again", "optimizer*.safetensors")
    assert_same(optim, case.optim)
    found = {name: value for name, value in load_folder(tmp_path / "again").items() if name not in optim}
    assert_same(found, {name: case.model[name] for name in found})
    if not name.startswith("torch_save"):  # whose numbers only `--param-names` can tell
        assert shardckpt.diff(case.source, tmp_path / "ranks").same
    assert shardckpt.verify(tmp_path / "ranks").ok


def test_a_file_lists_all_ranks_once(tmp_path: Path) -> None:
    save_file({f"w{n}": torch.arange(6.0) for n in range(10)}, tmp_path / "model.safetensors")
    shardckpt.reshard(tmp_path / "model.safetensors", tmp_path / "out", world_size=300, to="torch")
    with zipfile.ZipFile(tmp_path / "out" / "rank7.pt") as archive:
        data = archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    assert data.count(b"K\xfeK\xffM\x00\x01M\x01\x01") == 1


def test_tensors_without_shards_are_sharded_unless_they_are_named(tmp_path: Path) -> None:
    save_file({"w": torch.arange(6.0), "buffer": torch.arange(4.0)}, tmp_path / "model.safetensors")
    shardckpt.reshard(tmp_path / "model.safetensors", tmp_path / "a", world_size=2, to="torch", keep_whole=["buf*"])
    pieces = {tensor.name: tensor.pieces for tensor in shardckpt.inspect(tmp_path / "a").tensors}
    assert pieces == {"w": 2, "buffer": 1}
    with pytest.raises(UsageError, match=r"'nothing\*' matches no tensor"):
        shardckpt.reshard(
            tmp_path / "model.safetensors", tmp_path / "b", world_size=2, to="torch", keep_whole=["nothing*"]
        )
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("to", ["native", "dcp", "torch"])
@pytest.mark.parametrize("step", [3, torch.tensor(3.0)], ids=["value", "tensor"])
def test_an_optimizer_beside_safetensors_comes_along(to: str, step: object, tmp_path: Path) -> None:
    """What is no tensor of its state lies in another file than what is."""
    slots = {"exp_avg": torch.arange(8.0).reshape(4, 2), "step": step}
    optim = {"state": {"w": slots}, "param_groups": [{"params": ["w"], "lr": 0.1}]}
    torch.save({"model": {"w": torch.ones(4, 2)}, "optimizer": optim}, tmp_path / "a.pt")
    shardckpt.consolidate(tmp_path / "a.pt", tmp_path / "merged", part="all")
    shardckpt.reshard(tmp_path / "merged", tmp_path / "out", world_size=2, to=to)
    assert shardckpt.diff(tmp_path / "a.pt", tmp_path / "out").same
    state = shardckpt.load(tmp_path / "out")["optimizer"]["state"]["w"]
    assert torch.equal(state["exp_avg"], slots["exp_avg"])
    assert torch.as_tensor(state["step"]) == 3
