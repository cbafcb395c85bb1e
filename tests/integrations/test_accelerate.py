"""A registered accelerator saves, is killed and resumes as one that was never interrupted; each way to shard."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardckpt
from tests.kit.ranks.harness import outcomes, run

KINDS = ("ddp", "fsdp1", "fsdp2")
SAVED, END = 6, 12  # in the middle of the second of three epochs
Losses = dict[int, tuple[float, float]]


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import what the ranks use in the process that they are forked from."""
    import shardckpt.integrations.accelerate
    from tests.kit.runs import accelerators

    assert accelerators.Training
    assert shardckpt.integrations.accelerate.register


def start(
    rank: int, world: int, kind: str, *, is_registered: bool = True, background: bool = False, **options: Any
) -> Any:
    """Return a training of this rank, and what `register` gave."""
    from shardckpt.integrations.accelerate import register
    from tests.kit.runs import accelerators

    accelerators.be_rank(rank, world)
    training = accelerators.Training(kind, **options)
    checkpoints = register(training.accelerator, background=background) if is_registered else None
    return training, checkpoints


def train_alone(rank: int, world: int, kind: str, folder: Path, dropout: float = 0.2) -> Losses:
    """Train without shardckpt, with a folder that Accelerate writes."""
    training, _ = start(rank, world, kind, is_registered=False, dropout=dropout)
    training.run(0, SAVED)
    training.accelerator.save_state(folder)
    training.run(SAVED, END)
    return training.losses


def be_killed(rank: int, world: int, kind: str, folder: Path) -> None:
    from tests.kit.runs import accelerators

    training, _ = start(rank, world, kind, background=kind != "fsdp1")
    training.run(0, SAVED)
    training.accelerator.save_state(folder)
    training.run(SAVED, SAVED + 2)
    accelerators.wait_for(folder / "shardckpt" / "COMMIT")
    accelerators.kill()


def resume(rank: int, world: int, kind: str, folder: Path, seed: int = 2, dropout: float = 0.2) -> Losses:
    """Train from a folder."""
    training, _ = start(rank, world, kind, seed=seed, dropout=dropout)
    training.accelerator.load_state(folder)
    training.run(SAVED, END)
    training.accelerator.free_memory()
    return training.losses


def resume_both(rank: int, world: int, kind: str, ours: Path, alone: Path) -> list[Losses]:
    """Train from our folder with another seed, and from one of Accelerate, which does not have the seed."""
    return [resume(rank, world, kind, ours), resume(rank, world, kind, alone, seed=1)]


def after(start_step: int, losses: Losses) -> Losses:
    return {step: loss for step, loss in losses.items() if step >= start_step}


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_resumes_bit_for_bit(kind: str, tmp_path: Path) -> None:
    alone, ours = tmp_path / "alone", tmp_path / "ours"
    expected = run(2, train_alone, kind, alone)
    assert all("died" in (each.waits or "") for each in outcomes(2, be_killed, kind, ours))
    for rank, (from_ours, from_alone) in enumerate(run(2, resume_both, kind, ours, alone)):
        assert from_ours == after(SAVED, expected[rank])
        assert from_alone == from_ours, "from a folder that Accelerate wrote"
    assert [path.name for path in ours.iterdir()] == ["shardckpt"]


def train_and_save(rank: int, world: int, kind: str, ours: Path, alone: Path) -> Losses:
    """Train with shardckpt, and save as Accelerate does too."""
    training, checkpoints = start(rank, world, kind, dropout=0.0)
    training.run(0, SAVED)
    training.accelerator.save_state(ours)
    checkpoints.remove()
    training.accelerator.save_state(alone)
    training.run(SAVED, END)
    return training.losses


