"""Every learning rate scheduler of torch is saved, and continues where it was."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim import swa_utils

import shardckpt

MAKE: dict[str, Callable[[Any], Any]] = {
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o), schedulers.MultiStepLR(o, [2, 4])]
    ),
    "ConstantLR": schedulers.ConstantLR,
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 5),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, mode="exp_range", gamma=0.9),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "LinearLR": schedulers.LinearLR,
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4, 4, 6]),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda _: 0.9),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=20),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 5),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o), schedulers.MultiStepLR(o, [3])], milestones=[2]
    ),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
}


def make(name: str) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.5, momentum=0.9)
    return optimizer, MAKE[name](optimizer)


def run(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


def test_all_of_torch_are_tried() -> None:
    known = {name for name, value in vars(schedulers).items() if inspect.isclass(value) and name.endswith("LR")}
    assert {name for name in known if not name.startswith("_")} - {"LRScheduler"} <= MAKE.keys()


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")
@pytest.mark.parametrize("name", MAKE)
def test_a_scheduler_continues_where_it_was(name: str, tmp_path: Path) -> None:
    optimizer, scheduler = make(name)
    if any(callable(value) for value in scheduler.state_dict().values()):
        pytest.skip("the state of this torch's scheduler has a function, which no checkpoint holds")
    run(optimizer, scheduler, 3)
    shardckpt.save({"optim": optimizer, "scheduler": scheduler}, tmp_path / "a")
    expected = run(optimizer, scheduler, 6)
    optimizer, scheduler = make(name)
    before = type(getattr(scheduler, "milestones", None))
    shardckpt.load({"optim": optimizer, "scheduler": scheduler}, tmp_path / "a")
    assert run(optimizer, scheduler, 6) == expected
    assert type(getattr(scheduler, "milestones", None)) is before
