"""Full parameters outside the engine's own computation: `summon_full_params`, `iter_full_params`, `apply`."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from tests.kit.models.models import PLAIN, Block, Case, Stack, Wide, blocks_and_root, built, case, floats, square
from tests.kit.models.reference import Training, compare, groups, product, reduce_gradients, sgd
from tests.kit.models.under_test import FSDP, TORCH, Strategy, core, shard, torch_is_wrong
from tests.kit.ranks.harness import raised_everywhere, run

if not TORCH:
    from shardckpt.core.comm.streams import FULL_BYTES
    from shardckpt.core.modules.dtensors import shard_full_tensor, wrap_local
    from shardckpt.core.tools.summon_full_params import iter_full_params

BOTH = pytest.mark.parametrize("orig", [False, True], ids=["flat", "original"])
STRATEGIES = (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD)
KINDS = [
    case(name)
    for name in (
        "mlp",
        "one unit",
        "tied in the root",
        "tied across units",
        "frozen unit and frozen part",
        "nested",
        "unused everywhere",
        "mixed dtypes",
        "scalars and strides",
        "lstm",
        "lists, parametrized, attention",
    )
]
WORLDS = pytest.mark.parametrize("world", [1, 2, 3])
FEW = ("mlp", "tied across units", "scalars and strides")
KINDS_AND_WORLDS = pytest.mark.parametrize(
    ("which", "world"),
    [*((each, 2) for each in KINDS), *((case(name), world) for name in FEW for world in (1, 3))],
    ids=str,
)


Combination = tuple[Strategy, bool]
EVERY: list[Combination] = [(strategy, orig) for strategy in STRATEGIES for orig in (False, True)]


def paired(which: Case) -> list[Combination]:
    """Each strategy, and with and without original parameters; over the cases each strategy is with both."""
    turn = [each.name for each in KINDS].index(which.name)
    return [(strategy, (turn + i) % 2 == 0) for i, strategy in enumerate(STRATEGIES)]


def every(which: Case) -> list[Combination]:
    return EVERY


CHOICES = pytest.mark.parametrize("choose", [paired, pytest.param(every, marks=pytest.mark.slow)])
"""Which combinations of strategies and kinds of parameters a case meets: pairs, or all in `pytest -m slow`."""


def can(which: Case, orig: bool) -> bool:
    """Whether torch's engine is right; there what is frozen beside what trains has gradients."""
    frozen = which.name == "frozen unit and frozen part"
    return not TORCH or (which.torch in ("yes", "orig" if orig else "flat") and not frozen)


def cut(which: Case, **settings) -> tuple[nn.Module, nn.Module]:
    """The unsharded model of a case, and its sharded twin."""
    plain = built(which)
    return plain, which.cut(copy.deepcopy(plain), lambda module: shard(module, **settings))


def held() -> int:
    gc.collect()
    return 0 if TORCH else FULL_BYTES.held


def differences(model: nn.Module, plain: nn.Module, *, grads: bool = False) -> list[str]:
    """Where the registered parameters differ from the plain model's: in names, order, bits, gradients."""
    ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    if list(ours) != list(theirs):
        return [f"names {list(ours)}"]
    wrong = []
    for name, parameter in ours.items():
        other = theirs[name]
        if not isinstance(parameter, nn.Parameter) or parameter.requires_grad != other.requires_grad:
            wrong.append(f"{name} is {type(parameter).__name__}")
        if parameter.stride() != other.stride() or not torch.equal(parameter.data, other.data):
            wrong.append(f"{name} {tuple(parameter.shape)}")
        if grads and (parameter.grad is None) != (other.grad is None):
            wrong.append(f"gradient of {name} is {parameter.grad}")
        if grads and parameter.grad is not None:
            try:
                torch.testing.assert_close(parameter.grad, other.grad)
            except AssertionError as error:
                wrong.append(f"gradient of {name}: {error}")
    return wrong