@pytest.mark.shown_by(
    "checkpoint/test_ranks.py::TestElastic::test_saved_at_four_by_any_face_and_loaded_by_all_at_one_two_and_three"
)
def test_training_resumes_on_other_numbers_of_ranks_with_another_sharding(tmp_path: Path) -> None:
    folders = (tmp_path / "ours", tmp_path / "alone")
    for saved, world, kind in (("fsdp2", 1, "ddp"), ("ddp", 3, "fsdp1"), ("fsdp1", 2, "fsdp2")):
        (expected, *_) = run(2, train_and_save, saved, *folders)
        means = [expected[step][1] for step in range(SAVED, END)]
        for losses in run(world, resume_resharded, kind, *folders)[0]:
            assert [losses[step][1] for step in range(SAVED, END)] == pytest.approx(means, rel=1e-4), (
                saved,
                world,
                kind,
            )
        shutil.rmtree(folders[1])


def resume_resharded(rank: int, world: int, kind: str, ours: Path, alone: Path) -> list[Losses]:
    return [resume(rank, world, kind, ours, 2, 0.0), resume(rank, world, kind, alone, 1, 0.0)]


def train_twice(rank: int, world: int, kind: str) -> list[tuple[Losses, bool]]:
    """Train with torch's classes, then with ours; the losses, and whether the model is one of ours."""
    from shardckpt import core

    found = []
    for is_replaced in (False, True):
        replaced = core.replace_torch_fsdp() if is_replaced else contextlib.ExitStack()
        with replaced:
            training, _ = start(rank, world, kind, is_registered=is_replaced)
            training.run(0, SAVED)
        ours = (core.FullyShardedDataParallel, core.FSDPModule)
        found.append((training.losses, isinstance(training.accelerator._models[0], ours)))
        training.accelerator.free_memory()
    return found


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2"])
def test_our_engine_trains_under_accelerate_as_that_of_torch(kind: str) -> None:
    for (theirs, is_ours), (ours, is_ours_now) in run(2, train_twice, kind):
        assert (is_ours, is_ours_now) == (False, True)
        assert ours == theirs


def number_folders(rank: int, world: int, folder: Path) -> list[Any]:
    """Save four times under `total_limit`; what is there after each, and how training goes on."""
    project = {"project_dir": str(folder), "automatic_checkpoint_naming": True, "total_limit": 2}
    training, checkpoints = start(rank, world, "ddp", background=True, dropout=0.0, project=project)
    found, names = [], folder / "checkpoints"
    for step in range(4):
        training.run(step, step + 1)
        saved = training.accelerator.save_state()
        assert saved == names / f"checkpoint_{step}"
        checkpoints.wait()
        found.append(sorted(path.name for path in names.iterdir()))
    (names / "checkpoint_4").mkdir()  # of a save that was killed
    again, _ = start(rank, world, "ddp", background=True, dropout=0.0, project=project, seed=2)
    again.accelerator.load_state()
    training.run(4, 6)
    again.run(4, 6)
    again.accelerator.save_state()
    again.accelerator.end_training()
    return [*found, sorted(path.name for path in names.iterdir()), again.losses == after(4, training.losses)]


def test_folders_are_numbered_and_the_oldest_go_once_the_newest_is_complete(tmp_path: Path) -> None:
    (found,) = run(1, number_folders, tmp_path)
    assert found == [
        ["checkpoint_0"],
        ["checkpoint_0", "checkpoint_1"],
        ["checkpoint_1", "checkpoint_2"],
        ["checkpoint_2", "checkpoint_3"],
        ["checkpoint_3", "checkpoint_4"],
        True,
    ]


def load_damaged_folders(rank: int, world: int, folder: Path) -> list[str]:
    """Load the newest of numbered folders, which is damaged, and do as the error says; the errors."""
    from tests.kit.runs import accelerators

    training, _ = start(rank, world, "ddp", project={"project_dir": str(folder), "automatic_checkpoint_naming": True})
    for _ in range(11):
        training.accelerator.save_state()
    newest = folder / "checkpoints" / "checkpoint_10"
    accelerators.damage(newest / "shardckpt")
    with pytest.raises(shardckpt.errors.ChecksumError) as damaged:
        training.accelerator.load_state()
    shutil.rmtree(newest)
    (earlier,) = re.findall(r'load_state\("(.*?)"\)', str(damaged.value))
    training.accelerator.project_configuration.iteration = 0  # as in a new job
    training.accelerator.load_state(earlier)
    assert training.accelerator.save_state() == newest
    first = folder / "checkpoints" / "checkpoint_0"
    accelerators.damage(first / "shardckpt")
    with pytest.raises(shardckpt.errors.ChecksumError) as alone:
        training.accelerator.load_state(first)
    return [str(damaged.value), str(alone.value)]


