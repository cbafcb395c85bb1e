"""A process that saves and loads alone: every kind of object comes back as it was, or is refused by its name."""

from __future__ import annotations

import copy
import json
import os
import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardckpt
from shardckpt.dtypes import SAFETENSORS_NAMES
from shardckpt.errors import (
    AmbiguousError,
    ChecksumError,
    ShardckptError,
    StateDictError,
    TargetExistsError,
    UnsupportedError,
    UsageError,
)
from shardckpt.native.payload import BLOCK_BYTES
from shardckpt.storage.local import LocalStore


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(self.norm(self.embed(x)))

    def get_extra_state(self) -> dict:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict) -> None:
        self.calls = state["calls"]


class Counted:
    def __init__(self, n: int) -> None:
        self.n = n

    def state_dict(self) -> dict:
        return {"n": self.n}

    def load_state_dict(self, state: dict) -> None:
        self.n = state["n"]


def trained(seed: int = 0, optimizer=torch.optim.AdamW, lr=0.1, steps: int = 2, **settings):
    torch.manual_seed(seed)
    net = Net()
    optim = optimizer(net.parameters(), lr=copy.deepcopy(lr), **settings)
    for _ in range(steps):
        step(net, optim)
    return net, optim


def step(net: nn.Module, optim) -> torch.Tensor:
    def loss() -> torch.Tensor:
        optim.zero_grad()
        found = net(torch.randint(6, (5,))).square().mean()
        found.backward()
        return found

    return optim.step(loss)


