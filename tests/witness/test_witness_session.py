"""Records are written beside steps, go and move with them, and are compared after a restore."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardckpt
from shardckpt.errors import UsageError
from shardckpt.native.run_directory import step_name, witness_name
from shardckpt.witness import state_digests, witness_session
from tests.kit.ranks.harness import recorded, run
from tests.kit.runs.faults import SAVED_AT, STEPS, Job


def job(root: Path, seed: int = 1, **options: Any) -> Job:
    return Job("plain", 0, 1, seed, root, **options)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.is_file())


def resumed(root: Path, **options: Any) -> Job:
    made = job(root, 2, **options)
    made.restore()
    return made


@pytest.mark.parametrize("in_background", [False, True])
def test_the_record_lies_beside_its_step_and_proves_a_clean_resume(
    in_background: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = job(tmp_path)
    first.train(SAVED_AT, SAVED_AT, in_background=in_background)
    assert names(tmp_path) == []
    first.train(STEPS)
    assert names(tmp_path) == [witness_name(step_name(SAVED_AT))]
    with caplog.at_level(logging.INFO, "shardckpt"):
        resumed(tmp_path).train()
    assert "the resume of step 3 is proven over 2 steps, bit for bit" in caplog.text


def test_a_run_that_dies_after_one_step_leaves_a_record_of_one(tmp_path: Path) -> None:
    job(tmp_path).train(SAVED_AT + 1, SAVED_AT)
    other = resumed(tmp_path)
    torch.manual_seed(9)
    with pytest.raises(shardckpt.errors.ResumeDivergence, match="random state of torch differs after step 4"):
        other.train(SAVED_AT + 1)


def test_a_divergence_may_be_a_warning(tmp_path: Path) -> None:
    job(tmp_path).train(saved_at=SAVED_AT)
    other = resumed(tmp_path, on_divergence="warn")
    torch.manual_seed(9)
    with pytest.warns(UserWarning, match="random state of torch differs after step 4"):
        other.train()
    assert other.step == STEPS


def test_steps_that_are_not_due_are_not_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = job(tmp_path)
    made.train(2)
    for name in ("digest_batch", "StateReader", "digest_random_states"):
        monkeypatch.setattr(witness_session, name, None)
    made.train(STEPS)


def test_only_steps_that_are_not_deep_use_the_flattened_state_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flattened: list[Any] = []
    flatten_state = state_digests.flatten_state

    def count(state: Any, *args: Any) -> Any:
        flattened.append(find_models(state))
        return flatten_state(state, *args)

    made = job(tmp_path, deep=2)
    made.train(SAVED_AT, SAVED_AT)
    monkeypatch.setattr(state_digests, "flatten_state", count)
    made.train(SAVED_AT + 1)
    assert flattened == [[]], "the settings alone"
    made.train(SAVED_AT + 2)
    assert flattened == [[], [made.model]]


def find_models(state: dict[str, Any]) -> list[Any]:
    return [each for each in state.values() if isinstance(each, torch.nn.Module)]


def replace_optimizer(made: Job) -> None:
    fresh = torch.optim.AdamW(made.model.parameters(), lr=made.schedule.get_last_lr()[0])
    made.optim.state = fresh.state


def rename_settings(made: Job) -> None:
    made.optim.param_groups[0]["weight_decay"] = 0.5


@pytest.mark.parametrize(
    ("change", "cause"), [(replace_optimizer, "optimizer"), (rename_settings, "optimizer")], ids=["slots", "settings"]
)
def test_steps_that_are_not_deep_see_replaced_slots_and_changed_settings(
    change: Callable[[Job], None], cause: str, tmp_path: Path
) -> None:
    job(tmp_path, deep=0).train(saved_at=SAVED_AT)
    other = resumed(tmp_path, deep=0)
    train_step = other.train_step

    def step(batch: Any) -> torch.Tensor:
        if other.step == STEPS:
            change(other)
        return train_step(batch)

    other.train_step = step
    with pytest.raises(shardckpt.errors.ResumeDivergence) as caught:
        other.train()
    assert (caught.value.divergence.cause, caught.value.divergence.step) == (cause, STEPS)


def test_slots_that_move_to_other_memory_are_read_there(tmp_path: Path) -> None:
    job(tmp_path, deep=0).train(saved_at=SAVED_AT)
    other = resumed(tmp_path, deep=0)
    other.train(SAVED_AT + 1)
    for parameter, slots in other.optim.state.items():
        other.optim.state[parameter] = {name: slot.clone() for name, slot in slots.items()}
    other.train()


def test_deep_witnesses_see_a_parameter_replaced_between_a_restore_and_its_steps(tmp_path: Path) -> None:
    job(tmp_path, deep=2).train(saved_at=SAVED_AT)
    other = resumed(tmp_path, deep=2)
    other.train(SAVED_AT + 1)
    train_step = other.train_step

    def step(batch: Any) -> torch.Tensor:
        loss, head, optim = train_step(batch), other.net.head, other.optim
        before, head.weight = head.weight, torch.nn.Parameter(head.weight.detach() * 0.5)
        optim.state[head.weight] = optim.state.pop(before)
        for group in optim.param_groups:
            group["params"] = [head.weight if each is before else each for each in group["params"]]
        return loss

    other.train_step = step
    with pytest.raises(shardckpt.errors.ResumeDivergence, match=r"model\.head\.weight differs after step 5"):
        other.train()


def test_a_checkpointer_without_a_witness_records_nothing(tmp_path: Path) -> None:
    made = job(tmp_path)
    made.checkpointer = shardckpt.Checkpointer(tmp_path)
    made.train(saved_at=SAVED_AT)
    assert names(tmp_path) == []


def test_retention_removes_the_record_with_its_step(tmp_path: Path) -> None:
    made = job(tmp_path)
    made.checkpointer = shardckpt.Checkpointer(tmp_path, keep_last=1, witness=shardckpt.Witness(steps=1))
    for step in (1, 2, 3):
        made.train(step, step)
    made.train(4)
    assert names(tmp_path) == [witness_name(step_name(3))]


def test_steps_that_are_saved_each_have_all_of_their_steps_recorded(tmp_path: Path) -> None:
    made = job(tmp_path)
    for step in (1, 2, 3):
        made.train(step, step)
    made.train(STEPS)
    for step in (1, 2, 3):
        record = witness_session.read_record(made.checkpointer._finder.open_store(), step_name(step))
        assert [each.step for each in record.steps] == [step + 1, step + 2]
        assert record.steps[0].before is not None


def test_a_resumed_run_that_saves_again_is_compared_to_the_end_of_its_record(tmp_path: Path) -> None:
    job(tmp_path, deep=2).train(saved_at=SAVED_AT)
    other = resumed(tmp_path, deep=2)
    exact = other.train_step

    def train_step(batch: Any) -> torch.Tensor:
        loss = exact(batch)
        if other.step == STEPS:
            other.change(lambda shard: shard.tensor.mul_(0.5), "model", "head.weight")
        return loss

    other.train_step = train_step
    with pytest.raises(shardckpt.errors.ResumeDivergence, match=r"model\.head\.weight differs after step 5"):
        other.train(STEPS, SAVED_AT + 1)


def save_in_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Job, list[bool]]:
    """Return a job whose save counts as running while the returned list is empty."""
    is_over: list[bool] = []
    monkeypatch.setattr(shardckpt.results.SaveHandle, "done", lambda handle: bool(is_over))
    made = job(tmp_path)
    made.train(STEPS, SAVED_AT, in_background=True)
    return made, is_over


def test_a_record_waits_for_the_end_of_its_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, is_over = save_in_background(tmp_path, monkeypatch)
    assert names(tmp_path) == []
    is_over.append(True)
    made.train(STEPS + 1)
    assert names(tmp_path) == [witness_name(step_name(SAVED_AT))]


def test_a_run_that_ends_with_wait_has_the_record_of_its_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, is_over = save_in_background(tmp_path, monkeypatch)
    is_over.append(True)
    made.checkpointer.wait()
    assert names(tmp_path) == [witness_name(step_name(SAVED_AT))]


def test_a_restore_writes_the_record_of_the_save_for_which_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, is_over = save_in_background(tmp_path, monkeypatch)
    is_over.append(True)
    made.restore()
    with caplog.at_level(logging.INFO, "shardckpt"):
        made.train()
    assert "the resume of step 3 is proven over 2 steps, bit for bit" in caplog.text


def test_an_optimizer_that_was_not_restored_is_named_by_what_it_lacks(tmp_path: Path) -> None:
    job(tmp_path).train(saved_at=SAVED_AT)
    other = job(tmp_path, 2)
    other.restore("optim")
    with pytest.raises(
        shardckpt.errors.ResumeDivergence, match=r"optim\.state\.\*\.step is missing after the load"
    ) as caught:
        other.train()
    assert caught.value.divergence.step == SAVED_AT + 1


def test_the_optimizer_of_a_schedule_counts_if_it_is_not_in_the_state(tmp_path: Path) -> None:
    first = job(tmp_path)
    del first.state["optim"]
    first.train(saved_at=SAVED_AT)
    other = job(tmp_path, 2)
    del other.state["optim"]
    other.restore()
    with pytest.raises(shardckpt.errors.ResumeDivergence, match=r"schedule\.optimizer\.state\.\*\.step is missing"):
        other.train()


def test_copies_of_a_run_and_of_a_step_have_the_record(tmp_path: Path) -> None:
    job(tmp_path / "run").train(saved_at=SAVED_AT)
    shardckpt.copy(tmp_path / "run", tmp_path / "all")
    shardckpt.copy(tmp_path / "run" / step_name(SAVED_AT), tmp_path / "one" / step_name(SAVED_AT))
    for folder in ("all", "one"):
        assert names(tmp_path / folder) == [witness_name(step_name(SAVED_AT))]
        other = resumed(tmp_path / folder)
        torch.manual_seed(9)
        with pytest.raises(shardckpt.errors.ResumeDivergence):
            other.train()


class Wrapper(torch.optim.Optimizer):
    """Optimizer that holds another, and calls no constructor of its class, as that of accelerate."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


