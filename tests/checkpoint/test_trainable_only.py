"""Frozen parameters stay in the base: compared with it, referred to, read from it; the adapter alone is written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from safetensors.torch import save as serialize
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import shardckpt
from shardckpt.core import FullyShardedDataParallel, fully_shard
from shardckpt.errors import ChecksumError, IncompleteError, UsageError
from shardckpt.state import model_state_dict
from shardckpt.storage.local import LocalStore
from tests.kit.models.states import whole
from tests.kit.ranks.harness import raised_everywhere, run

RULES = {r"\.base\.": "."}
WIDE = 33


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDE, WIDE).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDE, 2, bias=False), nn.Linear(2, WIDE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Net(nn.Module):
    """An embedding and two layers, all frozen but for their adapters and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, WIDE).requires_grad_(False)
        self.layers = nn.Sequential(Adapted(), Adapted())
        self.head = nn.Linear(WIDE, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.emb(x)))


def wrapped(net: Net, use_orig_params: bool, wrapper: Any = FullyShardedDataParallel, **options: Any) -> nn.Module:
    """Return the model in a wrapper; in units of one kind of parameter where they are flat."""
    for layer in net.layers:
        layer.base = wrapper(layer.base, use_orig_params=use_orig_params, **options)
    net.emb = wrapper(net.emb, use_orig_params=use_orig_params, **options)
    return wrapper(net, use_orig_params=use_orig_params, **options)


def in_place(net: Net, shard) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for part in (*net.layers, net):
        shard(part, mesh=mesh)
    return net


FACES = {
    "plain": lambda net: net,
    "flat": lambda net: wrapped(net, use_orig_params=False),
    "orig": lambda net: wrapped(net, use_orig_params=True),
    "torch wrapper": lambda net: wrapped(net, True, TorchWrapper, device_id=torch.device("cpu")),
    "in place": lambda net: in_place(net, fully_shard),
    "torch in place": lambda net: in_place(net, torch_fully_shard),
}


def base_of(net: Net) -> dict[str, torch.Tensor]:
    """Return what the base holds, under names without the adapters."""
    frozen = {name: value for name, value in net.named_parameters() if not value.requires_grad}
    return {name.replace(".base.", "."): value.detach().clone() for name, value in frozen.items()}


@pytest.fixture
def hf(tmp_path: Path) -> Path:
    """A base as `transformers` writes it, in two files."""
    torch.manual_seed(0)
    base = base_of(Net())
    folder = tmp_path / "hf"
    folder.mkdir()
    files = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    for number, (name, value) in enumerate(base.items()):
        list(files.values())[number % 2][name] = value
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    index = ", ".join(f'"{key}": "{name}"' for name, tensors in files.items() for key in tensors)
    (folder / "model.safetensors.index.json").write_text(f'{{"metadata": {{}}, "weight_map": {{{index}}}}}')
    return folder


def trained(
    face: str = "plain", seed: int = 0, narrow: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net()
    for value in net.parameters():
        value.data = value.data if value.requires_grad else value.data.to(narrow).float()
    model = FACES[face](net)
    optim = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(torch.arange(7)).sum().backward()
    optim.step()
    return model, optim


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(value).clone() for name, value in model_state_dict(model, "FULL").items()}


def keep(path: object, base: object, **options: object) -> None:
    model, optim = trained()
    shardckpt.save(
        {"model": model, "optim": optim}, path, base=base, trainable_only=True, base_key_map=RULES, **options
    )


def payload_names(path: Path) -> set[str]:
    """Return the arrays whose elements lie in the step itself."""
    return {key.rpartition("@")[0] for file in path.glob("*.safetensors") for key in load_file(file)}


ADAPTERS = {f"model.layers.{n}.{part}.weight" for n in (0, 1) for part in ("down", "up")}


