"""Debug mode (TORCH_DISTRIBUTED_DEBUG=DETAIL): all ranks report ranks that diverge or begin with other values."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardckpt.core.comm.rank_checks import checksum
from tests.kit.models.front_ends import FRONT_ENDS, sharder, train, twins
from tests.kit.models.models import PLAIN, Stack, blocks_and_root, built, case, floats, square
from tests.kit.models.reference import Training, sgd
from tests.kit.models.under_test import TORCH, Strategy, shard
from tests.kit.ranks.harness import count, mark, outcomes, raised_everywhere, run, since

pytestmark = pytest.mark.skipif(TORCH, reason="the engine's own")

FULL, GRAD_OP, NONE = Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD
KEEPING = {"full": FULL, "grad_op": GRAD_OP, "none": NONE}
ALL = [(front_end, name) for front_end in FRONT_ENDS for name in KEEPING if (front_end, name) != ("in place", "none")]
EACH = pytest.mark.parametrize(("front_end", "keeping"), ALL, ids=[f"{front_end}-{name}" for front_end, name in ALL])
FRONT_END = pytest.mark.parametrize("front_end", FRONT_ENDS)


@pytest.fixture(autouse=True)
def detail(monkeypatch):
    """Ranks are forked and read it when their first forward begins."""
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")


def by(front_end: str, keeping: str):
    """What shards by a front end: freeing, keeping between the passes, or not sharding at all."""
    if keeping == "none":
        return sharder(front_end, sharding_strategy=NONE)
    return sharder(front_end, frees=keeping == "full")


def model(front_end: str = "flat", keeping: str = "full", plain: nn.Module | None = None) -> nn.Module:
    return blocks_and_root(built(PLAIN) if plain is None else plain, by(front_end, keeping))


# ------------------------------------------------------------------------------------------------------- order


class Wandering(Stack):
    """Runs its blocks in an order of its own, some not at all."""

    way = (0, 1, 2)

    def forward(self, x):
        x = self.first(x)
        for index in self.way:
            x = self.blocks[index](x)
        return self.last(x)


def wandering(rank: int, ways, front_end: str = "flat", keeping: str = "full") -> nn.Module:
    torch.manual_seed(3)
    plain = Wandering()
    plain.way = ways[rank]
    return model(front_end, keeping, plain)


WAYS = {
    "one rank skips a block": ((0, 1, 2), (0, 2)),
    "one rank skips the last": ((0, 1, 2), (0, 1)),
    "ranks swap blocks of one size": ((0, 1, 2), (1, 0, 2)),
    "one rank runs none": ((0, 1, 2), ()),
}


ROUTES = [
    pytest.param(
        WAYS[way],
        front_end,
        keeping,
        id=f"{front_end}-{keeping}-{way}",
        marks=() if (i + j) % 2 == 0 else pytest.mark.slow,
    )
    for i, (front_end, keeping) in enumerate(ALL)
    for j, way in enumerate(WAYS)
]
"""Every way with every front end and what it keeps; those that are not slow bring every two of the three together."""


@pytest.mark.parametrize(("ways", "front_end", "keeping"), ROUTES)
def test_g4_ranks_that_run_other_units_learn_it_on_every_rank(ways, front_end, keeping):
    def body(rank, world):
        made = wandering(rank, ways, front_end, keeping)
        for step in range(2):
            square(made(floats(rank, step))).backward()

    for error in raised_everywhere(2, body):
        assert error.is_a(RuntimeError)
        assert "order differs across ranks" in error.message
        assert "rank 0 is about to" in error.message
        assert "rank 1 is about to" in error.message
        assert "blocks." in error.message


def test_g4_a_unit_that_one_rank_runs_twice_is_told_where_that_gathers_twice():
    def body(rank, world):
        wandering(rank, ((0, 1, 2), (0, 1, 1, 2)))(floats(rank, 0))

    for error in raised_everywhere(2, body):
        assert "rank 0 is about to gather blocks.2 in forward; rank 1 is about to gather blocks.1" in error.message


def test_g4_the_message_names_the_unit_that_each_of_many_ranks_is_at():
    def body(rank, world):
        wandering(rank, ((0, 1, 2), (0, 2), (0, 1, 2)))(floats(rank, 0))

    for error in raised_everywhere(3, body):
        assert error.message.startswith("Forward order differs across ranks: ranks 0, 2 are about to gather blocks.1")
        assert "rank 1 is about to gather blocks.2" in error.message


@EACH
def test_g4_a_rank_that_is_done_learns_of_one_that_runs_a_unit_alone(front_end, keeping):
    """The other rank has ended its iteration, and begins another."""

    def body(rank, world):
        made = model(front_end, keeping)
        square(made(floats(rank, 0))).backward()
        if rank == 0:
            square(made.blocks[1](torch.ones(2, 7))).backward()
        square(made(floats(rank, 1))).backward()

    for error in raised_everywhere(2, body):
        assert error.is_a(RuntimeError)
        assert "blocks.1" in error.message


@EACH
def test_g4_a_rank_that_leaves_out_a_backward_is_told(front_end, keeping):
    def body(rank, world):
        made = model(front_end, keeping)
        loss = square(made(floats(rank, 0)))
        if rank == 0:
            loss.backward()
        made(floats(rank, 1))

    for error in raised_everywhere(2, body):
        assert "order differs across ranks" in error.message.lower() or "got no answer" in error.message


def test_g4_a_rank_that_failed_by_itself_is_told_by_the_next_iteration():
    def body(rank, world):
        made = model()
        try:
            made(floats(rank, 0) if rank else torch.ones(2, 6))
        except RuntimeError as error:
            assert "shapes" in str(error) or rank
        made(floats(rank, 1))

    found = outcomes(2, body)
    assert any(
        each.raised is not None and "Forward order differs across ranks" in each.raised.message for each in found
    )


def test_g4_a_rank_that_is_gone_is_told_with_the_unit_that_waited():
    def body(rank, world):
        made = model()
        made(floats(rank, 0))
        if rank == 0:
            made(floats(rank, 0))

    found = outcomes(2, body, group_timeout=3.0)
    assert found[0].raised is not None
    assert found[0].raised.is_a(RuntimeError)
    assert "about to gather" in found[0].raised.message


@FRONT_END
def test_g4_ranks_that_agree_again_go_on(front_end):
    def body(rank, world):
        plain, made = twins(PLAIN, front_end)
        square(made(floats(rank, 0))).backward()
        made.zero_grad()
        try:
            made.blocks[rank](torch.ones(2, 7))
        except RuntimeError as error:
            assert "differs" in str(error)
        return train(PLAIN, made, plain, Training(sgd, steps=2), front_end)

    assert run(2, body) == [[], []]


TRAPS = [
    "nested",
    "called three times",
    "checkpoint(unit) reentrant",
    "used on some ranks",
    "part of the outputs by rank",
]


def assert_no_difference(name: str, rows: list[tuple[str, bool]]) -> None:
    """The case trains as its unsharded twin in each row: a front end, and whether it frees between the passes."""

    def body(rank, world):
        found = []
        for front_end, frees in rows:
            plain, made = twins(case(name), front_end, frees=frees)
            wrong = train(case(name), made, plain, Training(sgd, steps=2, micro=2, no_sync=True), front_end)
            found += [f"{front_end} {'frees' if frees else 'keeps'}: {each}" for each in wrong]
        return found

    assert run(2, body) == [[], []]


@pytest.mark.shown_by("[nested]", "called three times")
@pytest.mark.shown_by("[used on some ranks]", "part of the outputs by rank")
@pytest.mark.parametrize("name", TRAPS)
def test_ranks_that_differ_inside_units_are_no_difference(name):
    """On each front end; each front end frees and keeps over the names."""
    assert_no_difference(
        name, [(front_end, (TRAPS.index(name) + i) % 2 == 0) for i, front_end in enumerate(FRONT_ENDS)]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAPS)
@FRONT_END
def test_ranks_that_differ_inside_units_that_are_freed_or_kept_are_no_difference(name, front_end):
    assert_no_difference(name, [(front_end, True), (front_end, False)])


def test_outside_debug_mode_nothing_is_compared(monkeypatch):
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "OFF")

    def body(rank, world):
        made = model()
        start = mark()
        square(made(floats(rank, 0))).backward()
        return count(since(start), "all_gather"), len(since(start))

    assert run(2, body) == [(7, 11)] * 2


# ---------------------------------------------------------------------------------------------------- beginning


def apart(rank: int, name: str) -> nn.Module:
    """A model one value of which is the rank's own."""
    plain = built(PLAIN)
    with torch.no_grad():
        dict(plain.named_parameters())[name].view(-1)[-1] += rank
    return plain


