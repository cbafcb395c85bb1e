"""The gaps of torch's engines (reference: G1 to G32), each closed on both front ends; some are tested elsewhere."""

from __future__ import annotations

import contextlib
import copy
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from shardckpt.devices import has_streams
from tests.kit.models.front_ends import FRONT_ENDS, build_groups, differing, full, sharder, train, twins
from tests.kit.models.models import (
    PLAIN,
    WIDTH,
    Block,
    Case,
    FrozenMix,
    Stack,
    Unused,
    blocks_and_root,
    built,
    case,
    floats,
    square,
)
from tests.kit.models.reference import Training, adamw, clean, product, reduce_gradients, sgd
from tests.kit.models.under_test import TORCH, Strategy, core, no_sync, shard
from tests.kit.ranks.harness import mark, raised_everywhere, run, since, stored_bytes

pytestmark = pytest.mark.skipif(TORCH, reason="torch is wrong, or refuses")

EACH = pytest.mark.parametrize("front_end", FRONT_ENDS)
NAMED = pytest.mark.parametrize("front_end", ["orig", "in place"])  # those that show a parameter a name
ENGINE = ("G1", *(f"G{n}" for n in range(2, 21)), "G27", "G28", "G29", "G32")
CLOSE = Training(sgd).close


def test_every_gap_has_a_test_of_its_name():
    """The others (G21 to G26, G30, G31) are those of state dicts."""
    text = "\n".join(path.read_text() for path in Path(__file__).parent.rglob("test_*.py"))
    named = {number for name in re.findall(r"def test_\w+", text) for number in re.findall(r"_(g\d+)(?=_)", name)}
    assert [gap for gap in ENGINE if gap.lower() not in named] == []


def trained(which: Case, front_end: str, world: int = 2, how: Training | None = None, **settings) -> None:
    """The case trains under this front end as its unsharded twin does."""

    def body(rank, world):
        warnings.simplefilter("ignore")
        plain, model = twins(which, front_end, **settings)
        return train(which, model, plain, how or Training(sgd, steps=2), front_end)

    assert run(world, body) == [[]] * world


def trained_in_each(cases: list[tuple[Case, dict]], front_end: str, how: Training | None = None) -> None:
    """Each case with its settings trains on two ranks as its unsharded twin does, one after the other."""

    def body(rank, world):
        warnings.simplefilter("ignore")
        wrong = []
        for which, settings in cases:
            plain, model = twins(which, front_end, **settings)
            found = train(which, model, plain, how or Training(sgd, steps=2), front_end)
            wrong += [f"{which} with {settings}: {each}" for each in found]
        return wrong

    assert run(2, body) == [[]] * 2


def one_step(model: nn.Module, plain: nn.Module, front_end: str, batch) -> list[str]:
    """Gradients of one batch, compared."""
    square(model(batch)).backward()
    square(plain(batch)).backward()
    reduce_gradients(plain, build_groups(model, plain, front_end))
    return differing(model, plain, front_end, CLOSE)


# ------------------------------------------------------------------------------------------------- optimizers


def decayed(named, first: str) -> list[dict]:
    """Two groups by name, in the order asked for, each with its own learning rate."""
    named = [(clean(name), parameter) for name, parameter in named]
    groups = {
        "weight": {"params": [each for each in named if each[0].endswith("weight")], "lr": 0.1, "weight_decay": 0.1},
        "bias": {"params": [each for each in named if each[0].endswith("bias")], "lr": 0.01},
    }
    return [groups[first], groups["bias" if first == "weight" else "weight"]]


@pytest.mark.parametrize("first", ["weight", "bias"])
@NAMED
def test_g1_groups_of_an_optimizer_keep_names_members_and_settings(front_end, first):
    def body(rank, world):
        plain, model = twins(PLAIN, front_end)
        optimizers = []

        def optimizer(parameters):
            net = (model, plain)[len(optimizers)]
            optimizers.append(torch.optim.AdamW(decayed(net.named_parameters(), first), eps=1e-4))
            return optimizers[-1]

        wrong = train(PLAIN, model, plain, Training(optimizer, steps=2), front_end)
        ours, theirs = ([group["param_names"] for group in each.param_groups] for each in optimizers)
        now = {clean(name): parameter for name, parameter in model.named_parameters()}
        members = [
            now[name] is parameter
            for group in optimizers[0].param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
        ]
        return wrong, ours == theirs, all(members), len(members)

    assert run(2, body) == [([], True, True, 16)] * 2


