"""torchtitan's trainer with our manager: kill and resume, other ranks, retention, its last and first checkpoints."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardckpt
from tests.kit.ranks.harness import outcomes, run

pytest.importorskip("torchtitan.components.checkpointer")

pytestmark = pytest.mark.filterwarnings("ignore")
EVERY_SECOND = {"interval": 2, "last_save_model_only": False}


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import what the ranks use in the process that they are forked from."""
    from tests.kit.runs import titans

    assert titans.CheckpointManager


def train(rank: int, world: int, folder: Path, config: dict[str, Any], own: bool = False) -> dict[int, float]:
    from tests.kit.runs import titans

    return titans.train(folder, titans.TitanCheckpointManager if own else titans.CheckpointManager, **config)


def be_killed(rank: int, world: int, folder: Path, config: dict[str, Any]) -> None:
    from tests.kit.runs import titans

    titans.train_and_die(folder, 5, **config)


def load(rank: int, world: int, folder: Path, config: dict[str, Any]) -> tuple[int, dict[str, torch.Tensor]]:
    from tests.kit.runs import titans

    training = titans.Training(folder, titans.CheckpointManager, **config)
    loaded = training.checkpointer.load(step=config.pop("load_step", -1))
    assert loaded == (training.step > 0 or "initial_load_path" in config)
    return training.step, training.full()


def steps(folder: Path) -> list[int]:
    return [step.number for step in shardckpt.ls(folder / "checkpoint").complete]


def after(step: int, losses: dict[int, float]) -> dict[int, float]:
    return {each: loss for each, loss in losses.items() if each > step}


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_killed_training_resumes_bit_for_bit_and_keeps_the_latest_steps(mode: str, tmp_path: Path) -> None:
    expected = run(2, train, tmp_path / "alone", {"interval": 100})
    config = {**EVERY_SECOND, "async_mode": mode, "keep_latest_k": 2}
    assert all("died" in (each.waits or "") for each in outcomes(2, be_killed, tmp_path / "run", config))
    assert steps(tmp_path / "run") == [2, 4]
    for rank, losses in enumerate(run(2, train, tmp_path / "run", {**config, "seed": 2})):
        assert losses == after(4, expected[rank])
    assert steps(tmp_path / "run") == [4, 6, 8], "torchtitan does not remove old ones after the last step"
    assert shardckpt.verify(str(tmp_path / "run" / "checkpoint" / "step-8")).ok


def test_steps_load_on_other_numbers_of_ranks_and_incomplete_ones_are_passed_over(tmp_path: Path) -> None:
    run(2, train, tmp_path, EVERY_SECOND)
    (newest, expected), _ = run(2, load, tmp_path, {})
    assert newest == 8
    (tmp_path / "checkpoint" / "step-8" / "COMMIT").unlink()
    for world in (1, 3):
        config = {"seed": world + 5, "exclude_from_loading": ["dataloader"]}  # which torchtitan cannot reshard
        for number, full in run(world, load, tmp_path, config):
            assert number == 6
            assert full.keys() == expected.keys()
    ((_, one), *_), ((_, three), *_) = (run(world, load, tmp_path, dict(config)) for world in (1, 3))
    assert all(torch.equal(one[name], three[name]) for name in one)
    assert run(1, load, tmp_path, {"load_step": 4, **config})[0][0] == 4


def test_a_folder_of_torchtitans_own_manager_resumes(tmp_path: Path) -> None:
    expected = run(2, train, tmp_path, {**EVERY_SECOND, "until": 5}, True)
    resumed = run(2, train, tmp_path, {**EVERY_SECOND, "seed": 2, "keep_latest_k": 2})
    again = run(2, train, tmp_path / "own", EVERY_SECOND, True)
    for rank, losses in enumerate(resumed):
        assert losses == after(4, again[rank])
        assert losses[5] == expected[rank][5]
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert names == ["step-2", "step-4", "step-6", "step-8"]
    assert steps(tmp_path) == [6, 8]


class Adapter(SimpleNamespace):
    """Names of another library, as torchtitan's adapters give them."""

    fqn_to_index_mapping = None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return {f"model.{name}": value for name, value in state.items()}


