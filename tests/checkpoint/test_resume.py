"""Training that goes on from a checkpoint is the training that was never interrupted, bit for bit, in every style."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import shardckpt
from shardckpt.state import load_optim_state_dict, model_state_dict, optim_state_dict
from tests.kit.models.states import (
    FRONT_ENDS,
    Net,
    differing,
    flat,
    kept_differs,
    looked_at,
    over,
    refused,
    step,
    theirs,
    whole,
    wrapper,
)
from tests.kit.ranks.harness import run

SAMPLES, BATCH, STEPS, SAVED_AT = 22, 4, 10, 3  # an epoch has six batches: resumed in the middle, and on into the next


class Noisy(Dataset):
    """Samples that are augmented by every generator there is."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(5)
        return number, torch.arange(5.0) * number / SAMPLES + 0.1 * noise


class Loader:
    """A rank's batches: a DataLoader with a generator of its own, and how far its epoch has come."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.began, self.at = self.generator.get_state(), 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.began = self.generator.get_state()
        order = torch.randperm(SAMPLES, generator=self.generator).split(BATCH)
        left = [numbers.tolist() for numbers in order[self.at :]]
        for batch in DataLoader(Noisy(), batch_sampler=left, generator=self.generator):
            self.at += 1
            yield batch
        self.at = 0

    def state_dict(self) -> dict:
        return {"began": self.began, "at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.generator.set_state(state["began"])
        self.at = state["at"]


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Job:
    """What one rank trains with; seeds differ between jobs, and between ranks but for the weights."""

    def __init__(self, face: str, rank: int, seed: int) -> None:
        seed_everything(seed)
        self.model = FRONT_ENDS[face](Net((1,)))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.05, amsgrad=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optim, STEPS)
        seed_everything(100 * seed + rank)
        self.loader = Loader(100 * seed + rank)
        self.state = {"model": self.model, "optim": self.optim, "schedule": self.schedule, "step": 0}
        self.state |= {"rng": shardckpt.RNGState(), "loader": shardckpt.PerRank(self.loader)}

    def train(self) -> Iterator[tuple[float, list[int], float]]:
        """Go on to the end; yield the loss, the samples and the learning rate of each step."""
        while True:
            for numbers, x in self.loader:
                loss = functional.dropout(self.model(x), 0.3).square().mean()
                loss.backward()
                self.optim.step()
                self.optim.zero_grad()
                self.schedule.step()
                self.state["step"] += 1
                yield loss.item(), numbers.tolist(), self.schedule.get_last_lr()[0]
                if self.state["step"] == STEPS:
                    return

    def looked_at(self) -> dict:
        """Return all that training has changed, as values that can be compared."""
        numpy_ = np.random.get_state()
        weights = {f"weight {name}": whole(value) for name, value in model_state_dict(self.model, "FULL").items()}
        return {
            **weights,
            **flat(optim_state_dict(self.model, self.optim, "FULL")),
            "schedule": self.schedule.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": (numpy_[1].tolist(), numpy_[2:]),
            "generator": self.loader.generator.get_state(),
        }


def unlike(rank: int, face: str, root: Path, left_out: str = "") -> list[str]:
    """Train to the end, saving on the way; train again from there, and name what differs in as much as one bit."""
    checkpoints = shardckpt.Checkpointer(root)
    job, expected, handle = Job(face, rank, 1), [], None
    for each in job.train():
        expected.append(each)
        if job.state["step"] == SAVED_AT:
            handle = checkpoints.async_save(SAVED_AT, job.state)  # training goes on while it is written
    handle.result()

    other = Job(face, rank, 2)
    wanted = {name: each for name, each in other.state.items() if name != left_out}
    assert checkpoints.restore(wanted, strict=not left_out) == SAVED_AT
    other.state["step"] = SAVED_AT
    found = list(other.train())
    wrong = [f"step {SAVED_AT + n}" for n, each in enumerate(found) if each != expected[SAVED_AT + n]]
    return wrong + differing(other.looked_at(), job.looked_at())


def test_training_that_resumes_is_training_that_was_never_interrupted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(FRONT_ENDS, "torch wrapper", wrapper(theirs, use_orig_params=True))
    faces = ["flat", "orig", "in place", "torch in place", "torch wrapper", "ddp"]
    over(faces, lambda rank, world, face: unlike(rank, face, tmp_path / face))


def test_whatever_is_not_restored_is_seen(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> dict[str, int]:
        parts = ("optim", "schedule", "rng", "loader")
        return {part: len(unlike(rank, "flat", tmp_path / part, part)) for part in parts}

    for told in run(2, body):
        assert min(told.values()) > 1, told


class Factored(torch.optim.Optimizer):
    """Keeps factors of what it sees, as DTensors where parameters are: rows cut, columns and a copy whole."""

    def __init__(self, params) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for p in (each for group in self.param_groups for each in group["params"] if each.dim() == 2):
            seen = p.grad.square()
            row, column, same = seen.mean(1), seen.mean(0, keepdim=True), p.detach().clone()
            if isinstance(p, DTensor):
                column, same = (each.redistribute(placements=[Replicate()]) for each in (column, same))
            state = self.state[p]
            if not state:
                state.update(row=torch.zeros_like(row), column=torch.zeros_like(column), same=same)
            state["row"].lerp_(row, 0.1)
            state["column"].lerp_(column, 0.1)
            state["same"].lerp_(same, 0.5)
            p.sub_(0.1 * p.grad / (state["row"][:, None] * state["column"]).sqrt().add(1e-3) + 0.01 * state["same"])


class Keeping(torch.optim.Optimizer):
    """Keeps what it is told to."""

    def __init__(self, params, kept) -> None:
        super().__init__(params, {"lr": 0.1})
        self.kept = kept

    def step(self) -> None:
        for p in (each for group in self.param_groups for each in group["params"] if each.dim() == 2):
            self.state[p] = self.kept(p.detach())


class TestOptimizersOfTheirOwn:
    """What an optimizer keeps in shapes of its own is saved where it is known how it lies, and else refused by path."""

    def test_dtensors_of_any_shape_come_back_on_any_ranks(self, tmp_path: Path) -> None:
        def body(rank: int, world: int, saves: bool):
            wrong = []
            for face in ("in place", "torch in place"):
                seed_everything(0)
                model = FRONT_ENDS[face](Net((1,)))
                optim = Factored(model.parameters())
                step(model, optim)
                path = tmp_path / f"{face} at 2"
                if saves:
                    shardckpt.save({"model": model, "optim": optim}, path)
                expected = {name: whole(value) for name, value in optim.state[model.first.weight].items()}
                trained = []
                for is_fresh in (True, False):
                    other = FRONT_ENDS[face](Net((1,)))
                    again = Factored(other.parameters())
                    if not is_fresh:
                        step(other, again, 9)
                    before = {name: value.placements for name, value in again.state[other.first.weight].items()}
                    shardckpt.load({"model": other, "optim": again}, path)
                    found = again.state[other.first.weight]
                    wrong += differing({name: whole(value) for name, value in found.items()}, expected, exact=saves)
                    wrong += [name for name, each in before.items() if found[name].placements != each]
                    seed_everything(5)
                    step(other, again, 5)
                    trained.append({name: whole(value) for name, value in other.named_parameters()})
                wrong += differing(*trained, exact=False)
            return wrong

        assert run(2, body, True) == [[]] * 2
        assert run(3, body, False) == [[]] * 3
        nest = shardckpt.load(tmp_path / "in place at 2")
        model = Net((1,))
        optim = Factored(model.parameters())
        shardckpt.load({"model": model, "optim": optim}, tmp_path / "in place at 2")
        kept = nest["optim"]["state"]["first.weight"]
        assert {name: tuple(value.shape) for name, value in kept.items()} == {
            "row": (6,),
            "column": (1, 5),
            "same": (6, 5),
        }
        assert differing(dict(optim.state[model.first.weight]), kept) == []

    def test_what_nobody_can_cut_is_refused_by_path_and_saved_as_it_is_told(self, tmp_path: Path) -> None:
        def rows_of(p: DTensor) -> dict:
            return {"rows": p.to_local().sum(1)}

        def partial(p: DTensor) -> dict:
            return {"sum": DTensor.from_local(torch.ones(3), p.device_mesh, [Partial()])}

        def packed(p: DTensor) -> dict:
            return {"packed": DTensor.from_local(Packed(p.to_local()), p.device_mesh, p.placements)}

        def body(rank: int, world: int):
            told, made = {}, {}
            for name, kept in (("rows", rows_of), ("sum", partial), ("packed", packed)):
                model = FRONT_ENDS["in place"](Net((1,)))
                optim = Keeping(model.parameters(), kept)
                step(model, optim)
                told[name] = refused(shardckpt.save, {"model": model, "optim": {"a": optim}}, tmp_path / name)
                made[name] = model, optim
            layout = lambda name, slot, value: 0 if slot == "rows" else None  # noqa: E731
            model, optim = made["rows"]
            saved = optim_state_dict(model, optim, "SHARDED", state_layout=layout)
            shardckpt.save({"model": model, "optim": saved}, tmp_path / "told")
            again = Keeping(model.parameters(), rows_of)
            load_optim_state_dict(model, again, shardckpt.load(tmp_path / "told")["optim"], state_layout=layout)
            weight = model.first.weight
            return told, torch.equal(again.state[weight]["rows"], optim.state[weight]["rows"])

        for told, is_back in run(2, body):
            assert is_back
            for name, text in told.items():
                assert f"optim.a.state.first.weight.{name}" in text
            assert "state_layout" in told["rows"]
            assert "partial" in told["sum"]
            assert "Packed" in told["packed"]
        assert sorted(each.name for each in tmp_path.iterdir()) == ["told"]


class Packed(torch.Tensor):
    """A tensor whose elements are not in its memory as they are, as those of quantised optimizers."""

    @staticmethod
    def __new__(cls, value: torch.Tensor):
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        held = torch.utils._pytree.tree_map_only(Packed, lambda each: each.value, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, func(*held[0], **held[1]))


def test_a_state_is_saved_and_loaded_in_inference_mode_and_trains_on(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> list[str]:
        wrong = []
        for face in ("in place", "torch in place", "orig", "flat"):
            nets = [FRONT_ENDS[face](Net((1,))) for _ in range(2)]
            (net, optim), (other, again) = ((each, torch.optim.AdamW(each.parameters())) for each in nets)
            step(net, optim)
            with torch.inference_mode():
                shardckpt.save({"model": net, "optim": optim}, tmp_path / face)
                shardckpt.load({"model": other, "optim": again}, tmp_path / face)
            for each, with_it in ((net, optim), (other, again)):
                step(each, with_it, seed=1)
            wrong += [f"{face}: {name}" for name in kept_differs(net, optim, other, again)]
        return wrong

    assert run(2, body) == [[], []]


MADE_AT_ONCE = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adagrad, begun high": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, t0=1.0),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}


def train_net(face: str, optimizer: str, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(steps)
    model = FRONT_ENDS[face](Net((1,)))
    optim = MADE_AT_ONCE[optimizer](model.parameters())
    for number in range(steps):
        step(model, optim, number)
    return model, optim


def count_steps(optim: torch.optim.Optimizer) -> set[float]:
    """Return the numbers of steps that the optimizer of this rank has, of parameters without elements here too."""
    return {float(slots["step"]) for slots in optim.state.values()}


class TestOptimizersThatMakeStateBeforeTheirFirstStep:
    """Where a rank has no elements of a parameter its step does not advance: the ranks that have some decide."""

    def test_they_resume_bit_for_bit_and_all_ranks_have_the_saved_step(self, tmp_path: Path) -> None:
        def body(rank: int, world: int, face: str) -> list:
            wrong: list = []
            for name in MADE_AT_ONCE if face == "orig" else list(MADE_AT_ONCE)[:1]:
                checkpoints = shardckpt.Checkpointer(tmp_path / face / name)
                model, optim = train_net(face, name, 3)
                checkpoints.save(3, {"model": model, "optim": optim})
                other, again = train_net(face, name, 0)
                assert checkpoints.restore({"model": other, "optim": again}) == 3
                wrong += [] if count_steps(again) == {3.0} else [(name, count_steps(again))]
                for number in (3, 4):
                    step(model, optim, number)
                    step(other, again, number)
                checkpoints.save(5, {"model": other, "optim": again})
                for mine, expected in zip(looked_at(other, again), looked_at(model, optim), strict=True):
                    wrong += [(name, each) for each in differing(mine, expected)]
            return wrong

        over(["orig", "flat", "kept", "offloaded", "in place", "torch in place"], body)

    def test_they_are_saved_and_loaded_at_one_two_and_three_ranks(self, tmp_path: Path) -> None:
        def body(rank: int, world: int) -> dict:
            found = {}
            for name in MADE_AT_ONCE:
                path = tmp_path / name
                model, optim = train_net("orig", name, 2 if world == 1 else 0)
                if world > 1:
                    made_at_once = set(optim.state)
                    shardckpt.load({"model": model, "optim": optim}, path / f"at {world - 1}")
                    assert (made_at_once <= optim.state.keys(), count_steps(optim)) == (True, {float(world)}), name
                    step(model, optim, world)
                shardckpt.save({"model": model, "optim": optim}, path / f"at {world}")
                found[name] = looked_at(model, optim), flat(shardckpt.load(path / f"at {world}")["optim"])
            return found

        for world in (1, 2, 3):
            for found in run(world, body):
                for name, ((_, kept), saved) in found.items():
                    assert differing(saved, kept) == [], (world, name)
                    assert {float(v) for (_, slot), v in kept.items() if slot == "step"} == {1.0 + world}, (world, name)
