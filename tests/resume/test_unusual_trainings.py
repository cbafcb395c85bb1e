"""Clean resumes of unusual trainings are never reported, and their lost parts are named."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

import shardckpt
from tests.kit.runs.faults import Generator

SAVED_AT, STEPS, BATCH = 3, 6, 4
DATA = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))


class Training:
    """A small training: model, optimizers, schedule and position; variants change one of them."""

    def __init__(self) -> None:
        self.at = torch.zeros((), dtype=torch.int64)
        self.model = self.build_model()
        self.optims = self.build_optims()
        self.schedule = self.build_schedule()
        self.state = {"model": self.model, "optims": self.optims, "schedule": self.schedule, "at": self.at}
        self.state["rng"] = shardckpt.RNGState()

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 6))

    def build_optims(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(self.model.parameters(), lr=0.01)]

    def build_schedule(self) -> Any:
        return lr_scheduler.ExponentialLR(self.optims[0], 0.9)

    def next(self) -> torch.Tensor:
        start = int(self.at) * BATCH
        self.at += 1
        return DATA[start : start + BATCH]

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.model(batch) - batch.flip(1)).square().mean()

    def update(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.loss(batch)
        loss.backward()
        for optim in self.optims:
            optim.step()
            optim.zero_grad()
        return loss

    def step(self) -> tuple[Any, Any]:
        batch = self.next()
        loss = self.update(batch)
        self.schedule.step()
        return loss.detach(), batch


class TwoOptimizers(Training):
    def build_optims(self) -> list[torch.optim.Optimizer]:
        first, last = self.model[0], self.model[3]
        return [torch.optim.Adam(first.parameters(), amsgrad=True), torch.optim.SGD(last.parameters(), momentum=0.9)]


class FrozenLayers(Training):
    def build_optims(self) -> list[torch.optim.Optimizer]:
        self.model[0].requires_grad_(False)
        return super().build_optims()


class Ema(Training):
    def __init__(self) -> None:
        super().__init__()
        self.ema = swa_utils.AveragedModel(self.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        self.state["ema"] = self.ema

    def step(self) -> tuple[Any, Any]:
        result = super().step()
        self.ema.update_parameters(self.model)
        return result


class Lora(Training):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(6, 6).requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.zeros(6, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + functional.dropout(x, 0.1, self.training) @ self.a.T @ self.b.T

    def build_model(self) -> nn.Module:
        return nn.Sequential(self.Layer(), nn.Tanh(), self.Layer())

    def build_optims(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW([each for each in self.model.parameters() if each.requires_grad], lr=0.02)]


class Accumulation(Training):
    def step(self) -> tuple[Any, Any]:
        batches = [self.next(), self.next()]
        losses = [self.loss(batch) for batch in batches]
        (sum(losses) / 2).backward()
        self.optims[0].step()
        self.optims[0].zero_grad()
        self.schedule.step()
        return sum(losses).detach(), batches


class Recomputed(Training):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        out = checkpoint(self.model, batch, use_reentrant=False)
        return (out - batch.flip(1)).square().mean()


class Masters(Training):
    """Parameters of bfloat16, which the optimizer of float32 masters is copied to."""

    def build_model(self) -> nn.Module:
        return super().build_model().bfloat16()

    def build_optims(self) -> list[torch.optim.Optimizer]:
        self.masters = [nn.Parameter(each.detach().float()) for each in self.model.parameters()]
        return [torch.optim.AdamW(self.masters, lr=0.01)]

    def __init__(self) -> None:
        super().__init__()
        self.state["masters"] = self.masters

    def update(self, batch: torch.Tensor) -> torch.Tensor:
        loss = self.loss(batch.bfloat16())
        loss.backward()
        with torch.no_grad():
            for master, each in zip(self.masters, self.model.parameters(), strict=True):
                master.grad, each.grad = each.grad.float(), None
            self.optims[0].step()
            for master, each in zip(self.masters, self.model.parameters(), strict=True):
                each.copy_(master)
        return loss


class WarmRestarts(Training):
    def build_schedule(self) -> Any:
        warmup = lr_scheduler.LinearLR(self.optims[0], 0.1, total_iters=2)
        return lr_scheduler.SequentialLR(
            self.optims[0], [warmup, lr_scheduler.CosineAnnealingWarmRestarts(self.optims[0], 2)], [2]
        )


class OneCycle(Training):
    def build_schedule(self) -> Any:
        return lr_scheduler.OneCycleLR(self.optims[0], 0.1, total_steps=20)  # changes betas too


class Plateau(Training):
    def build_schedule(self) -> Any:
        return lr_scheduler.ReduceLROnPlateau(self.optims[0], patience=0)

    def step(self) -> tuple[Any, Any]:
        batch = self.next()
        loss = self.update(batch).detach()
        self.schedule.step(loss)
        return loss, batch


class SparseEmbedding(Training):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Linear(6, 6))

    def build_optims(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SparseAdam(self.model[0].parameters()),
            torch.optim.Adagrad(self.model[1].parameters()),
        ]

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return self.model((batch.abs() * 4).long().clamp(max=9)).square().mean()


class Closure(Training):
    def build_optims(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.LBFGS(self.model.parameters(), lr=0.1, max_iter=3)]

    def update(self, batch: torch.Tensor) -> torch.Tensor:
        def closure() -> torch.Tensor:
            self.optims[0].zero_grad()
            loss = self.loss(batch)
            loss.backward()
            return loss

        return self.optims[0].step(closure)


class Compiled(Training):
    def __init__(self) -> None:
        super().__init__()
        self.compiled = torch.compile(self.model, backend="eager")
        self.compiled_step = torch.compile(self.optims[0].step, backend="eager")

    def update(self, batch: torch.Tensor) -> torch.Tensor:
        loss = (self.compiled(batch) - batch.flip(1)).square().mean()
        loss.backward()
        self.compiled_step()
        self.optims[0].zero_grad()
        return loss


class TensorRate(Training):
    def build_optims(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(self.model.parameters(), lr=torch.tensor(0.01))]


class SpectralNorm(Training):
    def build_model(self) -> nn.Module:
        norm = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        return nn.Sequential(norm, nn.BatchNorm1d(8), nn.utils.parametrizations.weight_norm(nn.Linear(8, 6)))


class LaterGroup(Training):
    """A layer that begins to train in the middle of the run."""

    def build_optims(self) -> list[torch.optim.Optimizer]:
        optim = torch.optim.AdamW(self.model[3].parameters(), lr=0.01)
        optim.add_param_group({"params": [*self.model[0].parameters()], "lr": 0.0})
        return [optim]

    def step(self) -> tuple[Any, Any]:
        if int(self.at) >= SAVED_AT:
            self.optims[0].param_groups[1]["lr"] = 0.003
        return super().step()


class Augmented(Training):
    """Noise of numpy on each batch."""

    def next(self) -> torch.Tensor:
        return super().next() + torch.from_numpy(np.random.standard_normal((BATCH, 6)).astype("float32"))


class Adversarial(Training):
    """A generator and a discriminator that train in turn, with averages of gradients as plain tensors."""

    def build_model(self) -> nn.Module:
        return nn.ModuleDict({"g": nn.Linear(6, 6), "d": nn.Linear(6, 1)})

    def build_optims(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.RMSprop(each.parameters(), centered=True) for each in self.model.values()]

    def update(self, batch: torch.Tensor) -> torch.Tensor:
        at = int(self.at) % 2
        noise = torch.randn_like(batch)
        loss = self.model["d"](self.model["g"](noise)).mean() * (1 - 2 * at) + self.model["d"](batch).mean() * at
        loss.backward()
        self.optims[at].step()
        for optim in self.optims:
            optim.zero_grad()
        return loss


class NoiseGenerator(Training):
    """Noise from a generator of its own, which an object in the state has."""

    def __init__(self) -> None:
        super().__init__()
        self.state["noise"] = Generator(torch.Generator().manual_seed(int(torch.randint(1000, ()))))

    def next(self) -> torch.Tensor:
        return super().next() + torch.randn((BATCH, 6), generator=self.state["noise"].generator)


class CachedBuffer(Training):
    """A buffer that is not saved, and that the first forward pass of a process computes."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.register_buffer("cache", torch.zeros(0), persistent=False)
        return model

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        if not len(self.model.cache):
            self.model.cache = torch.arange(6.0)
        return (self.model(batch) * self.model.cache).square().mean()


