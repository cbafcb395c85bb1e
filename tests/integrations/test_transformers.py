"""A Trainer with the callback saves, is killed and resumes as one that was never interrupted; each way to shard."""

from __future__ import annotations

import re
import shutil
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.errors import UsageError
from shardckpt.readers.registry import resolve_step
from tests.kit.ranks.harness import outcomes, run
from tests.kit.ranks.stepping import whole_dtensors

KINDS = ("ddp", "fsdp1", "fsdp2")


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import what the ranks use in the process that they are forked from."""
    from tests.kit.runs import trainers

    assert trainers.Trainer
    assert trainers.be_rank


def test_background_is_true_or_false(tmp_path: Path) -> None:
    from tests.kit.runs import trainers

    with pytest.raises(UsageError, match="`background` is neither True nor False; found 'yes'"):
        trainers.ShardckptCallback(tmp_path, background="yes")


def test_an_empty_root_is_refused() -> None:
    from tests.kit.runs import trainers

    with pytest.raises(UsageError, match="the path must not be empty"):
        trainers.ShardckptCallback("")


@pytest.mark.parametrize(("background", "typo"), [(False, "max_staging_bytes"), (False, "chekcsums"), (True, "metric")])
def test_an_unknown_option_is_refused_before_the_training(background: bool, typo: str, tmp_path: Path) -> None:
    from tests.kit.runs import trainers

    trainers.ShardckptCallback(tmp_path, background=background, checksums=False, metrics={"size": 1})
    with pytest.raises(TypeError, match=rf"ShardckptCallback\(\) got an unexpected keyword argument '{typo}'"):
        trainers.ShardckptCallback(tmp_path, background=background, **{typo: True})


def losses_of_trainer_alone(rank: int, world: int, kind: str, folder: Path) -> dict[int, Any]:
    """Train to the end as the Trainer does by itself, in a process that has a callback for others."""
    from tests.kit.runs import trainers

    trainers.be_rank(rank, world)
    trainers.ShardckptCallback(folder / "unused")
    trainer, losses = trainers.build(kind, folder / "alone")
    trainer.train()
    return losses.by_step


def be_killed(rank: int, world: int, kind: str, folder: Path) -> None:
    from tests.kit.runs import trainers

    trainers.be_rank(rank, world)
    killer = trainers.KilledAt(5, folder / "run" / "step-00000003" / "COMMIT")
    trainer, _ = trainers.build(kind, folder / "out", trainers.ShardckptCallback(folder / "run"), killer)
    trainer.train()


def resume_twice(rank: int, world: int, kind: str, folder: Path) -> tuple[dict[int, Any], dict[int, Any], list[str]]:
    """Resume from the newest step, then from the folder of the Trainer alone; both losses, and what stays replaced."""
    from tests.kit.runs import trainers

    losses = trainers.train(rank, world, kind, folder, resume=True)
    callback = trainers.ShardckptCallback(folder / "other")
    trainer, others = trainers.build(kind, folder / "alone", callback, seed=2)
    trainer.train(resume_from_checkpoint=True)
    return losses, others.by_step, [name for name in vars(trainer) if name in dir(type(trainer))]


def resume_resharded(rank: int, world: int, folder: Path) -> dict[int, Any]:
    """Resume from the folder of the Trainer alone, under FSDP2."""
    from tests.kit.runs import trainers

    trainers.be_rank(rank, world)
    trainer, losses = trainers.build("fsdp2", folder / "out", trainers.ShardckptCallback(folder / "resharded"), seed=2)
    trainer.train(resume_from_checkpoint=str(folder / "alone" / "checkpoint-3"))
    return losses.by_step


def after(step: int, losses: dict[int, Any]) -> dict[int, Any]:
    return {each: loss for each, loss in losses.items() if each > step}


@pytest.mark.shown_by("[fsdp2]", "ddp", "fsdp1")
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_and_one_of_the_trainer_resume_bit_for_bit(kind: str, tmp_path: Path) -> None:
    expected = run(2, losses_of_trainer_alone, kind, tmp_path)
    for number in (6, 8):
        shutil.rmtree(tmp_path / "alone" / f"checkpoint-{number}")
    assert all("died" in (each.waits or "") for each in outcomes(2, be_killed, kind, tmp_path))
    for rank, (resumed, others, replaced) in enumerate(run(2, resume_twice, kind, tmp_path)):
        assert resumed == after(3, expected[rank]), "from a step"
        assert others == after(3, expected[rank]), "from a folder of the Trainer"
        assert replaced == [], "methods of the trainer"
    found = shardckpt.ls(tmp_path / "run", metrics=True).complete
    assert [(step.number, step.metrics) for step in found] == [(3, {}), (6, {}), (8, {})]
    assert [step.number for step in shardckpt.ls(tmp_path / "other").complete] == [6, 8]
    assert list((tmp_path / "out").iterdir()) == [], "the Trainer writes no folders beside the steps"
    assert [path.name for path in (tmp_path / "alone").iterdir()] == ["checkpoint-3"]
    if kind == "ddp":
        resharded, _ = run(2, resume_resharded, tmp_path)
        assert [resharded[each] for each in resharded] == [pytest.approx(loss, rel=1e-3) for loss in others.values()]


def be_told_to_end(rank: int, world: int, folder: Path, told: int) -> tuple[int, list[str], Any]:
    """Train while one rank gets SIGTERM; the last step, the folders of the Trainer, and the handler afterwards."""
    from tests.kit.runs import trainers

    trainers.be_rank(rank, world)
    before = signal.getsignal(signal.SIGTERM)
    ended = trainers.SignalledAt(4, signal.SIGTERM) if rank == told else trainers.TrainerCallback()
    callback = trainers.ShardckptCallback(folder / "run")
    trainer, _ = trainers.build("ddp", folder / "out", callback, ended, enable_jit_checkpoint=True)
    trainer.train()
    assert signal.getsignal(signal.SIGTERM) == before
    names = [path.name for path in (folder / "out").iterdir()] if (folder / "out").exists() else []
    return trainer.state.global_step, names


@pytest.mark.parametrize("told", [0, 1])
def test_after_sigterm_on_one_rank_all_save_one_step_and_stop(tmp_path: Path, told: int) -> None:
    expected = run(2, losses_of_trainer_alone, "ddp", tmp_path)
    found = run(2, be_told_to_end, tmp_path, told)
    assert found == [(found[0][0], [])] * 2, "one step, and no empty folder of the Trainer"
    assert found[0][0] in (4, 5)
    assert shardckpt.ls(tmp_path / "run").complete[-1].number == found[0][0]
    resumed = run(2, train_and_resume_bits, tmp_path)
    assert resumed == [after(found[0][0], losses) for losses in expected]


def train_and_resume_bits(rank: int, world: int, folder: Path) -> dict[int, Any]:
    from tests.kit.runs import trainers

    return trainers.train(rank, world, "ddp", folder, True, enable_jit_checkpoint=True)


def train_and_resume(rank: int, world: int, kind: str, folder: Path, resume: str | None) -> dict[int, Any]:
    from tests.kit.runs import trainers

    return trainers.train(rank, world, kind, folder, resume, dropout=0.0, save_steps=4)


@pytest.mark.shown_by(
    "checkpoint/test_ranks.py::TestElastic::test_saved_at_four_by_any_face_and_loaded_by_all_at_one_two_and_three"
)
def test_training_resumes_on_other_numbers_of_ranks_with_another_sharding(tmp_path: Path) -> None:
    (expected, _) = run(2, train_and_resume, "fsdp2", tmp_path / "two", None)
    step = str(tmp_path / "two" / "run" / "step-00000004")
    for world, kind in ((1, "ddp"), (3, "fsdp1")):
        (losses, *_) = run(world, train_and_resume, kind, tmp_path / kind, step)
        assert list(losses) == [5, 6, 7, 8]
        assert [losses[each] for each in losses] == [pytest.approx(expected[each], rel=1e-3) for each in losses]


def choose_the_best(rank: int, world: int, folder: Path, scores: list[float], strategy: str) -> tuple[Any, ...]:
    """Evaluate after each step, with these scores; the best step, its path, and weights at the end."""
    from torch.distributed.tensor import DTensor

    from tests.kit.runs import trainers

    trainers.be_rank(rank, world)
    callback = trainers.ShardckptCallback(folder / "run", metrics={"mine": 7})
    best = {"metric_for_best_model": "score", "greater_is_better": True, "load_best_model_at_end": True}
    trainer, _ = trainers.build(
        "fsdp2" if world > 1 else "ddp",
        folder / "out",
        callback,
        save_strategy=strategy,
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        max_steps=len(scores),
        save_total_limit=2,
        **best,
    )
    given = iter(scores)
    trainer.compute_metrics = lambda _: {"score": next(given)}
    trainer.train()
    weight = trainer.model.get_parameter("lm_head.weight")
    full = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return trainer.state.best_global_step, trainer.state.best_model_checkpoint, full.detach().tolist()


def test_the_best_step_stays_and_its_weights_are_loaded_at_the_end(tmp_path: Path) -> None:
    for best, path, weight in run(2, choose_the_best, tmp_path, [0.5, 0.9, 0.9, 0.7, 0.6], "steps"):
        assert (best, path) == (2, str(tmp_path / "run" / "step-00000002")), "of equal scores the first"
        assert torch.equal(torch.tensor(weight), shardckpt.load(path)["model"]["lm_head.weight"])
    assert [step.number for step in shardckpt.ls(tmp_path / "run").complete] == [2, 5]


def test_the_newest_steps_stay_if_the_best_is_one_of_them(tmp_path: Path) -> None:
    (found,) = run(1, choose_the_best, tmp_path, [0.5, 0.6, 0.9, 0.7], "steps")
    assert found[0] == 3
    assert resolve_step(f"{tmp_path / 'run'}@best").endswith("step-00000003"), "as the Trainer ranks"
    assert [step.number for step in shardckpt.ls(tmp_path / "run").complete] == [3, 4]


def test_the_strategy_best_saves_the_best_steps_only(tmp_path: Path) -> None:
    (found,) = run(1, choose_the_best, tmp_path, [0.5, 0.4, 0.6, 0.1], "best")
    assert found[0] == 3
    assert [step.number for step in shardckpt.ls(tmp_path / "run").complete] == [1, 3]


def evaluate_after_saving(rank: int, world: int, folder: Path) -> Any:
    """Evaluate at the ends of epochs, whose steps were saved before, of which the first is the best."""
    from tests.kit.runs import trainers

    trainers.be_rank(rank, world)
    callback = trainers.ShardckptCallback(folder / "run")
    best = {"metric_for_best_model": "score", "greater_is_better": True}
    trainer, _ = trainers.build(
        "ddp", folder, callback, save_steps=2, eval_strategy="epoch", num_train_epochs=3, save_total_limit=2, **best
    )
    scores = iter([0.9, 0.1, 0.2])
    trainer.compute_metrics = lambda _: {"score": next(scores)}
    trainer.train()
    return trainer.state.best_model_checkpoint


def test_a_step_that_turns_out_to_be_the_best_after_its_save_stays(tmp_path: Path) -> None:
    (path,) = run(1, evaluate_after_saving, tmp_path)
    assert path == str(tmp_path / "run" / "step-00000004")
    assert [step.number for step in shardckpt.ls(tmp_path / "run").complete] == [4, 12]


def resume_with_the_model_alone_from_now_on(rank: int, world: int, folder: Path) -> list[Any]:
    """Train without interruption, and resume its first step to save the model alone; losses behind the resume."""
    from tests.kit.runs import trainers

    expected = trainers.train(rank, world, "ddp", folder, None, max_steps=6)
    step = str(folder / "run" / "step-00000003")
    losses = trainers.train(rank, world, "ddp", folder, step, max_steps=6, save_only_model=True)
    return [{step: expected[step] for step in losses}, losses]


def test_a_step_with_an_optimizer_resumes_with_it_if_new_steps_have_the_model_alone(tmp_path: Path) -> None:
    ((expected, losses),) = run(1, resume_with_the_model_alone_from_now_on, tmp_path)
    assert list(losses) == [4, 5, 6]
    assert losses == expected


def look_at_the_begin(rank: int, world: int, kind: str, folder: Path) -> list[Any]:
    """Resume with a callback before that of the steps; weights, slots and schedule at its `on_train_begin`."""
    from tests.kit.runs import trainers

    class Average(trainers.TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any, optimizer: Any, lr_scheduler: Any, **kw: Any) -> None:
            self.weight = model.get_parameter("lm_head.weight").detach().clone()
            self.seen = [len(optimizer.state) > 0, lr_scheduler.last_epoch]

    trainers.train(rank, world, kind, folder, None, max_steps=3)
    average, callback = Average(), trainers.ShardckptCallback(folder / "run")
    trainer, _ = trainers.build(kind, folder / "out", average, callback, seed=2, max_steps=4)
    trainer.train(resume_from_checkpoint=True)
    weight = average.weight.full_tensor() if hasattr(average.weight, "full_tensor") else average.weight
    return [weight.tolist(), *average.seen]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_callbacks_before_that_of_the_steps_begin_with_what_is_loaded(kind: str, tmp_path: Path) -> None:
    for weight, has_slots, epochs in run(1 if kind == "ddp" else 2, look_at_the_begin, kind, tmp_path):
        saved = shardckpt.load(tmp_path / "run" / "step-00000003")["model"]["lm_head.weight"]
        assert torch.equal(torch.tensor(weight), saved)
        assert (has_slots, epochs) == (True, 3)


def save_by_strategy(rank: int, world: int, folder: Path) -> list[Any]:
    """Train by each strategy, and resume; the steps of each run, and the parts and losses of a step of the model."""
    from tests.kit.runs import trainers

    def steps(name: str) -> list[int]:
        return [step.number for step in shardckpt.ls(folder / name / "run").complete]

    trainers.train(rank, world, "ddp", folder / "epoch", None, save_strategy="epoch", num_train_epochs=1)
    first = steps("epoch")
    losses = trainers.train(rank, world, "ddp", folder / "epoch", True, save_strategy="epoch")
    trainers.train(rank, world, "ddp", folder / "no", None, save_strategy="no", max_steps=2)
    trainers.train(rank, world, "ddp", folder / "model", None, save_only_model=True, max_steps=3)
    parts = sorted(shardckpt.load(folder / "model" / "run" / "step-00000003"))
    resumed = trainers.train(rank, world, "ddp", folder / "model", True, save_only_model=True, max_steps=5)
    return [first, steps("epoch"), list(losses), (folder / "no" / "run").exists(), parts, list(resumed)]


def test_steps_are_saved_at_the_ends_of_epochs_never_or_without_an_optimizer(tmp_path: Path) -> None:
    (found,) = run(1, save_by_strategy, tmp_path)
    assert found == [[4], [4, 8], [5, 6, 7, 8], False, ["model", "trainer"], [4, 5]]


def start_again(rank: int, world: int, folder: Path) -> str:
    from tests.kit.runs import trainers

    trainers.train(rank, world, "ddp", folder, True, max_steps=2, save_steps=2)
    with pytest.raises(shardckpt.errors.UsageError) as caught:
        trainers.train(rank, world, "ddp", folder, None)
    return str(caught.value)


def test_two_callbacks_and_a_number_to_resume_from_are_refused(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> list[str]:
        from tests.kit.runs import trainers

        trainers.be_rank(rank, world)
        first, second = (trainers.ShardckptCallback(tmp_path / name) for name in ("one", "two"))
        trainer, _ = trainers.build("ddp", tmp_path / "out", first, second)
        with pytest.raises(shardckpt.errors.UsageError) as both:
            trainer.train()
        trainer.remove_callback(second)
        with pytest.raises(shardckpt.errors.UsageError) as number:
            trainer.train(resume_from_checkpoint=4)
        return [str(both.value), str(number.value)]

    ((both, number),) = run(1, body)
    assert f"callbacks for {tmp_path / 'one'}, {tmp_path / 'two'}" in both
    assert "True or a checkpoint's path" in number
    assert "found 4" in number
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_a_training_from_the_start_does_not_replace_a_run(tmp_path: Path) -> None:
    (message,) = run(1, start_again, tmp_path)
    assert "found step 2" in message
    assert "train(resume_from_checkpoint=True)" in message


def resume_from_damaged_step(rank: int, world: int, folder: Path) -> list[Any]:
    """Resume with the advice in the error of a damaged newest step; the error, the steps, and an error of step 1."""
    from tests.kit.runs import accelerators, trainers

    trainers.train(rank, world, "ddp", folder, None, max_steps=3, save_steps=1)
    accelerators.damage(folder / "run" / "step-00000003")
    with pytest.raises(shardckpt.errors.ChecksumError) as caught:
        trainers.train(rank, world, "ddp", folder, True, max_steps=4, save_steps=1)
    (path,) = re.findall(r'pass resume_from_checkpoint="(.*?)"', str(caught.value))
    losses = trainers.train(rank, world, "ddp", folder, path, max_steps=4, save_steps=1)
    accelerators.damage(folder / "run" / "step-00000001")
    with pytest.raises(shardckpt.errors.ChecksumError) as first:
        trainers.train(rank, world, "ddp", folder, str(folder / "run" / "step-00000001"), max_steps=4, save_steps=1)
    return [path, list(losses), str(first.value)]


def test_the_error_of_a_damaged_step_names_the_one_before(tmp_path: Path) -> None:
    (found,) = run(1, resume_from_damaged_step, tmp_path)
    assert found[:2] == [str(tmp_path / "run" / "step-00000002"), [3, 4]]
    assert found[2].endswith("None was found before it.")


def test_unsupported_trainers_are_refused(tmp_path: Path) -> None:
    from shardckpt.integrations.transformers import ShardckptCallback

    callback = ShardckptCallback(tmp_path)
    for trainer, words in (
        (SimpleNamespace(is_deepspeed_enabled=True), "DeepSpeed"),
        (SimpleNamespace(is_deepspeed_enabled=False), "a Trainer without _save_checkpoint, _load_from_checkpoint"),
    ):
        with pytest.raises(shardckpt.errors.UnsupportedError, match=words), callback.attach(trainer):
            pass


def train_in_a_loop_of_its_own(rank: int, world: int, folder: Path) -> None:
    """Call events of a training that is not that of `Trainer`, as some subclasses do."""
    from tests.kit.runs import trainers

    trainers.be_rank(rank, world)
    trainer, _ = trainers.build("ddp", folder, trainers.ShardckptCallback(folder / "run"))
    with pytest.raises(shardckpt.errors.UnsupportedError, match="whose `train` does not call"):
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)


def test_a_trainer_with_a_loop_of_its_own_is_refused_since_nothing_would_be_saved(tmp_path: Path) -> None:
    run(1, train_in_a_loop_of_its_own, tmp_path)


def finish_beside_a_folder(rank: int, world: int, folder: Path) -> Any:
    """Resume a folder of the Trainer, and keep the best step alone in a run behind a URL."""
    from tests.kit.runs import trainers

    trainers.be_rank(rank, world)
    best = {"save_total_limit": 1, "metric_for_best_model": "loss"}
    given = {"save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, **best}
    trainers.build("ddp", folder, max_steps=2, **given)[0].train()
    trainer, _ = trainers.build("ddp", folder, trainers.ShardckptCallback("memory://best/run"), max_steps=4, **given)
    trainer.train(resume_from_checkpoint=True)
    return trainer.state.best_model_checkpoint, trainer.args.save_total_limit


def test_a_training_ends_beside_folders_of_the_trainer_if_its_run_is_behind_a_url(tmp_path: Path) -> None:
    assert run(1, finish_beside_a_folder, tmp_path) == [("memory://best/run/step-00000004", 1)]
    assert (tmp_path / "checkpoint-2").is_dir()


def save_base(folder: Path) -> None:
    """Save a small model, from which every rank loads its part."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=64, **shape, num_key_value_heads=2, use_cache=False)).save_pretrained(
        folder
    )


