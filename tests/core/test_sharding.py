"""What ranks hold and send: shards outside compute, one full unit at a time inside, and no collective too many."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tests.kit.models.models import (
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
from tests.kit.models.reference import clean, exposed, sgd, units
from tests.kit.models.under_test import (
    FSDP,
    STYLES,
    TORCH,
    Strategy,
    Style,
    core,
    no_sync,
    shard,
    sharder,
    torch_is_wrong,
)
from tests.kit.ranks.harness import Call, count, mark, note, run, since, stored_bytes

FULL, GRAD_OP, NONE = Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD
SLACK = 16_000  # bytes of activations, paddings and small tensors that the counts leave out
HYBRID = Strategy.HYBRID_SHARD


def wide(strategy: Strategy, style: Style, probe=lambda _: None, **more):
    """A sharded `Wide` and the bytes of each of its units when whole."""
    torch.manual_seed(0)
    plain = Wide(probe=probe)
    model = blocks_and_root(plain, sharder(style, strategy, **more))
    sizes = {f"blocks.{i}": 4 * (2 * 64 * (96 + 16 * i) + 64 + 96 + 16 * i) for i in range(4)}
    return model, {**sizes, "": 4 * (5 * 64 + 64 + 64 * 3 + 3)}


LAST_ROW = 4 * (64 + 1)  # bytes of one row of the head, which has three: of four ranks the last has none


def fitted(found: int, wanted: int) -> bool:
    """Whether a rank holds its share; the last may have no row of the head, neither of its values nor of gradients."""
    return wanted - 2 * LAST_ROW <= found <= wanted + SLACK


# -------------------------------------------------------------------------------------------------- bytes


SHARES = [
    pytest.param(strategy, world, style, marks=pytest.mark.slow if world == 4 and (i + 2) % 3 != j else ())
    for i, strategy in enumerate((FULL, GRAD_OP, NONE))
    for world in (2, 4)
    for j, style in enumerate(Style)
]
"""Each strategy with each style on two ranks; on four that are not slow, each strategy once and each style once."""


@pytest.mark.parametrize(("strategy", "world", "style"), SHARES)
def test_a_rank_holds_its_share_between_iterations(strategy, world, style):
    if TORCH and strategy is NONE and style is Style.FLAT:
        pytest.skip("torch is wrong: a unit's bytes stay twice")

    def body(rank, world):
        model, sizes = wide(strategy, style)
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
        if style is not Style.ORIGINAL:  # those may keep it until the next forward
            assert fitted(after_zero_grad, share)
            assert fitted(at_end, share)
        assert at_end <= 2 * share + SLACK


@STYLES
def test_nothing_grows_from_iteration_to_iteration(style):
    def body(rank, world):
        model, _ = wide(FULL, style)
        optimizer, held = sgd(model.parameters()), []
        for step in range(5):
            square(model(floats(rank, step))).backward()
            optimizer.step()
            optimizer.zero_grad()
            held.append(stored_bytes())
        return held

    for held in run(2, body):
        assert held[1] == held[4], held


@STYLES
@pytest.mark.parametrize(
    ("strategy", "kept"), [(FULL, ("",)), (GRAD_OP, ("", "blocks.0", "blocks.1", "blocks.2", "blocks.3"))]
)
def test_between_forward_and_backward_only_what_the_strategy_keeps_is_whole(strategy, kept, style):
    def body(rank, world):
        model, sizes = wide(strategy, style)
        loss = square(model(floats(rank, 0)))
        return stored_bytes(), sum(sizes.values()) // world + sum(sizes[name] for name in kept), float(loss.detach())

    for held, wanted, _ in run(2, body):
        assert fitted(held, wanted)


@pytest.mark.parametrize(("answer", "whole"), [(True, 0.0), (2, 0.5), (False, 1.0)])
def test_fully_shard_keeps_after_forward_what_it_was_told(answer, whole):
    """True frees the root too; a number keeps a slice of everything, so that so many ranks hold the whole."""

    def body(rank, world):
        model, sizes = wide(FULL, Style.EACH, reshard_after_forward=answer)
        total = sum(sizes.values())
        loss = square(model(floats(rank, 0)))
        held = [stored_bytes()]
        loss.backward()
        held.append(stored_bytes())
        return held, [total // world + int(whole * total), 2 * total // world]

    for held, wanted in run(4, body):
        assert all(map(fitted, held, wanted)), (held, wanted)


def test_fully_shard_told_to_keep_keeps_after_a_forward_without_gradients():
    def body(rank, world):
        model, sizes = wide(GRAD_OP, Style.EACH)
        with torch.no_grad():
            model(floats(rank, 0))
        return stored_bytes(), sum(sizes.values())

    for held, total in run(2, body):
        assert fitted(held, total // 2 + total)


@torch_is_wrong("the root keeps its parameters after a forward without gradients, SHARD_GRAD_OP keeps all")
@pytest.mark.parametrize(
    ("style", "strategy"),
    [(Style.FLAT, FULL), (Style.FLAT, GRAD_OP), (Style.ORIGINAL, FULL), (Style.ORIGINAL, GRAD_OP), (Style.EACH, FULL)],
)
def test_g29_a_forward_without_gradients_leaves_nothing_whole(strategy, style):
    def body(rank, world):
        model, sizes = wide(strategy, style)
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


@STYLES
def test_while_a_block_computes_at_most_the_next_unit_is_whole_besides(style):
    if TORCH and style is Style.EACH:
        pytest.skip("torch is wrong: it holds what was gathered last a second time")

    def body(rank, world):
        seen: dict[str, int] = {}
        model, sizes = wide(FULL, style, lambda what: seen.__setitem__(what, stored_bytes()))
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


@STYLES
def test_full_buffers_are_freed_when_nothing_else_is_said(style):
    """The sharded parameters and nothing else is what `parameters()` leads to."""

    def body(rank, world):
        model, sizes = wide(FULL, style)
        found = []
        for step in range(2):
            square(model(floats(rank, step))).backward()
            held = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
            found.append(sum(p.numel() for p in held) * 4)
            storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in held}
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


@STYLES
@pytest.mark.parametrize(
    ("strategy", "gathers", "scatters", "reduces"), [(FULL, 9, 5, 0), (GRAD_OP, 5, 5, 0), (NONE, 0, 0, 5)]
)
def test_each_strategy_issues_its_collectives_and_no_other(strategy, gathers, scatters, reduces, style):
    """Four blocks and the root: FULL_SHARD gathers all in forward and the blocks again in backward."""
    calls = run(2, lambda rank, world: [c for c in logged(wide(strategy, style)[0], rank) if c.ranks > 1])
    found = [
        (count(each, "all_gather"), count(each, "reduce_scatter"), count(each, "all_reduce"), len(each))
        for each in calls
    ]
    assert found == [(gathers, scatters, reduces, gathers + scatters + reduces)] * 2
    assert calls[0] == calls[1]


@STYLES
def test_replicas_of_groups_gather_and_scatter_inside_and_reduce_across(style):
    """Two groups of two: each rank holds half, and all it sends but the last sum stays in its group."""

    def body(rank, world):
        model, sizes = wide(HYBRID, style)
        calls = logged(model, rank)
        model.zero_grad()
        return calls, stored_bytes(), sum(sizes.values()) // 2

    found = run(4, body)
    for calls, held, half in found:
        assert [count(calls, op) for op in ("all_gather", "reduce_scatter", "all_reduce")] == [9, 5, 5]
        assert {call.ranks for call in calls} == {2}
        assert half <= held <= (2 * half if style is Style.ORIGINAL else half) + SLACK
    assert all(calls == found[0][0] for calls, *_ in found)


@STYLES
@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_sizes_are_those_of_the_units(world, style):
    def body(rank, world):
        model, sizes = wide(FULL, style)
        if style is Style.EACH:
            numels = [sum(rows_on(p, world) for p in own(each)) for each in [model, *model.blocks]]
        else:
            numels = [bytes_ // 4 for bytes_ in sizes.values()]
        return logged(model, rank), sorted(numels)

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


def own(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a unit of `Wide`."""
    return [p for name, p in module.named_parameters() if not name.startswith("blocks")]