def test_a_wrapper_of_an_optimizer_is_looked_at_in_its_first_step(tmp_path: Path) -> None:
    first = job(tmp_path)
    first.state["optim"] = Wrapper(first.optim)
    first.train(saved_at=SAVED_AT)
    other = job(tmp_path, 2)
    other.state["optim"] = Wrapper(other.optim)
    other.restore()
    other.change(lambda shard: shard.tensor.mul_(0.5), "model", "head.weight")
    with pytest.raises(shardckpt.errors.ResumeDivergence, match=r"model\.head\.weight differs in step 4"):
        other.train()


def test_the_record_of_a_replaced_step_is_not_compared(tmp_path: Path) -> None:
    job(tmp_path).train(saved_at=SAVED_AT)
    other = job(tmp_path, 5)
    other.checkpointer = shardckpt.Checkpointer(tmp_path)
    other.train(SAVED_AT)
    other.checkpointer.save(SAVED_AT, other.state, overwrite=True)
    resumed(tmp_path).train()


def test_a_damaged_record_is_a_warning(tmp_path: Path) -> None:
    job(tmp_path).train(saved_at=SAVED_AT)
    path = tmp_path / witness_name(step_name(SAVED_AT))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.warns(UserWarning, match="cannot be read"):
        other = resumed(tmp_path)
    other.train()


