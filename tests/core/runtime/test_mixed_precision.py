"""Types to compute and to reduce in, and shards on the CPU: the numbers are torch's, or those without offloading."""

from __future__ import annotations

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed.tensor import DTensor

from shardckpt import core as ours
from tests.kit.ranks.harness import run

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.LayerNorm(10)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(10, 10), nn.Tanh()) for _ in range(2)])
        self.last = nn.Linear(10, 3, bias=False)
        self.register_buffer("shift", torch.full((3,), 0.125))
        self.seen: list[torch.dtype] = []

    def forward(self, x):
        self.seen += [x.dtype, self.shift.dtype]
        hidden = self.norm(self.first(x))
        for block in self.blocks:
            hidden = block(hidden)
        self.seen.append(hidden.dtype)
        return self.last(hidden) + self.shift


def wrapped(engine, net: nn.Module, mixed: dict, orig: bool, **settings) -> nn.Module:
    if engine is theirs:
        settings |= {"device_id": CPU}
    policy = engine.MixedPrecision(**{"_module_classes_to_ignore": (), **mixed})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index, block in enumerate(net.blocks):
            net.blocks[index] = engine.FullyShardedDataParallel(
                block, mixed_precision=policy, use_orig_params=orig, **settings
            )
        return engine.FullyShardedDataParallel(net, mixed_precision=policy, use_orig_params=orig, **settings)


def trained(model: nn.Module, rank: int, steps: int = 3, micro: int = 1):
    """Losses, gradients of the last step and parameters as the optimizer sees them."""
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(100 + rank)
    losses, grads = [], []
    for _ in range(steps):
        optim.zero_grad()
        for _ in range(micro):
            output = model(torch.randn(4, 6))
            loss = output.float().square().mean()
            loss.backward()
            losses.append((loss.item(), output.dtype))
        grads = [None if p.grad is None or not p.numel() else p.grad.clone() for p in model.parameters()]
        optim.step()
    return losses, grads, [p.detach().clone() for p in model.parameters()]


MIXED = {
    "parameters": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "all": {"param_dtype": torch.bfloat16},
    "reduction alone": {"reduce_dtype": torch.bfloat16},
    "buffers": {"buffer_dtype": torch.bfloat16},
    "inputs everywhere": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "cast_forward_inputs": True},
    "kept low": {"param_dtype": torch.bfloat16, "keep_low_precision_grads": True},
}


@pytest.mark.parametrize("grads", [(40000.0, 36032.0), (30016.0, 26016.0, 28000.0, 24000.0)], ids=len)
def test_float16_gradients_are_averaged_even_if_their_sum_overflows(grads):
    def body(rank, world):
        plain, half = nn.Linear(1, world, bias=False), torch.float16
        models = [
            ours.fully_shard(copy.deepcopy(plain), mp_policy=ours.MixedPrecisionPolicy(reduce_dtype=half)),
            *(wrap_half(copy.deepcopy(plain), orig, half) for orig in (False, True)),
        ]
        for model in models:
            model(torch.full((1, 1), grads[rank])).sum().backward()
        return [local(parameter.grad).tolist() for model in models for parameter in model.parameters()]

    def wrap_half(net, orig, half):
        policy = ours.MixedPrecision(reduce_dtype=half)
        return ours.FullyShardedDataParallel(net, mixed_precision=policy, use_orig_params=orig)

    def local(grad):
        return (grad.to_local() if isinstance(grad, DTensor) else grad).flatten()

    mean = sum(grads) / len(grads)
    assert sum(grads) > torch.finfo(torch.float16).max
    assert run(len(grads), body) == [[[pytest.approx(mean, rel=1e-3)]] * 3] * len(grads)


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_mixed_precision_gives_torchs_numbers(orig):
    def body(rank, world):
        return {name: compared(rank, mixed) for name, mixed in MIXED.items()}

    def compared(rank, mixed):
        torch.manual_seed(0)
        net = Net()
        keeps = mixed.get("keep_low_precision_grads")
        steps = 1 if keeps else 3
        found = []
        for engine in (ours, theirs):
            model = wrapped(engine, copy.deepcopy(net), mixed, orig)
            if keeps:
                model(torch.ones(2, 6)).float().sum().backward()
                found.append(([p.grad.dtype for p in model.parameters() if p.grad is not None],))
            else:
                found.append((*trained(model, rank, steps), model.module.seen))
        return [_near(a, b) for a, b in zip(*found, strict=True)], found[0][0]

    results = run(2, body)
    assert all(near for rank in results for nears, _ in rank.values() for near in nears), results


def _near(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.allclose(a.float(), b.float(), atol=1e-2, rtol=2e-2)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_near(x, y) for x, y in zip(a, b, strict=True))
    return abs(a - b) < 1e-2 if isinstance(a, float) else a == b


def test_g7_offloading_changes_no_number_also_when_gradients_accumulate():
    kinds = {"plain": {}, "mixed": MIXED["parameters"]}
    rows = list(itertools.product(kinds, ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), (False, True)))

    def body(rank, world):
        return [row for row in rows if not is_the_same(rank, *row)]

    def is_the_same(rank, kind, strategy, orig):
        torch.manual_seed(0)
        net = Net()
        found = []
        for offload in (True, False):
            settings = {"cpu_offload": ours.CPUOffload(offload), "sharding_strategy": ours.ShardingStrategy[strategy]}
            found.append(trained(wrapped(ours, copy.deepcopy(net), kinds[kind], orig, **settings), rank, micro=2))
        return str(found[0]) == str(found[1])

    assert run(2, body) == [[], []]


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_units_in_eval_compute_in_full_precision_where_the_environment_says_so(orig, monkeypatch):
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")

    def body(rank, world):
        torch.manual_seed(0)
        net = Net()
        plain = copy.deepcopy(net).eval()
        model = wrapped(ours, net, {"param_dtype": torch.bfloat16}, orig)
        x = torch.randn(4, 6)
        model.eval()
        with torch.no_grad():
            exact = torch.equal(model(x), plain(x))
        seen = model.module.seen
        seen.clear()
        model.train()(x)
        model.eval()(x)
        return exact, seen[2], seen[5]

    assert run(2, body) == [(True, torch.bfloat16, torch.float32)] * 2


def test_the_shard_and_the_optimizer_stay_in_the_stored_type():
    def body(rank, world):
        model = wrapped(ours, Net(), {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, False)
        model(torch.randn(4, 6)).float().sum().backward()
        return {(p.dtype, p.grad.dtype) for p in model.parameters()}

    assert run(2, body) == [{(torch.float32, torch.float32)}] * 2
