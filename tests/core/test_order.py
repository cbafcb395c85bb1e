"""All ranks issue the same collectives in the same order, whatever each computed; the traps of the mechanism."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from harness import mark, raised_everywhere, run, since, stored_bytes
from models import (
    PLAIN,
    WIDTH,
    Block,
    Case,
    CheckpointedReentrant,
    Gated,
    Noted,
    Partial,
    Ranked,
    Stack,
    TwiceCheckpointed,
    TwiceCheckpointedReentrant,
    Wide,
    blocks_and_root,
    built,
    case,
    floats,
    root_alone,
    rows,
    square,
    tokens,
)
from reference import Training, adamw, compare, groups, mismatches, reduce_gradients, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint
from under_test import TORCH, Strategy, engine_lacks, shard, torch_is_wrong

FULL, GRAD_OP = Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP
BOTH = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig"])
EACH = pytest.mark.parametrize("strategy", [FULL, GRAD_OP], ids=["full", "grad_op"])


def cut(which: Case, orig: bool = True, strategy: Strategy = FULL, **more):
    """The unsharded model of a case and its sharded twin."""
    plain = built(which)
    settings = {"use_orig_params": orig, "sharding_strategy": strategy, **more}
    return plain, which.cut(copy.deepcopy(plain), lambda module: shard(module, **settings))


def trained(which: Case, orig: bool = True, strategy: Strategy = FULL, optimizer=sgd, steps: int = 3) -> list[str]:
    """Where training parts from the reference."""
    plain, model = cut(which, orig, strategy)
    return compare(which, model, plain, Training(optimizer, steps=steps), orig=orig, replicated=False)


def order(which: Case, rank: int, orig: bool, strategy: Strategy = FULL, steps: int = 3) -> list[str]:
    """Every collective of some iterations, as text."""
    _, model = cut(which, orig, strategy)
    start = mark()
    for step in range(steps):
        square(model(which.batch(rank, step))).backward()
        model.zero_grad()
    return [str(call) for call in since(start)]


def same_order_and_right(which: Case, world: int, orig: bool, strategy: Strategy = FULL) -> None:
    found = run(world, lambda rank, world: (order(which, rank, orig, strategy), trained(which, orig, strategy)))
    assert all(log == found[0][0] for log, _ in found)
    assert found[0][0], "collectives were recorded"
    assert found[0][1] == []


# ---------------------------------------------------------------------------- trap 1: graphs that differ by rank


def using(*sets: set[int]):
    """A batch that makes rank r use the extra parts of the blocks in `sets[r]`."""
    return lambda rank, step: (rows(rank, step), sets[rank])


@torch_is_wrong("ranks reduce in different orders or hang")
@BOTH
@pytest.mark.parametrize(
    "sets",
    [({0}, set()), ({1}, {2}), ({3}, set()), ({0, 1, 2, 3}, set()), ({0, 3}, {1, 2}), (set(), set())],
    ids=["first", "middle", "last", "all or none", "crosswise", "nobody"],
)
def test_parameters_used_on_some_ranks_only(sets, orig):
    same_order_and_right(Case("ranked", Ranked, using(*sets)), 2, orig)


@torch_is_wrong("ranks reduce in different orders or hang")
@pytest.mark.parametrize("world", [3, 4])
def test_parameters_used_on_some_of_many_ranks(world):
    same_order_and_right(Case("ranked", Ranked, using({0, 1}, {2}, set(), {3, 0})), world, True)


class NestedRanked(nn.Module):
    """Units inside units, of one size, whose parts are used or not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Around(index) for index in range(2))

    def forward(self, batch):
        x, used = batch
        for block in self.blocks:
            x = block(x, used)
        return x