def test_the_noise_of_a_run_that_is_not_deterministic_is_learned(tmp_path: Path) -> None:
    def train(made: Job, factor: float) -> None:
        exact = made.train_step
        made.train_step = lambda batch: exact(batch).double() * factor
        made.train()

    job(tmp_path, deterministic=False).train(saved_at=SAVED_AT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(resumed(tmp_path, deterministic=False), 1 + 1e-9)
        train(resumed(tmp_path, deterministic=False), 1 + 2e-9)
    with pytest.warns(UserWarning, match="the loss of step 4"):
        train(resumed(tmp_path, deterministic=False), 1 + 1e-6)


@pytest.mark.parametrize(
    "options", [{"steps": 0}, {"steps": True}, {"deep": -1}, {"on_divergence": "stop"}, {"deterministic": 1}]
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        shardckpt.Witness(**options)


def test_a_loss_that_is_no_number_is_refused(tmp_path: Path) -> None:
    made = job(tmp_path)
    made.train(SAVED_AT, SAVED_AT)
    with pytest.raises(UsageError, match="loss"):
        made.checkpointer.witness(SAVED_AT + 1, loss="low")


def without_dropout(rank: int, world: int, style: str, root: Path, *, resumes: bool, fault: bool = False) -> str:
    made = Job(style, rank, world, 2 if resumes else 1, root)
    made.model.eval()
    if resumes:
        made.restore(*(["data"] if fault else []))
        made.data.world, made.data.rank = world, rank
    try:
        made.train(saved_at=-1 if resumes else SAVED_AT)
    except shardckpt.errors.ResumeDivergence as error:
        return f"{error.divergence.cause} {error.divergence.name}"
    return ""


def test_a_resume_on_other_ranks_is_compared_by_samples_and_mean_loss(tmp_path: Path) -> None:
    assert without_dropout(0, 1, "plain", tmp_path / "one", resumes=False) == ""

    def on_two(rank: int, world: int) -> list[str]:
        without_dropout(rank, world, "fully_shard", tmp_path / "two", resumes=False)
        return [
            without_dropout(rank, world, "ddp", tmp_path / "one", resumes=True),
            without_dropout(rank, world, "fully_shard", tmp_path / "one", resumes=True),
            without_dropout(rank, world, "ddp", tmp_path / "one", resumes=True, fault=True),
        ]

    assert run(2, on_two) == [["", "", "batch repeated"]] * 2
    assert without_dropout(0, 1, "plain", tmp_path / "two", resumes=True) == ""
    assert without_dropout(0, 1, "plain", tmp_path / "two", resumes=True, fault=True) == "batch repeated"


def count_calls(rank: int, world: int, folder: Path) -> dict[str, list[int]]:
    """Return the numbers of collectives of a save and of the steps behind it, with a witness and without one."""
    counts = {}
    for name, witness in (("with", shardckpt.Witness(steps=2)), ("without", None)):
        checkpointer = shardckpt.Checkpointer(folder / name, witness=witness)
        state = {"w": torch.ones(4)}
        checkpointer.save(1, state)  # the first makes groups and the folder
        found = []
        with recorded() as calls:
            checkpointer.save(10, state)
        found.append(len(calls))
        for step in (11, 12, 13):
            with recorded() as calls:
                checkpointer.witness(step, loss=1.0, batch=torch.ones(2))
            found.append(len(calls))
        counts[name] = found
    return counts


def test_a_save_has_no_message_for_its_witness_and_a_recorded_step_has_one_each_way(tmp_path: Path) -> None:
    for counts in run(2, count_calls, tmp_path):
        with_witness, without = counts["with"], counts["without"]
        assert with_witness[0] == without[0], "the save itself sends nothing more"
        assert without[1:] == [0, 0, 0]
        assert with_witness[3] == 0, "the third step is not due"
        assert 0 < with_witness[1] == with_witness[2] <= 4
