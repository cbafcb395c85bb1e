"""Hybrid strategies: shards inside a group, copies across groups, and how the groups are found."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.core.fsdp2.test_fully_shard import averaged
from tests.kit.models.models import Block, Stack, blocks_and_root, floats, square
from tests.kit.models.under_test import FSDP, TORCH, Strategy, shard, torch_is_wrong, wrap
from tests.kit.ranks.harness import count, recorded, run

STRATEGIES = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
POLICY = wrap.ModuleWrapPolicy({Block})


def pair() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Ranks 0 and 1 share, and ranks 2 and 3; 0 and 2 have copies of the same, and 1 and 3."""
    rank = dist.get_rank()
    shards = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    copies = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    return shards[rank // 2], copies[rank % 2]


def settings(how: str) -> dict:
    """The groups of a 2x2 arrangement, passed in one of three ways."""
    if how == "mesh":
        return {"device_mesh": init_device_mesh("cpu", (2, 2))}
    if how == "pair":
        return {"process_group": pair()}
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    return {"auto_wrap_policy": POLICY}


def built(how: str, strategy: str, **more) -> nn.Module:
    torch.manual_seed(0)
    options = settings(how) | {"sharding_strategy": Strategy[strategy], "use_orig_params": True} | more
    if how == "nodes":
        return shard(Stack(), **options)
    return blocks_and_root(Stack(), lambda m: shard(m, **options))


def whole(held: list[torch.Tensor]) -> list[torch.Tensor]:
    """The flat tensors of which ranks 0 and 1, or 2 and 3, hold a piece each."""
    pieces: list = [None] * 4
    dist.all_gather_object(pieces, [each.flatten() for each in held])
    first = dist.get_rank() // 2 * 2
    return [torch.cat(each) for each in zip(*pieces[first : first + 2], strict=True)]


def reference_step(plain: nn.Module, optim: torch.optim.Optimizer, batches: list[torch.Tensor]) -> float:
    """A step on the unsharded model with gradients averaged over all ranks."""
    optim.zero_grad()
    loss = sum(square(plain(each)) for each in batches)
    loss.backward()
    averaged(plain)
    optim.step()
    return loss.item()


def train(model: nn.Module, steps: int, *, accumulate: bool = False) -> list[bool]:
    """Train beside an unsharded twin; tell of each step whether losses, gradients and parameters are equal."""
    rank, same = dist.get_rank(), []
    torch.manual_seed(0)
    plain = Stack()
    optims = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, plain)]
    for step in range(steps):
        batches = [floats(rank, 2 * step + i) for i in range(2 if accumulate else 1)]
        optims[0].zero_grad()
        loss = 0.0
        if accumulate:
            with model.no_sync():
                part = square(model(batches[0]))
                part.backward()
                loss += float(part)
        part = square(model(batches[-1]))
        part.backward()
        loss += float(part)
        expected = reference_step(plain, optims[1], batches)
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        optims[0].step()
        found = whole([*grads, *(p.detach() for p in model.parameters())])
        wanted = [*(q.grad for q in plain.parameters()), *plain.parameters()]
        rows = zip(found, wanted, strict=True)
        close = [torch.allclose(p, q.flatten(), rtol=1e-4, atol=1e-6) for p, q in rows]
        same.append(all(close) and abs(loss - expected) < 1e-4 * abs(expected))
    return same


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("how", ["mesh", "pair", pytest.param("nodes", marks=torch_is_wrong("one CPU is a node"))])
def test_four_ranks_train_as_the_unsharded_model(how, strategy):
    assert run(4, lambda rank, world: train(built(how, strategy), 3)) == [[True] * 3] * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_held_back_are_reduced_with_the_next(strategy):
    assert run(4, lambda rank, world: train(built("mesh", strategy), 2, accumulate=True)) == [[True] * 2] * 4