def equal(one, other) -> bool:
    """Tell whether two nests are the same, types, bits and containers included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bytes_of(one) == bytes_of(other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other and repr(one) == repr(other)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


PLAIN = {
    "none": None,
    "flags": [True, False],
    "int": 1 << 70,
    "floats": [0.1, float("inf"), -0.0],
    "text": "grüße",
    "bytes": b"\x00\xff",
    "tuple": (1, (2, [3])),
    "empty": [{}, [], ()],
    "set": {1, 2},
    "complex": 1 + 2j,
    "keys": {2: "a", None: "b", (1, 2): "c", 1.5: "d"},
    "dtype": torch.bfloat16,
    "size": torch.Size([2, 3]),
    "device": torch.device("cuda", 1),
    "numpy": np.arange(6, dtype=np.int16).reshape(2, 3),
}


class TestValues:
    @pytest.mark.parametrize("name", PLAIN)
    def test_a_plain_value_comes_back_with_its_type(self, tmp_path: Path, name: str) -> None:
        shardckpt.save({"deep": [{name: PLAIN[name]}]}, tmp_path / "c")
        assert equal(shardckpt.load(tmp_path / "c"), {"deep": [{name: PLAIN[name]}]})

    @pytest.mark.parametrize(
        "dtype",
        [name for name in SAFETENSORS_NAMES if isinstance(getattr(torch, name, None), torch.dtype)] + ["complex128"],
    )
    @pytest.mark.parametrize("shape", [(), (0, 3), (3, 5)])
    def test_a_tensor_comes_back_bit_for_bit(self, tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
        kind = getattr(torch, dtype)
        count = int(np.prod(shape)) * kind.itemsize
        tensor = (torch.arange(count, dtype=torch.int64) % 2).to(torch.uint8).view(kind).view(shape)
        shardckpt.save({"t": tensor}, tmp_path / "c")
        assert equal(shardckpt.load(tmp_path / "c"), {"t": tensor})
        into = torch.ones(count, dtype=torch.uint8).view(kind).view(shape)
        shardckpt.load({"t": into}, tmp_path / "c")
        assert equal(into, tensor)

    def test_views_of_any_strides_are_saved_as_what_they_show(self, tmp_path: Path) -> None:
        base = torch.arange(24.0).view(4, 6)
        state = {"t": base.t(), "s": base[::2, 1:4], "e": torch.tensor(2.0).expand(3), "c": (base + 1j * base).conj()}
        shardckpt.save(state, tmp_path / "c")
        into = {
            name: torch.zeros(2, *value.shape, dtype=value.dtype).movedim(0, -1)[..., 0]
            for name, value in state.items()
        }
        shardckpt.load(into, tmp_path / "c")
        assert all(torch.equal(into[name], value) for name, value in state.items())

    def test_a_view_with_gaps_comes_back_with_its_dimensions_in_the_same_order(self, tmp_path: Path) -> None:
        # A kernel may sum in another order if the dimensions have another one in memory.
        base = torch.arange(64.0).view(8, 8).t()
        state = {"rows": base[:3], "columns": base[:, 2:5], "both": base[2:4, 1:6], "flat": base[1], "all": base.t()}
        shardckpt.save(state, tmp_path / "c")
        read = shardckpt.load(tmp_path / "c")
        assert all(torch.equal(read[name], value) for name, value in state.items())
        orders = {name: value.stride() for name, value in read.items()}
        assert orders == {"rows": (1, 3), "columns": (1, 8), "both": (1, 2), "flat": (1,), "all": (8, 1)}

    @pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
    def test_a_dense_weight_is_not_loaded_into_a_sparse_one(self, tmp_path: Path, layout: torch.layout) -> None:
        model = torch.nn.Linear(4, 4, bias=False)
        shardckpt.save({"m": model}, tmp_path / "c")
        model.weight = torch.nn.Parameter(torch.eye(4).to_sparse(layout=layout), requires_grad=False)
        with pytest.raises(ShardckptError, match=r"m\.weight: it was saved dense, and .* torch\.sparse"):
            shardckpt.load({"m": model}, tmp_path / "c")

    def test_names_like_those_of_an_old_dcp_folder_are_not_split(self, tmp_path: Path) -> None:
        saved = {"model.w": torch.ones(3), "optim.state.w.exp_avg": torch.arange(3.0), "epoch": 4}
        shardckpt.save(saved, tmp_path / "step")
        state = {"model.w": torch.zeros(3), "optim.state.w.exp_avg": torch.zeros(3), "epoch": 0}
        for loaded in (shardckpt.load(state, tmp_path / "step"), shardckpt.load(tmp_path / "step")):
            assert list(loaded) == list(saved) and loaded["epoch"] == 4
            assert all(torch.equal(loaded[name], saved[name]) for name in ("model.w", "optim.state.w.exp_avg"))

    def test_names_with_dots_are_not_nests(self, tmp_path: Path) -> None:
        state = {"a.b": torch.tensor(1), "a": {"b": torch.tensor(2), "c": 3}, "a.c": 4}
        shardckpt.save(state, tmp_path / "c")
        assert equal(shardckpt.load(tmp_path / "c"), state)

    def test_what_is_held_twice_is_written_once(self, tmp_path: Path) -> None:
        big = torch.rand(100_000)
        shardckpt.save({"a": big, "b": {"c": big}, "view": big[:]}, tmp_path / "c")
        assert sum(file.stat().st_size for file in (tmp_path / "c").iterdir()) < 1.1 * big.nbytes
        found = shardckpt.load(tmp_path / "c")
        assert found["a"] is found["b"]["c"] and torch.equal(found["view"], big)

    @pytest.mark.parametrize(
        ("value", "kind"),
        [
            (object(), "object"),
            (torch.eye(3).to_sparse(), "sparse"),
            (torch.empty(2, device="meta"), "meta"),
            (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "qint8"),
            (np.array(["a"]), "numpy array"),
            (np.ma.array([1.0, 2.0], mask=[0, 1]), "MaskedArray"),
            (np.ones(2).view(type("Unit", (np.ndarray,), {})), "Unit"),
            (lambda: 0, "function"),
        ],
    )
    def test_anything_else_is_refused_by_its_path_and_nothing_is_written(self, tmp_path: Path, value, kind) -> None:
        with pytest.raises(UnsupportedError, match=rf"(?s)run\.0\.odd.*{kind}|{kind}.*run\.0\.odd"):
            shardckpt.save({"run": [{"odd": value}]}, tmp_path / "c")
        assert os.listdir(tmp_path) == []

    @pytest.mark.parametrize("size", [2, 3])
    def test_an_array_of_a_class_of_its_own_is_not_filled(self, tmp_path: Path, size: int) -> None:
        shardckpt.save({"stats": np.ones(2)}, tmp_path / "c")
        state = {"stats": np.ma.array(np.zeros(size), mask=np.ones(size))}
        with pytest.raises(UnsupportedError, match=r"stats: an array of the class MaskedArray"):
            shardckpt.load(state, tmp_path / "c")
        assert state["stats"].mask.all()

    def test_an_array_is_filled_where_the_saved_one_fits_and_replaced_where_it_does_not(self, tmp_path: Path) -> None:
        shardckpt.save({"fits": np.ones(3), "log": [np.ones(5)], "kind": np.ones(2, np.float32)}, tmp_path / "c")
        fits = np.zeros(3)
        state = {"fits": fits, "log": [np.zeros(2)], "kind": np.zeros(2, np.int64)}
        shardckpt.load(state, tmp_path / "c")
        assert state["fits"] is fits and (fits == 1).all()
        assert equal(state["log"], [np.ones(5)]) and equal(state["kind"], np.ones(2, np.float32))
        state["kind"] = kind = np.zeros(2, np.int64)
        shardckpt.load(state, tmp_path / "c", cast=True)
        assert state["kind"] is kind and (kind == 1).all()

    def test_values_beside_tensors_in_a_tuple_come_back(self, tmp_path: Path) -> None:
        shardckpt.save({"t": (torch.ones(2), 5, (torch.ones(1), "new"))}, tmp_path / "c")
        tensor = torch.zeros(2)
        state = {"t": (tensor, 0, (torch.zeros(1), "old"))}
        shardckpt.load(state, tmp_path / "c")
        assert equal(state["t"], (torch.ones(2), 5, (torch.ones(1), "new"))) and state["t"][0] is tensor

    def test_an_expanded_tensor_is_filled_where_the_saved_values_repeat(self, tmp_path: Path) -> None:
        shardckpt.save({"mask": torch.arange(4.0).expand(3, 4), "nan": torch.tensor(float("nan"))}, tmp_path / "c")
        row = torch.zeros(4)
        state = {"mask": row.expand(3, 4), "nan": torch.zeros(())}
        shardckpt.load(state, tmp_path / "c")
        assert torch.equal(row, torch.arange(4.0)) and state["mask"].stride() == (0, 1)

    def test_an_expanded_buffer_that_cannot_hold_the_saved_one_is_named_before_a_change(self, tmp_path: Path) -> None:
        class Masked(nn.Linear):
            def __init__(self, mask: torch.Tensor) -> None:
                super().__init__(2, 2)
                self.register_buffer("mask", mask)

        shardckpt.save({"m": Masked(torch.arange(8.0).reshape(2, 4))}, tmp_path / "c")
        model = Masked(torch.zeros(4).expand(2, 4))
        before = model.weight.clone()
        with pytest.raises(shardckpt.errors.MismatchError, match=r"m\.mask is an expanded tensor.*clone"):
            shardckpt.load({"m": model}, tmp_path / "c")
        assert torch.equal(before, model.weight) and not model.mask.any()

    def test_a_value_in_the_place_of_a_tensor_is_one_fault(self, tmp_path: Path) -> None:
        shardckpt.save({"w": 5, "n": 1}, tmp_path / "c")
        with pytest.raises(
            shardckpt.errors.MismatchError, match=r"in 1 place: kind mismatch for w: .* of type int"
        ) as caught:
            shardckpt.load({"w": torch.ones(2), "n": 0}, tmp_path / "c")
        assert len(caught.value.problems) == 1 and "ignore_extra" not in str(caught.value)

    def test_a_state_that_holds_itself_is_refused(self, tmp_path: Path) -> None:
        state: dict = {}
        state["again"] = state
        with pytest.raises(UnsupportedError, match="holds itself"):
            shardckpt.save(state, tmp_path / "c")


class Mean(nn.Module):
    """Values beside buffers, as metrics of `torchmetrics` have them, in a state of its own making."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.total = torch.zeros(1)

    def state_dict(self, *args, prefix: str = "", **kwargs) -> dict:
        made = super().state_dict(*args, prefix=prefix, **kwargs)
        made[f"{prefix}total"] = self.total
        return made

    def _load_from_state_dict(self, state: dict, prefix: str, *args) -> None:
        self.total = state.pop(f"{prefix}total")
        super()._load_from_state_dict(state, prefix, *args)


