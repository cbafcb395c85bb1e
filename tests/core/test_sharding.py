"""What ranks hold and send: shards outside compute, one full unit at a time inside, and no collective too many."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from harness import Call, count, mark, note, run, since, stored_bytes
from models import (
    PLAIN,
    Checkpointed,
    CheckpointedReentrant,
    FrozenMix,
    UnitOfCheckpoint,
    UnitOfCheckpointReentrant,
    Wide,
    blocks_and_root,
    built,
    case,
    floats,
    square,
)
from reference import clean, exposed, sgd, units
from torch import nn
from under_test import FSDP, TORCH, Strategy, core, shard, torch_is_wrong

FULL, GRAD_OP, NONE = Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD
SLACK = 16_000  # bytes of activations, paddings and small tensors that the counts leave out
BOTH = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])


def wide(strategy: Strategy, orig: bool, probe=lambda _: None, **more):
    """A sharded `Wide` and the bytes of each of its units when whole."""
    torch.manual_seed(0)
    plain = Wide(probe=probe)
    model = blocks_and_root(plain, lambda m: shard(m, sharding_strategy=strategy, use_orig_params=orig, **more))
    sizes = {f"blocks.{i}": 4 * (2 * 64 * (96 + 16 * i) + 64 + 96 + 16 * i) for i in range(4)}
    return model, {**sizes, "": 4 * (5 * 64 + 64 + 64 * 3 + 3)}


def fitted(found: int, wanted: int) -> bool:
    return wanted <= found <= wanted + SLACK


# -------------------------------------------------------------------------------------------------- bytes


@BOTH
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP, NONE])
def test_a_rank_holds_its_share_between_iterations(strategy, world, orig):
    if TORCH and strategy is NONE and not orig:
        pytest.skip("torch is wrong: a unit's bytes stay twice")

    def body(rank, world):
        model, sizes = wide(strategy, orig)
        share = sum(sizes.values()) // (1 if strategy is NONE else world)
        held = [stored_bytes()]
        for step in range(2):
            square(model(floats(rank, step))).backward()
            held.append(stored_bytes())
            model.zero_grad()
            held.append(stored_bytes())
        return share, held

    for share, held in run(world, body):
        built_, after_backward, after_zero_grad, after_second, at_end = held
        assert fitted(built_, share)
        assert fitted(after_backward, 2 * share), "a shard and its gradient"
        assert fitted(after_second, 2 * share)
        if not orig:
            assert fitted(after_zero_grad, share)
            assert fitted(at_end, share)
        assert at_end <= 2 * share + SLACK


@BOTH
def test_nothing_grows_from_iteration_to_iteration(orig):
    def body(rank, world):
        model, _ = wide(FULL, orig)
        optimizer, held = sgd(model.parameters()), []
        for step in range(5):
            square(model(floats(rank, step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            held.append(stored_bytes())
        return held

    for held in run(2, body):
        assert held[1] == held[4], held


@BOTH
@pytest.mark.parametrize(
    ("strategy", "kept"), [(FULL, ("",)), (GRAD_OP, ("", "blocks.0", "blocks.1", "blocks.2", "blocks.3"))]
)
def test_between_forward_and_backward_only_what_the_strategy_keeps_is_whole(strategy, kept, orig):
    def body(rank, world):
        model, sizes = wide(strategy, orig)
        loss = square(model(floats(rank, 0)))
        return stored_bytes(), sum(sizes.values()) // world + sum(sizes[name] for name in kept), float(loss.detach())

    for held, wanted, _ in run(2, body):
        assert fitted(held, wanted)


@torch_is_wrong("the root keeps its parameters after a forward without gradients, SHARD_GRAD_OP keeps all")
@BOTH
@pytest.mark.parametrize("strategy", [FULL, GRAD_OP])
def test_g29_a_forward_without_gradients_leaves_nothing_whole(strategy, orig):
    def body(rank, world):
        model, sizes = wide(strategy, orig)
        with torch.no_grad():
            model(floats(rank, 0))
        held = stored_bytes()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
            zero = model(floats(rank, 0)).abs().sum().item()
        return held, sum(sizes.values()) // world, zero

    for held, wanted, zero in run(2, body):
        assert fitted(held, wanted)
        assert zero == 0.0, "changes after it take effect"


@BOTH
def test_while_a_block_computes_at_most_the_next_unit_is_whole_besides(orig):
    def body(rank, world):
        seen: dict[str, int] = {}
        model, sizes = wide(FULL, orig, lambda what: seen.__setitem__(what, stored_bytes()))
        square(model(floats(rank, 0))).backward()
        return seen, sizes

    for seen, sizes in run(2, body):
        share, root = sum(sizes.values()) // 2, sizes[""]
        for index in range(4):
            own, following = sizes[f"blocks.{index}"], sizes.get(f"blocks.{index + 1}", 0)
            preceding = sizes.get(f"blocks.{index - 1}", 0)
            assert seen[f"run blocks.{index}"] <= share + root + own + following + SLACK
            # In backward gradient shards of later blocks have come, and the last one's whole gradient is on its way.
            grads = share + 2 * own + following
            assert seen[f"grad blocks.{index}"] <= share + root + own + preceding + grads + SLACK


@BOTH
def test_full_buffers_are_freed_when_nothing_else_is_said(orig):
    """The sharded parameters and nothing else is what `parameters()` leads to."""

    def body(rank, world):
        model, sizes = wide(FULL, orig)
        found = []
        for step in range(2):
            square(model(floats(rank, step))).backward()
            found.append(sum(p.numel() for p in model.parameters()) * 4)
            storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
            found.append(sum(storages.values()))
        return found, sum(sizes.values()) // world

    for found, share in run(2, body):
        assert all(bytes_ <= share + SLACK for bytes_ in found)


# -------------------------------------------------------------------------------------------- collectives


def logged(model, rank: int, steps: int = 2, forward_only: bool = False) -> list[Call]:
    """The collectives of the last of some iterations: the first may agree on things."""
    for step in range(steps):
        start = mark()
        loss = square(model(floats(rank, step)))
        if not forward_only:
            loss.backward()
        model.zero_grad()
    return since(start)


@BOTH
@pytest.mark.parametrize(
    ("strategy", "gathers", "scatters", "reduces"), [(FULL, 9, 5, 0), (GRAD_OP, 5, 5, 0), (NONE, 0, 0, 5)]
)
def test_each_strategy_issues_its_collectives_and_no_other(strategy, gathers, scatters, reduces, orig):
    """Four blocks and the root: FULL_SHARD gathers all in forward and the blocks again in backward."""
    calls = run(2, lambda rank, world: logged(wide(strategy, orig)[0], rank))
    found = [
        (count(each, "all_gather"), count(each, "reduce_scatter"), count(each, "all_reduce"), len(each))
        for each in calls
    ]
    assert found == [(gathers, scatters, reduces, gathers + scatters + reduces)] * 2
    assert calls[0] == calls[1]


@BOTH
@pytest.mark.parametrize("world", [2, 3, 4])
def test_sizes_are_those_of_the_units(world, orig):
    def body(rank, world):
        model, sizes = wide(FULL, orig)
        return logged(model, rank), sorted(bytes_ // 4 for bytes_ in sizes.values())

    for calls, numels in run(world, body):
        gathered = sorted({call.sent for call in calls if call.op == "all_gather"})
        assert len(gathered) == len(numels)
        for sent, numel in zip(gathered, numels, strict=True):
            assert numel <= sent * world <= numel + world + 16, "no padding but the alignment and that to the ranks"
        scattered = sorted(call.received for call in calls if call.op == "reduce_scatter")
        for received, numel in zip(scattered, numels, strict=True):
            assert numel <= received * world <= numel + world * 8 + 16, "the gradient, a flag a parameter"
        assert all(call.received == call.sent * world for call in calls if call.op == "all_gather")
        assert all(call.sent == call.received * world for call in calls if call.op == "reduce_scatter")
        assert {call.dtype for call in calls} == {"float32"}


@BOTH
@pytest.mark.parametrize(("strategy", "first", "second"), [(FULL, 9, 9), (GRAD_OP, 5, 0), (NONE, 0, 0)])
def test_no_sync_reduces_nothing_and_the_next_backward_once(strategy, first, second, orig):
    def body(rank, world):
        model, _ = wide(strategy, orig)
        logged(model, rank, 1)
        starts = []
        with model.no_sync():
            for step in range(2):
                starts.append(mark())
                square(model(floats(rank, step))).backward()
        starts.append(mark())
        square(model(floats(rank, 2))).backward()
        return since(starts[0])[: starts[1] - starts[0]], since(starts[1])[: starts[2] - starts[1]], since(starts[2])

    for one, two, three in run(2, body):
        assert (count(one, "all_gather"), len(one)) == (first, first)
        assert (count(two, "all_gather"), len(two)) == (second, second)
        assert count(three, "reduce_scatter") + count(three, "all_reduce") == 5
        assert count(three, "all_gather") == second


@BOTH
def test_a_forward_without_gradients_gathers_each_unit_once(orig):
    def body(rank, world):
        model, _ = wide(FULL, orig)
        logged(model, rank, 1)
        start = mark()
        with torch.no_grad():
            model(floats(rank, 0))
        return since(start)

    for calls in run(2, body):
        assert count(calls, "all_gather") == len(calls)
        assert len(calls) in (4, 5)


def test_a_frozen_unit_is_never_reduced():
    def body(rank, world):
        torch.manual_seed(0)
        model = blocks_and_root(FrozenMix(), lambda m: shard(m, use_orig_params=True))
        return logged(model, rank)

    for calls in run(2, body):
        assert count(calls, "reduce_scatter") == 3


@pytest.mark.parametrize("kind", [Checkpointed, CheckpointedReentrant, UnitOfCheckpoint, UnitOfCheckpointReentrant])
@BOTH
def test_recomputing_gathers_no_more_than_backward_does(kind, orig):
    if TORCH and kind is CheckpointedReentrant:
        pytest.skip("torch is wrong: it gathers for the forward that is repeated and again for its backward")

    def body(rank, world):
        torch.manual_seed(0)
        model, ran = kind(), []
        for block in model.blocks:
            target = getattr(block, "inner", block).up
            target.register_forward_hook(lambda *_: ran.append(1))
        model = blocks_and_root(model, lambda m: shard(m, use_orig_params=orig))
        calls = logged(model, rank)
        return count(calls, "all_gather"), count(calls, "reduce_scatter"), len(calls), len(ran)

    assert run(2, body) == [(7, 4, 11, 12)] * 2


# ------------------------------------------------------------------------------------------------ prefetch


def timeline(rank: int, steps: int = 2, **settings) -> list[str]:
    """What a FULL_SHARD iteration does in order, collectives by the unit they are for."""
    model, sizes = wide(FULL, False, note, **settings)
    calls = logged(model, rank, steps)
    names = {(bytes_ // 4 + 1) // 2: name or "root" for name, bytes_ in sizes.items()}
    told = []
    for call in calls:
        if call.op in ("all_gather", "reduce_scatter"):
            numel = min(call.sent, call.received)
            nearest = min(names, key=lambda known: abs(known - numel))
            told.append(f"{'gather' if call.op == 'all_gather' else 'reduce'} {names[nearest]}")
        else:
            told.append(call.op)
    return told


def both(**settings) -> list[str]:
    first, second = run(2, lambda rank, world: timeline(rank, **settings))
    assert first == second
    return first


def test_backward_prefetch_pre_gathers_before_the_gradients_of_the_unit_behind():
    told = both(backward_prefetch=core.BackwardPrefetch.BACKWARD_PRE)
    backward = told[told.index("run blocks.3") + 1 :]
    for index in (3, 2, 1):
        assert backward.index(f"gather blocks.{index - 1}") < backward.index(f"grad blocks.{index}")


def test_backward_prefetch_post_gathers_after_the_gradients_and_before_their_reduction():
    told = both(backward_prefetch=core.BackwardPrefetch.BACKWARD_POST)
    backward = told[told.index("run blocks.3") + 1 :]
    for index in (3, 2, 1):
        gather = backward.index(f"gather blocks.{index - 1}")
        assert backward.index(f"grad blocks.{index}") < gather < backward.index(f"reduce blocks.{index}")


def test_without_backward_prefetch_a_unit_is_gathered_when_it_is_needed():
    told = both(backward_prefetch=None)
    backward = told[told.index("run blocks.3") + 1 :]
    for index in (3, 2, 1):
        gather = backward.index(f"gather blocks.{index - 1}")
        assert backward.index(f"reduce blocks.{index}") < gather < backward.index(f"grad blocks.{index - 1}")


@pytest.mark.parametrize("forward_prefetch", [False, True])
def test_forward_prefetch_gathers_the_next_unit_before_this_one_runs(forward_prefetch):
    told = both(forward_prefetch=forward_prefetch, steps=3)
    early = [told.index(f"gather blocks.{i + 1}") < told.index(f"run blocks.{i}") for i in range(3)]
    assert early == [forward_prefetch] * 3


# ------------------------------------------------------------------------------------------------ exposure


def test_original_parameters_stay_the_objects_that_the_user_made():
    def body(rank, world):
        torch.manual_seed(0)
        plain = PLAIN.build()
        before = {name: id(parameter) for name, parameter in plain.named_parameters()}
        keep = list(plain.parameters())
        model = blocks_and_root(plain, lambda m: shard(m, use_orig_params=True))
        seen = [{name: id(parameter) for name, parameter in exposed(model).items()}]
        square(model(floats(rank, 0))).backward()
        seen.append({name: id(parameter) for name, parameter in exposed(model).items()})
        return all(each == before for each in seen), len(keep), [p.dim() for p in model.parameters()]

    for same, _, dims in run(2, body):
        assert same
        assert set(dims) == {1}


def test_a_flat_parameter_a_unit_is_all_that_an_optimizer_sees():
    def body(rank, world):
        torch.manual_seed(0)
        model = blocks_and_root(PLAIN.build(), lambda m: shard(m, use_orig_params=False))
        names = []
        for step in range(2):
            names.append(sorted(exposed(model)))
            square(model(floats(rank, step))).backward()
        return names, [clean(name) for name, _ in model.named_parameters()]

    for names, _ in run(2, body):
        assert names == [["_flat_param", "blocks.0._flat_param", "blocks.1._flat_param", "blocks.2._flat_param"]] * 2


def test_inside_forward_parameters_have_their_own_shapes_and_names():
    def body(rank, world):
        found = {}
        torch.manual_seed(0)
        plain = PLAIN.build()
        for orig in (False, True):
            model = copy.deepcopy(plain)
            block = model.blocks[0]
            block.up.register_forward_pre_hook(
                lambda m, _, o=orig: found.update({o: (tuple(m.weight.shape), tuple(m.bias.shape))})
            )
            model = blocks_and_root(model, lambda m, o=orig: shard(m, use_orig_params=o))
            model(floats(rank, 0))
        return found

    assert run(2, body) == [{False: ((9, 7), (9,)), True: ((9, 7), (9,))}] * 2


@BOTH
def test_a_deleted_model_leaves_no_bytes(orig):
    def body(rank, world):
        start = stored_bytes()
        model, _ = wide(FULL, orig)
        square(model(floats(rank, 0))).backward()
        del model
        gc.collect()
        return stored_bytes() - start

    assert max(run(2, body)) <= (SLACK if not TORCH else 10**9)


def test_units_are_named_as_they_were_cut():
    def body(rank, world):
        which = case("nested")
        model = which.cut(built(which), lambda m: shard(m, use_orig_params=True))
        return units(model), len(FSDP.fsdp_modules(model)), len(FSDP.fsdp_modules(model, root_only=False))

    names, number, same = run(1, body)[0]
    assert number == same == len(names) == 9
    assert names[0] == ""


def test_the_three_strategies_send_what_they_say_in_bytes():
    """FULL_SHARD sends half as much again as SHARD_GRAD_OP, which sends as much as NO_SHARD."""

    def body(rank, world):
        sent = {}
        for strategy in (FULL, GRAD_OP, NONE):
            calls = logged(wide(strategy, True)[0], rank)
            sent[strategy.name] = sum(max(c.sent, c.received) * (2 if c.op == "all_reduce" else 1) for c in calls)
        return sent

    sent = run(2, body)[0]
    assert sent["FULL_SHARD"] == pytest.approx(1.5 * sent["SHARD_GRAD_OP"], rel=0.03)
    assert sent["SHARD_GRAD_OP"] == pytest.approx(sent["NO_SHARD"], rel=0.03)


def test_a_unit_without_parameters_is_allowed():
    def body(rank, world):
        model = shard(nn.Sequential(shard(nn.Linear(5, 3)), shard(nn.ReLU())))
        calls = logged(model, rank)
        return len(calls)

    assert run(2, body)[0] >= 2