class Curriculum(Training):
    """Batches that grow from step to step."""

    def next(self) -> torch.Tensor:
        at = int(self.at)
        self.at += 1
        return DATA[at * (at + 1) :][: 2 + at]


class LayerThatUnfreezes(Training):
    def step(self) -> tuple[Any, Any]:
        self.model[0].requires_grad_(int(self.at) > SAVED_AT)
        return super().step()


class OptimizerThatBeginsAnew(Training):
    """Slots that the run itself drops, behind the save."""

    def step(self) -> tuple[Any, Any]:
        if int(self.at) == SAVED_AT + 1:
            self.optims[0].state.clear()
        return super().step()


class GradientPenalty(Training):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        batch = batch.clone().requires_grad_(True)
        out = self.model(batch).square().mean()
        (gradient,) = torch.autograd.grad(out, batch, create_graph=True)
        return out + gradient.square().sum()


class GroupOfEachParameter(Training):
    def build_optims(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW([{"params": [each]} for each in self.model.parameters()])]

    def build_schedule(self) -> Any:
        return lr_scheduler.LambdaLR(self.optims[0], [lambda at, n=n: 0.9 ** (at * n) for n in range(4)])


TRAININGS: Mapping[str, type[Training]] = {each.__name__: each for each in (Training, *Training.__subclasses__())}


