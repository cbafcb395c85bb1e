"""A drill in a framework passes for a complete step, names what a step lacks, and changes nothing of the training."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.errors import UsageError
from tests.kit.ranks.harness import run

KINDS = ("ddp", "fsdp2")


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import what the ranks use in the process that they are forked from."""
    import shardckpt.integrations.accelerate
    from tests.kit.runs import accelerators, lightning_trainers, trainers

    assert accelerators.Training
    assert lightning_trainers.Trainer
    assert trainers.Trainer
    assert shardckpt.integrations.accelerate.register


def follow(model: torch.nn.Module, *, has_effect: bool) -> None:
    """Let a model keep an average of its outputs outside of its state, as an EMA; its loss may depend on it."""
    model.ema = torch.zeros(())

    def add(module: Any, args: Any, output: Any) -> Any:
        loss = output.loss if hasattr(output, "loss") else output
        module.ema = 0.9 * module.ema + 0.1 * loss.detach().mean()
        if has_effect and hasattr(output, "loss"):
            output.loss = output.loss + module.ema
        return output

    model.register_forward_hook(add)


def train_trainer(rank: int, world: int, kind: str, folder: Path, *, drill: bool, ema: str = "") -> dict[int, Any]:
    from tests.kit.runs import trainers

    trainers.be_rank(rank, world)
    callback = trainers.ShardckptCallback(folder / "run", drill=drill)
    trainer, losses = trainers.build(kind, folder / "out", callback, save_strategy="no", max_steps=4)
    if ema:
        follow(trainer.model, has_effect=ema == "in the loss")
    trainer.train()
    assert not (folder / "run" / ".drill").exists()
    return losses.by_step


