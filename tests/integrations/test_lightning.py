"""A Trainer of Lightning with the callback saves, is killed and resumes as one that was never interrupted."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import resource
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.readers.registry import resolve_step
from tests.kit.ranks.harness import outcomes, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")

KINDS = ("ddp", "fsdp1", "fsdp2")


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import what the ranks use in the process that they are forked from."""
    from tests.kit.runs import lightning_trainers

    assert lightning_trainers.Trainer


def fit(
    rank: int, world: int, kind: str, folder: Path, ckpt_path: str | None, *others: Any, **arguments: Any
) -> tuple[Any, Any]:
    """Train with steps in `folder / "run"`; the trainer and the network."""
    from tests.kit.runs import lightning_trainers as trainers

    saving = {"every_n_train_steps": 3, "save_top_k": -1, **arguments.pop("saving", {})}
    callback = trainers.ShardckptModelCheckpoint(folder / "run", **saving)
    data = arguments.pop("data", trainers.Data)()
    trainer, net = trainers.build(kind, rank, world, folder, callback, *others, **arguments)
    trainer.fit(net, data, ckpt_path=ckpt_path)
    return trainer, net


def replaced_methods(trainer: Any) -> list[str]:
    strategy = trainer.strategy
    return [name for name in vars(strategy) if callable(getattr(type(strategy), name, None))]


def losses_of_lightning_alone(rank: int, world: int, kind: str, folder: Path) -> dict[int, float]:
    """Train to the end without the callback."""
    from tests.kit.runs import lightning_trainers as trainers

    trainer, net = trainers.build(kind, rank, world, folder, enable_checkpointing=False)
    trainer.fit(net, trainers.Data())
    return net.losses


def be_killed(rank: int, world: int, kind: str, folder: Path) -> None:
    from tests.kit.runs import lightning_trainers as trainers

    killer = trainers.KilledAt(5, folder / "run" / "step-00000003" / "COMMIT")
    fit(rank, world, kind, folder, None, killer, trainers.RankNote(rank))


