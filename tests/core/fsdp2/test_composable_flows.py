"""fully_shard in loops that are not a plain forward and backward: parts of a group, chunks, pairs, inner modules."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from tests.core.fsdp2.test_fully_shard import Block, Tower, averaged, batch, full, fully_shard, line, tower
from tests.kit.models.reference import Training, adamw, here, mine
from tests.kit.models.under_test import TORCH, core
from tests.kit.ranks import harness

Policy = core.MixedPrecisionPolicy


class Headed(nn.Module):
    """A language model whose head can be left out of the forward."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.body = nn.Linear(8, 8, bias=False)
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 13, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, *, headless: bool = False) -> torch.Tensor:
        hidden = self.norm(self.body(self.embedding(tokens)))
        return hidden if headless else self.head(hidden)


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 13, (2, 8), generator=torch.Generator().manual_seed(100 * step + rank))


def headed(*, tied: bool = False, grouped: bool = True, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = Headed(tied=tied)
    fully_shard(model.body, mesh=line(), **settings)
    if tied:
        fully_shard([model.embedding, model.norm, model.head], mesh=line(), **settings)
    elif grouped:
        fully_shard([model.norm, model.head], mesh=line(), **settings)
    else:
        fully_shard(model.norm, mesh=line(), **settings)
        fully_shard(model.head, mesh=line(), **settings)
    return fully_shard(model, mesh=line(), **settings)


def chunked(model: Any, data: torch.Tensor, chunks: int = 4) -> tuple[float, list[torch.Tensor]]:
    """The loss by parts: the head's backward runs for each before the rest's does; the head's gradients on the way."""
    hidden = model(data, headless=True)
    total, gradients, seen = 0.0, [], []
    for chunk in torch.chunk(hidden.detach().float(), chunks, dim=1):
        leaf = chunk.contiguous().requires_grad_(True)
        loss = model.head(leaf).float().square().mean()
        loss.backward()
        total += loss.item()
        gradients.append(leaf.grad)
        if model.head.weight.grad is not None:
            seen.append(full(model.head.weight.grad))
    hidden.backward(torch.cat(gradients, dim=1).to(hidden.dtype))
    return total, seen


def same_gradients(model: nn.Module, plain: nn.Module, what: Any = "", **tolerance: float) -> None:
    """Each rank looks at its own part, so that nothing is gathered."""
    for (name, one), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert isinstance(one, DTensor), name
        assert one.grad.shape == other.shape, name
        found, expected = here(one.grad), mine(other.grad, one.grad)
        torch.testing.assert_close(found, expected, msg=lambda m, n=name: f"{what} {n}: {m}", **tolerance)


@pytest.mark.parametrize("shape", ["tied", "grouped", "apart"])
def test_a_head_that_is_called_by_chunks_trains_like_a_whole_one(shape: str) -> None:
    def body(rank: int, world: int) -> None:
        for settings in ({}, {"reshard_after_forward": True}, {"reshard_after_forward": False}):
            trains_by_chunks(shape, rank, **settings)

    harness.run(2, body)


def trains_by_chunks(shape: str, rank: int, **settings: Any) -> None:
    torch.manual_seed(0)
    plain = Headed(tied=shape == "tied")
    model = headed(tied=shape == "tied", grouped=shape == "grouped", **settings)
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (plain, model)]
    for step in range(3):
        expected, _ = chunked(plain, tokens(step, rank))
        found, seen = chunked(model, tokens(step, rank))
        assert found == pytest.approx(expected), settings
        assert len(seen) == 4
        assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))
        averaged(plain)
        same_gradients(model, plain, settings)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)


def test_a_group_of_which_a_part_ran_is_freed_after_forward() -> None:
    def body(rank: int, world: int) -> None:
        model = headed()
        hidden = model(tokens(0, rank), headless=True)
        assert isinstance(model.head.weight, DTensor)
        assert isinstance(model.norm.weight, DTensor)
        model.head(hidden.detach())
        assert isinstance(model.norm.weight, DTensor)

    harness.run(2, body)


def test_results_of_a_part_of_a_group_have_the_policys_dtype() -> None:
    def body(rank: int, world: int) -> None:
        model = headed(mp_policy=Policy(torch.float32, output_dtype=torch.bfloat16))
        hidden = model(tokens(0, rank), headless=True)
        assert hidden.dtype is torch.bfloat16
        assert model.head(hidden.detach().float()).dtype is torch.bfloat16

    harness.run(2, body)