class TestObjects:
    def test_values_that_modules_add_to_their_state_are_named_and_saved_apart(self, tmp_path: Path) -> None:
        model, again = (nn.ModuleDict({"net": nn.Linear(2, 2), "mean": Mean()}) for _ in range(2))
        model["mean"].total += 3
        with pytest.warns(UserWarning, match=r"are not saved: m\.mean\.total\. Put .* as shardckpt\.PerRank\(module\)"):
            shardckpt.save({"m": model, "mean": shardckpt.PerRank(model["mean"])}, tmp_path / "c")
        shardckpt.load({"m": again, "mean": shardckpt.PerRank(again["mean"])}, tmp_path / "c")
        assert again["mean"].total == 3 and torch.equal(again["net"].weight, model["net"].weight)

    def test_an_optimizer_of_two_models_keeps_values_that_belong_to_no_parameter(self, tmp_path: Path) -> None:
        a, b = nn.Linear(2, 2), nn.Linear(2, 2)
        optim, again = (torch.optim.SGD([*a.parameters(), *b.parameters()], momentum=0.9) for _ in range(2))
        b(a(torch.ones(1, 2))).sum().backward()
        optim.step()
        optim.state["seen"] = {"samples": torch.tensor(7)}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            shardckpt.save({"a": a, "b": b, "optim": optim}, tmp_path / "c")
        shardckpt.load({"a": a, "b": b, "optim": again}, tmp_path / "c")
        assert again.state["seen"]["samples"] == 7
        momentum = [each.state[b.weight]["momentum_buffer"] for each in (optim, again)]
        assert torch.equal(*momentum)

    def test_values_that_modules_with_parameters_add_to_their_state_are_named(self, tmp_path: Path) -> None:
        class Scaled(nn.Linear):
            def _save_to_state_dict(self, made: dict, prefix: str, keep_vars: bool) -> None:
                super()._save_to_state_dict(made, prefix, keep_vars)
                made[f"{prefix}scale"] = torch.ones(1)

        with pytest.warns(UserWarning, match=r"are not saved: m\.0\.scale\. Put the modules"):
            shardckpt.save({"m": nn.Sequential(Scaled(2, 2), nn.Linear(2, 2))}, tmp_path / "c")

    @pytest.mark.filterwarnings("ignore:(?!values of)")
    def test_weights_of_modules_that_torch_has_quantized_are_named(self, tmp_path: Path) -> None:
        quantization = pytest.importorskip("torch.ao.quantization")
        model = quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2)), {nn.Linear}, dtype=torch.qint8)
        with pytest.warns(UserWarning, match=r"are not saved: m\.0\.scale, m\.0\.zero_point, m\.0\._packed_params"):
            shardckpt.save({"m": model}, tmp_path / "c")

    @pytest.mark.parametrize("form", ["key", "class", "hook"])
    def test_values_that_optimizers_have_besides_the_state_of_parameters_are_saved(self, tmp_path: Path, form: str):
        class Counting(torch.optim.SGD):
            def state_dict(self) -> dict:
                return {**super().state_dict(), "count": 3}

        net = nn.Linear(2, 2)
        optim = (Counting if form == "class" else torch.optim.SGD)(net.parameters(), momentum=0.9)
        net(torch.ones(1, 2)).sum().backward()
        optim.step()
        if form == "key":
            optim.state["count"] = {"n": torch.ones(1)}
        elif form == "hook":
            optim.register_state_dict_post_hook(lambda _, made: {**made, "count": 3})
        for state in ({"m": net, "o": optim}, {"o": optim}):
            shardckpt.save(state, tmp_path / f"{len(state)}")
            saved = shardckpt.load(tmp_path / f"{len(state)}")["o"]
            assert saved["state"]["count"]["n"] == 1 if form == "key" else saved["count"] == 3

    @pytest.mark.parametrize(
        ("optimizer", "settings"),
        [
            (torch.optim.AdamW, {"amsgrad": True}),
            (torch.optim.SGD, {"momentum": 0.9}),
            (torch.optim.Adafactor, {}),
            (torch.optim.LBFGS, {}),
            (torch.optim.AdamW, {"capturable": False, "lr": torch.tensor(0.1)}),
        ],
    )
    def test_training_goes_on_as_if_nothing_had_been(self, tmp_path: Path, optimizer, settings) -> None:
        settings = dict(settings)
        lr = settings.pop("lr", 0.1)
        net, optim = trained(0, optimizer, lr, **settings)
        sched = torch.optim.lr_scheduler.StepLR(optim, 1) if not isinstance(lr, torch.Tensor) else None
        state = {"model": net, "optim": optim, "step": 7, "rng": shardckpt.RNGState()}
        state |= {"sched": sched} if sched else {}
        shardckpt.save(state, tmp_path / "c")
        expected = [step(net, optim), random.random(), np.random.rand(), torch.rand(2)]
        net2, optim2 = trained(9, optimizer, 0.5 if sched else torch.tensor(0.5), steps=0, **settings)
        state2 = {"model": net2, "optim": optim2, "step": 0, "rng": shardckpt.RNGState()}
        state2 |= {"sched": torch.optim.lr_scheduler.StepLR(optim2, 1)} if sched else {}
        assert shardckpt.load(state2, tmp_path / "c") is state2
        assert state2["step"] == 7
        found = [step(net2, optim2), random.random(), np.random.rand(), torch.rand(2)]
        assert equal(found, expected)
        assert equal(dict(net2.state_dict()), dict(net.state_dict())), "what modules keep themselves, too"
        assert optim2.param_groups[0]["lr"] == optim.param_groups[0]["lr"]

    def test_a_state_that_was_there_is_filled_in_place(self, tmp_path: Path) -> None:
        net, optim = trained()
        shardckpt.save({"model": net, "optim": optim}, tmp_path / "c")
        held = [net.embed.weight.data_ptr(), optim.state[net.embed.weight]["exp_avg"].data_ptr()]
        before = copy.deepcopy(optim.state_dict())
        step(net, optim)
        shardckpt.load({"model": net, "optim": optim}, tmp_path / "c")
        assert held == [net.embed.weight.data_ptr(), optim.state[net.embed.weight]["exp_avg"].data_ptr()]
        assert equal(optim.state_dict()["state"], before["state"])

    def test_optimizers_are_kept_by_name_whatever_the_groups(self, tmp_path: Path) -> None:
        net, optim = trained()
        shardckpt.save({"model": net, "optim": optim}, tmp_path / "c")
        nest = shardckpt.load(tmp_path / "c")["optim"]
        assert list(nest["state"]) == ["embed.weight", "norm.weight", "norm.bias"]
        assert nest["param_groups"][0]["params"] == ["embed.weight", "norm.weight", "norm.bias"]
        other = Net()
        again = torch.optim.AdamW([{"params": [other.norm.bias]}, {"params": [other.norm.weight, other.embed.weight]}])
        shardckpt.load({"model": other, "optim": again}, tmp_path / "c")
        assert equal(again.state[other.norm.bias], optim.state[net.norm.bias])
        assert [group["lr"] for group in again.param_groups] == [0.1, 0.1]

    def test_an_optimizer_without_its_model_is_kept_as_it_says(self, tmp_path: Path) -> None:
        _net, optim = trained()
        shardckpt.save({"optim": optim}, tmp_path / "c")
        _, again = trained(seed=4)
        shardckpt.load({"optim": again}, tmp_path / "c")
        assert equal(again.state_dict(), optim.state_dict())

    @pytest.mark.parametrize("kind", [list, tuple])
    def test_lists_of_objects_are_filled_one_by_one(self, tmp_path: Path, kind) -> None:
        def made(seed: int, steps: int):
            net, optim = trained(seed, steps=steps)
            schedules = [torch.optim.lr_scheduler.StepLR(optim, 1 + n) for n in range(2)]
            for _ in range(steps):
                schedules[0].step()
            return net, optim, {"model": net, "optims": kind([optim]), "schedules": kind([*schedules, {"n": seed}])}

        net, optim, state = made(0, 3)
        shardckpt.save(state, tmp_path / "c")
        other, again, into = made(5, 0)
        shardckpt.load(into, tmp_path / "c")
        assert [each.last_epoch for each in into["schedules"][:2]] == [3, 0]
        assert into["schedules"][2] == {"n": 0}
        assert equal(again.state[other.norm.bias], optim.state[net.norm.bias])
        shardckpt.save({**state, "schedules": [*state["schedules"][:2], {"n": 0, "m": [1, {"k": 2}]}]}, tmp_path / "d")
        with pytest.raises(shardckpt.errors.UsageError, match=r"unexpected: schedules\.2\.m"):
            shardckpt.load(
                {**into, "schedules": [*into["schedules"][:2], {"n": torch.optim.SGD(other.parameters())}]},
                tmp_path / "d",
            )

    def test_tied_parameters_are_kept_once_and_come_back_tied(self, tmp_path: Path) -> None:
        net, optim = trained()
        shardckpt.save({"model": net, "optim": optim}, tmp_path / "c")
        found = shardckpt.load(tmp_path / "c")
        assert equal(found["model"]["embed.weight"], net.embed.weight.detach())
        assert found["model"]["head.weight"] is found["model"]["embed.weight"]

    def test_anything_with_a_state_dict_is_asked_for_it(self, tmp_path: Path) -> None:
        class Loader:
            def __init__(self) -> None:
                self.at = {"epoch": 3, "order": torch.randperm(5)}

            def state_dict(self) -> dict:
                return self.at

            def load_state_dict(self, state: dict) -> None:
                self.at = state

        loader, other = Loader(), Loader()
        shardckpt.save({"loaders": [loader]}, tmp_path / "c")
        shardckpt.load({"loaders": [other]}, tmp_path / "c")
        assert equal(other.at, loader.at)

    def test_a_flat_dict_of_tensors_is_a_state(self, tmp_path: Path) -> None:
        net, _ = trained()
        shardckpt.save(net.state_dict() | {"_extra_state": 1}, tmp_path / "c")
        other = {name: torch.zeros_like(t) for name, t in net.state_dict().items() if name != "_extra_state"}
        shardckpt.load({**other, "_extra_state": 0}, tmp_path / "c")
        assert all(torch.equal(other[name], net.state_dict()[name]) for name in other)

    def test_the_model_is_a_hugging_face_folder_at_once(self, tmp_path: Path) -> None:
        net, optim = trained()
        shardckpt.save({"optim": optim, "model": net}, tmp_path / "c")
        index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
        (file,) = set(index["weight_map"].values())
        assert set(load_file(tmp_path / "c" / file)) == {
            n for n in net.state_dict() if n not in ("head.weight", "_extra_state")
        }