def resume(rank: int, world: int, kind: str, folder: Path, ckpt_path: str = "last", **arguments: Any) -> dict[str, Any]:
    """Resume with other random weights; losses, states that came back, and what stays replaced."""
    from tests.kit.runs import lightning_trainers as trainers

    note = trainers.RankNote(rank)
    trainer, net = fit(rank, world, kind, folder, ckpt_path, note, seed=2, **arguments)
    loader = trainer.train_dataloader.restored
    restored = {"fitted": trainer.datamodule.fitted, "callback": note.restored, "loader": loader}
    return {"losses": net.losses, "restored": restored, "replaced": replaced_methods(trainer)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_resumes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    expected = run(2, losses_of_lightning_alone, kind, tmp_path)
    assert all("died" in (each.waits or "") for each in outcomes(2, be_killed, kind, tmp_path))
    for rank, resumed in enumerate(run(2, resume, kind, tmp_path)):
        assert resumed["losses"] == {step: loss for step, loss in expected[rank].items() if step > 3}
        assert resumed["restored"] == {"fitted": 2, "callback": 0, "loader": rank}
        assert resumed["replaced"] == [], "methods of the strategy"
    assert [step.number for step in shardckpt.ls(tmp_path / "run").complete] == [3, 6]
    with shardckpt.open(tmp_path / "run" / "step-00000006") as opened:
        assert sorted(opened["model"]) == ["net.0.bias", "net.0.weight", "net.2.0.bias", "net.2.0.weight"]


def resume_from_lightning(rank: int, world: int, kind: str, folder: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Save with Lightning alone, and resume with the callback; losses of both."""
    from tests.kit.runs import lightning_trainers as trainers

    own = trainers.ModelCheckpoint(folder / "own", every_n_train_steps=3)
    trainer, net = trainers.build(kind, rank, world, folder, own, dropout=0.0)
    trainer.fit(net, trainers.Data())
    return net.losses, resume(rank, world, kind, folder, own.best_model_path, dropout=0.0)["losses"]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_training_resumes_from_checkpoints_of_lightning(kind: str, tmp_path: Path) -> None:
    for expected, resumed in run(2, resume_from_lightning, kind, tmp_path):
        assert resumed == {step: expected[step] for step in (7, 8)}


def losses_without_dropout(rank: int, world: int, kind: str, folder: Path, ckpt_path: str | None) -> list[float]:
    """Train, and return the mean loss of all ranks by step."""
    _, net = fit(rank, world, kind, folder, ckpt_path, dropout=0.0, seed=2 if ckpt_path else 1)
    losses = torch.tensor([net.losses[step] for step in sorted(net.losses)])
    if world > 1:
        torch.distributed.all_reduce(losses)
    return (losses / world).tolist()


@pytest.mark.shown_by(
    "checkpoint/test_ranks.py::TestElastic::test_saved_at_four_by_any_face_and_loaded_by_all_at_one_two_and_three"
)
def test_training_resumes_on_other_numbers_of_ranks_with_another_sharding(tmp_path: Path) -> None:
    (expected, _) = run(2, losses_without_dropout, "fsdp2", tmp_path / "two", None)
    step = str(tmp_path / "two" / "run" / "step-00000003")
    for world, kind in ((1, "one"), (3, "fsdp1")):
        (losses, *_) = run(world, losses_without_dropout, kind, tmp_path / kind, step)
        assert losses == pytest.approx(expected[3:], rel=1e-4)


def keep_the_best(rank: int, world: int, folder: Path, background: bool) -> dict[str, Any]:
    """Log a score after each epoch; what is kept, and what was complete whenever a step was about to be removed."""
    from shardckpt.integrations import local_folders
    from tests.kit.runs import lightning_trainers as trainers

    complete, prune = [], local_folders.prune

    def watch(root: str, steps: set[int]) -> None:
        complete.append([[step.number for step in shardckpt.ls(root).complete], sorted(steps)])
        prune(root, steps=steps)

    def deliver_late(self: Any, event: Any) -> None:
        time.sleep(0.1)
        deliver(self, event)

    local_folders.prune = watch
    deliver = local_folders.StepRemoval.take_event
    local_folders.StepRemoval.take_event = deliver_late
    scores = iter((0.5, 0.2, 0.4, 0.6, 0.3, 0.9))
    trainers.Net.validation_step = lambda self, *_: self.log_dict({"score": next(scores, 0.25), "step": 77.0})
    saving = {"monitor": "score", "save_top_k": 2, "every_n_train_steps": None, "background": background}
    trainer, net = fit(rank, world, "one", folder, None, saving=saving, max_epochs=6, num_sanity_val_steps=0)
    best = trainer.checkpoint_callback
    loaded = trainer.validate(net, trainers.Data(), ckpt_path="best", verbose=False)
    weights = {name: weight.tolist() for name, weight in net.state_dict().items()}
    return {"best": best.best_model_path, "score": best.best_model_score.item(), "complete": complete} | {
        "loaded": loaded,
        "weights": weights,
    }


@pytest.mark.parametrize("background", [True, False])
def test_the_best_steps_stay_and_one_is_removed_once_the_next_is_complete(background: bool, tmp_path: Path) -> None:
    (found,) = run(1, keep_the_best, tmp_path, background)
    assert [step.number for step in shardckpt.ls(tmp_path / "run").complete] == [8, 20]
    assert found["best"] == str(tmp_path / "run" / "step-00000008")
    assert found["score"] == pytest.approx(0.2)
    assert resolve_step(f"{tmp_path / 'run'}@best") == found["best"], "of several metrics, by that of the callback"
    assert found["complete"] == [[[4, 8, 12], [4]], [[8, 12, 20], [12]]]
    with shardckpt.open(found["best"]) as opened:
        saved = {name: weight.tolist() for name, weight in opened["model"][...].items()}
    assert found["weights"] == saved, "`validate` loads the best step"
    assert shardckpt.ls(tmp_path / "run", metrics=True).complete[0].metrics["score"] == pytest.approx(0.2)


def save_last(rank: int, world: int, folder: Path) -> tuple[list[str], list[int]]:
    from tests.kit.runs import lightning_trainers as trainers

    scores = iter((0.9, 0.5, 0.9, 0.6, 0.9, 0.4, 0.9, 0.8))
    trainers.Net.on_train_batch_start = lambda self, *_: self.log("score", next(scores))
    events = list[Any]()
    saving = {"monitor": "score", "save_top_k": 1, "save_last": True, "every_n_train_steps": 2}
    saving["options"] = {"on_event": events.append}
    trainer, _ = fit(rank, world, "one", folder, None, saving=saving, limit_val_batches=0)
    callback = trainer.checkpoint_callback
    return [callback.best_model_path, callback.last_model_path], [event.step for event in events]


def test_the_last_step_stays_beside_the_best(tmp_path: Path) -> None:
    ((kept, saved),) = run(1, save_last, tmp_path)
    assert saved == [2, 4, 6, 8], "each once"
    assert kept == [step.path for step in shardckpt.ls(tmp_path / "run").complete]
    assert [step.number for step in shardckpt.ls(tmp_path / "run").complete] == [6, 8]


def train_with_scores(rank: int, world: int, folder: Path, kill_at: str) -> list[int]:
    """Train six epochs from the newest step, with growing scores; the best steps. Perhaps end in the third save."""
    from shardckpt.integrations import local_folders
    from tests.kit.runs import lightning_trainers as trainers

    if kill_at == "removal":  # which follows the save of step 12
        local_folders.prune = lambda *_, **__: trainers.kill()
    trainers.Net.validation_step = lambda self, *_: self.log("score", 1.0 - self.global_step / 24)
    killers = [trainers.Acting(16, trainers.kill)] if kill_at == "save" else []
    saving = {"monitor": "score", "save_top_k": 2, "save_last": True, "every_n_train_steps": None, "background": False}
    trainer, _ = fit(rank, world, "one", folder, "last", *killers, saving=saving, max_epochs=6, num_sanity_val_steps=0)
    return sorted(int(path[-8:]) for path in trainer.checkpoint_callback.best_k_models)


@pytest.mark.parametrize("kill_at", ["removal", "save"])
def test_a_killed_training_leaves_no_step_that_is_not_one_of_the_best(kill_at: str, tmp_path: Path) -> None:
    outcomes(1, train_with_scores, tmp_path, kill_at)
    left = [step.number for step in shardckpt.ls(tmp_path / "run").complete]
    assert left == ([4, 8, 12] if kill_at == "removal" else [12, 16])
    assert run(1, train_with_scores, tmp_path, "") == [[20, 24]]
    assert [step.number for step in shardckpt.ls(tmp_path / "run").complete] == [20, 24]


def test_a_run_that_was_moved_keeps_the_best_of_all_its_steps(tmp_path: Path) -> None:
    outcomes(1, train_with_scores, tmp_path, "save")
    (tmp_path / "moved").mkdir()
    (tmp_path / "run").rename(tmp_path / "moved" / "run")
    assert run(1, train_with_scores, tmp_path / "moved", "") == [[20, 24]]
    assert [step.number for step in shardckpt.ls(tmp_path / "moved" / "run").complete] == [20, 24]
    assert not (tmp_path / "run").exists()


def resume_from_a_path(rank: int, world: int, folder: Path) -> None:
    saving = {"save_top_k": 1}
    fit(rank, world, "one", folder, None, saving=saving, max_epochs=1)
    fit(rank, world, "one", folder, str(folder / "run" / "step-00000003"), saving=saving)


def test_the_step_whose_path_training_resumed_from_stays_as_in_lightning(tmp_path: Path) -> None:
    run(1, resume_from_a_path, tmp_path)
    assert [step.number for step in shardckpt.ls(tmp_path / "run").complete] == [3, 6]


def resume_with_everything(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Save and resume with averages of the weights, a gradient scaler and a hook; states before and after."""
    from tests.kit.runs import lightning_trainers as trainers

    def others() -> list[Any]:
        return [trainers.EMAWeightAveraging(decay=0.5), trainers.EarlyStopping("score", patience=3)]

    def precision() -> Any:
        return trainers.MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 1024.0, growth_interval=3))

    trainers.Net.on_save_checkpoint = lambda self, checkpoint: checkpoint.update(mine=[1, torch.ones(2)])
    trainers.Net.on_load_checkpoint = lambda self, checkpoint: setattr(self, "mine", checkpoint["mine"])
    alone, expected = trainers.build(
        "one", rank, world, folder, *others(), plugins=precision(), enable_checkpointing=False
    )
    alone.fit(expected, trainers.Data())
    with pytest.warns(UserWarning, match=r"not saved: hyper_parameters.act, hyper_parameters.folder"):
        fit(rank, world, "one", folder, None, *others(), plugins=precision(), max_epochs=1)
    trainer, net = fit(rank, world, "one", folder, "last", *others(), plugins=precision(), seed=2)
    return {
        "losses": (net.losses, {step: loss for step, loss in expected.losses.items() if step > 3}),
        "averages": [torch.equal(a, b) for a, b in zip(net.parameters(), expected.parameters(), strict=True)],
        "scalers": (trainer.precision_plugin.state_dict(), alone.precision_plugin.state_dict()),
        "stopping": (trainer.early_stopping_callback.state_dict(), alone.early_stopping_callback.state_dict()),
        "mine": (net.mine[0], net.mine[1].tolist()),
    }