def test_chunks_accumulate_over_microbatches() -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        plain, model = Headed(), headed()
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            model.set_is_last_backward(step == 2)
            chunked(model, tokens(step, rank), 2)
            chunked(plain, tokens(step, rank), 2)
        averaged(plain)
        same_gradients(model, plain)

    harness.run(2, body)


def test_a_head_that_is_kept_is_gathered_once_for_all_chunks() -> None:
    def body(rank: int, world: int) -> None:
        model = headed()
        for step in range(2):
            hidden = model(tokens(step, rank), headless=True)
            model.head.set_reshard_after_forward(False)
            model.head.set_reshard_after_backward(False)
            gathers = []
            for chunk in torch.chunk(hidden.detach(), 4, dim=1):
                with harness.recorded() as calls:
                    model.head(chunk.contiguous().requires_grad_(True)).sum().backward()
                gathers.append(harness.count(calls, "all_gather"))
                assert not isinstance(model.head.weight, DTensor)
            assert gathers[1:] == [0, 0, 0]
            model.head.set_reshard_after_forward(True)
            model.head.set_reshard_after_backward(True)
            model.head.reshard()
            assert isinstance(model.head.weight, DTensor)
            hidden.sum().backward()
            assert all(p.grad is not None for p in model.parameters())

    harness.run(2, body)


def test_forwards_of_a_part_of_a_group_may_come_twice_before_backward() -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        plain, model = Headed(), headed()
        for each in (plain, model):
            hidden = [each(tokens(step, rank), headless=True) for step in range(2)]
            (hidden[0].sum() + hidden[1].square().sum()).backward()
        assert model.head.weight.grad is None
        plain.head.weight.grad = torch.zeros_like(plain.head.weight)
        averaged(plain)
        for name in ("embedding.weight", "body.weight", "norm.weight"):
            torch.testing.assert_close(full(model.get_parameter(name).grad), plain.get_parameter(name).grad)

    harness.run(2, body)


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("reentrant", [None, True, False])
def test_two_forwards_may_be_in_one_loss(keeps: bool, reentrant: bool | None) -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        plain = Tower()
        model = copy.deepcopy(plain)
        for block in model.blocks:
            if reentrant is not None:
                forward = block.forward
                block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=reentrant)
            for each in (block.up, block.down, block):
                fully_shard(each, mesh=line(), reshard_after_forward=not keeps)
        fully_shard(model, mesh=line(), reshard_after_forward=not keeps)
        for each in (plain, model):
            first, second = each(batch(0, rank)), each(batch(1, rank))
            (first.sum() - second.sum()).square().backward()
        averaged(plain)
        same_gradients(model, plain, atol=1e-4, rtol=1e-4)

    harness.run(2, body)