def train_tensor_parallel(
    rank: int, world: int, folder: Path, name: str, last: int, *, resume: bool = False
) -> tuple[dict[int, Any], bool]:
    """Train a model that transformers has split over the ranks; losses, and whether its weights are DTensors."""
    from accelerate.parallelism_config import ParallelismConfig
    from torch.distributed.tensor import DTensor
    from transformers import LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

    from tests.kit.runs import trainers

    trainers.be_rank(rank, world)
    ParallelismConfig._validate_accelerator = lambda *_: None  # it refuses CPUs
    arguments = TrainingArguments(
        str(folder / "out"),
        max_steps=last,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="steps",
        save_steps=2,
        save_only_model=True,  # the Trainer demands it
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model = LlamaForCausalLM.from_pretrained(folder / "base", tp_plan="auto", dtype=torch.float32)
    losses, callback = trainers.Losses(), trainers.ShardckptCallback(folder / name, save_optimizer=True)
    trainer = Trainer(model, arguments, train_dataset=trainers.CountingSequences(), callbacks=[losses, callback])
    trainer.remove_callback(PrinterCallback)
    with whole_dtensors():
        trainer.train(resume_from_checkpoint=resume)
    return losses.by_step, isinstance(model.model.layers[0].self_attn.q_proj.weight, DTensor)


def test_a_model_split_by_a_tp_plan_resumes_bit_for_bit(tmp_path: Path) -> None:
    save_base(tmp_path / "base")
    expected = run(2, train_tensor_parallel, tmp_path, "full", 6)
    assert [is_split for _, is_split in expected] == [True, True]
    first = run(2, train_tensor_parallel, tmp_path, "run", 4)
    second = run(2, partial(train_tensor_parallel, resume=True), tmp_path, "run", 6)
    for (losses, _), (before, _), (after_resume, _) in zip(expected, first, second, strict=True):
        assert before | after_resume == losses
    last = {name: tmp_path / name / "step-00000006" for name in ("full", "run")}
    assert shardckpt.inspect(last["run"]).parts["optimizer"]
    assert [each.name for each in shardckpt.diff(last["full"], last["run"]).differences] == []
    shardckpt.consolidate(last["run"], tmp_path / "model")
    assert (tmp_path / "model" / "config.json").exists()