def test_averages_scaler_callbacks_and_values_of_hooks_come_back(tmp_path: Path) -> None:
    (found,) = run(1, resume_with_everything, tmp_path)
    assert all(found["averages"])
    for resumed, expected in (found["losses"], found["scalers"], found["stopping"]):
        assert resumed == expected
    assert found["mine"] == (1, [1.0, 1.0])
    with shardckpt.open(tmp_path / "run" / "step-00000003") as opened:
        assert opened["trainer"]["hyper_parameters"].keys() == {"kind", "dropout"}


def average_buffers(rank: int, world: int, folder: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the average of a buffer: after training, which ends with that of rank 0 everywhere; saved; resumed."""
    from tests.kit.runs import lightning_trainers as trainers

    class Normed(trainers.Net):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.net.append(torch.nn.BatchNorm1d(8))

    trainers.Net = Normed
    averages = [trainers.EMAWeightAveraging(decay=0.5) for _ in range(2)]
    fit(rank, world, "ddp", folder, None, averages[0], max_epochs=1, saving={"every_n_train_steps": 4})
    step = shardckpt.load(folder / "run" / "step-00000004")
    fit(rank, world, "ddp", folder, "last", averages[1], max_epochs=1, saving={"every_n_train_steps": 4})
    own, again = (each._average_model.module.net[-1].running_mean for each in averages)
    return own, step["trainer"]["state_dict"]["net.3.running_mean"], again


def test_averages_of_buffers_may_differ_and_those_of_rank_0_are_saved(tmp_path: Path) -> None:
    (first, *others), on_other_rank = run(2, average_buffers, tmp_path)
    assert all(torch.equal(first, each) for each in (*others, *on_other_rank))


def evaluate_averages(rank: int, world: int, folder: Path) -> bool:
    from tests.kit.runs import lightning_trainers as trainers

    _, averaged = fit(
        rank,
        world,
        "ddp",
        folder,
        None,
        trainers.EMAWeightAveraging(decay=0.5),
        max_epochs=1,
        saving={"every_n_train_steps": 4},
    )
    callback = trainers.ShardckptModelCheckpoint(folder / "run")
    trainer, net = trainers.build("ddp", rank, world, folder, callback, seed=2)
    trainer.validate(net, trainers.Data(), ckpt_path=str(folder / "run" / "step-00000004"), verbose=False)
    return all(torch.equal(a, b) for a, b in zip(net.parameters(), averaged.parameters(), strict=True))


def test_evaluation_takes_the_weights_that_a_hook_put_into_the_checkpoint(tmp_path: Path) -> None:
    assert run(2, evaluate_averages, tmp_path) == [True, True]


def train_in_epochs(
    rank: int, world: int, folder: Path, is_saved_at_the_end: bool
) -> tuple[dict[int, float], dict[int, float]]:
    """Train two epochs, and one after the other in two jobs; losses of the second epoch."""
    from tests.kit.runs import lightning_trainers as trainers

    saving = {"every_n_train_steps": None, "save_on_train_epoch_end": is_saved_at_the_end}
    given = {"data": trainers.ShuffledData, "saving": saving}
    _, expected = fit(rank, world, "one", folder / "alone", None, **given)
    fit(rank, world, "one", folder, None, max_epochs=1, **given)
    _, resumed = fit(rank, world, "one", folder, "last", seed=2, **given)
    return expected.losses, resumed.losses


@pytest.mark.parametrize("is_saved_at_the_end", [True, False], ids=["at its end", "after its validation"])
def test_a_new_epoch_is_shuffled_as_without_interruption(is_saved_at_the_end: bool, tmp_path: Path) -> None:
    ((expected, resumed),) = run(1, train_in_epochs, tmp_path, is_saved_at_the_end)
    assert resumed == {step: expected[step] for step in (5, 6, 7, 8)}


def resume_at_the_end_of_an_epoch(rank: int, world: int, folder: Path) -> tuple[dict[int, float], dict[int, float]]:
    """Resume from the last step of an epoch, with a loader that draws a number whenever it is iterated."""
    given: dict[str, Any] = {"max_epochs": -1, "saving": {"every_n_train_steps": 4}}
    _, expected = fit(rank, world, "one", folder / "alone", None, max_steps=6, **given)
    fit(rank, world, "one", folder, None, max_steps=4, **given)
    _, resumed = fit(rank, world, "one", folder, "last", seed=2, max_steps=6, **given)
    return expected.losses, resumed.losses


def test_a_loader_that_draws_numbers_does_not_change_those_of_a_resumed_epoch(tmp_path: Path) -> None:
    ((expected, resumed),) = run(1, resume_at_the_end_of_an_epoch, tmp_path)
    assert resumed == {step: expected[step] for step in (5, 6)}


def return_to_an_older_step(rank: int, world: int, folder: Path) -> list[int]:
    """Resume from step 3 of a run that has step 6, save step 4, resume from the newest, and save step 6 again."""
    fit(rank, world, "one", folder, None)
    older = str(folder / "run" / "step-00000003")
    fit(rank, world, "one", folder, older, max_steps=4, saving={"every_n_train_steps": 4})
    _, net = fit(rank, world, "one", folder, "last", max_steps=6)
    return list(net.losses)


def resume_while_gradients_accumulate(rank: int, world: int, folder: Path) -> bool:
    """Resume in an epoch; whether the step that training resumed from is as it was saved."""
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "saving": {"every_n_train_steps": 1}, "max_epochs": -1}
    fit(rank, world, "one", folder, None, max_steps=1, **options)
    commit = folder / "run" / "step-00000001" / "COMMIT"
    saved = commit.stat().st_ino, commit.stat().st_mtime_ns
    fit(rank, world, "one", folder, "last", max_steps=2, **options)
    return (commit.stat().st_ino, commit.stat().st_mtime_ns) == saved


def test_a_resumed_training_does_not_save_its_step_again_without_the_gradients(tmp_path: Path) -> None:
    assert run(1, resume_while_gradients_accumulate, tmp_path) == [True]


def test_the_newest_step_is_the_one_that_was_saved_last(tmp_path: Path) -> None:
    assert run(1, return_to_an_older_step, tmp_path) == [[5, 6]]
    assert [step.number for step in shardckpt.ls(tmp_path / "run").complete] == [3, 4, 6]


def train_in_a_bucket(rank: int, world: int, folder: Path, root: str) -> tuple[list[int], str]:
    from tests.kit.runs import lightning_trainers as trainers

    for ckpt_path, epochs in ((None, 1), ("last", 2)):
        callback = trainers.ShardckptModelCheckpoint(root, every_n_train_steps=3)
        trainer, net = trainers.build("one", rank, world, folder, callback, max_epochs=epochs)
        trainer.fit(net, trainers.Data(), ckpt_path=ckpt_path)
    trainer.validate(net, trainers.Data(), ckpt_path="best", verbose=False)
    return list(net.losses), callback.best_model_path


@pytest.mark.shown_by("checkpoint/test_stores.py::test_two_ranks_save_overwrite_and_restore")
def test_steps_may_be_in_a_bucket(s3_bucket: str, tmp_path: Path) -> None:
    ((losses, best),) = run(1, train_in_a_bucket, tmp_path, f"{s3_bucket}/run")
    assert losses == [4, 5, 6, 7, 8]
    assert best == f"{s3_bucket}/run/step-00000006"
    assert [step.path for step in shardckpt.ls(f"{s3_bucket}/run").complete] == [best]


def raise_while_saving(rank: int, world: int, folder: Path) -> list[str]:
    from tests.kit.runs import lightning_trainers as trainers

    callback = trainers.ShardckptModelCheckpoint(folder / "run", every_n_train_steps=3, save_on_exception=True)
    trainer, net = trainers.build("ddp", rank, world, folder, callback, trainers.Acting(5, lambda: 1 // 0))
    with pytest.raises(ZeroDivisionError):
        trainer.fit(net, trainers.Data())
    return replaced_methods(trainer)


def test_an_exception_leaves_a_complete_step_and_the_methods_of_the_strategy(tmp_path: Path) -> None:
    assert run(2, raise_while_saving, tmp_path) == [[], []]
    assert [step.number for step in shardckpt.ls(tmp_path / "run").complete] == [3, 5]


def fill_the_disk(rank: int, world: int, folder: Path) -> None:
    """Train with a disk that is full before the last save, which is the best."""
    from tests.kit.runs import lightning_trainers as trainers

    scores = iter((0.5, 0.4, 0.3))
    trainers.Net.validation_step = lambda self, *_: self.log("score", next(scores))

    def fill() -> None:
        trainers.wait_for(folder / "run" / "step-00000008" / "COMMIT")
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))

    full = trainers.Acting(10, fill)
    saving = {"monitor": "score", "save_top_k": 2, "every_n_train_steps": None}
    with pytest.raises(shardckpt.errors.StorageError):
        fit(rank, world, "one", folder, None, full, saving=saving, max_epochs=3, num_sanity_val_steps=0)


def test_a_background_save_that_fails_is_raised_at_the_end_and_removes_no_step(tmp_path: Path) -> None:
    run(1, fill_the_disk, tmp_path)
    assert [step.number for step in shardckpt.ls(tmp_path / "run").complete] == [4, 8]


def save_what_cannot_be_saved(rank: int, world: int, folder: Path) -> str:
    from tests.kit.runs import lightning_trainers as trainers

    note = trainers.RankNote(object())
    with pytest.raises(shardckpt.errors.UnsupportedError) as caught:
        fit(rank, world, "one", folder, None, note)
    return str(caught.value)


def test_a_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    (message,) = run(1, save_what_cannot_be_saved, tmp_path)
    assert message.startswith("trainer.callbacks.RankNote.rank: a value of type object cannot be saved")


def save_weights_only(rank: int, world: int, folder: Path) -> None:
    from tests.kit.runs import lightning_trainers as trainers

    fit(rank, world, "fsdp2", folder, None, max_epochs=1, saving={"save_weights_only": True})
    path = str(folder / "run" / "step-00000003")
    callback = trainers.ShardckptModelCheckpoint(folder / "run")
    trainer, net = trainers.build("ddp", rank, world, folder, callback, seed=2)
    trainer.validate(net, trainers.Data(), ckpt_path=path, verbose=False)
    saved = shardckpt.load(path)
    assert sorted(saved) == ["model", "trainer"]
    assert all(torch.equal(weight, saved["model"][name]) for name, weight in net.state_dict().items())
    with pytest.raises(KeyError, match="contains only the model"):
        fit(rank, world, "fsdp2", folder, path)


def test_steps_of_weights_alone_are_for_evaluation(tmp_path: Path) -> None:
    run(2, save_weights_only, tmp_path)


def change_weights_in_a_hook(rank: int, world: int, kind: str, folder: Path) -> tuple[set[str], list[float]]:
    """Save with a hook that changes weights, and evaluate; classes of the weights that it saw, and a weight."""
    from tests.kit.runs import lightning_trainers as trainers

    seen = set[str]()

    def change(self: Any, checkpoint: dict[str, Any]) -> None:
        weights = checkpoint["state_dict"]
        seen.update(type(weight).__name__ for weight in weights.values())
        checkpoint["double"] = weights["net.0.weight"] * 2
        weights["net.0.bias"] = weights["net.0.bias"] * 0 + 5
        del weights["net.2.0.bias"]

    trainers.Net.on_save_checkpoint = change
    fit(rank, world, kind, folder, None, max_epochs=1)
    callback = trainers.ShardckptModelCheckpoint(folder / "run")
    trainer, net = trainers.build(kind, rank, world, folder, callback, seed=2)
    trainer.validate(net, trainers.Data(), ckpt_path=str(folder / "run" / "step-00000003"), verbose=False)
    return seen, shardckpt.model_state_dict(trainer.strategy.model)["net.0.bias"].tolist()


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_hooks_get_and_change_the_weights_without_gathering_them(kind: str, tmp_path: Path) -> None:
    for seen, bias in run(2, change_weights_in_a_hook, kind, tmp_path):
        assert seen == {"DTensor"}
        assert bias == [5.0] * 16
    saved = shardckpt.load(tmp_path / "run" / "step-00000003")
    assert torch.equal(saved["trainer"]["double"], saved["model"]["net.0.weight"] * 2)
    assert "net.2.0.bias" in saved["model"]


def resume_from_damaged_step(rank: int, world: int, folder: Path) -> tuple[list[str], list[int]]:
    """Resume with the advice in the error of a damaged newest step; its paths, and the steps of the training."""
    from tests.kit.runs import accelerators

    fit(rank, world, "one", folder, None, saving={"every_n_train_steps": 1}, max_epochs=1)
    accelerators.damage(folder / "run" / "step-00000004")
    with pytest.raises(shardckpt.errors.ChecksumError) as caught:
        fit(rank, world, "one", folder, "last")
    paths = re.findall(r'pass ckpt_path="(.*?)"', str(caught.value))
    _, net = fit(rank, world, "one", folder, paths[0], saving={"every_n_train_steps": 1}, max_epochs=1)
    return paths, list(net.losses)


def test_the_error_of_a_damaged_step_names_the_one_before(tmp_path: Path) -> None:
    assert run(1, resume_from_damaged_step, tmp_path) == [([str(tmp_path / "run" / "step-00000003")], [4])]


def start_again(rank: int, world: int, folder: Path) -> str:
    fit(rank, world, "one", folder, None, max_epochs=1)
    fit(rank, world, "one", folder, None, fast_dev_run=True)
    with pytest.raises(shardckpt.errors.UsageError) as caught:
        fit(rank, world, "one", folder, None)
    return str(caught.value)


def test_a_training_from_the_start_does_not_replace_a_run(tmp_path: Path) -> None:
    (message,) = run(1, start_again, tmp_path)
    assert "found step 3" in message
    assert 'fit(..., ckpt_path="last")' in message


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    from shardckpt.integrations.lightning import ShardckptModelCheckpoint

    with pytest.raises(
        shardckpt.errors.UsageError,
        match=r"`filename` cannot be chosen; expected steps named `step-00000100`.*Leave it out",
    ):
        ShardckptModelCheckpoint(tmp_path, filename="{epoch}")
    with pytest.raises(shardckpt.errors.UsageError, match="`background` is neither True nor False"):
        ShardckptModelCheckpoint(tmp_path, background="yes")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="keep_last"):
        ShardckptModelCheckpoint(tmp_path, keep_last=3)
    for root, words in (("", "must not be empty"), (None, "must be a path or a URL"), (3, "must be a path or a URL")):
        with pytest.raises(shardckpt.errors.UsageError, match=words):
            ShardckptModelCheckpoint(root)
    for options in (3, "checksums", ["checksums"]):
        with pytest.raises(shardckpt.errors.UsageError, match=r"ShardckptModelCheckpoint\.options must be a dict"):
            ShardckptModelCheckpoint(tmp_path, options=options)
    for background, options in ((True, {"chekcsums": True}), (False, {"max_staging_bytes": "1GB"})):
        with pytest.raises(TypeError, match=rf"unexpected keyword argument '{next(iter(options))}'"):
            ShardckptModelCheckpoint(tmp_path, background=background, options=options)


def test_type_checkers_see_all_arguments_of_model_checkpoint() -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from shardckpt.integrations.lightning import ModelCheckpointParams

    names = inspect.signature(ModelCheckpoint).parameters.keys()
    of_files = {"dirpath", "filename", "auto_insert_metric_name", "enable_version_counter"}
    assert ModelCheckpointParams.__annotations__.keys() == names - of_files


def test_unsupported_strategies_and_shared_runs_are_refused(tmp_path: Path) -> None:
    from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy

    from shardckpt.integrations.lightning import ShardckptModelCheckpoint

    callbacks = [ShardckptModelCheckpoint(tmp_path), ShardckptModelCheckpoint(tmp_path, every_n_epochs=2)]
    trainer: Any = SimpleNamespace(strategy=DeepSpeedStrategy.__new__(DeepSpeedStrategy), callbacks=callbacks)
    with pytest.raises(
        shardckpt.errors.UnsupportedError, match="found DeepSpeedStrategy; expected SingleDeviceStrategy, "
    ):
        callbacks[0].setup(trainer, trainer, "fit")
    trainer.strategy = SingleDeviceStrategy()
    with pytest.raises(shardckpt.errors.UsageError, match="two callbacks save into one run"):
        callbacks[0].setup(trainer, trainer, "fit")


def test_a_lightning_without_a_method_that_is_replaced_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from shardckpt.integrations.lightning import ShardckptModelCheckpoint

    monkeypatch.delattr(ModelCheckpoint, "_remove_checkpoint")
    with pytest.raises(shardckpt.errors.UnsupportedError, match="a ModelCheckpoint without _remove_checkpoint"):
        ShardckptModelCheckpoint(tmp_path)


def be_told_to_end(rank: int, world: int, kind: str, folder: Path, told: int) -> tuple[int, dict[int, float]]:
    """Train while one rank gets SIGTERM; the last step and the losses."""
    from tests.kit.runs import lightning_trainers as trainers

    before = signal.getsignal(signal.SIGTERM)
    acting = trainers.Acting(3, lambda: os.kill(os.getpid(), signal.SIGTERM) if rank == told else None)
    saving = {"save_on_signal": True, "every_n_train_steps": 100}
    trainer, net = fit(rank, world, kind, folder, None, acting, trainers.RankNote(rank), saving=saving)
    assert signal.getsignal(signal.SIGTERM) == before
    return trainer.global_step, net.losses


@pytest.mark.parametrize("told", [0, 1])
def test_after_sigterm_on_one_rank_all_save_one_step_and_stop(tmp_path: Path, told: int) -> None:
    expected = run(2, losses_of_lightning_alone, "ddp", tmp_path)
    found = run(2, be_told_to_end, "ddp", tmp_path, told)
    steps = [step for step, _ in found]
    assert steps in ([4, 4], [5, 5])
    assert [step.number for step in shardckpt.ls(tmp_path / "run").complete] == steps[:1]
    resumed = run(2, resume, "ddp", tmp_path)
    for (_, before), after, alone in zip(found, resumed, expected, strict=True):
        assert before | after["losses"] == alone