@pytest.mark.parametrize(
    ("name", "front_end", "keeping"),
    [(("first.bias", "blocks.1.up.weight")[i % 2], front_end, keeping) for i, (front_end, keeping) in enumerate(ALL)],
)
def test_g6_parameters_that_differ_at_the_beginning_are_named(name, front_end, keeping):
    def body(rank, world):
        square(model(front_end, keeping, apart(rank, name))(floats(rank, 0))).backward()

    for error in raised_everywhere(2, body):
        assert error.is_a(RuntimeError)
        assert f"different parameters: {name}." in error.message
        assert "sync_module_states" in error.message


def test_g6_replicas_of_a_hybrid_that_differ_are_named():
    def body(rank, world):
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        plain = apart(rank // 2, "blocks.0.down.bias")
        made = shard(plain, sharding_strategy=Strategy.HYBRID_SHARD, device_mesh=mesh)
        made(floats(rank, 0))

    for error in raised_everywhere(4, body):
        assert "blocks.0.down.bias" in error.message


@FRONT_END
def test_g6_what_was_loaded_since_is_no_difference(front_end):
    """Each rank made its own beginning, and all were overwritten alike before the first iteration."""

    def body(rank, world):
        torch.manual_seed(rank)
        made = model(front_end, plain=Stack())
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.fill_(0.5)
        return made(floats(0, 0)).sum().item()

    first, second = run(2, body)
    assert first == second


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_g6_states_that_were_synchronised_are_no_difference(orig):
    def body(rank, world):
        torch.manual_seed(rank)
        made = shard(Stack(), use_orig_params=orig, sync_module_states=True)
        return made(floats(0, 0)).sum().item()

    first, second = run(2, body)
    assert first == second


def test_g6_buffers_and_ignored_parameters_that_differ_are_warned_of():
    def body(rank, world):
        plain = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        plain[1].running_mean += rank
        with torch.no_grad():
            plain[2].weight += rank
        made = shard(plain, ignored_states=[plain[2]])
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            made(floats(rank, 0))
            made(floats(rank, 1))
        return [str(each.message) for each in messages if "start with" in str(each.message)]

    for messages in run(2, body):
        assert len(messages) == 1
        assert "1.running_mean" in messages[0]
        assert "2.weight" in messages[0]
        assert "2.bias" not in messages[0]


def test_a_checksum_sees_every_bit_and_every_place():
    torch.manual_seed(0)
    one = torch.randn(33)
    assert checksum(one) == checksum(one.clone())
    swapped = one.clone()
    swapped[[3, 9]] = swapped[[9, 3]]
    flipped = one.clone()
    flipped.view(torch.int32)[32] ^= 1
    assert len({checksum(each) for each in (one, swapped, flipped, one[:32], one.bfloat16())}) == 5
    for dtype in (torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn):
        assert checksum(torch.ones(3).to(dtype)) == checksum(torch.ones(3).to(dtype))
    assert checksum(torch.ones(())) == checksum(torch.ones(1))
    assert checksum(torch.empty(0)) == 0


def test_debug_mode_is_read_from_torch_too(monkeypatch):
    monkeypatch.delenv("TORCH_DISTRIBUTED_DEBUG")

    def body(rank, world):
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        assert "TORCH_DISTRIBUTED_DEBUG" not in os.environ
        wandering(rank, WAYS["one rank skips a block"])(floats(rank, 0))

    for error in raised_everywhere(2, body):
        assert error.message.startswith("Forward order differs across ranks")