class TestOnRanks:
    @pytest.mark.parametrize("face", ["flat", "orig", "torch wrapper", "in place", "torch in place"])
    def test_the_base_is_left_where_it_is_and_read_from_there(self, tmp_path: Path, hf: Path, face: str) -> None:
        def body(rank: int, world: int):
            model, optim = trained(face)
            state = {"model": model, "optim": optim, "step": 1}
            shardckpt.save(state, tmp_path / "one", base=hf, trainable_only=True, base_key_map=RULES)
            again = {"base": tmp_path / "one", "trainable_only": True, "base_key_map": RULES}
            shardckpt.async_save(state, tmp_path / "two", **again).result()
            other, fresh = trained(face, seed=5)
            shardckpt.load({"model": other, "optim": fresh, "step": 0}, tmp_path / "two")
            return full(model), full(other)

        expected, found = run(2, body)[0]
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert {name for name in payload_names(tmp_path / "one") if name.startswith("model.")} == {
            *ADAPTERS,
            "model.head.weight",
            "model.head.bias",
        }
        assert not payload_names(tmp_path / "two"), "it refers to the first step for adapters, to the base for the rest"
        for name in ("one", "two"):
            assert shardckpt.verify(str(tmp_path / name)).ok
            nest = shardckpt.load(tmp_path / name)["model"]
            assert all(torch.equal(nest[key], value) for key, value in expected.items())

    @pytest.mark.parametrize("face", ["orig", "in place", "torch in place"])
    @pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
    def test_a_wider_model_refers_to_the_narrow_base_it_was_cast_from(
        self, tmp_path: Path, face: str, narrow: torch.dtype
    ) -> None:
        torch.manual_seed(0)
        save_file({name: value.to(narrow) for name, value in base_of(Net()).items()}, tmp_path / "base.safetensors")

        def body(rank: int, world: int):
            model, optim = trained(face, narrow=narrow)
            state, options = {"model": model, "optim": optim}, {"trainable_only": True, "base_key_map": RULES}
            shardckpt.save(state, tmp_path / "one", base=tmp_path / "base.safetensors", **options)
            shardckpt.save(state, tmp_path / "two", base=tmp_path / "one", **options)
            other, fresh = trained(face, seed=5, narrow=narrow)
            shardckpt.load({"model": other, "optim": fresh}, tmp_path / "two", verify="live")
            return full(model), full(other)

        expected, found = run(2, body)[0]
        assert {value.dtype for value in found.values()} == {torch.float32}
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert not any("base" in name or "emb" in name for name in payload_names(tmp_path / "one"))
        assert shardckpt.verify(str(tmp_path / "two")).ok
        assert shardckpt.load(tmp_path / "two")["model"]["emb.weight"].dtype == narrow, "as it is in the base"

    def test_one_that_differs_is_named_on_every_rank_and_nothing_is_saved(self, tmp_path: Path, hf: Path) -> None:
        def body(rank: int, world: int) -> None:
            model, _ = trained("in place")
            with torch.no_grad():
                if rank == 1:
                    model.layers[1].base.weight.to_local()[-1, -1] += 1e-6
            shardckpt.save({"model": model}, tmp_path / "c", base=hf, trainable_only=True, base_key_map=RULES)

        found = raised_everywhere(2, body)
        assert found[1].is_a(UsageError)
        assert all(
            "model.layers.1.base.weight: a frozen parameter differs from the base" in each.message for each in found
        )
        assert "rank 1" in found[0].message
        assert sorted(os.listdir(tmp_path)) == ["hf"]


