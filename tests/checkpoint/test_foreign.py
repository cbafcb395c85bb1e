"""Checkpoints of other tools go straight into models and optimizers, sharded ones too."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817  (as everybody calls it)

import shardckpt
from shardckpt.checkpoint.load.source import allocate
from shardckpt.errors import IncompleteError, NoMemoryError
from shardckpt.manifest import TensorEntry
from shardckpt.plan.optim.optim_keys import flatten, to_names
from tests.kit.models.states import FRONT_ENDS, Net, differing, looked_at, step
from tests.kit.ranks.harness import mark, run, since

ADAPTER = "adapter_model.safetensors"


def trained(seed: int = 0, steps: int = 2):
    torch.manual_seed(seed)
    net = Net((1,))
    optim = torch.optim.AdamW(net.parameters(), lr=0.01)
    for number in range(steps):
        step(net, optim, number)
    return net, optim


def load_on(face: str, path: Path, model_key: str = "model", optim_key: str = "optim"):
    """Return what a rank has after it loaded a checkpoint into a model that never ran, and the largest message."""

    def body(rank: int, world: int):
        torch.manual_seed(8)
        model = FRONT_ENDS[face](Net((1,)))
        optim = torch.optim.AdamW(model.parameters(), lr=9.0)
        start = mark()
        state = {model_key: model, optim_key: optim, "epoch": 0}
        shardckpt.load(state, path)
        sent = max((call.sent for call in since(start)), default=0)
        return state["epoch"], looked_at(model, optim), sent

    return body


def compared(found, expected) -> list[str]:
    return [*differing(found[0], expected[0]), *differing(found[1], expected[1])]


@pytest.mark.parametrize("face", ["flat", "orig", "in place", "torch in place", "ddp"])
def test_a_file_of_torch_save_with_numbers_for_parameters(tmp_path: Path, face: str) -> None:
    net, optim = trained()
    torch.save({"model": net.state_dict(), "optimizer": optim.state_dict(), "epoch": 3}, tmp_path / "last.pt")
    expected = looked_at(net, optim)
    for epoch, found, sent in run(2, load_on(face, tmp_path / "last.pt", optim_key="optimizer")):
        assert epoch == 3 and compared(found, expected) == [] and sent < 4096


@pytest.mark.parametrize("form", ["numbers", "names", "flattened"])
def test_an_optimizer_of_torchs_wrapper_however_it_was_saved(tmp_path: Path, form: str) -> None:
    net, optim = trained()
    names = [name for name, _ in net.named_parameters()]
    state = to_names(optim.state_dict(), [names])
    saved = {"numbers": optim.state_dict(), "names": state, "flattened": flatten(state)}[form]
    torch.save({"model": net.state_dict(), "optim": saved}, tmp_path / "last.pt")
    expected = looked_at(net, optim)

    def body(rank: int, world: int):
        model = FSDP(Net((1,)), device_id=torch.device("cpu"), use_orig_params=True)
        other = torch.optim.AdamW(model.parameters(), lr=9.0)
        shardckpt.load({"model": model, "optim": other}, tmp_path / "last.pt")
        return looked_at(model, other)

    for found in run(2, body):
        assert compared(found, expected) == []


def test_an_optimizer_by_itself_keeps_its_numbers(tmp_path: Path) -> None:
    _, optim = trained()
    torch.save({"optimizer": optim.state_dict(), "epoch": 3}, tmp_path / "last.pt")
    other = torch.optim.AdamW(Net((1,)).parameters(), lr=9.0)
    shardckpt.load({"optimizer": other, "epoch": 0}, tmp_path / "last.pt")
    assert other.param_groups[0]["lr"] == optim.param_groups[0]["lr"]
    nest = shardckpt.load(tmp_path / "last.pt")["optimizer"]
    for found in (other.state_dict(), nest):
        assert list(found["state"]) == list(optim.state_dict()["state"])
        for number, slots in optim.state_dict()["state"].items():
            assert differing(found["state"][number], slots) == []


@pytest.mark.parametrize("face", ["flat", "in place", "torch in place"])
@pytest.mark.parametrize("flattened", [False, True])
def test_a_folder_of_torchs_distributed_checkpoint(tmp_path: Path, face: str, flattened: bool) -> None:
    """The optimizer is nested, or flattened into one key a value, as torchtitan saves it: each rank takes its part."""

    def save_it(rank: int, world: int):
        torch.manual_seed(0)
        model = FRONT_ENDS["torch in place"](Net((1,)))
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        step(model, optim)
        options = StateDictOptions(flatten_optimizer_state_dict=flattened)
        weights, moments = get_state_dict(model, optim, options=options)
        dcp.save({"model": weights, "optim": moments, "epoch": 3}, checkpoint_id=tmp_path / "dcp")
        return looked_at(model, optim)

    expected = run(2, save_it)[0]
    for epoch, found, _ in run(3, load_on(face, tmp_path / "dcp")):
        assert epoch == 3 and compared(found, expected) == []


@pytest.mark.parametrize("face", ["flat", "in place"])
def test_rank_files_of_torchs_fully_shard(tmp_path: Path, face: str) -> None:
    """Each of two ranks saved its DTensors by itself; three ranks, of another wrapper, take what each needs."""

    def save_it(rank: int, world: int):
        torch.manual_seed(0)
        model = FRONT_ENDS["torch in place"](Net((1,)))
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        step(model, optim)
        state = {"model": model.state_dict(), "optim": optim.state_dict(), "epoch": 3}
        torch.save(state, tmp_path / f"checkpoint_rank{rank}.pt")
        return looked_at(model, optim)

    expected = run(2, save_it)[0]
    for epoch, found, _ in run(3, load_on(face, tmp_path)):
        assert epoch == 3 and compared(found, expected) == []


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod."])
def test_a_hugging_face_folder_whatever_the_names_were_wrapped_in(tmp_path: Path, prefix: str) -> None:
    net, _ = trained()
    save_file({prefix + k: v.contiguous() for k, v in net.state_dict().items()}, tmp_path / "model.safetensors")
    for target in (tmp_path, tmp_path / "model.safetensors"):
        model = Net((1,))
        shardckpt.load({"model": model}, target)
        assert differing(dict(model.state_dict()), dict(net.state_dict())) == []


def test_a_bare_state_dict_goes_into_a_bare_model(tmp_path: Path) -> None:
    net, _ = trained()
    torch.save(net.state_dict(), tmp_path / "net.pt")
    model, tensors = Net((1,)), {name: torch.zeros_like(value) for name, value in net.state_dict().items()}
    shardckpt.load(model, tmp_path / "net.pt")
    shardckpt.load(tensors, tmp_path / "net.pt")
    assert differing(dict(model.state_dict()), dict(net.state_dict())) == []
    assert differing(tensors, dict(net.state_dict())) == []


def test_without_a_state_it_is_the_nest_that_was_saved(tmp_path: Path) -> None:
    net, optim = trained()
    saved = {"model": net.state_dict(), "optim": optim.state_dict(), "list": [torch.ones(2), 3], "n": None}
    torch.save(copy.deepcopy(saved), tmp_path / "last.pt")
    found = shardckpt.load(tmp_path / "last.pt")
    assert differing(found["model"], saved["model"]) == []
    assert found["optim"]["param_groups"] == saved["optim"]["param_groups"]
    assert torch.equal(found["optim"]["state"][0]["exp_avg"], saved["optim"]["state"][0]["exp_avg"])
    assert torch.equal(found["list"][0], torch.ones(2)) and found["list"][1] == 3 and found["n"] is None
    assert torch.equal(shardckpt.open(tmp_path / "last.pt")["model.first.weight"][1:3], net.first.weight[1:3])


def test_what_does_not_fit_is_listed_as_for_our_own(tmp_path: Path) -> None:
    net, optim = trained()
    torch.save({"model": net.state_dict(), "optim": optim.state_dict(), "epoch": 3}, tmp_path / "last.pt")
    with pytest.raises(shardckpt.errors.MismatchError) as caught:
        shardckpt.load({"model": nn.Linear(5, 3)}, tmp_path / "last.pt")
    for part in ("missing: model.weight", "unexpected: model.first.weight", "unexpected: epoch"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("config", "other", "is_told"), [(True, "renamed", True), (False, "renamed", False), (True, "0.bias", False)]
)
def test_other_names_beside_a_config_are_told_to_be_those_of_transformers(
    config: bool, other: str, is_told: bool, tmp_path: Path
) -> None:
    """Not without a config, nor where tensors are missing alone."""
    names = {"0.weight": torch.zeros(2, 2), other: torch.zeros(2)}
    save_file({name: value for name, value in names.items() if name != "0.bias"}, tmp_path / "model.safetensors")
    if config:
        (tmp_path / "config.json").write_text("{}")
    with pytest.raises(shardckpt.errors.MismatchError, match=r"missing: model\.0\.bias") as caught:
        shardckpt.load({"model": nn.Sequential(nn.Linear(2, 2))}, tmp_path)
    assert ("save_pretrained of transformers" in str(caught.value)) == is_told


def adapted(*adapters: str) -> nn.Module:
    """A model with the names that PEFT gives, which cannot train."""
    names = ("base_layer.weight", *(f"lora_A.{name}.weight" for name in adapters), "modules_to_save.default.bias")
    model = nn.Module()
    for name in (*names, "original_module.bias"):
        *modules, last = f"base_model.model.x.{name}".split(".")
        at = model
        for module in modules:
            if not hasattr(at, module):
                at.add_module(module, nn.Module())
            at = getattr(at, module)
        at.register_parameter(last, nn.Parameter(torch.zeros(2)))
    return model


@pytest.mark.parametrize("state", ["model", "in a dict"])
def test_an_adapter_of_peft_goes_into_the_model_whose_names_have_that_of_the_adapter(
    tmp_path: Path, state: str
) -> None:
    stored = {"x.lora_A.weight": torch.ones(2), "x.bias": torch.full((2,), 2.0)}
    save_file({f"base_model.model.{name}": value for name, value in stored.items()}, tmp_path / ADAPTER)
    model = adapted("default")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardckpt.load(model if state == "model" else {"net": model}, tmp_path, strict=False)
    found = {name.removeprefix("base_model.model.x."): value.tolist() for name, value in model.named_parameters()}
    assert found == {
        "base_layer.weight": [0, 0],
        "lora_A.default.weight": [1, 1],
        "modules_to_save.default.bias": [2, 2],
        "original_module.bias": [0, 0],
    }


def test_a_file_of_one_adapter_fills_none_of_several(tmp_path: Path) -> None:
    save_file({"base_model.model.x.lora_A.weight": torch.ones(2)}, tmp_path / ADAPTER)
    model = adapted("default", "other")
    with pytest.raises(shardckpt.errors.MismatchError, match=r"unexpected: base_model\.model\.x\.lora_A\.weight"):
        shardckpt.load({"model": model}, tmp_path)
    with pytest.warns(UserWarning, match="nothing was loaded into model: the checkpoint has none of its names"):
        shardckpt.load({"model": model}, tmp_path, strict=False)
    assert not any(value.any() for value in model.parameters())


@pytest.mark.parametrize("include", [None, ["other"]])
def test_a_load_without_strictness_that_finds_no_name_of_a_model_warns(tmp_path: Path, include) -> None:
    """Not where the model was not to be loaded."""
    torch.save({"old": nn.Linear(2, 2).state_dict(), "other": 3}, tmp_path / "last.pt")
    state = {"model": nn.Sequential(nn.Linear(2, 2)), "other": 0}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardckpt.load(state, tmp_path / "last.pt", strict=False, include=include)
    told = ["nothing was loaded into model: the checkpoint has none of its names"] if include is None else []
    assert [str(each.message) for each in caught] == told
    assert state["other"] == 3


def test_code_in_a_file_never_runs(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self):
            return (Path(tmp_path / "ran").touch, ())

    torch.save({"model": {"w": torch.ones(2)}, "x": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(shardckpt.ShardckptError):
        shardckpt.load(tmp_path / "evil.pt")
    assert not (tmp_path / "ran").exists()


class TestShapesThatDoNotFitIntoMemory:
    @pytest.mark.parametrize("read", [shardckpt.load, lambda path: shardckpt.open(path)["w"][:]], ids=["load", "open"])
    def test_elements_that_no_file_holds_are_missed_before_memory_is_taken(self, read, tmp_path):
        dcp.save({"w": torch.zeros(4, 2)}, checkpoint_id=tmp_path)
        metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
        metadata.state_dict_metadata["w"].size = torch.Size([1 << 40, 4])
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(IncompleteError, match="w"):
            read(tmp_path)

    def test_memory_that_cannot_be_had_is_told_with_the_name_and_the_bytes(self):
        with pytest.raises(
            NoMemoryError, match=r"^model.w: .*found 17592186044416 bytes for float32 \[1099511627776, 4\]"
        ):
            allocate(TensorEntry(("model", "w"), (1 << 40, 4), "float32", ()), (1 << 40, 4))


def test_arrays_in_a_pickle_fill_the_arrays_of_a_state(tmp_path: Path) -> None:
    generator = np.random.RandomState(7).get_state()
    torch.save({"w": torch.ones(2), "a": np.arange(3), "big": np.ones(4), "rng": generator}, tmp_path / "f.pt")
    array = np.zeros(3, dtype=np.int64)
    state = {"w": torch.zeros(2), "a": array, "big": np.zeros(2), "rng": np.random.RandomState(8).get_state()}
    shardckpt.load(state, tmp_path / "f.pt")
    assert state["a"] is array and array.tolist() == [0, 1, 2]
    assert state["big"].tolist() == [1.0] * 4
    assert np.array_equal(state["rng"][1], generator[1]) and state["rng"][2:] == generator[2:]


def test_a_list_of_a_pickle_does_not_take_the_place_of_tensors(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "a": [1, 2], "n": 3}, tmp_path / "f.pt")
    with pytest.raises(shardckpt.errors.MismatchError, match=r"a\.0"):
        shardckpt.load({"w": torch.zeros(2), "a": [torch.zeros(1), 2], "n": 1}, tmp_path / "f.pt")
    with pytest.raises(shardckpt.errors.MismatchError, match="kind mismatch for n: the checkpoint has no tensor there"):
        shardckpt.load({"w": torch.zeros(2), "a": [1], "n": np.zeros(1)}, tmp_path / "f.pt")


def test_a_load_without_a_state_returns_the_arrays_of_a_pickle(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "a": np.arange(3), "s": np.float64(1.5)}, tmp_path / "f.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = shardckpt.load(tmp_path / "f.pt")
    assert found["a"].tolist() == [0, 1, 2] and type(found["s"]) is np.float64


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no float4")
class TestFloat4:
    """Pairs of numbers of half a byte."""

    @pytest.fixture
    def pairs(self) -> torch.Tensor:
        return torch.arange(6, dtype=torch.uint8).reshape(2, 3).view(torch.float4_e2m1fn_x2)

    @pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp", "native"])
    def test_float4_is_read_from_every_format(self, kind: str, pairs: torch.Tensor, tmp_path: Path) -> None:
        path = tmp_path / ("a.safetensors" if kind == "safetensors" else "a.pt" if kind == "torch" else "a")
        if kind == "safetensors":
            save_file({"t": pairs}, path)
        elif kind == "torch":
            torch.save({"t": pairs}, path)
        elif kind == "dcp":
            dcp.save({"t": pairs}, checkpoint_id=path, no_dist=True)
        else:
            shardckpt.save({"t": pairs}, path)
        into = torch.zeros_like(pairs.view(torch.uint8)).view(pairs.dtype)
        shardckpt.load({"t": into}, path)
        for found in (into, shardckpt.load(path)["t"], shardckpt.open(path)["t"][...]):
            assert found.dtype == pairs.dtype and torch.equal(found.view(torch.uint8), pairs.view(torch.uint8))

    @pytest.mark.parametrize("source", ["safetensors", "torch", "native"])
    @pytest.mark.parametrize("to", ["safetensors", "torch", "dcp", "native"])
    def test_float4_is_converted_both_ways(self, source: str, to: str, pairs: torch.Tensor, tmp_path: Path) -> None:
        first, second = tmp_path / "first.safetensors", tmp_path / ("second.pt" if to == "torch" else "second")
        save_file({"t": pairs}, first)
        if source != "safetensors":
            shardckpt.consolidate(first, first := tmp_path / ("first.pt" if source == "torch" else "first"), to=source)
        shardckpt.consolidate(first, second, to=to)
        found = {"t": torch.zeros(2, 3, dtype=torch.uint8).view(pairs.dtype)}
        if to == "safetensors":
            found = load_file(second / "model.safetensors")
        elif to == "torch":
            found = torch.load(second)
        elif to == "dcp":
            dcp.load({"model": found}, checkpoint_id=second, no_dist=True)
        else:
            shardckpt.load({"model": found}, second)
        assert found["t"].dtype == pairs.dtype and torch.equal(found["t"].view(torch.uint8), pairs.view(torch.uint8))