class TestRefusals:
    """What can be seen from the manifest is refused whole, before anything is changed."""

    def saved(self, tmp_path: Path) -> Path:
        shardckpt.save({"model": nn.Linear(3, 2), "more": {"step": 1, "t": torch.zeros(4)}}, tmp_path / "c")
        return tmp_path / "c"

    def test_everything_that_is_wrong_is_listed_and_nothing_is_changed(self, tmp_path: Path) -> None:
        model = nn.Linear(3, 5).to(torch.float64)
        state = {"model": model, "more": {"t": torch.ones(4, dtype=torch.int8), "new": 0}, "absent": torch.ones(1)}
        before = copy.deepcopy((model.state_dict(), state["more"]))
        with pytest.raises(shardckpt.errors.MismatchError) as caught:
            shardckpt.load(state, self.saved(tmp_path))
        for part in (
            "size mismatch for model.weight: found [2, 3], expected [5, 3]",
            "dtype mismatch for model.bias: found float32, expected float64",
            "dtype mismatch for more.t: found float32, expected int8",
            "missing: absent",
            "missing: more.new",
            "unexpected: more.step",
        ):
            assert part in str(caught.value)
        assert equal((model.state_dict(), state["more"]), before)

    def test_a_cast_is_made_where_it_is_asked_for(self, tmp_path: Path) -> None:
        state = {"t": torch.ones(4, dtype=torch.bfloat16)}
        shardckpt.load({"more": state}, self.saved(tmp_path), strict=False, cast=True)
        assert torch.equal(state["t"], torch.zeros(4, dtype=torch.bfloat16))

    @pytest.mark.parametrize(
        ("value", "stored", "wanted"),
        [
            (1e30, "float32", "float16"),
            (3.4e38, "float32", "bfloat16"),
            (1e4, "float32", "float8_e4m3fn"),
            (200.6, "float32", "int8"),
            (float("nan"), "float32", "int32"),
            (-1, "int32", "uint8"),
            (2**40, "int64", "int32"),
            (70_000, "int32", "float16"),
            (2, "int32", "bool"),
            (1 + 2j, "complex64", "float32"),
            (complex(1, float("nan")), "complex64", "float64"),
            (1j, "complex64", "int32"),
            (1e300, "float64", "complex64"),
            (1e300j, "complex128", "complex64"),
            (1e30, "complex64", "float16"),
        ],
    )
    def test_a_cast_never_makes_another_value(self, tmp_path: Path, value, stored: str, wanted: str) -> None:
        tensor = torch.tensor([[1, value]], dtype=getattr(torch, stored))
        shardckpt.save({"w": tensor}, tmp_path / "c")
        with pytest.raises(shardckpt.errors.PrecisionError, match=rf"w: .*{stored}; expected {wanted}") as caught:
            shardckpt.load({"w": torch.zeros(1, 2, dtype=getattr(torch, wanted))}, tmp_path / "c", cast=True)
        assert str(tensor[0, 1].item()) in str(caught.value)

    @pytest.mark.parametrize(
        ("values", "stored", "wanted"),
        [
            ([0.1, float("inf"), float("nan"), -3e38], "float32", "bfloat16"),
            ([0.25, -7.9, 127.5], "float32", "int8"),
            ([1.5, float("-inf")], "bfloat16", "float64"),
            ([0, 1], "int64", "bool"),
            ([2**53 + 1], "int64", "float32"),
            ([1.5, -2], "complex64", "float32"),
            ([1.5 + 0.1j, complex(float("inf"), float("nan"))], "complex128", "complex64"),
            ([1.5, float("nan")], "float32", "complex64"),
            ([3, -4], "int64", "complex128"),
        ],
    )
    def test_a_cast_that_only_rounds_is_what_torch_makes_of_it(self, tmp_path: Path, values, stored, wanted) -> None:
        tensor = torch.tensor(values, dtype=getattr(torch, stored))
        shardckpt.save({"w": tensor}, tmp_path / "c")
        into = torch.zeros(len(values), dtype=getattr(torch, wanted))
        shardckpt.load({"w": into}, tmp_path / "c", cast=True)
        assert equal(into, tensor.to(into.dtype))

    @pytest.mark.parametrize("kind", [">f4", ">i8", ">c16", "<f4"])
    def test_numpy_arrays_of_any_byte_order_are_saved_by_value(self, tmp_path: Path, kind: str) -> None:
        array = np.arange(6).astype(kind).reshape(2, 3)
        shardckpt.save({"deep": {"array": array}}, tmp_path / "c")
        state = {"deep": {"array": np.zeros((2, 3), dtype=kind)}}
        shardckpt.load(state, tmp_path / "c")
        assert state["deep"]["array"].dtype == array.dtype.newbyteorder("=")
        assert (state["deep"]["array"] == array).all()

    def test_names_may_differ_where_that_is_said(self, tmp_path: Path) -> None:
        state = {"more": {"step": 5, "other": 7}}
        shardckpt.load(state, self.saved(tmp_path), strict=False)
        assert state == {"more": {"step": 1, "other": 7}}

    @pytest.mark.parametrize(
        ("state", "found"),
        [({}, "an empty dict"), (5, "a value of type int"), ("text", "a value of type str"), (None, "None")],
        ids=repr,
    )
    def test_a_state_that_holds_nothing_to_fill_is_refused(self, tmp_path: Path, state, found) -> None:
        with pytest.raises(UsageError, match=f"cannot be loaded in place; found {found};") as caught:
            shardckpt.load(state, self.saved(tmp_path))
        assert "filled in part" not in str(caught.value)

    def test_what_is_raised_is_told_once(self, tmp_path: Path, monkeypatch) -> None:
        with pytest.raises(shardckpt.errors.MismatchError) as caught:
            shardckpt.load({"absent": 1}, self.saved(tmp_path))
        assert caught.value.__cause__ is None and caught.value.__context__ is None
        full = OSError(28, "No space left on device")
        monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(full))
        with pytest.raises(shardckpt.errors.StorageError) as broken:
            shardckpt.save({"t": torch.ones(2)}, tmp_path / "d")
        assert broken.value.__cause__ is full

    def test_a_part_is_loaded_by_globs(self, tmp_path: Path) -> None:
        model = nn.Linear(3, 2)
        bias = model.bias.detach().clone()
        shardckpt.load({"model": model}, self.saved(tmp_path), include=["*.weight"])
        assert torch.equal(model.bias, bias)
        assert torch.equal(model.weight, shardckpt.load(tmp_path / "c")["model"]["weight"])

    @pytest.mark.parametrize(
        ("globs", "loaded"),
        [
            (["model.*"], {"model"}),
            (["model"], {"model"}),
            (["optim.*"], {"moments", "settings"}),
            (["optim.state.*"], {"moments"}),
            (["optim.param_groups"], {"settings"}),
            (["own.*", "step"], {"own", "step"}),
            (["*"], {"model", "moments", "settings", "own", "step"}),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_what_no_glob_matches_stays_as_it_is(self, tmp_path: Path, globs, loaded) -> None:
        net, optim = trained()
        own = Counted(7)
        shardckpt.save({"model": net, "optim": optim, "own": shardckpt.PerRank(own), "step": 7}, tmp_path / "c")
        other, live = trained(seed=1, lr=0.5)
        counted, state = Counted(0), {"model": other, "optim": live, "step": 0}
        before = [copy.deepcopy(each.state_dict()) for each in (other, live)]
        shardckpt.load({**state, "own": shardckpt.PerRank(counted)}, tmp_path / "c", include=globs)

        def settled(is_loaded: bool, found, saved, old) -> None:
            assert equal(found, saved if is_loaded else old) and not equal(saved, old)

        settled("model" in loaded, other.state_dict(), net.state_dict(), before[0])
        settled("moments" in loaded, live.state_dict()["state"], optim.state_dict()["state"], before[1]["state"])
        settled("settings" in loaded, live.param_groups[0]["lr"], 0.1, 0.5)
        assert counted.n == (7 if "own" in loaded else 0)

    def test_of_one_parameter_alone_an_optimizer_gets_the_moments(self, tmp_path: Path) -> None:
        net, optim = trained()
        shardckpt.save({"model": net, "optim": optim}, tmp_path / "c")
        other, live = trained(seed=1)
        old = copy.deepcopy(live.state_dict()["state"])
        shardckpt.load({"model": other, "optim": live}, tmp_path / "c", include=["optim.state.norm.bias.exp_avg"])
        found, saved = live.state_dict()["state"], optim.state_dict()["state"]
        at = [name for name, _ in other.named_parameters()].index("norm.bias")
        assert equal(found, {**old, at: {**old[at], "exp_avg": saved[at]["exp_avg"]}})
        assert not equal(old[at]["exp_avg"], saved[at]["exp_avg"])

    @pytest.mark.parametrize("globs", [["modle.*"], ["model.*", "more.new"], "t"])
    def test_a_glob_that_matches_nothing_is_told(self, tmp_path: Path, globs) -> None:
        model = nn.Linear(3, 2)
        with pytest.raises(shardckpt.errors.MismatchError, match=r"nothing is called '(modle\.\*|more\.new|t)'"):
            shardckpt.load({"model": model}, self.saved(tmp_path), include=globs)
        shardckpt.load({"model": model}, tmp_path / "c", include=globs, strict=False)

    def test_a_glob_that_only_the_checkpoint_has_something_for_is_fine(self, tmp_path: Path) -> None:
        state = {"more": {"step": 0}}
        shardckpt.load(state, self.saved(tmp_path), include=["more.step", "model.*"])
        assert state == {"more": {"step": 1}}

    def test_an_optimizer_of_other_parameters_is_told_by_their_names(self, tmp_path: Path) -> None:
        def made(*of: int):
            net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            optim = torch.optim.AdamW([{"params": net[at].parameters()} for at in of])
            net(torch.ones(1, 2)).sum().backward()
            optim.step()
            return {"model": net, "optim": optim}

        shardckpt.save(made(0, 1), tmp_path / "both")
        shardckpt.save(made(0), tmp_path / "first")
        with pytest.raises(shardckpt.errors.MismatchError) as caught:
            shardckpt.load(made(0), tmp_path / "both")
        assert caught.value.problems == tuple(f"unexpected: optim.state.1.{name}" for name in ("weight", "bias"))
        with pytest.raises(shardckpt.errors.MismatchError) as caught:
            shardckpt.load(made(1, 0), tmp_path / "first")
        assert caught.value.problems == tuple(f"missing: optim.state.1.{name}" for name in ("weight", "bias"))
        shardckpt.load(made(0), tmp_path / "both", strict=False)
        shardckpt.load(made(1, 0), tmp_path / "both")

    def test_a_model_without_memory_is_refused_by_name_both_ways(self, tmp_path: Path) -> None:
        with torch.device("meta"):
            model = nn.Linear(3, 2)
        with pytest.raises(UnsupportedError, match=r"model\.weight: .*meta device"):
            shardckpt.save({"model": model}, tmp_path / "m")
        assert os.listdir(tmp_path) == []
        with pytest.raises(shardckpt.errors.MismatchError, match=r"no memory for model\.weight.*to_empty"):
            shardckpt.load({"model": model}, self.saved(tmp_path), ignore_extra=True)

    def test_parameters_without_memory_are_not_told_to_share_it(self, tmp_path: Path) -> None:
        """Parts of two meta tensors have the same address: their offset."""
        model = nn.ModuleList(nn.Linear(3, 2, bias=False) for _ in range(2))
        shardckpt.save({"model": model}, tmp_path / "saved")
        for layer in model:
            layer.weight = nn.Parameter(torch.empty(3, 3, device="meta")[1:])
        with pytest.raises(shardckpt.errors.MismatchError) as caught:
            shardckpt.load({"model": model}, tmp_path / "saved")
        told = [problem.split(":")[0] for problem in caught.value.problems]
        assert told == ["no memory for model.0.weight", "no memory for model.1.weight"]

    @pytest.mark.parametrize("nbytes", [0, 20])
    @pytest.mark.parametrize("kind", ["tensor", "columns of it", "model"])
    def test_a_tensor_whose_storage_was_freed_is_refused_both_ways(
        self, tmp_path: Path, kind: str, nbytes: int
    ) -> None:
        model = nn.Linear(3, 2, bias=False)
        tensor = model.weight.data if kind == "model" else torch.ones(2, 3)
        value = {"tensor": tensor, "columns of it": tensor[:, 1:], "model": model}[kind]
        shardckpt.save({"a": value}, tmp_path / "saved")
        tensor.untyped_storage().resize_(nbytes)
        name = "a.weight" if kind == "model" else "a"
        with pytest.raises(UnsupportedError, match=f"{name}: .*storage .*was freed.*{nbytes} bytes"):
            shardckpt.save({"a": value}, tmp_path / "other")
        with pytest.raises(shardckpt.errors.MismatchError, match=f"no memory for {name}.*was freed"):
            shardckpt.load({"a": value}, tmp_path / "saved")
        assert os.listdir(tmp_path) == ["saved"]
        assert tensor.untyped_storage().nbytes() == nbytes

    @pytest.mark.parametrize("wrong", [None, 5, {"model": 1}])
    def test_what_is_no_path_is_refused_before_anything_is_done(self, tmp_path: Path, monkeypatch, wrong) -> None:
        monkeypatch.chdir(tmp_path)
        for call in (shardckpt.save, shardckpt.async_save, shardckpt.load):
            if wrong is not None or call is not shardckpt.load:
                with pytest.raises(UsageError, match=f"must be a path or a URL.*{type(wrong).__name__}"):
                    call({"step": 1}, wrong)
        for call in (shardckpt.load, shardckpt.open):
            with pytest.raises(UsageError, match=f"must be a path or a URL.*{type(wrong).__name__}"):
                call(wrong)
        assert os.listdir() == []

    @pytest.mark.parametrize("name", ["overwrite", "checksums", "store_digests", "trainable_only"])
    def test_a_flag_that_is_not_a_bool_is_refused_and_replaces_nothing(self, tmp_path: Path, name: str) -> None:
        shardckpt.save({"step": 1}, tmp_path / "c")
        for call in (shardckpt.save, shardckpt.async_save):
            with pytest.raises(UsageError, match=f"`{name}` is neither True nor False; found 'no'"):
                call({"step": 2}, tmp_path / "c", **{name: "no"})
        assert shardckpt.load(tmp_path / "c") == {"step": 1}

    def test_what_the_checkpoint_has_besides_may_be_left(self, tmp_path: Path) -> None:
        state = {"more": {"step": 0}}
        shardckpt.load(state, self.saved(tmp_path), ignore_extra=True)
        assert state == {"more": {"step": 1}}
        with pytest.raises(shardckpt.errors.MismatchError, match="missing: absent"):
            shardckpt.load({"absent": 0}, tmp_path / "c", ignore_extra=True)
        for odd in (3, [1], {"a": 1}.items()):
            with pytest.raises(UsageError, match="include"):
                shardckpt.load(state, tmp_path / "c", include=odd)
        for none in ([], (), iter(())):
            with pytest.raises(UsageError, match="`include` must name at least one pattern"):
                shardckpt.load(state, tmp_path / "c", include=none)

    @pytest.mark.parametrize("wrong", [5, [], {"base": "x"}, True])
    def test_a_base_of_a_save_that_is_no_place_is_refused(self, tmp_path: Path, wrong) -> None:
        for save in (shardckpt.save, shardckpt.async_save):
            with pytest.raises(UsageError, match="`base` must be a path or a URL, or a function"):
                save({"w": torch.ones(2)}, tmp_path / "new", base=wrong)

    @pytest.mark.parametrize("wrong", [5, [5], {"base": 5}, True])
    def test_a_base_that_is_no_place_is_refused(self, tmp_path: Path, wrong) -> None:
        path = self.saved(tmp_path)
        calls = [lambda **given: shardckpt.open(path, **given), lambda **given: shardckpt.verify(str(path), **given)]
        if wrong is not True:
            calls += [lambda **given: shardckpt.load(path, **given), lambda **given: shardckpt.load({}, path, **given)]
        for call in calls:
            with pytest.raises(UsageError, match="`base` must be a path or a URL"):
                call(base=wrong)

    def test_a_subtree_that_is_unexpected_as_a_whole_is_one_line(self, tmp_path: Path) -> None:
        shardckpt.save({"a": {f"k{n}": n for n in range(39)}, "b": {"c": 1, "d": 2}}, tmp_path / "c")
        with pytest.raises(shardckpt.errors.MismatchError) as caught:
            shardckpt.load({"b": {"c": 0}}, tmp_path / "c")
        assert "unexpected: a (39 values); unexpected: b.d" in str(caught.value)
        assert "unexpected: a.k38" in caught.value.problems

    def test_keys_are_renamed_by_rules(self, tmp_path: Path) -> None:
        model = nn.ModuleDict({"layer": nn.Linear(3, 2)})
        state = {"net": model, "more": {"step": 0, "t": torch.ones(4)}}
        shardckpt.load(state, self.saved(tmp_path), key_map={"^model$": "net", "^(weight|bias)$": r"layer.\1"})
        assert torch.equal(model["layer"].weight, shardckpt.load(tmp_path / "c")["model"]["weight"])

    @pytest.mark.parametrize("shape", [(3,), (5,), (4, 1), ()])
    def test_another_shape_is_never_a_part_of_it(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        with pytest.raises(shardckpt.errors.MismatchError, match=r"size mismatch for more\.t"):
            shardckpt.load({"more": {"t": torch.ones(shape)}}, self.saved(tmp_path), strict=False)

    def test_a_target_that_exists_is_refused_and_stays(self, tmp_path: Path) -> None:
        path = self.saved(tmp_path)
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        with pytest.raises(TargetExistsError):
            shardckpt.save({"step": 2}, path)
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before
        shardckpt.save({"step": 2}, path, overwrite=True)
        assert shardckpt.load(path) == {"step": 2}
        assert os.listdir(tmp_path) == ["c"]

    def test_an_unknown_way_to_verify_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="verify"):
            shardckpt.load(self.saved(tmp_path), verify="sometimes")

    @pytest.mark.parametrize(
        ("how", "told"),
        [
            ({"key_map": {"model": "net", "([": "x"}}, r"key_map.*'\(\['"),
            ({"key_map": {"(a)": r"\2"}}, r"key_map.*'\(a\)'.*2"),
            ({"key_map": {"a": 1}}, "key_map.*two strings"),
            ({"key_map": [("a", "b")]}, "`key_map` must be a dict"),
            ({"rules": [("a", "b")]}, "`rules` must be a file with rules"),
            ({"include": 7}, "`include`"),
            ({"include": ["model.*", 7]}, "`include`"),
            ({"ignore_extra": "no"}, "`ignore_extra`"),
            ({"cast": "bf16"}, "`cast`.*'bf16'"),
            ({"cast": None}, "`cast`"),
            ({"strict": "no"}, "`strict`"),
            ({"broadcast_reads": 3}, "`broadcast_reads`"),
            ({"verify": ["read"]}, "verify"),
            ({"verify": 1}, "verify"),
        ],
        ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
    )
    def test_an_argument_that_means_nothing_is_refused_before_anything_is_opened(self, how, told: str) -> None:
        with pytest.raises(UsageError, match=told):
            shardckpt.load({"t": torch.ones(2)}, "nothing-lies-here", **how)

    @pytest.mark.parametrize("how", [{"include": ["model.*"]}, {"ignore_extra": True}, {"cast": True}])
    def test_what_is_for_loads_into_a_state_is_refused_without_one(self, tmp_path: Path, how) -> None:
        with pytest.raises(UsageError, match=f"`{next(iter(how))}` is for loads into a state"):
            shardckpt.load(self.saved(tmp_path), **how)

    def test_rules_that_give_two_tensors_one_name_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(shardckpt.errors.NameCollisionError, match=r"model\.x"):
            shardckpt.load({"model": {"x": torch.ones(2)}}, self.saved(tmp_path), key_map={"weight|bias": "x"})


class TestReading:
    BLOCK = 4 << 20

    def saved(self, tmp_path: Path, **how) -> torch.Tensor:
        tensor = torch.arange(6 * self.BLOCK // 4, dtype=torch.int32).view(-1, 256)
        shardckpt.save({"deep": {"t": tensor}, "a.b": 1, "a": {"b": 2}}, tmp_path / "c", **how)
        return tensor

    @pytest.mark.parametrize(
        "index", [0, -1, slice(2, 9), slice(None), (slice(5, 20, 3), -2), (..., slice(250, None)), (3, 4), ()]
    )
    def test_a_slice_is_what_the_tensor_would_give(self, tmp_path: Path, index) -> None:
        tensor = self.saved(tmp_path)
        found = shardckpt.open(tmp_path / "c")["deep.t"]
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(found[index], tensor[index])

    def test_a_slice_reads_the_blocks_that_it_touches(self, tmp_path: Path, monkeypatch) -> None:
        tensor = self.saved(tmp_path)
        opened, read, whole = shardckpt.open(tmp_path / "c"), [], LocalStore.read

        def counted(store, reads) -> None:
            read.extend(each.buffer.nbytes for each in reads)
            whole(store, reads)

        monkeypatch.setattr(LocalStore, "read", counted)
        assert torch.equal(opened["deep.t"][10:12], tensor[10:12])
        assert read == [BLOCK_BYTES]
        read.clear()
        plain = shardckpt.open(tmp_path / "c", verify=False)
        read.clear()
        assert torch.equal(plain["deep.t"][10:12], tensor[10:12])
        assert sum(read) == 2 * 256 * 4

    def test_a_name_that_means_two_things_is_told_apart_by_its_keys(self, tmp_path: Path) -> None:
        self.saved(tmp_path)
        opened = shardckpt.open(tmp_path / "c")
        with pytest.raises(AmbiguousError):
            opened["a.b"]
        assert (opened["a.b",], opened["a", "b"], set(opened)) == (1, 2, {"deep.t", "a.b"})
        with pytest.raises(KeyError, match=r"holds nothing called 'deep\.u'\. `list"):
            opened["deep.u"]
        assert opened.get("deep.u") is None and "deep.u" not in opened

    def flip(self, path: Path, at: int) -> str:
        file = next(path.glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[at] ^= 1
        file.write_bytes(data)
        return file.name

    def test_a_flipped_bit_is_found_in_the_blocks_that_are_read(self, tmp_path: Path) -> None:
        tensor = self.saved(tmp_path)
        name = self.flip(tmp_path / "c", 2 * self.BLOCK + 17)
        with pytest.raises(ChecksumError, match=rf"{name}.*block 64,"):
            shardckpt.load(tmp_path / "c")
        with pytest.raises(ChecksumError, match="block 64,"):
            shardckpt.load({"deep": {"t": torch.zeros_like(tensor)}}, tmp_path / "c", strict=False)
        opened = shardckpt.open(tmp_path / "c")["deep.t"]
        assert torch.equal(opened[0], tensor[0])
        with pytest.raises(ChecksumError):
            shardckpt.load(["nothing of it"], tmp_path / "c", strict=False, verify="full")
        assert not torch.equal(shardckpt.load(tmp_path / "c", verify=False)["deep"]["t"], tensor)

    @pytest.mark.parametrize("verify", ["read", "full"])
    def test_damage_met_midway_leaves_a_mixture_unless_it_is_looked_for_first(
        self, tmp_path: Path, verify: str
    ) -> None:
        tensor = self.saved(tmp_path)
        self.flip(tmp_path / "c", 2 * self.BLOCK + 17)
        state = {"deep": {"t": torch.full_like(tensor, -1)}, "a.b": 0, "a": {"b": 0}}
        with pytest.raises(ChecksumError, match="block 64,") as caught:
            shardckpt.load(state, tmp_path / "c", verify=verify)
        is_mixed = not (state["deep"]["t"] == -1).all()
        assert is_mixed == (verify == "read") == ("may be filled in part" in str(caught.value))
        assert (state["a.b"], state["a"]) == (0, {"b": 0})

    def test_an_object_that_refuses_its_state_is_told_of_the_mixture_too(self, tmp_path: Path) -> None:
        class Counter:
            def state_dict(self) -> dict:
                return {"n": 1}

            def load_state_dict(self, state: dict) -> None:
                raise ZeroDivisionError("refused")

        shardckpt.save({"a": Counted(1), "counter": Counter(), "z": 2}, tmp_path / "c")
        with pytest.raises(StateDictError) as caught:
            shardckpt.load({"a": Counted(0), "counter": Counter(), "z": 0}, tmp_path / "c")
        told = "counter: `load_state_dict` failed; found ZeroDivisionError: refused. counter could not load its state"
        assert str(caught.value).startswith(f"{told}, a did, and z was not reached. The state may be filled in part")
        assert isinstance(caught.value.__cause__, ZeroDivisionError)

    def test_an_object_that_gives_no_state_is_named(self, tmp_path: Path) -> None:
        class Broken(Counted):
            def state_dict(self) -> dict:
                raise ZeroDivisionError("boom")

        with pytest.raises(
            StateDictError, match=r"^deep\.0: `state_dict` failed; found ZeroDivisionError: boom$"
        ) as caught:
            shardckpt.save({"deep": [Broken(1)]}, tmp_path / "c")
        assert isinstance(caught.value.__cause__, ZeroDivisionError) and os.listdir(tmp_path) == []

    @pytest.mark.parametrize("lost", ["*.manifest.json", "COMMIT"])
    def test_marks_that_are_lost_are_told_with_the_way_to_make_them_anew(self, tmp_path: Path, lost: str) -> None:
        shardckpt.save({"t": torch.arange(4)}, tmp_path / "c")
        (path,) = (tmp_path / "c").glob(lost)
        path.unlink() if "manifest" in lost else os.truncate(path, 3)
        with pytest.raises(shardckpt.errors.CheckpointError, match="`shardckpt repair`"):
            shardckpt.load(tmp_path / "c")
        shardckpt.repair(tmp_path / "c")
        assert shardckpt.load(tmp_path / "c")["t"].tolist() == [0, 1, 2, 3]

    def test_without_checksums_nobody_can_tell(self, tmp_path: Path) -> None:
        tensor = self.saved(tmp_path, checksums=False)
        assert torch.equal(shardckpt.load(tmp_path / "c", verify="full")["deep"]["t"], tensor)
        self.flip(tmp_path / "c", 2 * self.BLOCK + 17)
        assert not torch.equal(shardckpt.load(tmp_path / "c")["deep"]["t"], tensor)