class TestTheBase:
    def test_each_byte_of_it_is_read_twice_for_the_first_save_and_not_for_the_next(self, tmp_path, monkeypatch):
        model = nn.Linear(2048, 2048).requires_grad_(False)
        save_file(model.state_dict(), tmp_path / "base.safetensors")
        read: list[int] = []
        whole_read = LocalStore.read

        def counted(self, reads):
            read.extend(len(each.buffer) for each in reads if each.name == "base.safetensors")
            return whole_read(self, reads)

        monkeypatch.setattr(LocalStore, "read", counted)
        counts = []
        for number in range(2):
            read.clear()
            base = tmp_path / "base.safetensors"
            shardckpt.save({"model": model}, tmp_path / str(number), base=base, trainable_only=True)
            counts.append(sum(read))
        frozen = 4 * 2048 * 2049
        headers = counts[1]
        assert headers < frozen / 4
        assert 2 * frozen < counts[0] <= 2 * frozen + 4 * headers, "compared once, hashed once"

    @pytest.mark.parametrize("where", ["local", "memory"])
    def test_one_that_was_replaced_under_its_name_is_read_anew(self, where: str, tmp_path: Path) -> None:
        url = str(tmp_path / "base.safetensors") if where == "local" else f"memory://{tmp_path.name}/base.safetensors"
        model = nn.Linear(64, 64).requires_grad_(False)

        def put(change: float) -> None:
            data = {name: value + change for name, value in model.state_dict().items()}
            with fsspec.open(url, "wb") as file:
                file.write(serialize(data))

        def keep_adapters(name: str) -> None:
            shardckpt.save({"model": model}, tmp_path / name, base=url, trainable_only=True)

        put(0)
        keep_adapters("first")
        put(1)
        with pytest.raises(UsageError, match="differs from the base"):
            keep_adapters("second")
        put(0)
        keep_adapters("third")
        there = url.rpartition("/")[0]
        assert shardckpt.load(tmp_path / "third", base=there)["model"]["weight"].equal(model.weight)

    def test_it_may_be_one_file_or_a_step(self, tmp_path: Path, hf: Path) -> None:
        torch.manual_seed(0)
        net = Net()
        save_file(base_of(net), tmp_path / "base.safetensors")
        keep(tmp_path / "a", tmp_path / "base.safetensors")
        keep(tmp_path / "b", tmp_path / "a")
        shardckpt.save({"model": net}, tmp_path / "step")
        keep(tmp_path / "c", tmp_path / "step")
        expected = full(trained()[0])
        for name in "abc":
            found = shardckpt.load(tmp_path / name)["model"]
            assert all(torch.equal(found[key], value) for key, value in expected.items())
            assert not any("base" in key for key in payload_names(tmp_path / name))

    @pytest.mark.parametrize("wrapped", ["base_layer", "original_module", "token_adapter.base_layer"])
    def test_names_that_an_adapter_library_makes_are_known(self, tmp_path: Path, wrapped: str) -> None:
        save_file({"x.weight": torch.ones(3, 2)}, tmp_path / "base.safetensors")
        model: nn.Module = nn.Linear(2, 3, bias=False).requires_grad_(False)
        nn.init.ones_(model.weight)
        for name in reversed(f"base_model.model.x.{wrapped}".split(".")):
            model = nn.ModuleDict({name: model})
        shardckpt.save({"model": model}, tmp_path / "c", base=tmp_path / "base.safetensors", trainable_only=True)
        assert payload_names(tmp_path / "c") == set()

    def test_a_changed_byte_of_it_is_found_by_whoever_reads_it(self, tmp_path: Path, hf: Path) -> None:
        keep(tmp_path / "c", hf)
        file = hf / "model-00001-of-00002.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
        with pytest.raises(ChecksumError):
            shardckpt.load(tmp_path / "c")
        [problem] = shardckpt.verify(str(tmp_path / "c")).problems
        assert "hf/model-00001-of-00002.safetensors" in problem.message

    def test_what_is_not_in_it_or_of_another_type_is_refused_by_name(self, tmp_path: Path, hf: Path) -> None:
        model, _ = trained()
        with pytest.raises(UsageError, match=r"model\.layers\.0\.base\.weight: a frozen parameter is not in the base"):
            shardckpt.save({"model": model}, tmp_path / "c", base=hf, trainable_only=True)
        with pytest.raises(UsageError, match=r"found bfloat16 \[7, 33\]; expected float32 \[7, 33\]"):
            options = {"trainable_only": True, "base_key_map": RULES}
            shardckpt.save({"model": model.bfloat16()}, tmp_path / "c", base=hf, **options)
        assert sorted(os.listdir(tmp_path)) == ["hf"]

    def test_a_wider_model_with_values_of_its_own_is_refused_by_name(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        base = {name: value.bfloat16() for name, value in base_of(Net()).items()}
        save_file(base, tmp_path / "base.safetensors")
        with pytest.raises(UsageError, match=r"model\.emb\.weight: a frozen parameter differs from the base"):
            keep(tmp_path / "c", tmp_path / "base.safetensors")
        save_file({name: value.double() for name, value in base.items()}, tmp_path / "base.safetensors")
        with pytest.raises(UsageError, match=r"found float32 \[7, 33\]; expected float64 \[7, 33\]"):
            keep(tmp_path / "c", tmp_path / "base.safetensors")

    def test_a_narrow_tensor_of_the_step_itself_is_not_cast_by_a_load(self, tmp_path: Path) -> None:
        shardckpt.save({"model": nn.Linear(2, 2).bfloat16()}, tmp_path / "c")
        with pytest.raises(shardckpt.ShardckptError, match=r"dtype mismatch for model\.weight"):
            shardckpt.load({"model": nn.Linear(2, 2)}, tmp_path / "c")

    def test_a_model_of_which_nothing_is_frozen_is_refused(self, tmp_path: Path, hf: Path) -> None:
        with pytest.raises(UsageError, match="finds no frozen parameter"):
            shardckpt.save({"model": nn.Linear(2, 2)}, tmp_path / "c", base=hf, trainable_only=True)

    def test_a_model_that_has_it_loads_the_adapters_alone(self, tmp_path: Path, hf: Path) -> None:
        keep(tmp_path / "c", hf)
        os.rename(hf, tmp_path / "away")
        model, _ = trained(seed=5)
        before = full(model)
        shardckpt.load({"model": model}, tmp_path / "c", base=False, strict=False)
        saved, found = full(trained()[0]), full(model)
        for name in found:
            expected = before if ".base." in name or name.startswith("emb") else saved
            assert torch.equal(found[name], expected[name]), name
        shardckpt.load({"model": model}, tmp_path / "c", base=tmp_path / "away", strict=False)
        assert torch.equal(full(model)["emb.weight"], saved["emb.weight"])


class TestExport:
    def test_the_adapter_alone_or_all_of_it(self, tmp_path: Path, hf: Path) -> None:
        keep(tmp_path / "c", hf)
        shardckpt.consolidate(str(tmp_path / "c"), str(tmp_path / "adapter"), include=("*.down.*", "*.up.*"))
        adapter = load_file(tmp_path / "adapter" / "model.safetensors")
        assert {f"model.{name}" for name in adapter} == ADAPTERS
        shardckpt.consolidate(str(tmp_path / "c"), str(tmp_path / "all"))
        found = load_file(tmp_path / "all" / "model.safetensors")
        expected = full(trained()[0])
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())

    def test_of_a_base_that_was_moved(self, tmp_path: Path, hf: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        away = tmp_path_factory.mktemp("run")
        keep(away / "c", hf)
        os.rename(hf, tmp_path / "moved")
        with pytest.raises(IncompleteError, match="--base PATH"):
            shardckpt.consolidate(away / "c", tmp_path / "all")
        shardckpt.consolidate(away / "c", tmp_path / "all", base=str(tmp_path / "moved"))
        assert torch.equal(load_file(tmp_path / "all" / "model.safetensors")["emb.weight"], trained()[0].emb.weight)