def reference_gradients(which: Case, model: nn.Module, plain: nn.Module, rank: int, orig: bool) -> None:
    """One backward of both; the plain model gets the mean over ranks, zeros where a flat parameter has them."""
    for net in (model, plain):
        batch = which.batch(rank, 0)
        square(net(*batch) if isinstance(batch, tuple) else net(batch)).backward()
    reduce_gradients(plain, groups(model, plain, orig))
    if not orig:
        for each in groups(model, plain, orig):
            members = [plain.get_parameter(name) for name in each.names]
            if any(member.grad is not None for member in members):
                for member in members:
                    member.grad = torch.zeros_like(member) if member.grad is None else member.grad


# ------------------------------------------------------------------------------------------- values and gradients


@CHOICES
@KINDS_AND_WORLDS
def test_values_names_and_gradients_are_the_unsharded_models(which, world, choose):
    """Values, names and gradients are those of the unsharded model; nothing stays whole."""

    def body(rank, world):
        warnings.simplefilter("ignore")
        wrong = []
        for strategy, orig in choose(which):
            if not can(which, orig):
                continue
            plain, model = cut(which, sharding_strategy=strategy, use_orig_params=orig)
            exposed, before = [*model.parameters()], held()
            with FSDP.summon_full_params(model):
                wrong += differences(model, plain)
            shapes = [tuple(p.shape) for p in exposed]
            reference_gradients(which, model, plain, rank, orig)
            if orig or not TORCH:
                with FSDP.summon_full_params(model, with_grads=True):
                    wrong += differences(model, plain, grads=True)
            after = [*model.parameters()]
            same = len(after) == len(exposed) and all(a is b for a, b in zip(after, exposed, strict=True))
            if not same or shapes != [tuple(p.shape) for p in after] or held() != before:
                wrong.append(f"{strategy} {orig}: not sharded as before")
        return wrong

    assert run(world, body, timeout=60) == [[]] * world


@BOTH
def test_training_goes_on_after_it(orig):
    """Values, gradients and the state of the optimizer are what they would be without."""

    def body(rank, world):
        warnings.simplefilter("ignore")
        plain, model = cut(PLAIN, use_orig_params=orig)
        with FSDP.summon_full_params(model):
            pass
        wrong = compare(PLAIN, model, plain, Training(sgd, steps=1), orig=orig, replicated=False)
        for net in (plain, model):
            square(net(floats(rank, 7))).backward()
        reduce_gradients(plain, groups(model, plain, orig))
        with FSDP.summon_full_params(model, writeback=False):
            pass
        for net in (plain, model):
            sgd(net.parameters()).step()
        with FSDP.summon_full_params(model):
            for name, parameter in model.named_parameters():
                torch.testing.assert_close(parameter.data, plain.get_parameter(name).data)
        return wrong

    assert run(2, body) == [[]] * 2


# ------------------------------------------------------------------------------------------------ combinations


def edits(model: nn.Module, rank: int, rank0_only: bool, with_grads: bool) -> list[str]:
    """Change what this rank has, and tell what it should not have."""
    if rank0_only and rank:
        return [name for name, p in model.named_parameters() if p.dim() == 2 and "_flat_param" not in name]
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.mul_(index + 2.0)
            if with_grads:
                parameter.grad.mul_(-3.0)
    return []


def values_to_restore(*models: nn.Module) -> Callable[[], None]:
    """A function that writes the present values and gradients of the models back into what they hold."""
    parameters = [parameter for model in models for parameter in model.parameters()]
    held = [(value, value.detach().clone()) for p in parameters for value in (p.detach(), p.grad) if value is not None]

    @torch.no_grad()
    def restore() -> None:
        for value, before in held:
            value.copy_(before)

    return restore


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@BOTH
@pytest.mark.parametrize("world", [1, 3])
def test_every_combination_keeps_edits_or_discards_them(world, orig, strategy):
    """G16."""
    if TORCH:
        pytest.skip("torch refuses most combinations, and crashes on a CPU with offload_to_cpu")
    rows = product(writeback=(True, False), rank0_only=(True, False), offload_to_cpu=(True, False), with_grads=(0, 1))

    def body(rank, world):
        warnings.simplefilter("ignore")
        wrong = []
        plain, model = cut(PLAIN, use_orig_params=orig, sharding_strategy=strategy)
        reference_gradients(PLAIN, model, plain, rank, orig)
        begin = values_to_restore(plain, model)
        for row in rows:
            begin()
            with FSDP.summon_full_params(model, **row):
                seen = edits(model, rank, row["rank0_only"], row["with_grads"])
            if seen and strategy is not Strategy.NO_SHARD:
                wrong.append(f"{row}: rank {rank} sees {seen}")
            persists = row["writeback"] or (strategy is Strategy.NO_SHARD and (rank == 0 or not row["rank0_only"]))
            with torch.no_grad():
                for index, parameter in enumerate(plain.parameters()):
                    parameter.mul_(index + 2.0 if persists else 1.0)
                    keeps = row["with_grads"] and persists
                    parameter.grad.mul_(-3.0 if keeps else 1.0)
            with FSDP.summon_full_params(model, writeback=False, with_grads=True):
                wrong += [f"{row}: {each}" for each in differences(model, plain, grads=True)]
        return wrong

    assert run(world, body, timeout=60) == [[]] * world