@pytest.mark.parametrize("orig", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_are_the_same_bits_and_shards_are_half(strategy, orig):
    def body(rank, world):
        model = built("mesh", strategy, use_orig_params=orig)
        optim = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(2):
            square(model(floats(rank, step))).backward()
            optim.step()
            optim.zero_grad()
        local = torch.cat([p.detach().flatten() for p in model.parameters()])
        return local.tolist(), sum(p.numel() for p in Stack().parameters())

    found = run(4, body)
    assert found[0] == found[2]
    assert found[1] == found[3]
    assert found[0] != found[1]
    held, total = len(found[0][0]) + len(found[1][0]), found[0][1]
    assert total <= held <= total + 8  # padding


@pytest.mark.parametrize(("strategy", "gathers"), [("HYBRID_SHARD", 7), ("_HYBRID_SHARD_ZERO2", 4)])
def test_gathers_stay_inside_and_each_unit_reduces_inside_then_across(strategy, gathers):
    def body(rank, world):
        model = built("mesh", strategy)
        square(model(floats(rank, 0))).backward()
        with recorded() as calls:
            square(model(floats(rank, 1))).backward()
        return [count(calls, op) for op in ("all_gather", "reduce_scatter", "all_reduce")], {c.ranks for c in calls}

    assert run(4, body) == [([gathers, 4, 4], {2})] * 4


@pytest.mark.parametrize("orig", [False, True])
def test_hybrid_units_below_one_that_all_ranks_share(orig):
    def body(rank, world):
        torch.manual_seed(0)
        model, plain = Stack(), Stack()
        plain.load_state_dict(model.state_dict())
        mesh = init_device_mesh("cpu", (2, 2))
        for i, block in enumerate(model.blocks):
            hybrid = {"sharding_strategy": Strategy.HYBRID_SHARD, "device_mesh": mesh}
            model.blocks[i] = shard(block, use_orig_params=orig, **hybrid)
        model = shard(model, use_orig_params=orig)
        optims = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, plain)]
        same = []
        for step in range(3):
            optims[0].zero_grad()
            loss = square(model(floats(rank, step)))
            loss.backward()
            optims[0].step()
            expected = reference_step(plain, optims[1], [floats(rank, step)])
            same.append(abs(loss.item() - expected) < 1e-4 * abs(expected))
        return same

    assert run(4, body) == [[True] * 3] * 4


def test_nested_units_have_the_groups_of_the_root():
    def body(rank, world):
        found = []
        for how in ("mesh", "pair"):
            options = settings(how) | {"auto_wrap_policy": POLICY, "sharding_strategy": Strategy.HYBRID_SHARD}
            model = shard(Stack(), **options)
            units = FSDP.fsdp_modules(model)
            found.append((len({id(u.process_group) for u in units}), len({id(u._inter_node_pg) for u in units})))
            found.append((model.rank, model.world_size, dist.get_process_group_ranks(model._inter_node_pg)))
        return found

    for rank, found in enumerate(run(4, body)):
        assert found == [(1, 1), (rank % 2, 2, [rank % 2, rank % 2 + 2])] * 2


@torch_is_wrong("it takes one CPU for a node, whatever LOCAL_WORLD_SIZE is")
def test_without_groups_the_ranks_of_a_node_share():
    def body(rank, world):
        model = built("nodes", "HYBRID_SHARD")
        units = FSDP.fsdp_modules(model)
        ranks = [dist.get_process_group_ranks(g) for g in (model.process_group, model._inter_node_pg)]
        return ranks, len(units), len({id(u.process_group) for u in units} | {id(u._inter_node_pg) for u in units})

    low, high = [0, 1], [2, 3]
    assert run(4, body) == [
        ([low, [0, 2]], 4, 2),
        ([low, [1, 3]], 4, 2),
        ([high, [0, 2]], 4, 2),
        ([high, [1, 3]], 4, 2),
    ]


@pytest.mark.skipif(TORCH, reason="our reading of the environment")
def test_how_many_ranks_a_node_has(monkeypatch):
    from shardckpt.core.comm.process_groups import ranks_per_node

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert ranks_per_node(8) == 4
    for world in (6, 2):
        with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE=4"):
            ranks_per_node(world)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    if not torch.accelerator.is_available():
        assert ranks_per_node(8) == 8