def train(kind: type[Training], root: Path, seed: int, fault: Callable[[Training], None] | None = None) -> None:
    """Train and save, or resume with a fault and train on."""
    torch.manual_seed(seed)
    np.random.seed(seed)
    made = kind()
    ck = shardckpt.Checkpointer(root, witness=shardckpt.Witness(steps=3))
    start = ck.restore(made.state) or 0
    if fault is not None:
        fault(made)
    for number in range(start + 1, STEPS + 1):
        loss, batch = made.step()
        ck.witness(number, loss=loss, batch=batch)
        if number == SAVED_AT and not start:
            ck.save(number, made.state)
    assert not start or shardckpt.prove(root).steps[0].verdict == "proven"


def keep(made: Training) -> None:
    """Change nothing."""


@pytest.mark.parametrize("name", TRAININGS)
def test_a_clean_resume_is_proven(name: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(TRAININGS[name], tmp_path / "run", 1)
        train(TRAININGS[name], tmp_path / "run", 2, keep)


def swap_slots(made: Training) -> None:
    first, last = (made.optims[0].state[made.model[at].weight] for at in (0, 3))
    first["exp_avg"], last["exp_avg"] = last["exp_avg"].T.contiguous(), first["exp_avg"].T.contiguous()


def change_betas(made: Training) -> None:
    made.optims[0].param_groups[0]["betas"] = (0.8, 0.999)


def step_the_schedule_twice(made: Training) -> None:
    once = made.schedule.step
    made.schedule.step = lambda: (once(), once())


def evaluate(made: Training) -> None:
    made.model.eval()


def clip(made: Training) -> None:
    for parameter in made.model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


def forget_the_average(made: Training) -> None:
    made.ema.load_state_dict(swa_utils.AveragedModel(copy.deepcopy(made.model)).state_dict())


def freeze(made: Training) -> None:
    made.model[0].weight.requires_grad_(False)


def transpose(made: Training) -> None:
    with torch.no_grad():
        made.model[2].base.weight.copy_(made.model[2].base.weight.T.clone())


def lose_masters(made: Training) -> None:
    with torch.no_grad():
        for master, each in zip(made.masters, made.model.parameters(), strict=True):
            master.copy_(each)


def seed_numpy(made: Training) -> None:
    np.random.seed(0)


def accumulate_once(made: Training) -> None:
    made.step = lambda: Training.step(made)


def lose_statistics(made: Training) -> None:
    made.model[1].reset_running_stats()


def skip_a_batch(made: Training) -> None:
    made.at += 1


def make_the_optimizer_anew(made: Training) -> None:
    made.optims[0] = torch.optim.AdamW(made.model.parameters(), lr=0.01)


def keep_a_gradient(made: Training) -> None:
    made.model[0].weight.grad = torch.ones_like(made.model[0].weight)


def normalize_samples(made: Training) -> None:
    exact = made.next
    made.next = lambda: exact() / 2


def change_dropout(made: Training) -> None:
    made.model[2].p = 0.5


FAULTS: Mapping[str, tuple[str, Callable[[Training], None], str, str]] = {
    "slots of two parameters swapped": ("Training", swap_slots, "optimizer", "exp_avg"),
    "other betas": ("Training", change_betas, "optimizer", "betas.0"),
    "a schedule that is stepped twice": ("Training", step_the_schedule_twice, "schedule", "lr"),
    "evaluation mode": ("Training", evaluate, "random state", "torch"),
    "gradients that are clipped": ("Training", clip, "optimizer", "exp_avg"),
    "a layer that is frozen": ("Training", freeze, "optimizer", "step"),
    "an average that begins anew": ("Ema", forget_the_average, "parameter", "ema"),
    "a square weight transposed": ("Lora", transpose, "parameter", "model.2.base.weight"),
    "masters made from bfloat16": ("Masters", lose_masters, "parameter", "masters.0"),
    "noise from another seed": ("Augmented", seed_numpy, "batch", ""),
    "half of the batches": ("Accumulation", accumulate_once, "batch", ""),
    "statistics of batch norm": ("SpectralNorm", lose_statistics, "parameter", "model.1.num_batches_tracked"),
    "an optimizer made after the restore": ("Training", make_the_optimizer_anew, "optimizer", "step"),
    "a gradient from before the restore": ("Training", keep_a_gradient, "optimizer", "0.weight.exp_avg"),
    "samples normalized otherwise": ("Training", normalize_samples, "batch", "other samples"),
    "another rate of dropout": ("Training", change_dropout, "loss", "loss"),
    "networks out of turn": ("Adversarial", skip_a_batch, "batch", "skipped"),
}
"""Training, fault, cause, and a part of the name."""


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_an_unusual_training_is_named(name: str, tmp_path: Path) -> None:
    kind, fault, cause, what = FAULTS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(TRAININGS[kind], tmp_path / "run", 1)
        with pytest.raises(shardckpt.errors.ResumeDivergence) as caught:
            train(TRAININGS[kind], tmp_path / "run", 2, fault)
    found = caught.value.divergence
    assert (found.cause, found.step) == (cause, SAVED_AT + 1), found
    assert what in found.name, found