def fail_trainer(rank: int, world: int, kind: str, folder: Path) -> tuple[str, list[str]]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        train_trainer(rank, world, kind, folder / "a", drill=True, ema="beside")
    with pytest.raises(shardckpt.errors.ResumeDivergence) as caught:
        train_trainer(rank, world, kind, folder / "b", drill=True, ema="in the loss")
    return str(caught.value), [str(each.message) for each in seen if "does not restore" in str(each.message)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_with_a_drill_trains_as_without_it(kind: str, tmp_path: Path) -> None:
    with_drill = run(2, partial(train_trainer, drill=True), kind, tmp_path / "a")
    assert with_drill == run(2, partial(train_trainer, drill=False), kind, tmp_path / "b")
    assert len(with_drill[0]) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_drill_of_a_trainer_names_an_ema_outside_of_the_state(kind: str, tmp_path: Path) -> None:
    (message, seen), (other, none) = run(2, fail_trainer, kind, tmp_path)
    assert "loss" in message
    assert "ema (Tensor)" in message
    assert message == other
    assert len(seen) == 1
    assert "ema (Tensor)" in seen[0]
    assert none == []


def test_a_drill_of_a_trainer_needs_steps_of_one_batch(tmp_path: Path) -> None:
    from tests.kit.runs import trainers

    callback = trainers.ShardckptCallback(tmp_path / "run", drill=True)

    def body(rank: int, world: int) -> None:
        trainers.be_rank(rank, world)
        trainer, _ = trainers.build("ddp", tmp_path / "out", callback, gradient_accumulation_steps=2)
        with pytest.raises(UsageError, match="gradient_accumulation_steps=2"):
            trainer.train()

    run(1, body)
    with pytest.raises(UsageError, match="drill"):
        trainers.ShardckptCallback(tmp_path, drill="yes")


def train_accelerated(
    rank: int, world: int, kind: str, folder: Path, left_out: str, *, drill: bool
) -> tuple[Any, dict[int, Any]]:
    from shardckpt.integrations.accelerate import register
    from tests.kit.runs import accelerators

    accelerators.be_rank(rank, world)
    training = accelerators.Training(kind)
    if left_out == "schedule":
        training.accelerator._schedulers.clear()
    checkpoints = register(training.accelerator)
    batch = torch.full((6, 8), 0.1 * (rank + 1))

    def train_step() -> dict[str, Any]:
        training.accelerator.gradient_state._set_sync_gradients(True)
        loss = torch.nn.functional.mse_loss(training.model(batch), batch.sum(1, keepdim=True))
        training.accelerator.backward(loss)
        training.optimizer.step()
        training.schedule.step()
        training.optimizer.zero_grad()
        training.average.add(loss.item())
        return {"loss": loss, "batch": batch}

    report = checkpoints.prove_resume(train_step, folder / "drill") if drill else None
    if not left_out:
        training.run(0, 4)
    training.accelerator.free_memory()
    return (report and (report.ok, report.divergence and report.divergence.cause, report.missing)), training.losses


@pytest.mark.parametrize("kind", KINDS)
def test_a_drill_of_an_accelerator_passes_and_names_a_schedule_that_is_not_saved(kind: str, tmp_path: Path) -> None:
    for (report, losses), (_, expected) in zip(
        run(2, partial(train_accelerated, drill=True), kind, tmp_path / "a", ""),
        run(2, partial(train_accelerated, drill=False), kind, tmp_path / "b", ""),
        strict=True,
    ):
        assert report[:2] == (True, None)
        assert losses == expected
    assert list((tmp_path / "a").iterdir()) == []
    for report, _ in run(2, partial(train_accelerated, drill=True), kind, tmp_path / "c", "schedule"):
        assert report[:2] == (False, "schedule")
        assert "training.schedule (AcceleratedScheduler)" in report[2]


def fit_lightning(
    rank: int, world: int, kind: str, folder: Path, *, drill: bool, ema: str = "", **arguments: Any
) -> tuple[dict[int, float], dict[str, float]]:
    from tests.kit.runs import lightning_trainers

    checkpoint = lightning_trainers.ShardckptModelCheckpoint(folder / "run", drill=drill)
    trainer, net = lightning_trainers.build(kind, rank, world, folder, checkpoint, **arguments)
    exact = net.training_step
    net.ema = torch.zeros(())

    def training_step(batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = exact(batch, batch_idx)
        net.log("mean", loss.detach(), on_step=False, on_epoch=True)
        if ema:
            net.ema = 0.9 * net.ema + 0.1 * loss.detach()
        return loss + net.ema if ema == "in the loss" else loss

    net.training_step = training_step
    trainer.fit(net, lightning_trainers.Data())
    return net.losses, {name: value.item() for name, value in trainer.callback_metrics.items()}


def fail_lightning(rank: int, world: int, kind: str, folder: Path) -> tuple[str, str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit_lightning(rank, world, kind, folder / "a", drill=True, ema="beside")
    with pytest.raises(shardckpt.errors.ResumeDivergence) as caught:
        fit_lightning(rank, world, kind, folder / "b", drill=True, ema="in the loss")
    return str(caught.value), " ".join(str(each.message) for each in seen)


@pytest.mark.parametrize("kind", KINDS)
def test_a_trainer_of_lightning_with_a_drill_trains_as_without_it(kind: str, tmp_path: Path) -> None:
    with_drill = run(2, partial(fit_lightning, drill=True), kind, tmp_path / "a")
    assert with_drill == run(2, partial(fit_lightning, drill=False), kind, tmp_path / "b")
    assert len(with_drill[0][0]) == 8
    assert "mean" in with_drill[0][1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_drill_of_lightning_names_an_ema_outside_of_the_state(kind: str, tmp_path: Path) -> None:
    (message, seen), (other, _) = run(2, fail_lightning, kind, tmp_path)
    assert message == other
    assert "module.ema (Tensor)" in message
    assert "module.ema (Tensor)" in seen


def test_a_drill_of_lightning_needs_steps_of_one_batch(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        with pytest.raises(UsageError, match="accumulate_grad_batches=2"):
            fit_lightning(rank, world, "one", tmp_path, drill=True, accumulate_grad_batches=2)

    run(1, body)