def test_the_last_step_may_be_the_model_alone_and_another_training_begins_from_it(tmp_path: Path) -> None:
    run(2, train, tmp_path, {"interval": 100, "export_dtype": "bfloat16"})
    last = tmp_path / "checkpoint" / "step-8"
    tree = shardckpt.load(last)
    assert set(tree) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert {value.dtype for value in tree.values()} == {torch.bfloat16}
    config = {"initial_load_path": str(last), "folder": "second", "seed": 2}
    for number, full in run(2, load, tmp_path, config):
        assert number == 0
        assert all(torch.equal(full[name].bfloat16(), tree[name]) for name in tree)
    run(2, train, tmp_path / "hf", {"interval": 100, "last_save_in_hf": True, "adapter": Adapter()})
    (file,) = (tmp_path / "hf" / "checkpoint" / "step-8").glob("*.safetensors")
    assert "model.0.weight" in shardckpt.load(file)


def test_a_version_without_a_replaced_method_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.kit.runs import titans

    monkeypatch.delattr(titans.TitanCheckpointManager, "_find_load_step")
    with pytest.raises(shardckpt.errors.UnsupportedError, match="_find_load_step"):
        titans.CheckpointManager.Config(enable=True).build()


def test_a_disabled_manager_does_nothing(tmp_path: Path) -> None:
    from tests.kit.runs import titans

    manager = titans.CheckpointManager.Config().build(
        dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
    )
    assert not manager.load()
    assert not manager.save(1, last_step=True)
    manager.close()


def train_with_drill(rank: int, world: int, folder: Path, config: dict[str, Any], fault: str = "") -> Any:
    """Return the losses, the steps whose metrics were logged, and what the drill reported."""
    from tests.kit.runs import titans

    training = titans.Training(folder, titans.CheckpointManager, **config)
    exact, training.model.ema = training.compute_loss, torch.zeros(())

    def compute_loss(batch: torch.Tensor) -> torch.Tensor:
        loss = exact(batch)
        training.model.ema = 0.9 * training.model.ema + 0.1 * loss.detach()
        return loss * (1 + training.model.ema) if "result" in fault else loss

    if fault == "no schedule":
        del training.checkpointer.states["lr_scheduler"]
    elif fault == "dropout":
        training.model.append(torch.nn.Dropout(0.5))
    elif fault:
        training.compute_loss = compute_loss
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            training.train()
        except shardckpt.errors.ResumeDivergence as error:
            return error.divergence.cause, str(error)
        finally:
            training.close()
    assert not (folder / "checkpoint" / ".drill").exists()
    warned = " ".join(str(each.message) for each in seen if "does not restore" in str(each.message))
    return training.losses, training.seen, training.metrics_processor.logged, warned


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_training_with_a_drill_trains_as_without_it_from_the_start_and_from_a_step(
    accumulated: int, tmp_path: Path
) -> None:
    config = {"interval": 100, "accumulated": accumulated}
    expected = run(2, train_with_drill, tmp_path / "b", config)
    assert run(2, train_with_drill, tmp_path / "a", {**config, "drill": True}) == expected
    assert expected[0][2] == [1], "the drill logs no step"
    config |= EVERY_SECOND
    outcomes(2, be_killed, tmp_path / "run", config)
    resumed = run(2, train_with_drill, tmp_path / "run", {**config, "seed": 2, "drill": True})
    for (losses, seen, *_), (all_losses, all_seen, *_) in zip(resumed, expected, strict=True):
        assert (losses, seen) == (after(4, all_losses), all_seen)


def test_a_drill_names_what_the_manager_does_not_save(tmp_path: Path) -> None:
    config = {"interval": 100, "drill": True}

    def find(fault: str) -> list[Any]:
        return run(2, train_with_drill, tmp_path / fault.replace(" ", "-"), config, fault)

    for cause, message in find("ema in the result"):
        assert cause == "loss"
        assert "model.ema (Tensor)" in message
    assert ["model.ema (Tensor)" in warned for *_, warned in find("ema beside")] == [True, False], "rank 0 warns"
    assert {cause for cause, _ in find("no schedule")} == {"schedule"}
    assert {cause for cause, _ in find("dropout")} == {"random state"}


def test_a_drill_needs_a_trainer_among_the_states(tmp_path: Path) -> None:
    from tests.kit.runs import titans

    with pytest.raises(shardckpt.errors.UsageError, match="train_step"):
        titans.CheckpointManager.Config(enable=True, drill=True).build(
            dataloader=None,
            model_parts=[],
            optimizers=None,
            lr_schedulers=None,
            states={},
            sd_adapter=None,
            base_folder=str(tmp_path),
        )
    with pytest.raises(shardckpt.errors.UsageError, match="drill"):
        titans.CheckpointManager.Config(enable=True, drill="yes").build(
            dataloader=None, model_parts=[], optimizers=None, lr_schedulers=None, states={}, sd_adapter=None
        )