class Around(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.own, self.inner = index, nn.Linear(WIDTH, WIDTH), Gated()

    def forward(self, x, used):
        x = self.inner(x, ("inner", self.index) in used)
        return self.own(x) if ("own", self.index) in used else x * 1.5


def cut_inner(model, sharder):
    for block in model.blocks:
        block.inner = sharder(block.inner)
    return blocks_and_root(model, sharder)


@torch_is_wrong("ranks reduce in different orders or hang")
@BOTH
@pytest.mark.parametrize(
    "sets",
    [
        ({("own", 0)}, {("own", 1)}),
        ({("inner", 0)}, {("own", 0), ("inner", 1)}),
        (set(), {("own", 0), ("own", 1), ("inner", 0)}),
    ],
    ids=["outer", "inner and outer", "one rank alone"],
)
def test_nested_units_used_on_some_ranks_only(sets, orig):
    same_order_and_right(Case("nested ranked", NestedRanked, using(*sets), cut_inner), 2, orig)


@torch_is_wrong("units that no backward reached are not reduced on that rank")
@BOTH
@EACH
def test_backward_from_other_outputs_on_each_rank(strategy, orig):
    case_ = Case("partial", Partial, lambda rank, step: (floats(rank, step), (rank + step) % 2 == 0))
    same_order_and_right(case_, 2, orig, strategy)


@torch_is_wrong("a unit that nothing came back to is not reduced on that rank")
@BOTH
def test_a_rank_that_detaches_a_units_output(orig):
    class Detaching(Stack):
        def forward(self, batch):
            x, at = batch
            x = self.first(x)
            for index, block in enumerate(self.blocks):
                x = block(x).detach() if index == at else block(x)
            return self.last(x)

    same_order_and_right(Case("detaching", Detaching, lambda rank, step: (floats(rank, step), rank)), 2, orig)


# ------------------------------------------------------------------- units used several times, and recomputation

REPEATED = [
    "called three times",
    "called three times, checkpointed",
    "checkpoint(unit)",
    "checkpoint(unit) reentrant",
    "unit(checkpoint)",
    "unit(checkpoint) reentrant",
    "nested",
    "part of the outputs",
    "inputs without gradients",
]


@pytest.mark.parametrize("name", REPEATED)
def test_order_is_equal_on_all_ranks(name):
    which = case(name)

    def body(rank, world):
        return [order(which, rank, orig, strategy) for orig in (False, True) for strategy in (FULL, GRAD_OP)]

    first, *others = run(3, body)
    assert all(each == first for each in others)


@torch_is_wrong("a unit used several times under reentrant checkpointing gets wrong gradients, or hangs")
@BOTH
@pytest.mark.parametrize("world", [2, 3])
def test_a_unit_used_several_times_under_reentrant_checkpointing(world, orig):
    same_order_and_right(Case("twice", TwiceCheckpointedReentrant), world, orig)


@BOTH
def test_a_unit_used_several_times_reduces_once(orig):
    def body(rank, world):
        log = order(Case("twice", TwiceCheckpointed), rank, orig, steps=1)
        return sum(call.startswith("reduce_scatter") for call in log)

    assert run(2, body) == [4, 4]


@torch_is_wrong("the frozen first part leaves checkpointed blocks without gradients to their inputs")
@BOTH
def test_reentrant_checkpointing_where_ranks_differ(orig):
    class Mixed(Ranked):
        def forward(self, batch):
            x, used = batch
            x = x.requires_grad_()
            for index, block in enumerate(self.blocks):
                x = checkpoint(block, x, index in used, use_reentrant=True)
            return x

    same_order_and_right(Case("mixed", Mixed, using({0, 2}, {1})), 2, orig)


# ------------------------------------------------------------------------- trap 2, 3: saved tensors and their hooks


@pytest.mark.parametrize("name", ["view changed in place", "escaped tensor", "unknown containers"])
@torch_is_wrong("the gather before backward hangs on the output object (G8, G9)")
@BOTH
@EACH
def test_gradients_do_not_depend_on_the_output_object(name, strategy, orig):
    same_order_and_right(case(name), 2, orig, strategy)


@torch_is_wrong("parameters saved for backward are freed before they are needed")
def test_g8_dataclass_outputs():
    same_order_and_right(case("containers"), 2, True)


@EACH
def test_saved_tensors_still_go_through_the_users_hooks(strategy):
    """The engine takes what is its own; activations go to whoever asked for them, here a copy on the way."""

    def body(rank, world):
        plain, model = cut(PLAIN, True, strategy)
        packed = []

        def pack(tensor):
            packed.append(tensor.numel())
            return tensor.detach().clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = square(model(floats(rank, 0)))
        loss.backward()
        square(plain(floats(rank, 0))).backward()
        shared = groups(model, plain, True)
        reduce_gradients(plain, shared)
        close = Training(sgd).close
        return mismatches(model, plain, shared, False, close), packed.count(4 * 9)

    for wrong, activations in run(2, body):
        assert wrong == []
        assert activations >= 3, "the blocks' activations were packed by the user's hook"


@BOTH
def test_save_on_cpu_around_forward(orig):
    class Saved(Stack):
        def forward(self, x):
            with torch.autograd.graph.save_on_cpu():
                return super().forward(x)

    assert run(2, lambda rank, world: trained(Case("saved", Saved), orig))[0] == []


def test_a_weight_edited_between_forward_and_backward_is_an_error():
    """As in plain autograd: what was saved has changed."""

    class Editing(Block):
        def forward(self, x):
            y = super().forward(x)
            with torch.no_grad():
                self.down.weight.add_(1.0)
            return y

    class Edited(Stack):
        block = Editing

    def body(rank, world):
        _, model = cut(Case("edited", Edited), True, GRAD_OP)
        square(model(floats(rank, 0))).backward()

    assert all(error.is_a(RuntimeError) and "modified" in error.message for error in raised_everywhere(2, body))


def test_an_activation_edited_between_forward_and_backward_is_an_error():
    """Hooks on saved tensors switch autograd's own check off: the engine has to make it."""

    class Editing(Block):
        def forward(self, x):
            y = torch.tanh(self.up(x))
            z = self.down(y)
            with torch.no_grad():
                y.mul_(2.0)
            return x + z

    class Edited(Stack):
        block = Editing

    def body(rank, world):
        _, model = cut(Case("edited", Edited), True)
        square(model(floats(rank, 0))).backward()

    assert all(error.is_a(RuntimeError) and "modified" in error.message for error in raised_everywhere(2, body))


@BOTH
@EACH
def test_a_forward_that_no_backward_follows_leaves_nothing(strategy, orig):
    """A pack hook that gives back the tensor itself makes a circle through autograd, which nothing collects."""

    def body(rank, world):
        _, model = cut(PLAIN, orig, strategy)
        held = []
        for step in range(6):
            loss = square(model(floats(rank, step)))
            del loss
            held.append(stored_bytes())
        return held

    for held in run(2, body):
        assert held[-1] == held[1], held


# ------------------------------------------------------------------------------ trap 5: backward inside backward


@BOTH
def test_a_backward_inside_a_hook_ends_nothing(orig):
    class Hooked(Stack):
        def forward(self, x):
            x = self.first(x)
            x = self.blocks[1](self.blocks[0](x))
            if x.requires_grad:
                x.register_hook(self.little)
            return self.last(self.blocks[2](x))

        @staticmethod
        def little(grad):
            with torch.enable_grad():
                leaf = torch.ones(3, requires_grad=True)
                (leaf * leaf).sum().backward()
            return grad * leaf.grad[0]

    which = Case("hooked", Hooked)
    found = run(2, lambda rank, world: (order(which, rank, orig), trained(which, orig)))
    assert found[0][0] == found[1][0]
    assert found[0][1] == []


@BOTH
def test_reentrant_checkpoint_inside_reentrant_checkpoint(orig):
    class Outer(CheckpointedReentrant):
        def forward(self, x):
            x = self.first(x)
            x = checkpoint(self.through, x, use_reentrant=True)
            return self.last(x)

        def through(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    if TORCH:
        pytest.skip("not asked of torch")
    same_order_and_right(Case("outer", Outer), 2, orig)


# ----------------------------------------------------------------------------------------- trap 7: autocast cache


@BOTH
@pytest.mark.parametrize("training", [False, True])
def test_two_forwards_in_one_autocast_region_see_changed_weights(training, orig):
    which = case("inputs without gradients")  # its root has no parameters: torch keeps the root's after such a forward

    def body(rank, world):
        plain, model = cut(which, orig)
        found, wanted = [], []
        for net, answers in ((model, found), (plain, wanted)):
            net.train(training)
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                answers.append(net(which.batch(rank, 0)))
                for parameter in net.parameters():
                    parameter.mul_(1.5)
                if net is plain:
                    torch.clear_autocast_cache()
                answers.append(net(which.batch(rank, 0)))
        return [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)], torch.equal(*found)

    assert run(2, body) == [([True, True], False)] * 2


@BOTH
def test_training_under_autocast(orig):
    class Cast(Stack):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    assert run(2, lambda rank, world: trained(Case("cast", Cast), orig))[0] == []


# ----------------------------------------------------------------------------------- trap 9: gradients in no_sync


@BOTH
@EACH
def test_zero_grad_discards_what_no_sync_gathered(strategy, orig):
    def body(rank, world):
        plain, model = cut(PLAIN, orig, strategy)
        with model.no_sync():
            square(model(floats(rank, 7))).backward()
        held = [p.grad is not None for p in model.parameters() if p.numel()]
        model.zero_grad()
        return compare(PLAIN, model, plain, Training(sgd, steps=2), orig=orig, replicated=False), all(held)

    for wrong, held in run(2, body):
        assert held, "the gradient is there to be discarded"
        assert wrong == []


@BOTH
def test_no_sync_is_left_even_when_its_body_raises(orig):
    def body(rank, world):
        plain, model = cut(PLAIN, orig)
        model(floats(rank, 0)).sum().backward()
        model.zero_grad()
        with pytest.raises(ZeroDivisionError), model.no_sync():
            raise ZeroDivisionError
        return compare(PLAIN, model, plain, Training(sgd, steps=1), orig=orig, replicated=False)

    assert run(2, body)[0] == []


# --------------------------------------------------------------------------------------------- trap 16: the rest


@torch_is_wrong("the second backward finds parameters freed or reduces them twice")
@BOTH
@EACH
def test_two_backwards_through_one_graph(strategy, orig):
    def body(rank, world):
        plain, model = cut(PLAIN, orig, strategy)
        for net in (model, plain):
            loss = square(net(floats(rank, 0)))
            loss.backward(retain_graph=True)
            loss.backward()
        shared = groups(model, plain, orig)
        reduce_gradients(plain, shared)
        return mismatches(model, plain, shared, False, Training(sgd).close)

    assert run(2, body)[0] == []


@BOTH
def test_two_forwards_and_then_two_backwards(orig):
    def body(rank, world):
        plain, model = cut(PLAIN, orig)
        for net in (model, plain):
            first, second = square(net(floats(rank, 0))), square(net(floats(rank, 1)))
            (first + second).backward()
        shared = groups(model, plain, orig)
        reduce_gradients(plain, shared)
        return mismatches(model, plain, shared, False, Training(sgd).close)

    assert run(2, body)[0] == []


class Stashing(torch.autograd.Function):
    """Keeps the weight on its context instead of saving it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.weight, grad.t() @ ctx.x


@BOTH
def test_a_weight_that_a_custom_function_keeps_to_itself(orig):
    class Stasher(Block):
        def forward(self, x):
            return x + Stashing.apply(torch.tanh(self.up(x)), self.down.weight)

    class Stashers(Stack):
        block = Stasher

    which = Case("stash", Stashers, torch="no")
    if TORCH and orig:
        pytest.skip("torch gives zeros where nothing was used")
    assert run(2, lambda rank, world: trained(which, orig))[0] == []


@engine_lacks("G18: deepcopy of groups and hooks (note 5)")
@torch_is_wrong("deepcopy of a sharded model fails (G18)")
@BOTH
def test_g18_a_copy_trains_like_the_original(orig):
    def body(rank, world):
        plain, model = cut(PLAIN, orig)
        square(model(floats(rank, 0))).backward()
        model.zero_grad()
        twin = copy.deepcopy(model)
        wrong = compare(PLAIN, twin, copy.deepcopy(plain), Training(sgd, steps=2), orig=orig, replicated=False)
        return wrong + compare(PLAIN, model, plain, Training(adamw, steps=2), orig=orig, replicated=False)

    assert run(2, body)[0] == []


def test_frozen_between_iterations_is_honoured():
    """G13: freezing and thawing takes effect at the next forward."""
    if TORCH:
        pytest.skip("torch is wrong: a mixed unit keeps gradients for what was frozen later")

    def body(rank, world):
        plain, model = cut(PLAIN, True)
        wrong = compare(PLAIN, model, plain, Training(sgd, steps=1), orig=True, replicated=False)
        for net in (model, plain):
            for name, parameter in net.named_parameters():
                parameter.grad = None
                if "up.weight" in name:
                    parameter.requires_grad_(False)
        wrong += compare(PLAIN, model, plain, Training(sgd, steps=1), orig=True, replicated=False)
        for net in (model, plain):
            for parameter in net.parameters():
                parameter.grad = None
                parameter.requires_grad_(True)
        return wrong + compare(PLAIN, model, plain, Training(sgd, steps=1), orig=True, replicated=False)

    assert run(2, body)[0] == []


# ------------------------------------------------------------------------------------------- G32: after an exception


class Failing(Stack):
    """Raises at the place it was told to, once."""

    armed: str | None = None

    def forward(self, x):
        x = self.first(x)
        x = self.blocks[0](x)
        if self.armed == "forward":
            raise ZeroDivisionError("forward")
        if self.armed == "backward":
            x.register_hook(self.fail)
        x = self.blocks[1](x)
        return self.last(self.blocks[2](x))

    @staticmethod
    def fail(grad):
        raise ZeroDivisionError("backward")


class FailingInside(Block):
    armed: str | None = None

    def forward(self, x):
        y = torch.tanh(self.up(x))
        if self.armed == "inside forward":
            raise ZeroDivisionError(self.armed)
        if self.armed == "inside backward":
            y.register_hook(Failing.fail)
        return x + self.down(y)


class FailingBlocks(Failing):
    block = FailingInside


def arm(model, where: str | None) -> None:
    for module in model.modules():
        if isinstance(module, (Failing, FailingInside)):
            module.armed = where


@torch_is_wrong("nothing resets the state of units after an exception (G32)")
@BOTH
@EACH
@pytest.mark.parametrize("where", ["forward", "backward", "inside forward", "inside backward"])
def test_g32_the_next_iteration_after_an_exception_works(where, strategy, orig):
    which = Case("failing", FailingBlocks)

    def body(rank, world):
        plain, model = cut(which, orig, strategy)
        wrong = compare(which, model, plain, Training(sgd, steps=1), orig=orig, replicated=False)
        model.zero_grad()
        plain.zero_grad()
        for _ in range(2):
            arm(model, where)
            with pytest.raises(ZeroDivisionError):
                square(model(floats(rank, 5))).backward()
            arm(model, None)
        model.zero_grad()
        start = mark()
        wrong += compare(which, model, plain, Training(sgd, steps=2), orig=orig, replicated=False)
        return wrong, [str(call) for call in since(start)]

    first, second = run(2, body)
    assert first[0] == []
    assert first[1] == second[1]


@torch_is_wrong("nothing frees what an exception left gathered (G32)")
@BOTH
@pytest.mark.parametrize("where", ["run blocks.2", "grad blocks.2"])
def test_g32_nothing_stays_whole_after_an_exception_and_an_iteration(where, orig):
    def body(rank, world):
        armed = []

        def probe(what: str) -> None:
            if armed and what == where:
                raise ZeroDivisionError(what)

        torch.manual_seed(0)
        model = blocks_and_root(Wide(probe=probe), lambda m: shard(m, use_orig_params=orig))
        held = []
        for step in range(6):
            armed[:] = [True] if step in (2, 3, 4) else []
            try:
                square(model(floats(rank, step))).backward()
            except ZeroDivisionError:
                continue
            finally:
                model.zero_grad()
            held.append(stored_bytes())
        return held

    for held in run(2, body):
        assert len(held) == 3
        assert held[2] <= held[1] + 16_000, "activations at most: a unit has 50,000 bytes and more"


@torch_is_wrong("the flag of no_sync and the states stay as they were (G32)")
def test_g32_an_exception_inside_no_sync():
    which = Case("failing", FailingBlocks)

    def body(rank, world):
        plain, model = cut(which, True)
        arm(model, "inside backward")
        with pytest.raises(ZeroDivisionError), model.no_sync():
            square(model(floats(rank, 5))).backward()
        arm(model, None)
        model.zero_grad()
        return compare(which, model, plain, Training(sgd, steps=2), orig=True, replicated=False)

    assert run(2, body)[0] == []


def test_an_exception_leaves_no_hooks_on_saved_tensors():
    def body(rank, world):
        _, model = cut(Case("failing", FailingBlocks), True)
        arm(model, "inside forward")
        before = stored_bytes()
        with pytest.raises(ZeroDivisionError):
            model(floats(rank, 0))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            x = torch.ones(3, requires_grad=True)
            (x * x).sum().backward()
        return x.grad.tolist(), before > 0, mark()

    for grads, _, _ in run(2, body):
        assert grads == [2.0, 2.0, 2.0]


@BOTH
def test_embedding_and_root_alone(orig):
    assert (
        run(2, lambda rank, world: trained(Case("tied", case("tied in the root").build, tokens, root_alone), orig))[0]
        == []
    )


def test_noted_blocks_note():
    seen = []
    square(Noted("b", 4, 5, seen.append)(torch.ones(2, 4, requires_grad=True))).backward()
    assert seen == ["run b", "grad b"]
