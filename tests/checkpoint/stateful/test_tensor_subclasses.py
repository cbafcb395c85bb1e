"""A tensor that is made from inner tensors is saved as these, with its class; what cannot be is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import shardckpt
from shardckpt import core
from shardckpt.checkpoint.load.source import CheckpointSource
from shardckpt.errors import UnsupportedError
from shardckpt.integrations import dcp
from shardckpt.plan.subclass_record import SUBCLASS, find_record
from tests.kit.models.states import refused
from tests.kit.ranks.harness import run


def int8(model: nn.Sequential) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model[0], Int8WeightOnlyConfig(version=2))


def float8(model: nn.Sequential) -> None:
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    quantize_(model[0], Float8WeightOnlyConfig())


def nf4(model: nn.Sequential) -> None:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    model[0].weight = nn.Parameter(to_nf4(model[0].weight.detach(), 64, 16), requires_grad=False)


KINDS: dict[str, tuple[Callable[[nn.Sequential], None], str]] = {
    "int8": (int8, "Int8Tensor"),
    "float8": (float8, "Float8Tensor"),
    "nf4": (nf4, "NF4Tensor"),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 6)).requires_grad_(False)


def inner(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    own: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return {name: getattr(own, name) for name in own.__tensor_flatten__()[0]}


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = inner(one), inner(other)
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def another(kind: str) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 6)).requires_grad_(False)
    KINDS[kind][0](model)
    return model


def build_layers(kind: str, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64, bias=False)) for _ in range(2))).requires_grad_(False)
    for layer in model:
        KINDS[kind][0](layer)
    return model


SAVES: dict[str, Callable[[nn.Module, Path], Any]] = {
    "save": lambda model, path: shardckpt.save({"m": model}, path),
    "async_save": lambda model, path: shardckpt.async_save({"m": model}, path).result(),
    "state dict": lambda model, path: shardckpt.save({"m": model.state_dict()}, path),
    "model_state_dict": lambda model, path: shardckpt.save({"m": shardckpt.model_state_dict(model, "SHARDED")}, path),
}

REFUSALS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "dcp": lambda model, path: dcp.save({"m": model.state_dict()}, checkpoint_id=path),
    "writer": lambda model, path: torch_dcp.save({"m": model.state_dict()}, storage_writer=dcp.StorageWriter(path)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", SAVES)
def test_every_save_keeps_a_subclass_bit_for_bit(way: str, kind: str, tmp_path: Path) -> None:
    model, other = net(), another(kind)
    KINDS[kind][0](model)
    SAVES[way](model, tmp_path / "step")
    shardckpt.load({"m": other}, tmp_path / "step", verify="live")
    assert is_equal(other[0].weight, model[0].weight)
    assert torch.equal(other[1].weight, model[1].weight)
    read = shardckpt.load(tmp_path / "step")["m"]["0.weight"]
    assert type(read) is type(model[0].weight.data)
    assert is_equal(read, model[0].weight)
    probe = torch.randn(3, 64)
    assert torch.equal(other(probe), model(probe))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["save", "state dict"])
def test_two_weights_of_one_shape_keep_their_own_elements(form: str, kind: str, tmp_path: Path) -> None:
    model, other = build_layers(kind, 0), build_layers(kind, 1)
    SAVES[form](model, tmp_path / "step")
    shardckpt.load({"m": other}, tmp_path / "step")
    for own, loaded in zip(model, other, strict=True):
        assert is_equal(loaded[0].weight, own[0].weight)


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpointer_keeps_a_subclass_over_several_steps(kind: str, tmp_path: Path) -> None:
    model, other = net(), another(kind)
    KINDS[kind][0](model)
    run = shardckpt.Checkpointer(tmp_path, dedup=True)
    run.save(1, {"m": other})
    run.save(2, {"m": model})
    run.save(3, {"m": model})
    assert run.restore({"m": other}) == 3
    assert is_equal(other[0].weight, model[0].weight)
    assert shardckpt.verify(f"{tmp_path}@2").ok


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_keeps_its_own_subclass(kind: str, tmp_path: Path) -> None:
    model, held = net(), shardckpt.PerRank({"w": None})
    KINDS[kind][0](model)
    shardckpt.save({"r": shardckpt.PerRank({"w": model[0].weight.data})}, tmp_path / "step")
    shardckpt.load({"r": held}, tmp_path / "step")
    assert is_equal(held.held["w"], model[0].weight)
    other = another(kind)
    shardckpt.load({"r": shardckpt.PerRank({"w": other[0].weight})}, tmp_path / "step")
    assert is_equal(other[0].weight, model[0].weight), "filled in place"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", REFUSALS)
def test_a_save_by_torch_refuses_a_subclass_by_name(way: str, kind: str, tmp_path: Path) -> None:
    model = net()
    put, name = KINDS[kind]
    put(model)
    with pytest.raises((UnsupportedError, torch_dcp.CheckpointException), match=rf"0\.weight.*{name}"):
        REFUSALS[way](model, tmp_path / "step")
    assert not list(tmp_path.rglob("COMMIT"))


LOADS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "dcp": lambda model, path: dcp.load({"m": model.state_dict()}, checkpoint_id=path),
    "reader": lambda model, path: torch_dcp.load({"m": model.state_dict()}, storage_reader=dcp.StorageReader(path)),
}


@pytest.mark.parametrize("way", LOADS)
def test_a_load_by_torch_refuses_a_subclass_by_name(way: str, tmp_path: Path) -> None:
    model, other = net(), another("int8")
    int8(model)
    before = {name: value.clone() for name, value in inner(other[0].weight).items()}
    shardckpt.save({"m": model}, tmp_path / "step")
    text = r"m\.0\.weight.*Int8Tensor.*shardckpt\.load"
    for each in (other, net()):
        with pytest.raises((UnsupportedError, torch_dcp.CheckpointException), match=text):
            LOADS[way](each, tmp_path / "step")
    assert all(torch.equal(value, before[name]) for name, value in inner(other[0].weight).items())
    LOADS[way](nn.Sequential(nn.Identity(), *other[1:]), tmp_path / "step")
    assert torch.equal(other[1].bias, model[1].bias)


@pytest.mark.parametrize("kind", KINDS)
def test_a_capture_in_memory_keeps_a_subclass_bit_for_bit(kind: str, tmp_path: Path) -> None:
    def body(rank: int, world: int) -> bool:
        model, other = net(), another(kind)
        KINDS[kind][0](model)
        options: dict[str, Any] = {"save_every": 100, "tiers": [shardckpt.PeerMemory(every=1)]}
        saved = shardckpt.Checkpointer(tmp_path / "run", **options)
        saved.save(1, {"m": model})
        saved.wait()
        assert shardckpt.Checkpointer(tmp_path / "run", **options).restore({"m": other}) == 1
        return is_equal(other[0].weight, model[0].weight)

    assert run(1, body) == [True]


FORMS = ["FULL", "SHARDED", "LOCAL"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", FORMS)
def test_a_state_dict_of_an_unsharded_model_keeps_a_subclass(form: str, kind: str) -> None:
    model, other = net(), another(kind)
    KINDS[kind][0](model)
    shardckpt.load_model_state_dict(other, shardckpt.model_state_dict(model, form))
    assert is_equal(other[0].weight, model[0].weight)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_with_another_class_is_refused_and_changes_nothing(kind: str) -> None:
    model, other = net(), net()
    KINDS[kind][0](model)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with torch.no_grad():
        model[1].bias.add_(1)
    with pytest.raises(shardckpt.ShardckptError, match=rf"0\.weight: it is a {KINDS[kind][1]}.*plain tensor"):
        shardckpt.load_model_state_dict(other, shardckpt.model_state_dict(model))
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize("fsdp", ["torch", "engine"])
@pytest.mark.parametrize("is_on_rank0", [True, False])
def test_a_full_state_is_refused_for_shards_of_a_subclass_on_all_ranks(is_on_rank0: bool, fsdp: str) -> None:
    def body(rank: int, world: int) -> str:
        state = make_nf4_net(0, world, lambda *_, **__: None).state_dict() if not (rank and is_on_rank0) else {}
        return refused(shardckpt.load_model_state_dict, make_nf4_net(1, world, FSDP[fsdp]), state)

    for told in run(2, body):
        assert "0.weight: a FULL state cannot be divided among shards of the class NF4Tensor" in told


def test_a_buffer_and_a_shared_parameter_keep_their_class(tmp_path: Path) -> None:
    def build(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        model = net() if not seed else another("nf4")
        if not seed:
            nf4(model)
        model.append(nn.Linear(64, 64, bias=False))
        model[2].weight = model[0].weight
        model.register_buffer("scale", model[0].weight.detach())
        return model

    model, other = build(0), build(1)
    shardckpt.save({"m": model}, tmp_path / "step")
    shardckpt.load({"m": other}, tmp_path / "step")
    assert other[2].weight is other[0].weight
    assert is_equal(other[0].weight, model[0].weight)
    assert is_equal(other.scale, model.scale)
    read = shardckpt.load(tmp_path / "step")["m"]
    assert is_equal(read["2.weight"], model[0].weight)
    names = shardckpt.open(tmp_path / "step").keys()
    assert "m.2.weight.nf4" in names and len(names) == 3 * (5 + 1) + 2


@pytest.mark.parametrize("kind", KINDS)
def test_different_saved_weights_are_refused_for_one_shared_parameter(kind: str, tmp_path: Path) -> None:
    model, tied = build_layers(kind, 0), build_layers(kind, 1)
    tied[1][0].weight = tied[0][0].weight
    before = {name: value.clone() for name, value in inner(tied[0][0].weight).items()}
    shardckpt.save({"m": model}, tmp_path / "step")
    with pytest.raises(shardckpt.ShardckptError, match=r"m\.0\.0\.weight and m\.1\.0\.weight are one parameter"):
        shardckpt.load({"m": tied}, tmp_path / "step")
    assert all(torch.equal(value, before[name]) for name, value in inner(tied[0][0].weight).items())
    model[1][0].weight = model[0][0].weight
    shardckpt.save({"m": model}, tmp_path / "tied")
    shardckpt.load({"m": tied}, tmp_path / "tied")
    assert is_equal(tied[1][0].weight, model[0][0].weight)


@pytest.mark.parametrize("kind", KINDS)
def test_an_average_that_follows_a_quantized_model_is_saved(kind: str, tmp_path: Path) -> None:
    model, other = net(), another(kind)
    KINDS[kind][0](model)
    averages = {name: each.detach() for name, each in other.named_parameters()}
    shardckpt.save({"m": model, "ema": shardckpt.Variant(averages, of=model)}, tmp_path / "step")
    assert is_equal(shardckpt.load(tmp_path / "step")["ema"]["0.weight"], other[0].weight)


MISFITS: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "plain": (lambda model: None, r"m\.0\.weight: it was saved as a Int8Tensor, and this is a plain tensor"),
    "float8": (float8, r"m\.0\.weight: it was saved as a Int8Tensor, and this is a Float8Tensor"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_load_into_another_class_is_refused_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    model, other = net(), net()
    int8(model)
    put, text = MISFITS[kind]
    put(other)
    other[1].bias.zero_()
    shardckpt.save({"m": model}, tmp_path / "step")
    with pytest.raises(shardckpt.ShardckptError, match=text):
        shardckpt.load({"m": other}, tmp_path / "step")
    assert not other[1].bias.any()
    shardckpt.load({"m": other}, tmp_path / "step", include=["m.1.*"])
    assert torch.equal(other[1].bias, model[1].bias)


def test_a_load_refuses_a_subclass_with_other_blocks(tmp_path: Path) -> None:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    model, other = net(), net()
    nf4(model)
    other[0].weight = nn.Parameter(to_nf4(other[0].weight.detach(), 32, 16), requires_grad=False)
    before = inner(other[0].weight)["quantized_data"].clone()
    shardckpt.save({"m": model}, tmp_path / "step")
    with pytest.raises(shardckpt.ShardckptError, match=r"NF4Tensor differs in block_size: found 64, expected 32"):
        shardckpt.load({"m": other}, tmp_path / "step")
    assert torch.equal(inner(other[0].weight)["quantized_data"], before)


PARTS = {"wrapper": ("int8", r"m\.0\.weight.*'m\.0\.weight'"), "plain": ("plain", r"m\.0\.weight.*m\.0\.weight\.scale")}


@pytest.mark.parametrize("kind", PARTS)
@pytest.mark.parametrize("strict", [True, False])
def test_a_pattern_that_matches_a_part_of_a_weight_is_refused(strict: bool, kind: str, tmp_path: Path) -> None:
    put, text = PARTS[kind]
    model, other = net(), net() if put == "plain" else another(put)
    int8(model)
    shardckpt.save({"m": model}, tmp_path / "step")
    for include in (["*scale"], ["*scale", "m.1.*"]):
        with pytest.raises(shardckpt.ShardckptError, match=rf"`include`.*{text}"):
            shardckpt.load({"m": other}, tmp_path / "step", include=include, strict=strict)
    if put != "plain":
        shardckpt.load({"m": other}, tmp_path / "step", include=["*scale", "m.0.weight"])
        assert is_equal(other[0].weight, model[0].weight)


@pytest.mark.parametrize("strict", [True, False])
def test_a_weight_without_one_of_its_inner_tensors_is_refused(strict: bool, tmp_path: Path) -> None:
    model, other = net(), another("int8")
    int8(model)
    before = {name: value.clone() for name, value in inner(other[0].weight).items()}
    shardckpt.save({"m": model}, tmp_path / "step")
    with pytest.raises(shardckpt.ShardckptError, match=r"missing: m\.0\.weight\.scale"):
        shardckpt.load({"m": other}, tmp_path / "step", key_map={"^scale$": "other"}, strict=strict)
    assert all(torch.equal(value, before[name]) for name, value in inner(other[0].weight).items())


def _cut(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda saved: saved.update({name: saved[name][..., :-2].clone()})


def _with_record(**fields: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda saved: saved.update({SUBCLASS: json.dumps({**json.loads(saved[SUBCLASS]), **fields})})


DAMAGE: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "shape": ("int8", _with_record(shape=[64, 32])),
    "float8 shape": ("float8", _with_record(shape=[64, 32])),
    "nf4 shape": ("nf4", _with_record(shape=[64, 32])),
    "8-bit shape": ("8-bit", _with_record(shape=[64, 32])),
    "4-bit shape": ("4-bit", _with_record(shape=[64, 32])),
    "dimensions": ("nf4", _with_record(shape=[])),
    "dtype": ("int8", _with_record(dtype="bfloat16")),
    "dtype of nothing": ("nf4", _with_record(dtype="nothing")),
    "no scale": ("int8", lambda saved: saved.pop("scale")),
    "other inner tensor": ("int8", lambda saved: saved.update(other=torch.zeros(2))),
    "scales": ("int8", lambda saved: saved.update(scale=saved["scale"][:-1].clone())),
    "nf4 scales": ("nf4", _cut("quantized_scalers")),
    "nf4 codes": ("nf4", _cut("quantized_data")),
    "8-bit scales": ("8-bit", _cut("scale")),
    "4-bit codes": ("4-bit", _cut("codes")),
    "type of codes": ("int8", lambda saved: saved.update(qdata=saved["qdata"].float())),
}


def moment(kind: str) -> torch.Tensor:
    from torchao.optim.subclass_4bit import OptimState4bit
    from torchao.optim.subclass_8bit import OptimState8bit

    tensor: torch.Tensor = (OptimState8bit if kind == "8-bit" else OptimState4bit).zeros((64, 64), block_size=128)
    return tensor


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_record_that_contradicts_its_inner_tensors_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    kind, change = DAMAGE[damage]
    tensor = another(kind)[0].weight.detach() if kind in KINDS else moment(kind)
    shardckpt.save({"w": tensor}, tmp_path / "good")
    with torch.no_grad():
        assert is_equal(shardckpt.load(tmp_path / "good")["w"], tensor)
    saved: dict[str, Any] = {**inner(tensor), SUBCLASS: _read_record(tmp_path / "good")}
    change(saved)
    shardckpt.save({"m": {"0.weight": saved}}, tmp_path / "bad")
    with pytest.raises(UnsupportedError, match=r"m\.0\.weight: .*cannot be built from its inner tensors"):
        shardckpt.load(tmp_path / "bad")


def _read_record(path: Path) -> str:
    manifest = CheckpointSource(str(path)).manifest
    return str(manifest.objects[("w", SUBCLASS)].value)


def test_a_load_refuses_a_plain_step_for_a_subclass(tmp_path: Path) -> None:
    model = net()
    shardckpt.save({"m": model}, tmp_path / "step")
    nf4(model)
    with pytest.raises(shardckpt.ShardckptError, match=r"m\.0\.weight: it was saved as a plain tensor.*NF4Tensor"):
        shardckpt.load({"m": model}, tmp_path / "step")


def test_a_class_that_is_unknown_here_is_loaded_in_place_and_read_as_inner_tensors(tmp_path: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    tensor, other = TwoTensor(torch.arange(4.0), torch.arange(4.0) + 1), TwoTensor(torch.zeros(4), torch.zeros(4))
    shardckpt.save({"t": tensor}, tmp_path / "step")
    shardckpt.load({"t": other}, tmp_path / "step")
    assert torch.equal(other.a, tensor.a) and torch.equal(other.b, tensor.b)
    read = shardckpt.load(tmp_path / "step")["t"]
    assert torch.equal(read["b"], tensor.b)
    record = find_record(read)
    assert record is not None and record.kind == "TwoTensor"


def test_a_context_that_is_not_data_is_refused_by_name(tmp_path: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    class WithCode(TwoTensor):
        def __tensor_flatten__(self) -> Any:
            return ["a", "b"], {"function": print}

    with pytest.raises(UnsupportedError, match=r"t: context of WithCode.*plain values.*builtin_function"):
        shardckpt.save({"t": WithCode(torch.zeros(2), torch.zeros(2))}, tmp_path / "step")
    assert not list(tmp_path.rglob("COMMIT"))


def make_nf4_net(seed: int, world: int, fsdp: Any) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 6)).requires_grad_(False)
    nf4(model)
    fsdp(model, mesh=init_device_mesh("cpu", (world,)))
    return model


FSDP = {"torch": fully_shard, "engine": core.fully_shard}


@pytest.mark.parametrize("fsdp", FSDP)
@pytest.mark.parametrize("form", ["module", "state dict"])
def test_shards_of_a_subclass_are_loaded_on_any_number_of_ranks(fsdp: str, form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 6)).requires_grad_(False)
    nf4(whole)
    whole_parts = inner(whole[0].weight)

    def save(rank: int, world: int) -> None:
        model = make_nf4_net(0, world, FSDP[fsdp])
        shardckpt.save({"m": model if form == "module" else model.state_dict()}, tmp_path / "step")

    def load(rank: int, world: int) -> dict[str, torch.Tensor]:
        model = make_nf4_net(1, world, FSDP[fsdp])
        shardckpt.load({"m": model if form == "module" else model.state_dict()}, tmp_path / "step")
        return inner(model[0].weight)

    run(2, save)
    read = shardckpt.load(tmp_path / "step")["m"]["0.weight"]
    assert is_equal(read, whole[0].weight)
    for world in (1, 2, 3):
        parts = run(world, load)
        for name in ("quantized_data", "quantized_scalers", "quantization_factor"):
            assert torch.equal(torch.cat([part[name] for part in parts]), whole_parts[name]), (world, name)
        assert all(torch.equal(part["scaler_mean"], whole_parts["scaler_mean"]) for part in parts)


def test_a_shard_that_divides_a_block_is_refused_by_name_on_all_ranks(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> str:
        from torchao.quantization import Int8Tensor

        mesh = init_device_mesh("cpu", (world,))
        weight = Int8Tensor(torch.zeros(10, 8, dtype=torch.int8), torch.ones(3, 1), [4, 8], torch.float32)
        meta = TensorMeta(torch.Size([20, 8]), (8, 1), torch.float32)
        state = {"w": DTensor(weight, DTensorSpec(mesh, (Shard(0),), meta), requires_grad=False)}
        return refused(shardckpt.save, state, tmp_path / "step")

    for told in run(2, body):
        assert "w.scale" in told and "rows" not in told
        assert "must not divide a block" in told and "multiples of 4" in told, told
    assert not list(tmp_path.rglob("COMMIT"))


@pytest.mark.parametrize("fsdp", FSDP)
@pytest.mark.parametrize("form", ["SHARDED", "LOCAL"])
def test_a_state_dict_keeps_shards_of_a_subclass(form: str, fsdp: str) -> None:
    def body(rank: int, world: int) -> bool:
        model, other = (make_nf4_net(seed, world, FSDP[fsdp]) for seed in (0, 1))
        shardckpt.load_model_state_dict(other, shardckpt.model_state_dict(model, form))
        return is_equal(other[0].weight, model[0].weight)

    assert run(2, body) == [True, True]


@pytest.mark.parametrize("world", [1, 2])
def test_the_full_state_of_a_sharded_subclass_is_refused_by_name_on_all_ranks(world: int) -> None:
    def body(rank: int, world: int) -> None:
        model = net()
        nf4(model)
        core.fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        with pytest.raises(UnsupportedError, match=r"0\.weight.*FULL.*NF4Tensor.*SHARDED"):
            shardckpt.model_state_dict(model)
        assert isinstance(shardckpt.model_state_dict(model, "SHARDED")["0.weight"], DTensor)

    run(world, body)


def test_a_local_tensor_that_is_still_on_its_way_is_saved_once_it_is_there(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> str:
        mesh = init_device_mesh("cpu", (world,))
        rows = distribute_tensor(torch.arange(8.0).view(4, 2), mesh, [Shard(0)])
        gathered = rows.redistribute(placements=[Replicate()], async_op=True)
        name = type(gathered._local_tensor).__name__
        shardckpt.save({"rows": gathered}, tmp_path / "step")
        return name

    assert run(2, body) == ["AsyncCollectiveTensor"] * 2
    assert torch.equal(shardckpt.load(tmp_path / "step")["rows"], torch.arange(8.0).view(4, 2))


class Named(torch.Tensor):
    """A subclass with its elements in its own memory."""


def test_a_subclass_with_its_elements_in_its_own_memory_is_saved_and_filled(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.named = nn.Buffer(torch.ones(3).as_subclass(Named))
    state = {"m": model, "t": torch.ones(2).as_subclass(Named)}
    shardckpt.save(state, tmp_path / "step")
    with torch.no_grad():
        model.named.zero_()
        state["t"].zero_()
    shardckpt.load(state, tmp_path / "step")
    assert model.named.all()
    assert state["t"].all()