@EACH
def test_g14_an_optimizer_may_hold_some_parameters_only(front_end):
    """What it does not hold gets gradients, and keeps its value; state of what is frozen later is kept."""

    def body(rank, world):
        plain, model = twins(PLAIN, front_end)

        def optimizer(parameters):
            parameters = list(parameters)
            return torch.optim.AdamW(parameters[1::2], lr=1e-2, eps=1e-4)

        if front_end != "flat":
            return train(PLAIN, model, plain, Training(optimizer, steps=2), front_end)
        held = list(model.parameters())[1::2]
        before = [parameter.detach().clone() for parameter in model.parameters()]
        made = torch.optim.AdamW(held, lr=1e-2)
        square(model(floats(rank, 0))).backward()
        made.step()
        moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)]
        return [] if moved == [index % 2 == 1 for index in range(len(before))] else [str(moved)]

    assert run(2, body) == [[], []]


@NAMED
def test_g14_state_of_what_is_frozen_later_is_kept(front_end):
    def body(rank, world):
        _, model = twins(PLAIN, front_end)
        optimizer = adamw(model.parameters())
        square(model(floats(rank, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()
        held = {p: {k: v.clone() for k, v in state.items()} for p, state in optimizer.state.items()}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("up" not in name)
        square(model(floats(rank, 1))).backward()
        optimizer.step()
        frozen = [p for n, p in model.named_parameters() if "up" in n]
        kept = [
            torch.equal(full(value), full(optimizer.state[p][key]))
            for p in frozen
            if p in held
            for key, value in held[p].items()
        ]
        return all(kept), [p.grad for p in frozen], len(kept) > 0

    found = run(2, body)
    assert any(some for _, _, some in found), "a rank may own no part of them"
    for kept, grads, _ in found:
        assert kept
        assert grads == [None] * 6


# ---------------------------------------------------------------------------------------------- between the passes


@NAMED
@pytest.mark.parametrize("frees", [True, False])
def test_g5_what_is_loaded_between_forward_and_backward_is_not_lost(front_end, frees):
    """It counts from the next forward on, or it is an error; it never vanishes."""

    def body(rank, world):
        plain, model = twins(PLAIN, front_end, frees=frees)
        loss = square(model(floats(rank, 0)))
        with torch.no_grad():
            for net in (model, plain):
                for parameter in net.parameters():
                    parameter.mul_(1.5)
        try:
            loss.backward()
        except RuntimeError as error:
            return "modified" in str(error)
        found, wanted = model(floats(rank, 1)), plain(floats(rank, 1))
        return torch.allclose(found, wanted, atol=1e-6)

    assert run(2, body) == [True, True]


@pytest.mark.parametrize("frees", [True, False])
def test_g5_a_state_dict_loaded_between_the_passes_is_not_lost(frees):
    def body(rank, world):
        plain, model = twins(PLAIN, "in place", frees=frees)
        loss = square(model(floats(rank, 0)))
        held = {name: value * 1.5 for name, value in model.state_dict().items()}
        model.load_state_dict(held)
        loss.backward()
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(1.5)
        return torch.allclose(model(floats(rank, 1)), plain(floats(rank, 1)), atol=1e-6)

    assert run(2, body) == [True, True]


@EACH
def test_g7_backwards_outside_no_sync_add_up(front_end):
    rows = [(PLAIN, {"offload": offload}) for offload in (False, True)]
    trained_in_each(rows, front_end, Training(sgd, steps=2, micro=2))


@EACH
def test_g7_several_passes_equal_one_over_all_rows_with_offload(front_end):
    def body(rank, world):
        plain, model = twins(PLAIN, front_end, offload=True)
        batches = [floats(rank, step) for step in range(3)]
        for batch in batches:
            (square(model(batch)) / 3).backward()
        square(plain(torch.cat(batches))).backward()
        reduce_gradients(plain, build_groups(model, plain, front_end))
        return differing(model, plain, front_end, CLOSE), {str(p.device) for p in model.parameters()}

    assert run(2, body) == [([], {"cpu"})] * 2


@EACH
def test_g8_g9_any_container_and_tensors_that_left_the_engines_sight(front_end):
    """A view changed in place, a container of any kind, a tensor that escaped from forward.

    Over the front ends full parameters are freed after forward and kept; `test_parity` has both on each front end.
    """
    names = ("view changed in place", "containers", "unknown containers", "escaped tensor")
    turn = FRONT_ENDS.index(front_end)
    trained_in_each([(case(name), {"frees": (turn + i) % 2 == 0}) for i, name in enumerate(names)], front_end)


# ------------------------------------------------------------------------------------- parameters of every kind


@EACH
def test_g10_a_tie_across_units_is_the_innermost_common_ones(front_end):
    def body(rank, world):
        warnings.simplefilter("ignore")
        which = case("tied across units")
        plain, model = twins(which, front_end)
        wrong = train(which, model, plain, Training(sgd, steps=3), front_end)
        return wrong, len(list(model.parameters())), len(list(plain.parameters()))

    for wrong, held, _ in run(2, body):
        assert wrong == []
        assert held


def test_g10_a_tie_is_still_a_tie_after_training():
    def body(rank, world):
        warnings.simplefilter("ignore")
        _, model = twins(case("tied across units"), "in place")
        square(model(torch.tensor([[1, 2, 3]]))).backward()
        return model.embed.weight is model.head.weight

    assert run(2, body) == [True, True]


@EACH
def test_g11_scalars_train(front_end):
    """On three ranks, which divide no size evenly; `test_parity` has them on two."""
    trained(case("scalars and strides"), front_end, 3)


@EACH
def test_g11_a_unit_of_scalars_alone(front_end):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.tensor(0.5))
            self.on = nn.Parameter(torch.tensor(0.1))

        def forward(self, x):
            return x * self.by + self.on

    class Scaled(Stack):
        block = Scale

    trained(Case("scalars", Scaled), front_end)


class Quantized(nn.Module):
    """A frozen uint8 table, a bf16 base, an fp32 norm: what low-memory fine-tuning is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randint(0, 256, (WIDTH, 5), dtype=torch.uint8), requires_grad=False)
        self.base = nn.Parameter(torch.randn(WIDTH, WIDTH).bfloat16())
        self.norm = nn.LayerNorm(WIDTH)
        self.read = nn.Linear(5, WIDTH)

    def forward(self, x):
        table = self.read(self.packed.float() / 255)
        return self.norm(x + (x.bfloat16() @ self.base).float() @ table)


class QuantizedStack(Stack):
    block = Quantized


@EACH
def test_g12_mixed_dtypes_train_in_one_unit(front_end):
    """What low-memory fine-tuning is made of; `test_parity` has doubles and integers beside fp32."""
    trained(Case("quantized", QuantizedStack), front_end)


@pytest.mark.parametrize("world", [2, 3])
def test_g12_mixed_dtypes_come_back_bit_for_bit(world):
    def body(rank, world):
        plain, model = twins(Case("quantized", QuantizedStack), "in place")
        held = {name: full(parameter) for name, parameter in model.named_parameters()}
        with torch.no_grad():
            model(floats(rank, 0))
        again = {name: full(parameter) for name, parameter in model.named_parameters()}
        return all(torch.equal(held[n], p) and torch.equal(again[n], p) for n, p in plain.named_parameters())

    assert run(world, body) == [True] * world


@EACH
def test_g13_gradients_are_as_large_as_what_trains(front_end):
    """A frozen neighbour takes no part in the reduction; freezing and thawing counts from the next iteration on."""

    def body(rank, world):
        torch.manual_seed(0)
        model = blocks_and_root(FrozenMix(), sharder(front_end))
        trains = sum(p.numel() for p in FrozenMix().parameters() if p.requires_grad)
        number = sum(p.requires_grad for p in FrozenMix().parameters())
        start = mark()
        square(model(floats(rank, 0))).backward()
        sent = [call.sent for call in since(start) if call.op == "reduce_scatter"]
        aligned = 2 * 31 * len(sent) if has_streams(torch.device("cpu")) else 0  # both rows, to 128 bytes
        return trains, sum(sent), number, aligned

    for trains, reduced, number, aligned in run(2, body):
        most = trains + 2 * number + 80 + aligned
        assert trains <= reduced <= most, "gradients, padding of rows or of places, a flag each"


@NAMED
def test_g13_freezing_and_thawing_between_iterations(front_end):
    def body(rank, world):
        plain, model = twins(PLAIN, front_end)
        wrong = []
        for frozen in ((), ("up.weight", "last"), ("first",), ()):
            for net in (model, plain):
                for name, parameter in net.named_parameters():
                    parameter.grad = None
                    parameter.requires_grad_(not any(part in name for part in frozen))
            wrong += train(PLAIN, model, plain, Training(sgd, steps=1), front_end)
        return wrong

    assert run(2, body) == [[], []]


@pytest.mark.parametrize(("dim", "world"), [(0, 3), (1, 3), (1, 2)])
def test_g15_any_dimension_may_be_cut_unevenly(dim, world):
    """Widths of 5, 7 and 9 divide by neither; a bias has one dimension only."""
    placed = {"shard_placement_fn": lambda p: Shard(min(dim, p.dim() - 1))}
    trained(PLAIN, "in place", world, Training(adamw, steps=2), **placed)


def test_g15_strides_are_those_of_the_original():
    class Turned(Block):
        def __init__(self):
            super().__init__()
            self.up.weight = nn.Parameter(torch.randn(WIDTH, 9).t())

        def forward(self, x):
            seen.append(self.up.weight.stride())
            return super().forward(x)

    class TurnedStack(Stack):
        block = Turned

    seen = []

    def body(rank, world):
        for front_end in FRONT_ENDS:
            plain, model = twins(Case("turned", TurnedStack), front_end)
            seen.clear()
            wrong = one_step(model, plain, front_end, floats(rank, 0))
            assert wrong == [], wrong
            assert set(seen) == {(1, 9)} or front_end == "in place", seen
        return [p.stride() for n, p in model.named_parameters() if "up.weight" in n]

    run(2, body)


# ------------------------------------------------------------------------------------------- running in any place


@EACH
def test_g17_the_cpu_needs_to_be_told_nothing(front_end):
    def body(rank, world):
        plain = built(PLAIN)
        apply = (
            core.fully_shard
            if front_end == "in place"
            else lambda m: core.FullyShardedDataParallel(m, use_orig_params=front_end == "orig")
        )
        model = blocks_and_root(copy.deepcopy(plain), apply)
        return train(PLAIN, model, plain, Training(sgd, steps=1), front_end)

    assert run(2, body) == [[], []]


@EACH
def test_g18_copies_are_independent_and_train_alike(front_end):
    def body(rank, world):
        plain, model = twins(PLAIN, front_end)
        wrong = train(PLAIN, model, plain, Training(sgd, steps=1), front_end)
        model.zero_grad()
        plain.zero_grad()
        twin, other = copy.deepcopy(model), copy.deepcopy(plain)
        wrong += train(PLAIN, twin, other, Training(sgd, steps=2), front_end)
        return wrong + train(PLAIN, model, plain, Training(adamw, steps=2), front_end)

    assert run(2, body) == [[], []]


@EACH
def test_g18_an_average_over_shards_is_that_over_whole_weights(front_end):
    def body(rank, world):
        plain, model = twins(PLAIN, front_end)
        means = [copy.deepcopy(model), copy.deepcopy(plain)]
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        wrong = []
        for step in range(3):
            wrong += one_step(model, plain, front_end, floats(rank, step))
            ours.step()
            theirs.step()
            ours.zero_grad()
            theirs.zero_grad()
            for mean, net in zip(means, (model, plain), strict=True):
                with torch.no_grad():
                    for kept, now in zip(mean.parameters(), net.parameters(), strict=True):
                        kept.lerp_(now, 0.3)
        with torch.no_grad():
            found, wanted = means[0](floats(rank, 9)), means[1](floats(rank, 9))
        return wrong, torch.allclose(found, wanted, atol=1e-5)

    assert run(2, body) == [([], True)] * 2


@EACH
def test_g19_one_rank_is_as_many_are(front_end):
    """The same objects, names and freed memory as with two ranks."""

    def body(rank, world):
        plain, model = twins(PLAIN, front_end)
        names = [name for name, _ in model.named_parameters()]
        kinds = [type(parameter).__name__ for parameter in model.parameters()]
        start = mark()
        wrong = train(PLAIN, model, plain, Training(sgd, steps=2), front_end)
        return wrong, names, kinds, mark() - start > 0

    alone, two = run(1, body)[0], run(2, body)[0]
    assert alone[0] == two[0] == []
    assert alone[1:3] == two[1:3]


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"])
@pytest.mark.parametrize("strategy", [Strategy.FULL_SHARD, Strategy.NO_SHARD], ids=["full", "none"])
def test_g20_every_kind_of_state_dict_goes_with_every_strategy_and_mesh(strategy, kind):
    """What they hold is the matter of state dicts; the engine refuses none."""

    def body(rank, world):
        mesh = torch.distributed.init_device_mesh("cpu", (2,))
        for settings in ({}, {"device_mesh": mesh}):
            model = shard(Stack(), sharding_strategy=strategy, **settings)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with core.FullyShardedDataParallel.state_dict_type(model, core.StateDictType[kind]):
                    found = core.FullyShardedDataParallel.get_state_dict_type(model).state_dict_type.name
                    assert found == kind
                    with contextlib.suppress(core.StateProviderMissing):
                        model.state_dict()

    run(2, body)


@pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
def test_g16_summoned_parameters_in_every_combination(orig):
    """Edits of rank 0, or of all ranks, are kept where they are written back, and only there."""
    front_end = "orig" if orig else "flat"
    rows = product(writeback=(False, True), rank0_only=(False, True), offload_to_cpu=(False, True))

    def after(rank: int, row: dict) -> tuple[list[str], bool]:
        plain, model = twins(PLAIN, front_end)
        wrong = one_step(model, plain, front_end, floats(rank, 0))
        with core.FullyShardedDataParallel.summon_full_params(model, with_grads=True, **row), torch.no_grad():
            if rank == 0 or not row["rank0_only"]:
                for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
                    assert clean(name) == name
                    torch.testing.assert_close(ours.detach(), theirs.detach())
                    torch.testing.assert_close(ours.grad, theirs.grad)
                    ours.mul_(1.5)
        if row["writeback"]:
            with torch.no_grad():
                for parameter in plain.parameters():
                    parameter.mul_(1.5)
        return wrong, torch.allclose(model(floats(rank, 1)), plain(floats(rank, 1)), atol=1e-5)

    def body(rank, world):
        warnings.simplefilter("ignore")
        return {str(row): after(rank, row) for row in rows}

    assert run(2, body) == [{str(row): ([], True) for row in rows}] * 2


# -------------------------------------------------------------------------------------------------- use and misuse


@EACH
def test_g4_parameters_unused_on_some_ranks(front_end):
    trained(case("used on some ranks"), front_end, 3)


@EACH
def test_g4_parameters_unused_everywhere(front_end):
    trained(Case("unused", Unused), front_end)


@EACH
def test_g28_a_submodule_called_outside_its_unit_names_unit_and_way_out(front_end):
    def body(rank, world):
        _, model = twins(PLAIN, front_end)
        square(model(floats(rank, 0))).backward()
        inner = getattr(model.blocks[1], "module", model.blocks[1])
        inner.up(torch.ones(2, WIDTH))

    for error in raised_everywhere(2, body):
        assert error.is_a(RuntimeError)
        assert "blocks.1" in error.message
        assert any(way in error.message for way in ("register_fsdp_forward_method", "summon_full_params", "unshard"))


@EACH
def test_g28_another_method_than_forward_may_be_registered(front_end):
    class Generating(Stack):
        def generate(self, x):
            return self.forward(x) * 2

    def body(rank, world):
        plain, model = twins(Case("generating", Generating), front_end)
        core.register_fsdp_forward_method(model, "generate")
        wrong = []
        found, wanted = model.generate(floats(rank, 0)), plain.generate(floats(rank, 0))
        if not torch.allclose(found, wanted):
            wrong.append("output")
        square(found).backward()
        square(wanted).backward()
        reduce_gradients(plain, build_groups(model, plain, front_end))
        return wrong + differing(model, plain, front_end, CLOSE)

    assert run(2, body) == [[], []]


@EACH
def test_g29_after_a_forward_without_gradients_changed_parameters_count(front_end):
    """With parameters that stay between forward and backward; `fully_shard` keeps them then too, as torch does."""

    def body(rank, world):
        plain, model = twins(PLAIN, front_end, frees=front_end == "in place")
        answers = []
        with torch.no_grad():
            for factor in (1.0, 1.5, 0.5):
                for net in (model, plain):
                    for parameter in net.parameters():
                        parameter.mul_(factor)
                answers.append(torch.allclose(model(floats(rank, 0)), plain(floats(rank, 0)), atol=1e-6))
        return answers, one_step(model, plain, front_end, floats(rank, 1))

    assert run(2, body) == [([True] * 3, [])] * 2


class Failing(Stack):
    """Raises at a given place."""

    armed: str | None = None

    def forward(self, x):
        x = self.blocks[1](self.blocks[0](self.first(x)))
        if self.armed == "forward":
            raise ZeroDivisionError
        if self.armed == "backward":
            x.register_hook(self.fail)
        return self.last(self.blocks[2](x))

    @staticmethod
    def fail(grad):
        raise ZeroDivisionError


@pytest.mark.parametrize(("front_end", "frees"), [("flat", True), ("orig", False), ("in place", True)])
def test_g32_after_an_exception_the_next_iteration_works(front_end, frees):
    """One in forward, then one in backward; `test_order` has each front end with each strategy."""

    def body(rank, world):
        plain, model = twins(Case("failing", Failing), front_end, frees=frees)
        inner = next(each for each in model.modules() if isinstance(each, Failing))
        wrong = train(PLAIN, model, plain, Training(sgd, steps=1), front_end)
        for where in ("forward", "backward"):
            for _ in range(2):
                model.zero_grad()
                inner.armed = where
                with pytest.raises(ZeroDivisionError):
                    square(model(floats(rank, 5))).backward()
                inner.armed = None
            model.zero_grad()
            plain.zero_grad()
            wrong += [
                f"after {where}: {each}" for each in train(PLAIN, model, plain, Training(sgd, steps=2), front_end)
            ]
        return wrong

    assert run(2, body) == [[], []]


@EACH
def test_g32_an_exception_while_gradients_are_held_back(front_end):
    def body(rank, world):
        plain, model = twins(Case("failing", Failing), front_end)
        inner = next(each for each in model.modules() if isinstance(each, Failing))
        inner.armed = "backward"
        with pytest.raises(ZeroDivisionError), no_sync(model):
            square(model(floats(rank, 5))).backward()
        inner.armed = None
        model.zero_grad()
        held = stored_bytes()
        wrong = train(PLAIN, model, plain, Training(sgd, steps=2), front_end)
        return wrong, held > 0

    assert run(2, body) == [([], True)] * 2


@EACH
def test_g5_what_is_changed_after_a_forward_that_no_backward_followed_counts(front_end):
    """An answer with gradients that nobody asked for, then a step or a load: the next forward sees it."""

    def found(rank, frees):
        plain, model = twins(PLAIN, front_end, frees=frees)
        ours, theirs = sgd(model.parameters()), sgd(plain.parameters())
        model(floats(rank, 0))
        with torch.no_grad():
            for net in (model, plain):
                for parameter in net.parameters():
                    parameter.mul_(1.5)
        wrong = one_step(model, plain, front_end, floats(rank, 1))
        if front_end != "orig":  # whose parameters are whole then, their gradients are not: an error says so
            model(floats(rank, 2))
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        return wrong + one_step(model, plain, front_end, floats(rank, 3))

    assert (
        run(2, lambda rank, world: {frees: found(rank, frees) for frees in (True, False)})
        == [{True: [], False: []}] * 2
    )


class Counting(nn.Module):
    """A layer with a buffer that it computes with, and one that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("scale", torch.ones(5))
        self.register_buffer("runs", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.runs += 1
        return self.linear(x * self.scale.float())


class Counted(nn.Module):
    """One in a unit, one in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Counting()
        self.blocks = nn.ModuleList([Counting()])

    def forward(self, x):
        return self.blocks[0](self.first(x))


@EACH
def test_g27_buffers_have_a_type_of_their_own_and_state_dicts_that_of_before(front_end):
    def body(rank, world):
        low = {"buffer_dtype": torch.float64}
        settings = {"mp_policy": core.MixedPrecisionPolicy(**low)} if front_end == "in place" else {}
        if front_end != "in place":
            settings = {"mixed_precision": core.MixedPrecision(**low)}
        _, model = twins(Case("counted", Counted), front_end, **settings)
        square(model(floats(rank, 0))).backward()
        now = {clean(name): buffer.dtype for name, buffer in model.named_buffers()}
        held = {name: value.dtype for name, value in model.state_dict().items() if name in now}
        return now, held

    for now, held in run(2, body):
        assert len(now) == len(held) == 4
        for name, dtype in now.items():
            assert dtype == (torch.int64 if name.endswith("runs") else torch.float64)
            assert held[name] == (torch.int64 if name.endswith("runs") else torch.float32)