@torch_is_wrong("writeback with rank0_only is refused (G16)")
@BOTH
def test_changes_of_the_first_rank_reach_every_replica(orig):
    """The other replica's first rank sees nothing, so replicas cannot part."""

    def body(rank, world):
        warnings.simplefilter("ignore")
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2]), dist.new_group([1, 3])]
        both = (pairs[rank // 2], pairs[2 + rank % 2])
        plain, model = cut(PLAIN, use_orig_params=orig, sharding_strategy=Strategy.HYBRID_SHARD, process_group=both)
        with FSDP.summon_full_params(model, rank0_only=True):
            edits(model, rank, True, False)
        edits(plain, 0, False, False)
        with FSDP.summon_full_params(model):
            return differences(model, plain)

    assert run(4, body) == [[]] * 4


@BOTH
def test_ranks_that_see_nothing_keep_what_is_sharded(orig):
    def body(rank, world):
        warnings.simplefilter("ignore")
        _, model = cut(PLAIN, use_orig_params=orig)
        shapes = [tuple(p.shape) for p in model.parameters()]
        with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
            return [tuple(p.shape) for p in model.parameters()] == shapes

    assert run(2, body) == [False, True]


@BOTH
def test_offload_without_rank0_only_warns(orig):
    if TORCH:
        pytest.skip("torch crashes on a CPU with offload_to_cpu")

    def body(rank, world):
        _, model = cut(PLAIN, use_orig_params=orig)
        with warnings.catch_warnings(record=True) as messages:
            warnings.simplefilter("always")
            with FSDP.summon_full_params(model, offload_to_cpu=True):
                pass
        return [str(each.message) for each in messages], [each.filename for each in messages]

    messages, files = run(1, body)[0]
    assert len(messages) == 1
    assert "offload_to_cpu=True and rank0_only=False may result in" in messages[0]
    assert files == [__file__]


@torch_is_wrong("at world size 1 edits persist whatever writeback says (G19)")
@BOTH
def test_g19_one_rank_discards_edits_too(orig):
    def body(rank, world):
        plain, model = cut(PLAIN, use_orig_params=orig)
        with FSDP.summon_full_params(model, writeback=False):
            edits(model, 0, False, False)
        with FSDP.summon_full_params(model):
            return differences(model, plain)

    assert run(1, body) == [[]]


@BOTH
def test_parameters_come_in_the_types_they_are_stored_in(orig):
    def body(rank, world):
        warnings.simplefilter("ignore")
        mixed = core.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        plain, model = cut(PLAIN, use_orig_params=orig, mixed_precision=mixed)
        model(floats(rank, 0))
        wrong = []
        for _ in range(2):
            with FSDP.summon_full_params(model):
                wrong += differences(model, plain)
                edits(model, rank, False, False)
            edits(plain, rank, False, False)
            square(model(floats(rank, 0))).backward()
        return wrong

    assert run(2, body) == [[]] * 2


@torch_is_wrong("the sharded gradient is gathered as if it were one")
@BOTH
def test_gradients_that_are_held_back_are_this_ranks_own(orig):
    def body(rank, world):
        warnings.simplefilter("ignore")
        plain, model = cut(PLAIN, use_orig_params=orig)
        with model.no_sync():
            square(model(floats(rank, 0))).backward()
        square(plain(floats(rank, 0))).backward()
        with FSDP.summon_full_params(model, with_grads=True):
            wrong = differences(model, plain, grads=True)
            for parameter in [*model.parameters(), *plain.parameters()]:
                parameter.grad.mul_(2.0)
        for net in (model, plain):
            square(net(floats(rank, 1))).backward()
        reduce_gradients(plain, groups(model, plain, orig))
        with FSDP.summon_full_params(model, with_grads=True):
            return wrong + differences(model, plain, grads=True)

    assert run(2, body) == [[]] * 2


# ------------------------------------------------------------------------------------------------------- scope


@BOTH
def test_without_recursion_nested_units_stay_sharded(orig):
    def body(rank, world):
        plain, model = cut(PLAIN, use_orig_params=orig)
        shapes = [p.shape for p in model.blocks.parameters()]
        with FSDP.summon_full_params(model, recurse=False):
            wrong = not torch.equal(model.first.weight, plain.first.weight)
            return wrong or [p.shape for p in model.blocks.parameters()] != shapes

    assert run(2, body) == [False, False]


@BOTH
def test_inner_units_and_plain_modules_with_several_roots(orig):
    def body(rank, world):
        plain = Stack()
        model = copy.deepcopy(plain)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = shard(block, use_orig_params=orig)
        wrong = []
        with FSDP.summon_full_params(model.blocks[1]):
            wrong += differences(model.blocks[1], plain.blocks[1])
            edits(model.blocks[1], rank, False, False)
        with FSDP.summon_full_params(model):
            edits(plain.blocks[1], rank, False, False)
            for ours, theirs in zip(model.blocks, plain.blocks, strict=True):
                wrong += differences(ours, theirs)
        with FSDP.summon_full_params(plain):
            pass
        square(model(floats(rank, 0))).backward()
        return wrong

    assert run(2, body) == [[]] * 2


def test_an_inner_unit_before_the_first_forward_does_not_become_the_root():
    if TORCH:
        pytest.skip("torch takes it for the root")

    def body(rank, world):
        plain, model = cut(PLAIN)
        with FSDP.summon_full_params(model.blocks[0]):
            pass
        return compare(PLAIN, model, plain, Training(sgd, steps=1), orig=False, replicated=False)

    assert run(2, body) == [[]] * 2


class Buffered(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2))


class BufferedStack(Stack):
    block = Buffered


@BOTH
def test_names_lose_the_wrappers_segment_only_inside(orig):
    def body(rank, world):
        plain, model = cut(Case("buffers", BufferedStack), use_orig_params=orig)
        inside = []
        with FSDP.summon_full_params(model):
            inside.append([name for name, _ in model.named_parameters()])
            inside.append([name for name, _ in model.named_buffers(prefix="net")])
        outside = [name for name, _ in [*model.named_parameters(), *model.named_buffers()]]
        wanted = [[n for n, _ in plain.named_parameters()], [f"net.{n}" for n, _ in plain.named_buffers()]]
        return inside == wanted, all("_fsdp_wrapped_module" in name for name in outside)

    assert run(2, body)[0] == (True, True)


@BOTH
def test_user_objects_stay_and_flat_ones_go(orig):
    """With original parameters the user's objects have full shapes; a flat parameter is not registered inside."""

    def body(rank, world):
        _, model = cut(PLAIN, use_orig_params=orig)
        before = [*model.parameters()]
        with FSDP.summon_full_params(model):
            inside = [*model.parameters()]
            names = [name for name, _ in model.named_parameters()]
        return [a is b for a, b in zip(before, inside, strict=False)], any("_flat_param" in name for name in names)

    same, flat = run(2, body)[0]
    assert all(same) if orig else not any(same)
    assert not flat


# ---------------------------------------------------------------------------------------------------- computing


@torch_is_wrong("the root is sharded again after a forward inside")
@BOTH
@pytest.mark.parametrize("recurse", [True, False])
def test_a_forward_inside_computes_as_the_plain_model(orig, recurse):
    """How models generate: many forwards of the units, and of modules that are none."""

    def body(rank, world):
        plain, model = cut(PLAIN, use_orig_params=orig)
        before = held()
        with FSDP.summon_full_params(model, recurse=recurse, writeback=False), torch.no_grad():
            for step in range(3):
                torch.testing.assert_close(model(floats(rank, step)), plain(floats(rank, step)))
                torch.testing.assert_close(model.first(floats(rank, step)), plain.first(floats(rank, step)))
        wrong = [] if held() == before else ["not freed"]
        return wrong + compare(PLAIN, model, plain, Training(sgd, steps=2), orig=orig, replicated=False)

    assert run(2, body) == [[]] * 2


@torch_is_wrong("nothing is promised")
@BOTH
def test_a_backward_inside_gives_this_ranks_gradients_and_reduces_nothing(orig):
    def body(rank, world):
        plain, model = cut(PLAIN, use_orig_params=orig)
        with FSDP.summon_full_params(model, writeback=False, with_grads=True):
            for net in (model, plain):
                square(net(floats(rank, 0))).backward()
            wrong = differences(model, plain, grads=True)
        wrong += [name for name, p in model.named_parameters() if p.grad is not None]
        plain.zero_grad()
        return wrong + compare(PLAIN, model, plain, Training(sgd, steps=1), orig=orig, replicated=False)

    assert run(2, body) == [[]] * 2


@torch_is_wrong("reading what was kept ends the process")
@BOTH
def test_what_was_kept_from_inside_can_be_read_after_it(orig):
    def body(rank, world):
        plain, model = cut(PLAIN, use_orig_params=orig)
        with FSDP.summon_full_params(model):
            kept = {name: p.detach() for name, p in model.named_parameters()}
            loss = square(model(floats(rank, 0)))
        with pytest.raises(RuntimeError, match="must match" if orig else "Leave summon_full_params"):
            loss.backward()
        return [name for name, value in kept.items() if not torch.equal(value, plain.get_parameter(name))]

    assert run(2, body) == [[]] * 2


class Summoning(Stack):
    """Summons itself where it must not."""

    place = ""
    target = None

    def forward(self, x):
        x = self.first(x)
        if self.place == "forward":
            self.summon()
        if self.place == "backward":
            x.register_hook(lambda _: self.summon())
        return self.last(self.blocks[0](x))

    def summon(self):
        with FSDP.summon_full_params(self.target[0]):
            pass


@BOTH
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_not_while_computing(orig, place):
    def body(rank, world):
        _, model = cut(Case("summoning", Summoning), use_orig_params=orig)
        inner = model.module
        inner.place, inner.target = place, [model]
        square(model(floats(rank, 0))).backward()

    raised = raised_everywhere(2, body)
    assert all(each.is_a(AssertionError) for each in raised)
    assert all("Cannot manually unshard parameters during forward/backward" in each.message for each in raised)
    assert TORCH or all("ShardckptError" in each.bases for each in raised)


@BOTH
def test_not_inside_another_one(orig):
    def body(rank, world):
        plain, model = cut(PLAIN, use_orig_params=orig)
        with FSDP.summon_full_params(model, recurse=False):
            with FSDP.summon_full_params(model.blocks[0]):
                pass  # another unit
            before = [*model.first.parameters()]
            again = FSDP.summon_full_params(model)
            with pytest.raises(AssertionError, match="when already unsharding parameters"), again:
                pass
            with pytest.raises(ValueError, match="current state is"):
                model.apply(lambda _: None)
            same = all(a is b for a, b in zip(before, model.first.parameters(), strict=True))
        with FSDP.summon_full_params(model):
            return [] if same and not differences(model, plain) else ["changed"]

    assert run(2, body) == [[]] * 2


# ----------------------------------------------------------------------------------------------------- leaving


@BOTH
@pytest.mark.parametrize("writeback", [True, False])
def test_after_an_exception_all_is_sharded_and_edits_are_kept_as_told(orig, writeback):
    def body(rank, world):
        plain, model = cut(PLAIN, use_orig_params=orig)
        before, exposed = held(), [*model.parameters()]
        with pytest.raises(ZeroDivisionError), FSDP.summon_full_params(model, writeback=writeback):
            edits(model, rank, False, False)
            raise ZeroDivisionError
        if writeback:
            edits(plain, rank, False, False)
        wrong = [] if held() == before else ["not freed"]
        wrong += [] if all(a is b for a, b in zip(exposed, model.parameters(), strict=True)) else ["other parameters"]
        return wrong + compare(PLAIN, model, plain, Training(sgd, steps=1), orig=orig, replicated=False)

    assert run(2, body) == [[]] * 2


@BOTH
@torch_is_wrong("with a flat parameter the new value is lost without a word")
def test_a_parameter_that_is_replaced_inside_is_taken(orig):
    def body(rank, world):
        plain, model = cut(PLAIN, use_orig_params=orig)
        exposed = [*model.parameters()]
        with FSDP.summon_full_params(model):
            for net in (model, plain):
                net.first.weight = nn.Parameter(torch.full_like(net.first.weight, 5.0))
                net.last.bias.data = torch.full((3,), 7.0)
        same = all(a is b for a, b in zip(exposed, model.parameters(), strict=True))
        with FSDP.summon_full_params(model):
            return same, differences(model, plain)

    assert run(2, body) == [(True, [])] * 2


@BOTH
@torch_is_wrong("edits in place persist, and the new value is lost without a word")
def test_without_shards_a_parameter_replaced_inside_is_taken_without_writeback_too(orig):
    def body(rank, world):
        plain, model = cut(PLAIN, use_orig_params=orig, sharding_strategy=Strategy.NO_SHARD)
        with FSDP.summon_full_params(model, writeback=False):
            for net in (model, plain):
                net.first.weight = nn.Parameter(torch.full_like(net.first.weight, 5.0))
        with FSDP.summon_full_params(model):
            return differences(model, plain)

    assert run(2, body) == [[]] * 2


@BOTH
@torch_is_wrong("with a flat parameter the new value is lost without a word")
def test_a_parameter_of_another_shape_is_refused_by_name_and_the_others_are_kept(orig):
    def body(rank, world):
        plain, model = cut(PLAIN, use_orig_params=orig)
        message = r"Cannot writeback when the parameter shape changes.*first\.weight"
        with pytest.raises(RuntimeError, match=message), FSDP.summon_full_params(model):
            edits(model, rank, False, False)
            model.first.weight = nn.Parameter(torch.ones(2))
        edits(plain, rank, False, False)
        with FSDP.summon_full_params(model):
            return differences(model, plain)

    assert run(2, body) == [[]] * 2


# ----------------------------------------------------------------------------------------------- one at a time


@torch_is_wrong("there is none")
@CHOICES
@KINDS_AND_WORLDS
def test_iteration_gives_every_parameter_once_with_its_clean_name(which, world, choose):
    """Each parameter comes once, with its clean name and full value; nothing stays whole."""

    def body(rank, world):
        warnings.simplefilter("ignore")
        wrong = []
        for strategy, orig in choose(which):
            plain, model = cut(which, sharding_strategy=strategy, use_orig_params=orig)
            before = held()
            names = []
            for name, value in iter_full_params(model):
                names.append(name)
                if not torch.equal(value, plain.get_parameter(name).data):
                    wrong.append(name)
            if sorted(names) != sorted(name for name, _ in plain.named_parameters()) or held() != before:
                wrong.append(f"{names} {held() - before}")
        return wrong

    assert run(world, body, timeout=60) == [[]] * world


@torch_is_wrong("there is none")
@BOTH
def test_iteration_holds_one_unit_at_a_time_and_nothing_once_it_is_left(orig):
    def body(rank, world):
        model = blocks_and_root(Wide(), lambda m: shard(m, use_orig_params=orig))
        largest = max(sum(p.numel() * 4 for p in Wide().blocks[i].parameters()) for i in range(4))
        start = held()
        FULL_BYTES.reset_peak()
        for _ in iter_full_params(model):
            pass
        peak = FULL_BYTES.peak - start
        for name, _ in iter_full_params(model):
            if name.startswith("blocks.1"):
                break
        left = held() - start
        square(model(floats(rank, 0))).backward()
        return largest <= peak <= largest * 1.02, left, held() - start

    assert run(2, body) == [(True, 0, 0)] * 2


@torch_is_wrong("there is none")
@BOTH
def test_iteration_includes_what_no_unit_has_and_refuses_a_part_of_one(orig):
    def body(rank, world):
        plain = Stack()
        model = copy.deepcopy(plain)
        model.blocks[1] = shard(model.blocks[1], use_orig_params=orig)
        found = dict(iter_full_params(model))
        wrong = [name for name, value in plain.named_parameters() if not torch.equal(found.pop(name), value)]
        found = dict(iter_full_params(model.blocks[1]))
        wrong += [n for n, value in plain.blocks[1].named_parameters() if not torch.equal(found.pop(n), value)]
        with pytest.raises(RuntimeError, match="part of a unit"):
            dict(iter_full_params(model.blocks[1].module.up))
        return wrong, list(found)

    assert run(2, body) == [([], [])] * 2


@torch_is_wrong("there is none")
def test_iteration_is_refused_where_summon_is():
    def body(rank, world):
        _, model = cut(PLAIN)
        with FSDP.summon_full_params(model), pytest.raises(AssertionError, match="already unsharding"):
            dict(iter_full_params(model))
        values = iter_full_params(model)
        next(values)
        next(values)
        values.close()
        return len(dict(iter_full_params(model)))

    assert run(2, body) == [16, 16]


# ------------------------------------------------------------------------------------------------ fully_shard


def in_place(which: Case) -> tuple[nn.Module, nn.Module]:
    plain = built(which)
    return plain, which.cut(copy.deepcopy(plain), core.fully_shard)


IN_PLACE = [each for each in KINDS if each.name not in ("nested", "unused everywhere")]


@torch_is_wrong("summon_full_params knows the wrapper only")
@pytest.mark.parametrize(
    ("which", "world"), [*((each, 3) for each in IN_PLACE), *((case(name), 1) for name in FEW)], ids=str
)
def test_fully_shard_is_summoned_and_iterated_too(which, world):
    def body(rank, world):
        warnings.simplefilter("ignore")
        plain, model = in_place(which)
        exposed, before = [*model.parameters()], held()
        with FSDP.summon_full_params(model):
            wrong = differences(model, plain)
        reference_gradients(which, model, plain, rank, True)
        with FSDP.summon_full_params(model, with_grads=True):
            wrong += differences(model, plain, grads=True)
        found = dict(iter_full_params(model))
        wrong += [name for name, p in plain.named_parameters() if not torch.equal(found.pop(name), p)]
        same = all(a is b for a, b in zip(exposed, model.parameters(), strict=True))
        return wrong + list(found) + ([] if same and held() == before else ["not sharded as before"])

    assert run(world, body) == [[]] * world


@torch_is_wrong("summon_full_params knows the wrapper only")
@pytest.mark.parametrize("which", [PLAIN, case("scalars and strides")], ids=str)
def test_every_combination_with_fully_shard(which):
    rows = product(writeback=(True, False), rank0_only=(True, False), offload_to_cpu=(True, False), with_grads=(0, 1))

    def body(rank, world):
        warnings.simplefilter("ignore")
        wrong = []
        plain, model = in_place(which)
        reference_gradients(which, model, plain, rank, True)
        begin = values_to_restore(plain, model)
        for row in rows:
            begin()
            with FSDP.summon_full_params(model, **row):
                if not rank or not row["rank0_only"]:
                    edits(model, rank, False, row["with_grads"])
            if row["writeback"]:
                edits(plain, rank, False, row["with_grads"])
            with FSDP.summon_full_params(model, writeback=False, with_grads=True):
                wrong += [f"{row}: {each}" for each in differences(model, plain, grads=True)]
        return wrong

    assert run(3, body, timeout=60) == [[]] * 3


@torch_is_wrong("summon_full_params knows the wrapper only")
def test_a_wrapper_around_fully_shard_and_a_forward_inside():
    def body(rank, world):
        plain = Stack()
        model = copy.deepcopy(plain)
        for block in model.blocks:
            core.fully_shard(block)
        model = shard(model, use_orig_params=True)
        with FSDP.summon_full_params(model), torch.no_grad():
            wrong = differences(model, plain)
            torch.testing.assert_close(model(floats(rank, 0)), plain(floats(rank, 0)))
            edits(model, rank, False, False)
        edits(plain, rank, False, False)
        found = dict(iter_full_params(model))
        return wrong + [name for name, p in plain.named_parameters() if not torch.equal(found.pop(name), p)]

    assert run(2, body) == [[]] * 2


@torch_is_wrong("summon_full_params knows the wrapper only")
def test_tensor_parallel_parameters_keep_their_placement_and_are_full_in_iteration():
    def body(rank, world):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        torch.manual_seed(1)
        plain = Stack()
        plain.blocks = nn.ModuleList(Block(hidden=8) for _ in range(2))
        model = copy.deepcopy(plain)
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            core.fully_shard(block, mesh=mesh["dp"])
        core.fully_shard(model, mesh=mesh["dp"])
        with FSDP.summon_full_params(model), torch.no_grad():
            inside = model.blocks[0].up.weight
            wrong = [] if isinstance(inside, DTensor) and inside.device_mesh == mesh["tp"] else ["not a DTensor"]
            torch.testing.assert_close(model(floats(0, 0)), plain(floats(0, 0)))
            for parameter in model.parameters():
                parameter.mul_(2.0)
        found = dict(iter_full_params(model))
        return wrong + [name for name, p in plain.named_parameters() if not torch.equal(found.pop(name), p * 2.0)]

    assert run(4, body) == [[]] * 4


# ------------------------------------------------------------------------------------------------------- apply


@BOTH
@WORLDS
def test_apply_sees_full_parameters_and_keeps_changes(world, orig):
    def body(rank, world):
        plain, model = cut(PLAIN, use_orig_params=orig)
        before = held()

        @torch.no_grad()
        def change(module):
            if isinstance(module, nn.Linear):
                assert module.weight.dim() == 2
                module.weight.mul_(module.weight.shape[0])
                module.bias.fill_(0.5)

        assert model.apply(change) is model
        plain.apply(change)
        with FSDP.summon_full_params(model):
            wrong = differences(model, plain)
        wrong += [] if held() == before else ["not freed"]
        return wrong + compare(PLAIN, model, plain, Training(sgd, steps=1), orig=orig, replicated=world == 1 or None)

    assert run(world, body) == [[]] * world


@BOTH
def test_apply_of_an_inner_unit_first_does_not_make_it_the_root(orig):
    def body(rank, world):
        plain, model = cut(PLAIN, use_orig_params=orig)
        model.blocks[0].apply(lambda _: None)
        return compare(PLAIN, model, plain, Training(sgd, steps=1), orig=orig, replicated=False)

    assert run(2, body) == [[]] * 2


@BOTH
def test_apply_that_raises_leaves_nothing_gathered(orig):
    def body(rank, world):
        plain, model = cut(PLAIN, use_orig_params=orig)
        before = held()

        def fail(module):
            if isinstance(module, nn.Linear):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            model.apply(fail)
        wrong = [] if held() == before else ["not freed"]
        return wrong + compare(PLAIN, model, plain, Training(sgd, steps=1), orig=orig, replicated=False)

    assert run(2, body) == [[]] * 2


@pytest.mark.skipif(TORCH, reason="of the engine")
def test_strided_rows_of_parameters_that_torch_shards_are_not_left_to_torch():
    """Its `full_tensor` misplaces them in torch 2.9."""

    def body(rank: int, world: int) -> list[list[float]]:
        value, mesh = torch.arange(6.0), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        place = _StridedShard(0, split_factor=2), Shard(0)
        empty = wrap_local(value.new_empty(0), mesh, place, value.shape, value.stride())
        model = nn.Module()
        model.rows = nn.Parameter(wrap_local(shard_full_tensor(value, empty), mesh, place, (6,), (1,)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DTensor, "full_tensor", None)
            return [full.tolist() for _, full in iter_full_params(model)]

    assert run(4, body) == [[[0, 1, 2, 3, 4, 5]]] * 4