def test_the_error_of_a_damaged_folder_names_the_one_before(tmp_path: Path) -> None:
    ((damaged, alone),) = run(1, load_damaged_folders, tmp_path)
    assert f'remove this folder, and call load_state("{tmp_path}/checkpoints/checkpoint_9").' in damaged
    assert alone.endswith("None was found before it.")


def save_twice_as_number(rank: int, world: int, folder: Path) -> tuple[str, str]:
    """Fail to replace a numbered folder, and to find one; the messages."""
    project = {"project_dir": str(folder), "automatic_checkpoint_naming": True}
    training, _ = start(rank, world, "ddp", project=project)
    with pytest.raises(shardckpt.errors.SourceNotFoundError) as missing:
        training.accelerator.load_state()
    training.accelerator.save_state()
    training.accelerator.project_configuration.iteration = 0
    with pytest.raises(shardckpt.errors.UsageError) as present:
        training.accelerator.save_state()
    return str(missing.value), str(present.value)


def test_a_numbered_folder_is_not_replaced(tmp_path: Path) -> None:
    ((missing, present),) = run(1, save_twice_as_number, tmp_path)
    assert "checkpoint_0: this folder does not exist" in missing
    assert "this folder has a checkpoint" in present


def save_with_hooks(rank: int, world: int, folder: Path) -> tuple[list[str], float, str]:
    """Save and load the model by hooks, as scripts of diffusers do."""
    training, _ = start(rank, world, "ddp")
    accelerator = training.accelerator

    def save_weights(models: list[Any], weights: list[Any], output_dir: str) -> None:
        if accelerator.is_main_process:
            torch.save(accelerator.unwrap_model(models[0]).state_dict(), Path(output_dir, "mine.pt"))
            weights.pop()

    def load_weights(models: list[Any], input_dir: str) -> None:
        accelerator.unwrap_model(models.pop()).load_state_dict(torch.load(Path(input_dir, "mine.pt")))

    handles = (
        accelerator.register_save_state_pre_hook(save_weights),
        accelerator.register_load_state_pre_hook(load_weights),
    )
    training.run(0, 2)
    accelerator.save_state(folder)
    weight = next(training.model.parameters()).detach().clone()
    training.run(2, 4)
    accelerator.load_state(folder)
    distance = (next(training.model.parameters()) - weight).abs().max().item()
    handles[0].remove()
    accelerator.register_save_state_pre_hook(lambda models, weights, output_dir: weights[0].popitem())
    with pytest.raises(shardckpt.errors.UsageError) as caught:
        accelerator.save_state(folder)
    return list(shardckpt.load(folder / "shardckpt")), distance, str(caught.value)


def test_hooks_decide_which_models_are_saved_and_loaded(tmp_path: Path) -> None:
    for parts, distance, message in run(2, save_with_hooks, tmp_path):
        assert "optimizer" in parts
        assert "model" not in parts
        assert distance == 0
        assert "a hook of register_save_state_pre_hook changed the weights" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.pt", "shardckpt"]


class Loader:
    """Stateful data loader at a position that differs between ranks."""

    use_stateful_dataloader = True

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def save_and_load_loop(rank: int, world: int, folder: Path) -> tuple[Any, ...]:
    training, _ = start(rank, world, "ddp")
    accelerator = training.accelerator
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    accelerator._dataloaders.append(Loader(rank + 3))
    training.run(0, 1)  # in the middle of a gradient accumulation
    training.loader.iteration = 7
    accelerator.save_state(folder)
    training.run(1, 4)
    accelerator.scaler.update(2.0)
    training.loader.iteration, accelerator._dataloaders[-1].position = 0, 0
    accelerator.load_state(str(folder))
    state = accelerator.scaler.state_dict()["scale"], training.schedule.state_dict()["last_epoch"]
    return accelerator.step, training.loader.iteration, accelerator._dataloaders[-1].position, *state