def rows_on(parameter: nn.Parameter, world: int) -> int:
    """Elements that all ranks hold of a parameter which is cut in whole rows, each rank's filled up to 16 bytes."""
    rows, *rest = parameter.shape
    held = -(-rows // world) * math.prod(rest)
    return (held + -held % 4) * world


@STYLES
def test_low_precision_gathers_half_the_bytes_and_reduces_in_full(style):
    def body(rank, world):
        calls = logged(wide(FULL, style, low=True)[0], rank)
        return {(call.op, call.dtype) for call in calls}, [call.sent for call in calls]

    def as_stored(rank, world):
        return [call.sent for call in logged(wide(FULL, style)[0], rank)]

    found = run(2, body)
    assert [kinds for kinds, _ in found] == [{("all_gather", "bfloat16"), ("reduce_scatter", "float32")}] * 2
    for (_, low), full in zip(found, run(2, as_stored), strict=True):
        assert low == pytest.approx(full, abs=16), "as many elements, but for what alignment takes"


@STYLES
def test_no_sync_reduces_nothing_and_the_next_backward_once(style):
    """The wrapper's SHARD_GRAD_OP keeps parameters while reductions are held back; `fully_shard` frees them."""
    gathers = {FULL: (9, 9), GRAD_OP: (5, 0 if style.wraps else 5), NONE: (0, 0)}

    def parts(rank, strategy):
        model, _ = wide(strategy, style)
        logged(model, rank, 1)
        starts = []
        with no_sync(model):
            for step in range(2):
                starts.append(mark())
                square(model(floats(rank, step))).backward()
        starts.append(mark())
        square(model(floats(rank, 2))).backward()
        parts = [since(start)[: end - start] for start, end in zip(starts, [*starts[1:], mark()], strict=True)]
        return [[call for call in part if call.ranks > 1] for part in parts]

    for found in run(2, lambda rank, world: [parts(rank, strategy) for strategy in gathers]):
        for (strategy, (first, second)), (one, two, three) in zip(gathers.items(), found, strict=True):
            assert (count(one, "all_gather"), len(one)) == (first, first), strategy
            assert (count(two, "all_gather"), len(two)) == (second, second), strategy
            assert count(three, "reduce_scatter") + count(three, "all_reduce") == 5, strategy
            assert count(three, "all_gather") == second, strategy


@STYLES
def test_a_forward_without_gradients_gathers_each_unit_once(style):
    def body(rank, world):
        model, _ = wide(FULL, style)
        logged(model, rank, 1)
        start = mark()
        with torch.no_grad():
            model(floats(rank, 0))
        return since(start)

    for calls in run(2, body):
        assert count(calls, "all_gather") == len(calls)
        assert len(calls) in (4, 5)


@pytest.mark.parametrize("style", [Style.ORIGINAL, Style.EACH])
def test_a_frozen_unit_is_never_reduced(style):
    def body(rank, world):
        torch.manual_seed(0)
        model = blocks_and_root(FrozenMix(), sharder(style))
        return logged(model, rank)

    for calls in run(2, body):
        assert count(calls, "reduce_scatter") == 3


@STYLES
def test_recomputing_gathers_no_more_than_backward_does(style):
    kinds = [Checkpointed, CheckpointedReentrant, UnitOfCheckpoint, UnitOfCheckpointReentrant]
    if TORCH:  # is wrong: it gathers for the forward that is repeated and again for its backward
        kinds.remove(CheckpointedReentrant)

    def counted(rank, kind):
        torch.manual_seed(0)
        model, ran = kind(), []
        for block in model.blocks:
            target = getattr(block, "inner", block).up
            target.register_forward_hook(lambda *_: ran.append(1))
        model = blocks_and_root(model, sharder(style))
        calls = logged(model, rank)
        return count(calls, "all_gather"), count(calls, "reduce_scatter"), len(calls), len(ran)

    found = run(2, lambda rank, world: {kind.__name__: counted(rank, kind) for kind in kinds})
    assert found == [{kind.__name__: (7, 4, 11, 12) for kind in kinds}] * 2


# ------------------------------------------------------------------------------------------------ prefetch


def timeline(rank: int, steps: int = 2, style: Style = Style.FLAT, tell=lambda blocks: None, **settings) -> list[str]:
    """What a FULL_SHARD iteration does in order, collectives by the unit they are for."""
    model, sizes = wide(FULL, style, note, **settings)
    tell(model.blocks)
    calls = logged(model, rank, steps)
    names = {(bytes_ // 4 + 1) // 2: name or "root" for name, bytes_ in sizes.items()}
    events = []
    for call in calls:
        if call.op in ("all_gather", "reduce_scatter"):
            numel = min(call.sent, call.received)
            nearest = min(names, key=lambda known: abs(known - numel))
            events.append(f"{'gather' if call.op == 'all_gather' else 'reduce'} {names[nearest]}")
        else:
            events.append(call.op)
    return events


def both(**settings) -> list[str]:
    first, second = run(2, lambda rank, world: timeline(rank, **settings))
    assert first == second
    return first


def test_backward_prefetch_pre_gathers_before_the_gradients_of_the_unit_behind():
    events = both(backward_prefetch=core.BackwardPrefetch.BACKWARD_PRE)
    backward = events[events.index("run blocks.3") + 1 :]
    for index in (3, 2, 1):
        assert backward.index(f"gather blocks.{index - 1}") < backward.index(f"grad blocks.{index}")


def test_backward_prefetch_post_gathers_between_the_gradients_and_their_reduction():
    events = both(backward_prefetch=core.BackwardPrefetch.BACKWARD_POST)
    backward = events[events.index("run blocks.3") + 1 :]
    for index in (3, 2, 1):
        gather = backward.index(f"gather blocks.{index - 1}")
        assert backward.index(f"grad blocks.{index}") < gather < backward.index(f"reduce blocks.{index}")


def test_without_backward_prefetch_a_unit_is_gathered_when_it_is_needed():
    events = both(backward_prefetch=None)
    backward = events[events.index("run blocks.3") + 1 :]
    for index in (3, 2, 1):
        gather = backward.index(f"gather blocks.{index - 1}")
        assert backward.index(f"reduce blocks.{index}") < gather < backward.index(f"grad blocks.{index - 1}")


@pytest.mark.parametrize("forward_prefetch", [False, True])
def test_forward_prefetch_gathers_the_next_unit_before_this_one_runs(forward_prefetch):
    events = both(forward_prefetch=forward_prefetch, steps=3)
    early = [events.index(f"gather blocks.{i + 1}") < events.index(f"run blocks.{i}") for i in range(3)]
    assert early == [forward_prefetch] * 3


def test_fully_shard_gathers_the_next_unit_of_backward_before_gradients_of_the_last():
    events = both(style=Style.EACH)
    backward = events[events.index("run blocks.3") + 1 :]
    for index in (3, 2, 1):
        assert backward.index(f"gather blocks.{index - 1}") < backward.index(f"grad blocks.{index}")
    assert all(events.index(f"run blocks.{i}") < events.index(f"gather blocks.{i + 1}") for i in range(3))


def test_fully_shard_gathers_in_forward_what_it_was_told_to():
    def two_ahead(blocks):
        blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[2]])
        blocks[1].set_modules_to_forward_prefetch([blocks[3]])

    events = both(style=Style.EACH, tell=two_ahead)
    forward = events[: events.index("run blocks.3")]
    assert forward.index("gather blocks.1") < forward.index("gather blocks.2") < forward.index("run blocks.0")
    assert forward.index("run blocks.0") < forward.index("gather blocks.3") < forward.index("run blocks.1")


def test_fully_shard_gathers_in_backward_what_it_was_told_to():
    def two_ahead(blocks):
        blocks[3].set_modules_to_backward_prefetch([blocks[2], blocks[1]])

    events = both(style=Style.EACH, tell=two_ahead)
    backward = events[events.index("run blocks.3") + 1 :]
    assert backward.index("gather blocks.2") < backward.index("gather blocks.1") < backward.index("grad blocks.3")


def test_fully_shard_told_of_nothing_to_gather_gathers_what_comes_next():
    def nothing(blocks):
        for block in blocks:
            block.set_modules_to_backward_prefetch([])

    assert both(style=Style.EACH, tell=nothing) == both(style=Style.EACH)


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


@STYLES
def test_inside_forward_parameters_have_their_own_shapes_and_names(style):
    def body(rank, world):
        found = []
        model = built(PLAIN)
        model.blocks[0].up.register_forward_pre_hook(
            lambda m, _: found.append((tuple(m.weight.shape), tuple(m.bias.shape), isinstance(m.weight, DTensor)))
        )
        model = blocks_and_root(model, sharder(style))
        model(floats(rank, 0))
        return found

    assert run(2, body) == [[((9, 7), (9,), False)]] * 2


def test_fully_shard_shows_dtensors_that_stay_the_same_objects():
    def body(rank, world):
        plain = built(PLAIN)
        shapes = {name: tuple(parameter.shape) for name, parameter in plain.named_parameters()}
        model = blocks_and_root(plain, sharder(Style.EACH))
        same = []
        before = exposed(model)
        for step in range(2):
            square(model(floats(rank, step))).backward()
            same.append(all(parameter is before[name] for name, parameter in exposed(model).items()))
        found = {name: tuple(parameter.shape) for name, parameter in before.items()}
        placed = {parameter.placements for parameter in before.values()}
        local = [tuple(model.blocks[0].up.weight.to_local().shape), tuple(model.last.bias.to_local().shape)]
        return found == shapes, placed == {(Shard(0),)}, local, all(same)

    assert run(2, body) == [(True, True, [(5, 7), (2,)], True), (True, True, [(4, 7), (1,)], True)]


@torch_is_wrong("what a user set on a parameter is lost")
def test_what_a_user_set_on_a_parameter_stays_on_it():
    def body(rank, world):
        plain = built(PLAIN)
        plain.blocks[0].up.weight.mark = "the user's"
        inside = []
        plain.blocks[0].up.register_forward_pre_hook(lambda module, _: inside.append(module.weight.mark))
        model = blocks_and_root(plain, sharder(Style.EACH))
        square(model(floats(rank, 0))).backward()
        return [model.blocks[0].up.weight.mark, *inside]

    assert run(2, body) == [["the user's"] * 2] * 2


@STYLES
def test_a_deleted_model_leaves_no_bytes(style):
    def body(rank, world):
        start = stored_bytes()
        model, _ = wide(FULL, style)
        square(model(floats(rank, 0))).backward()
        del model
        gc.collect()
        return stored_bytes() - start

    assert max(run(2, body)) <= (SLACK if not TORCH else 10**9)


@STYLES
def test_units_are_named_as_they_were_cut(style):
    def body(rank, world):
        which = case("nested")
        model = which.cut(built(which), sharder(style))
        if style is Style.EACH:
            return units(model), *[len([m for m in model.modules() if isinstance(m, core.FSDPModule)])] * 2
        return units(model), len(FSDP.fsdp_modules(model)), len(FSDP.fsdp_modules(model, root_only=False))

    names, number, same = run(1, body)[0]
    assert number == same == len(names) == 9
    assert names[0] == ""


@STYLES
def test_the_three_strategies_send_what_they_say_in_bytes(style):
    """FULL_SHARD sends half as much again as SHARD_GRAD_OP, which sends as much as NO_SHARD."""

    def body(rank, world):
        sent = {}
        for strategy in (FULL, GRAD_OP, NONE):
            calls = [call for call in logged(wide(strategy, style)[0], rank) if call.ranks > 1]
            sent[strategy.name] = sum(max(c.sent, c.received) * (2 if c.op == "all_reduce" else 1) for c in calls)
        return sent

    sent = run(2, body)[0]
    assert sent["FULL_SHARD"] == pytest.approx(1.5 * sent["SHARD_GRAD_OP"], rel=0.03)
    assert sent["SHARD_GRAD_OP"] == pytest.approx(sent["NO_SHARD"], rel=0.03)


@STYLES
def test_a_unit_without_parameters_is_allowed(style):
    def body(rank, world):
        unit = sharder(style)
        model = unit(nn.Sequential(unit(nn.Linear(5, 3)), unit(nn.ReLU())))
        calls = logged(model, rank)
        return len(calls)

    assert run(2, body)[0] >= 2