def test_an_inner_module_may_run_by_itself_once_the_root_has() -> None:
    def body(rank: int, world: int) -> None:
        torch.manual_seed(0)
        plain, model = Tower(), tower()
        optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (plain, model)]
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(rank))
        for step in range(2):
            for each in (plain, model):
                each(batch(step, rank)).sum().backward()
            averaged(plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            start = harness.mark()
            model.blocks[1](x).sum().backward()
            assert [call.op for call in harness.since(start)] == ["all_gather", "all_gather", "reduce_scatter"]
            assert model.head.weight.grad is None
            plain.blocks[1](x).sum().backward()
            averaged(plain)
            same_gradients(model.blocks[1], plain.blocks[1])
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(model(batch(5, rank)), plain(batch(5, rank)))

    harness.run(2, body)


def test_arguments_of_each_module_of_a_group_are_cast() -> None:
    def body(rank: int, world: int) -> None:
        class Pair(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.b(self.a(x).float())

        model = Pair()
        fully_shard([model.a, model.b], mesh=line(), mp_policy=Policy(torch.bfloat16))
        fully_shard(model, mesh=line(), mp_policy=Policy(torch.bfloat16))
        output = model(batch(0, rank))
        assert output.dtype is torch.bfloat16
        output.sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    harness.run(2, body)


def test_what_is_cut_along_other_dimensions_is_contiguous_everywhere() -> None:
    def body(rank: int, world: int) -> None:
        model = tower(shard_placement_fn=lambda p: Shard(1) if p.ndim > 1 and p.size(1) % 2 == 0 else None)

        def check(module: nn.Module, *_: Any) -> None:
            assert all(p.is_contiguous() for p in module.parameters())

        for block in model.blocks:
            block.register_forward_pre_hook(check)
        model(batch(0, rank)).sum().backward()
        for parameter in model.parameters():
            for each in (parameter, parameter.grad):
                assert each.is_contiguous()
                assert each.to_local().is_contiguous()

    harness.run(2, body)


def test_an_exception_in_a_part_of_a_group_leaves_nothing_behind() -> None:
    def body(rank: int, world: int) -> None:
        model = headed()
        handle = model.body.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(tokens(0, rank), headless=True)
        handle.remove()
        if TORCH:
            model.reset_iter_state()
        model(tokens(0, rank)).sum().backward()
        assert all(p.grad is not None for p in model.parameters())

    harness.run(2, body)


Accumulation = tuple[bool, bool | int, str, bool, bool]


def accumulation_cases() -> list[Accumulation]:
    """(hybrid, frees after forward, who waits, frees after backward, scatters always), those that make sense."""
    found = []
    for hybrid, forward, who, backward, scatters in itertools.product(
        (False, True), (True, False, 2), ("all", "root", "some"), (True, False), (False, True)
    ):
        if (backward or (forward is False and who != "some")) and (hybrid or not scatters):
            found.append((hybrid, forward, who, backward, scatters))
    return found


def test_accumulation_costs_what_was_asked_for() -> None:
    """In few of the cases, among which every two settings come together."""
    costs_what_was_asked_for(every_two_together(accumulation_cases()))


@pytest.mark.slow
def test_accumulation_costs_what_was_asked_for_in_every_case() -> None:
    costs_what_was_asked_for(accumulation_cases())


def every_two_together(cases: list[Accumulation]) -> list[Accumulation]:
    """Choose cases in which every two settings meet that meet in any."""
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cases}
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        chosen.append(max(cases, key=lambda case: len(missing & pairs[case])))
        missing -= pairs[chosen[-1]]
    return chosen


def costs_what_was_asked_for(cases: list[Accumulation]) -> None:
    blocks, microbatches = 3, 2

    def expected(hybrid: bool, forward: bool | int, who: str, backward: bool, scatters: bool) -> tuple[int, int, int]:
        reduces = blocks + 1
        if who == "some":
            reduces += (blocks - 2 + 1) * (microbatches - 1)
        elif who == "root":
            reduces += blocks * (microbatches - 1)
        across = reduces if hybrid else 0
        if scatters:
            reduces = (blocks + 1) * microbatches
        gathers = blocks + 1
        if forward is not False:
            gathers = 2 * gathers * microbatches
        elif backward:
            gathers *= microbatches
        elif who == "root":
            gathers += blocks * (microbatches - 1)
        return gathers, reduces, across

    def tell(model: Any, who: str, last: bool, backward: bool, scatters: bool) -> None:
        units, recurse = [model], who == "all"
        if who == "some":
            units = list(model.blocks[:2])
        for each in units:
            (each.set_requires_all_reduce if scatters else each.set_requires_gradient_sync)(last, recurse=recurse)
            if not backward:
                each.set_reshard_after_backward(last, recurse=recurse)

    def body(rank: int, world: int) -> None:
        hybrid_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        flat_mesh = line()
        for number, case in enumerate(cases):
            hybrid, forward, who, backward, scatters = case
            model = tower(mesh=hybrid_mesh if hybrid else flat_mesh, reshard_after_forward=forward)
            torch.manual_seed(0)
            plain = Tower()
            for round_ in range(1 + (number % 2 or who == "some")):  # every other one goes on after a whole iteration
                calls = []
                for at in range(microbatches):
                    tell(model, who, at == microbatches - 1, backward, scatters)
                    x = batch(10 * round_ + at, rank)
                    with harness.recorded() as seen:
                        model(x).square().mean().backward()
                    calls += seen
                    plain(x).square().mean().backward()
                counts = tuple(harness.count(calls, op) for op in ("all_gather", "reduce_scatter", "all_reduce"))
                assert counts == expected(*case), (case, round_)
                averaged(plain)
                same_gradients(model, plain)
                for each in (model, plain):
                    each.zero_grad(set_to_none=bool(round_))

    harness.run(4, body, timeout=120.0)


def test_microbatches_go_through_units_that_were_gathered_ahead() -> None:
    def body(rank: int, world: int) -> None:
        for ahead, frees in itertools.product((False, True), repeat=2):
            torch.manual_seed(0)
            plain, model = Tower(), tower(reshard_after_forward=False)
            if ahead:
                for module in model.modules():
                    if isinstance(module, core.FSDPModule):
                        module.unshard(async_op=True)
            for at in range(3):
                model.set_requires_gradient_sync(at == 2)
                model.set_is_last_backward(at == 2)
                if not frees:
                    model.set_reshard_after_backward(at == 2)
                for each in (model, plain):
                    each(batch(at, rank)).square().mean().backward()
            averaged(plain)
            same_gradients(model, plain)

    harness.run(2, body)


DIMS = core.DataParallelMeshDims
EVERYTHING: list[tuple[tuple[int, ...], tuple[str, ...], Any]] = [
    ((4,), ("cuts",), DIMS(shard="cuts")),
    ((4,), ("copies",), DIMS(replicate="copies")),
    ((2, 2), ("copies", "cuts"), DIMS(shard="cuts", replicate="copies")),
    ((2, 2), ("one", "two"), DIMS(shard=("one", "two"))),
    ((1, 2, 2), ("one", "two", "cuts"), DIMS(shard="cuts", replicate=("one", "two"))),
    ((2, 2), ("cuts", "tp"), DIMS(shard="cuts")),
    ((1, 2, 2), ("copies", "cuts", "tp"), DIMS(shard="cuts", replicate="copies")),
]


def spread(model: nn.Module, mesh: Any) -> None:
    """Make all parameters DTensors on a mesh, replicated except over its dimension for tensor parallelism."""
    has_tp = mesh.mesh_dim_names[-1] == "tp"
    rest = [Replicate()] * (mesh.ndim - has_tp)
    for name, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            last = Shard(0 if name.endswith("up") else 1) if key == "weight" and "." in name else Replicate()
            placements = [*rest, last] if has_tp else rest
            setattr(module, key, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))


