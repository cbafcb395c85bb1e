"""G28: a module called outside its unit while sharded is refused with the unit's name and the ways out."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.kit.models.models import PLAIN, WIDTH, Stack, blocks_and_root, built, floats, square
from tests.kit.models.under_test import FSDP, TORCH, Strategy, core, shard
from tests.kit.ranks.harness import run

pytestmark = pytest.mark.skipif(TORCH, reason="torch is wrong: 'mat2 must be a matrix' says neither unit nor fix")

WAYS = ("register_fsdp_forward_method", "summon_full_params", "unshard")


def original(module: nn.Module, **settings) -> nn.Module:
    return shard(module, use_orig_params=True, **settings)


FRONT_ENDS = pytest.mark.parametrize(
    "sharder", [original, core.fully_shard if not TORCH else None], ids=["orig", "in place"]
)


def made(sharder, **settings) -> nn.Module:
    return blocks_and_root(built(PLAIN), lambda module: sharder(module, **settings))


def refused(call) -> str:
    with pytest.raises(RuntimeError, match="outside its unit's forward") as caught:
        call()
    return str(caught.value)


@FRONT_ENDS
def test_the_message_names_unit_parameter_and_ways_out(sharder):
    def body(rank, world):
        model = made(sharder)
        first = refused(lambda: model.blocks[0].up(torch.ones(2, WIDTH)))
        square(model(floats(rank, 0))).backward()
        after = refused(lambda: model.blocks[1].down(torch.ones(2, 9)))
        return first, after

    for first, after in run(2, body):
        assert "Block" in first
        assert "up.weight" in first
        assert "blocks.1" in after
        assert "down.weight" in after
        assert all(way in after for way in WAYS)


@FRONT_ENDS
def test_every_way_out_is_one(sharder):
    def body(rank, world):
        plain, model = built(PLAIN), made(sharder)
        x = floats(rank, 0)
        wrong = []
        with FSDP.summon_full_params(model):
            wrong += [] if torch.equal(model.first(x), plain.first(x)) else ["summon_full_params"]
        refused(lambda: model.first(x))
        model(x)
        (model.unshard if sharder is not original else model._unshard)()
        wrong += [] if torch.equal(model.first(x), plain.first(x)) else ["unshard"]
        square(model(x)).backward()
        refused(lambda: model.first(x))
        return wrong

    assert run(2, body) == [[]] * 2


@FRONT_ENDS
def test_what_holds_no_part_of_a_parameter_can_be_called(sharder):
    def body(rank, world):
        model = Stack()
        model.free = nn.Dropout(0.0)
        model = sharder(model)
        return bool((model.free(torch.ones(3)) == 1).all())

    assert run(2, body) == [True] * 2


def test_where_nothing_is_sharded_every_module_computes():
    def body(rank, world):
        plain, model = built(PLAIN), made(original, sharding_strategy=Strategy.NO_SHARD)
        return torch.equal(model.first(floats(0, 0)), plain.first(floats(0, 0)))

    assert run(2, body) == [True] * 2


def test_dtensors_may_be_computed_with_outside():
    def body(rank, world):
        plain, model = built(PLAIN), core.fully_shard(built(PLAIN))
        mesh = model.first.weight.device_mesh
        out = model.first(DTensor.from_local(floats(0, 0), mesh))
        return torch.allclose(out.full_tensor(), plain.first(floats(0, 0)))

    assert run(2, body) == [True] * 2


@FRONT_ENDS
def test_a_forward_that_a_user_put_there_stays(sharder):
    """Put there before or after sharding; one that calls the module's own, as it was then, gets that."""

    def body(rank, world):
        plain = built(PLAIN)
        model = copy.deepcopy(plain)
        calls = []

        def patch(module, name):
            own = module.forward

            def patched(*args):
                calls.append(name)
                return own(*args)

            module.forward = patched

        patch(model.blocks[0].up, "before")
        model = blocks_and_root(model, sharder)
        patch(model.blocks[1].up, "after")
        for _ in range(2):
            square(model(floats(rank, 0))).backward()
        with torch.no_grad():
            same = torch.allclose(model(floats(rank, 0)), plain(floats(rank, 0)))
        return same, calls

    assert run(2, body) == [(True, ["before", "after"] * 3)] * 2


@FRONT_ENDS
def test_signatures_can_be_looked_at(sharder):
    def body(rank, world):
        model = made(sharder)
        linear = model.blocks[0].up
        return list(inspect.signature(linear.forward).parameters), linear.forward.__func__ is nn.Linear.forward

    assert run(1, body) == [(["input"], True)]


@FRONT_ENDS
def test_a_copy_refuses_and_computes_by_itself(sharder):
    def body(rank, world):
        model = made(sharder)
        twin = copy.deepcopy(model)
        x = floats(rank, 0)
        with FSDP.summon_full_params(twin):
            refused(lambda: model.first(x))
            twin.first(x)
        refused(lambda: twin.first(x))
        square(twin(x)).backward()
        square(model(x)).backward()
        refused(lambda: twin.blocks[0].up(torch.ones(2, WIDTH)))

    run(2, body)


@FRONT_ENDS
def test_it_keeps_no_module_alive(sharder):
    def body(rank, world):
        model = made(sharder)
        gone = weakref.ref(model.blocks[0].up)
        del model
        gc.collect()
        return gone() is None

    assert run(1, body) == [True]