def test_counters_loaders_scaler_and_schedule_come_back(tmp_path: Path) -> None:
    assert run(2, save_and_load_loop, tmp_path) == [(1, 7, 3, 64.0, 1), (1, 7, 4, 64.0, 1)]
    assert run(1, load_loop_on_one_rank, tmp_path) == [0], "a data loader that cannot continue begins again"


def load_loop_on_one_rank(rank: int, world: int, folder: Path) -> int:
    training, _ = start(rank, world, "ddp")
    training.accelerator.scaler = torch.amp.GradScaler("cpu")
    training.accelerator._dataloaders.append(Loader(0))
    with pytest.warns(UserWarning, match="starts its epoch again") as caught:
        training.accelerator.load_state(folder)
    assert Path(__file__).name in {Path(each.filename).name for each in caught}
    return training.accelerator._dataloaders[-1].position


def fail_and_remove(rank: int, world: int, folder: Path) -> list[str]:
    """Fail in the background, then give the methods back, register again, and give them back again."""
    from shardckpt.integrations.accelerate import register

    def write_nothing(_file: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    training, first = start(rank, world, "ddp", background=True)
    write, os.write = os.write, write_nothing
    training.accelerator.save_state(folder / "lost")
    with pytest.raises(shardckpt.errors.StorageError, match="No space left on device"):
        training.accelerator.end_training()
    os.write = write
    assert register(training.accelerator, background=True) is first
    with pytest.raises(
        shardckpt.errors.UsageError, match=r"registered with other options\. Keep the object that `register`"
    ):
        register(training.accelerator)
    first.remove()
    second = register(training.accelerator)
    first.remove()
    training.accelerator.save_state(folder / "second")
    assert (folder / "second" / "shardckpt").is_dir(), "the registration that came after the first stays"
    second.remove()
    training.accelerator.save_state(folder / "alone")
    return sorted(path.name for path in (folder / "alone").iterdir())


def test_the_end_of_training_raises_the_error_of_the_last_save(tmp_path: Path) -> None:
    (names,) = run(1, fail_and_remove, tmp_path)
    assert "model.safetensors" in names
    assert "shardckpt" not in names, "the accelerator has its own methods again"


def test_unsupported_accelerators_are_refused() -> None:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    from shardckpt.integrations.accelerate import register

    for kind, words in ((DistributedType.DEEPSPEED, "DEEPSPEED"), (DistributedType.MEGATRON_LM, "MEGATRON_LM")):
        with pytest.raises(shardckpt.errors.UnsupportedError, match=words):
            register(SimpleNamespace(distributed_type=kind))
    with pytest.raises(shardckpt.errors.UnsupportedError, match="an Accelerator without save_state"):
        register(SimpleNamespace(distributed_type=DistributedType.NO))
    with pytest.raises(shardckpt.errors.UsageError, match=r"must be an accelerate\.Accelerator; found None"):
        register(None)
    with pytest.raises(
        shardckpt.errors.UsageError, match=r"must be an instance; found the class Accelerator\. Pass an instance"
    ):
        register(Accelerator)
    with pytest.raises(shardckpt.errors.UsageError, match="`background` must be True or False"):
        register(SimpleNamespace(distributed_type=DistributedType.NO), background="yes")


def register_wrongly(rank: int, world: int, folder: Path) -> list[str]:
    """Call what strangers call; return the names of a folder of the user's home."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from shardckpt.integrations.accelerate import register

    training, checkpoints = start(rank, world, "ddp")
    for background, typo in ((False, "max_staging_bytes"), (False, "chekcsums"), (True, "chekcsums")):
        with pytest.raises(TypeError, match=rf"register\(\) got an unexpected keyword argument '{typo}'"):
            register(training.accelerator, background=background, **{typo: True})
    (folder / "file").write_text("mine")
    with pytest.raises(shardckpt.errors.TargetExistsError, match="a file is in place of the folder"):
        training.accelerator.save_state(folder / "file")
    with pytest.raises(
        shardckpt.errors.StorageError, match="/proc/none/a: rank 0 cannot make the folder; found No such file"
    ):
        training.accelerator.save_state("/proc/none/a")
    with pytest.raises(shardckpt.errors.UsageError, match="must be a path or a URL; found 3"):
        training.accelerator.save_state(3)
    for call in (training.accelerator.save_state, training.accelerator.load_state):
        with pytest.raises(shardckpt.errors.UsageError, match="the path must not be empty"):
            call("")
    os.environ["HOME"] = str(folder)
    os.chdir(folder)
    for training.average.values in (torch.ones(2), torch.zeros(2)):
        (training.accelerator.load_state if training.average.values[0] == 0 else training.accelerator.save_state)("~/a")
    assert training.average.values[0] == 1
    near = rf"\. Complete checkpoints in {folder}: a\."
    for wrong, message in (
        ("a/shardckpt", rf"not a folder of save_state\. Pass its folder, {folder}/a\."),
        ("missing", f"this folder does not exist{near}"),
        (".", f"no complete checkpoint{near}"),
        ("~/file", f"this is a file{near}"),
        ("/proc/none/a", r"this folder does not exist\. Check the path\."),
    ):
        with pytest.raises(shardckpt.errors.SourceNotFoundError, match=message):
            training.accelerator.load_state(wrong)
    with pytest.raises(shardckpt.errors.UsageError, match="`train_step` must be a function; found None"):
        checkpoints.prove_resume(None, folder / "drill")
    with pytest.raises(shardckpt.errors.UsageError, match="the drill proves nothing"):
        checkpoints.prove_resume(lambda: None, folder / "drill")
    shutil.rmtree(folder / "drill")
    project = ProjectConfiguration(project_dir="memory://run", automatic_checkpoint_naming=True, total_limit=1)
    remote = Accelerator(cpu=True, project_config=project)
    register(remote)
    for call in (remote.save_state, remote.load_state):
        with pytest.raises(shardckpt.errors.UsageError, match="needs a local project_dir; found memory://run"):
            call()
    return sorted(path.name for path in folder.iterdir())


def test_wrong_calls_are_named_and_a_home_is_found(tmp_path: Path) -> None:
    assert run(1, register_wrongly, tmp_path) == [["a", "file"]]


def load_with_other_objects(rank: int, world: int, folder: Path) -> None:
    """Objects have no names, so that fewer of them may be any of those that were saved."""
    from tests.kit.runs import accelerators

    training, _ = start(rank, world, "ddp")
    training.accelerator.register_for_checkpointing(accelerators.Average())
    training.accelerator.save_state(folder)
    training.accelerator.free_memory()
    training, _ = start(rank, world, "ddp")
    with pytest.raises(shardckpt.ShardckptError, match="too few objects are registered; found 1; expected 2"):
        training.accelerator.load_state(folder)
    training.accelerator._custom_objects.clear()
    training.accelerator.load_state(folder)


def test_a_checkpoint_with_more_objects_is_not_loaded_into_fewer(tmp_path: Path) -> None:
    run(1, load_with_other_objects, tmp_path)


def be_killed_while_saving(rank: int, world: int, kind: str, folder: Path) -> None:
    """Save, train, and lose rank 1 before it has written its files of the second save."""
    from shardckpt.checkpoint.save import session
    from tests.kit.runs import accelerators

    training, checkpoints = start(rank, world, kind, background=kind == "fsdp2")
    training.run(0, SAVED)
    training.accelerator.save_state(folder)
    checkpoints.wait()
    training.run(SAVED, SAVED + 2)
    if rank == 1:
        session.write_payloads = lambda *_, **__: accelerators.kill()
    with contextlib.suppress(shardckpt.ShardckptError):
        training.accelerator.save_state(folder)
        checkpoints.wait()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_a_save_that_is_killed_leaves_the_earlier_one_to_resume_from(kind: str, tmp_path: Path) -> None:
    expected = run(2, train_alone, kind, tmp_path / "alone")
    outcomes(2, be_killed_while_saving, kind, tmp_path / "ours")
    for rank, losses in enumerate(run(2, resume, kind, tmp_path / "ours")):
        assert losses == after(SAVED, expected[rank])


def save_on_one_rank(rank: int, world: int, folder: Path) -> str:
    """Save on rank 0 alone, as Accelerate allows under DDP, while the other trains; the error of rank 0."""
    training, _ = start(rank, world, "ddp")
    if rank > 0:
        with contextlib.suppress(RuntimeError):
            torch.distributed.all_reduce(torch.ones(1))
        return ""
    with pytest.raises(shardckpt.errors.RankError) as caught:
        training.accelerator.save_state(folder)
    return str(caught.value)


def test_a_save_of_one_rank_names_the_rank_that_did_not_come(tmp_path: Path) -> None:
    message, _ = run(2, save_on_one_rank, tmp_path, group_timeout=2)
    assert re.match("rank 1 of 2 did not come .* Saves and loads are calls that every rank makes", message)
    assert list(tmp_path.iterdir()) == [], "rank 0 waits before anything is written"


def load_what_accelerate_saved(rank: int, world: int, folder: Path) -> list[bool]:
    """Load an old folder of two models, save into it, and load again."""
    from accelerate import Accelerator

    from shardckpt.integrations.accelerate import register
    from tests.kit.runs import accelerators

    def build(accelerator: Any, seed: int) -> list[Any]:
        torch.manual_seed(seed)
        models = [torch.nn.Linear(2, 2) for _ in range(2)]
        optimizers = [torch.optim.Adam(model.parameters()) for model in models]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizers[0], [1, 3])
        return list(accelerator.prepare(*models, *optimizers, schedule))

    accelerators.be_rank(rank, world)
    accelerator = Accelerator(cpu=True)
    first, second, adam, _, schedule = build(accelerator, 0)
    (first(torch.ones(1, 2)) + second(torch.ones(1, 2))).sum().backward()
    adam.step()
    schedule.step()
    accelerator.save_state(folder)
    expected = [next(model.parameters()).detach().clone() for model in (first, second)]
    accelerator.free_memory()
    register(accelerator)
    first, second, adam, _, schedule = build(accelerator, 1)
    found = []
    for save in (True, False):
        accelerator.load_state(folder)
        weights = [next(model.parameters()) for model in (first, second)]
        found += map(torch.equal, weights, expected)
        found += [len(adam.state) == 2, schedule.scheduler.last_epoch == 1]
        if save:
            accelerator.save_state(folder)
            for parameter in first.parameters():
                parameter.data.zero_()
    return found


def test_an_old_folder_of_two_models_is_loaded_and_then_has_a_checkpoint_too(tmp_path: Path) -> None:
    (found,) = run(1, load_what_accelerate_saved, tmp_path / "old")
    assert all(found) and len(found) == 8
    assert {"model_1.safetensors", "shardckpt"} <= {path.name for path in (tmp_path / "old").iterdir()}


def be_told_to_end(rank: int, world: int, folder: Path, told: int) -> tuple[int, Losses]:
    """Train while one rank gets SIGTERM; the last step and the losses."""
    training, checkpoints = start(rank, world, "ddp")
    before = signal.getsignal(signal.SIGTERM)
    with checkpoints.save_on_signal():
        for step in range(0, END, 2):  # gradients accumulate over two steps
            training.run(step, step + 2)
            if step == 2 and rank == told:
                os.kill(os.getpid(), signal.SIGTERM)
            if checkpoints.is_stop_requested():
                training.accelerator.save_state(folder)
                break
    assert signal.getsignal(signal.SIGTERM) == before
    return step + 2, training.losses


@pytest.mark.parametrize("told", [0, 1])
def test_after_sigterm_on_one_rank_all_save_and_stop_at_one_step(tmp_path: Path, told: int) -> None:
    found = run(2, be_told_to_end, tmp_path, told)
    assert [step for step, _ in found] == [4, 4]
    assert shardckpt.verify(tmp_path / "shardckpt").ok