def beside(parameter: DTensor) -> Shard:
    """A dimension that tensor parallelism has not cut."""
    return Shard(1 if any(p == Shard(0) for p in parameter.placements) else 0)


@pytest.mark.shown_by("core/fsdp2/test_fully_shard.py::test_dtensors_on_the_mesh_of_everything_train_as_whole_ones")
def test_dtensors_on_any_mesh_of_everything_train_as_whole_ones() -> None:
    """On each mesh, parameters are freed after forward or kept until backward, in turn."""
    train_dtensors([(row, at % 2 == 0 and row[2].shard is not None) for at, row in enumerate(EVERYTHING)])


@pytest.mark.slow
def test_dtensors_on_any_mesh_train_as_whole_ones_whether_they_are_kept_or_not() -> None:
    train_dtensors([(row, keeps) for row in EVERYTHING for keeps in (False, True) if row[2].shard or not keeps])


def train_dtensors(choices: list[tuple[Any, bool]]) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Of one size, as torch works out how an operation is distributed for each; four ranks share it unequally.
            self.blocks = nn.ModuleList([Block(6, 6), Block(6, 6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = nn.functional.relu(block.down(nn.functional.relu(block.up(x))))  # DTensor knows it for Replicate
            return x

    def body(rank: int, world: int) -> None:
        meshes: dict[Any, Any] = {}  # torch gives a DTensor the first of equal meshes, and `fully_shard` wants the same
        for (sizes, names, dims), keeps in choices:
            mesh = meshes.setdefault((sizes, names), init_device_mesh("cpu", sizes, mesh_dim_names=names))
            parallel = names[-1] == "tp"
            at = rank // 2 if parallel else rank
            torch.manual_seed(0)
            plain = Pair()
            model = copy.deepcopy(plain)
            spread(model, mesh)
            options = {"mesh": mesh, "dp_mesh_dims": dims, "shard_placement_fn": beside if parallel else None}
            if dims.shard is not None:
                options["reshard_after_forward"] = not keeps
            for block in model.blocks:
                fully_shard(block.up, **options)
            fully_shard(model, **options)
            optimizers = [Training(adamw).stepper(each) for each in (plain, model)]
            for step in range(2):
                x = batch(step, at)
                plain(x).sum().backward()
                model(DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)).sum().backward()
                averaged(plain)  # tensor-parallel ranks compute the same, so the mean over all is that over the others
                same_gradients(model, plain, names)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(full(one), other.detach())

    harness.run(4, body, timeout=120.0)


def test_torchs_replicate_leaves_alone_what_is_sharded_below():
    from torch.distributed._composable import replicate

    def body(rank, world):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
        model = copy.deepcopy(plain)
        fully_shard(model[1])
        replicate(model)
        batches = [torch.randn(2, 8, generator=torch.Generator().manual_seed(each)) for each in range(world)]
        for _ in range(2):
            model(batches[rank]).square().sum().backward()
            for each in batches:
                (plain(each).square().sum() / world).backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        kinds = [type(parameter).__name__ for parameter in model.parameters()]
        close = [torch.allclose(full(p.grad), twin.grad, rtol=1e-5, atol=1e-6) for p, twin in pairs]
        return kinds, all(close)

    found = harness.run(2, body)
    assert [(kinds.count("DTensor"), same) for kinds, same in found] == [(4, True)] * 2
