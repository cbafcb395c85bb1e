"""A save with `overlap_staging`: only writers of parameters and optimizer states wait for the copies."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import shardckpt
from shardckpt import devices
from shardckpt.checkpoint.save import staging, write_hooks
from shardckpt.checkpoint.save.staging import StagingArea
from shardckpt.checkpoint.stateful import tensor_bytes
from shardckpt.checkpoint.stateful.flatten import flatten_state
from shardckpt.errors import UsageError
from tests.kit.ranks.streams import Checker, UnorderedError, checked

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.lin(x))


class Job:
    """A model and its optimizer on a device whose streams are checked."""

    def __init__(self, checker: Checker, folder: Path) -> None:
        self.checker, self.folder = checker, folder
        self.model = Net()
        self.optim = torch.optim.AdamW(self.model.parameters())
        self.compute()
        self.optim.step()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optim": self.optim}

    def compute(self) -> None:
        self.model(torch.ones(2, 4)).sum().backward()

    def save(self, name: str = "step", **more: Any) -> shardckpt.SaveHandle:
        options = {"overlap_staging": True} | more
        return shardckpt.async_save(self.state, self.folder / name, **options)

    def is_awaited(self) -> bool:
        """Whether what is queued now runs after the copies."""
        copying = staging._side_streams[CPU]
        return self.checker.current.clock.get(copying.number, 0) >= copying.clock.get(copying.number, 0)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    monkeypatch.setattr(tensor_bytes, "SMALL_BYTES", -1)  # small tensors on the CPU are copied by the host
    with checked() as checker:
        yield Job(checker, tmp_path)


def test_a_forward_and_backward_run_during_the_copies_and_a_step_after_them(job: Job) -> None:
    handle = job.save()
    job.compute()
    assert not job.is_awaited()
    job.optim.step()
    assert job.is_awaited()
    handle.result()


def test_without_the_option_all_work_waits(job: Job) -> None:
    job.save(overlap_staging=False).result()
    assert job.is_awaited() and not devices.has_deferred_waits()


def test_what_is_saved_has_the_values_of_the_call(job: Job) -> None:
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    handle = job.save()
    job.compute()
    job.optim.step()
    handle.result()
    loaded = shardckpt.load(job.folder / "step")["model"]
    assert loaded.keys() == before.keys() and all(torch.equal(loaded[name], before[name]) for name in before)


def load_part(job: Job) -> None:
    job.model.lin.load_state_dict(nn.Linear(4, 4).state_dict())


def load_root(job: Job) -> None:
    job.model.load_state_dict(Net().state_dict())


def load_step(job: Job) -> None:
    shardckpt.load(job.state, job.folder / "early")


def step_another(job: Job) -> None:
    """An optimizer that the state does not have."""
    torch.optim.SGD(job.model.parameters()).step()


def wait_by_hand(job: Job) -> None:
    shardckpt.async_save({"n": 1}, job.folder / "other").wait_for_staging()


@pytest.mark.parametrize("write", [load_part, load_root, load_step, step_another, wait_by_hand])
def test_each_writer_waits(job: Job, write: Callable[[Job], None]) -> None:
    job.save("early", overlap_staging=False).result()
    handle = job.save()
    assert not job.is_awaited()
    write(job)
    assert job.is_awaited()
    handle.result()


def test_a_second_save_is_overlapped_as_the_first(job: Job) -> None:
    for number in range(2):
        handle = job.save(str(number))
        job.compute()
        assert not job.is_awaited()
        job.optim.step()
        assert job.is_awaited()
        handle.result()


def test_a_save_behind_an_overlapped_one_waits_for_its_copies_on_the_host(job: Job) -> None:
    job.save("first")
    first = staging._side_streams[CPU].clock.copy()
    job.save("second").result()
    number = staging._side_streams[CPU].number
    assert job.checker.host[number] >= first[number]
    job.optim.step()


def test_writers_on_two_streams_wait(job: Job) -> None:
    """An optimizer for each stream."""
    handle, streams = job.save(), [devices.make_stream(CPU) for _ in range(2)]
    for stream in streams:
        stream.wait_stream(devices.get_current_stream(CPU))
    for stream, part in zip(streams, (job.model.lin, job.model.norm), strict=True):
        with devices.use_stream(stream, CPU):
            torch.optim.SGD(part.parameters()).step()
    for stream in streams:
        devices.get_current_stream(CPU).wait_stream(stream)
    handle.result()


def test_a_parameter_written_by_hand_is_not_protected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_bytes, "SMALL_BYTES", -1)
    with pytest.raises(UnorderedError, match=r"write by add_ (.|\n)*after read by copy_"), checked() as checker:
        job = Job(checker, tmp_path)
        job.save().result()
        job.model.lin.weight.data.add_(1)


def test_buffers_and_plain_tensors_are_copied_first_and_waited_for_at_once(job: Job) -> None:
    plain, model = torch.zeros(4), job.model
    job.folder /= "plain"
    handle = shardckpt.async_save({"plain": plain, **job.state}, job.folder, overlap_staging=True)
    plain.add_(1)
    model.norm.running_mean.add_(1)
    model.norm.num_batches_tracked.add_(1)
    assert not job.is_awaited()
    handle.result()
    job.optim.step()


def test_a_graph_that_is_captured_does_not_wait_and_the_next_writer_does(job: Job) -> None:
    handle = job.save()
    with job.checker.capturing():
        write_hooks._before_step()
    assert not job.is_awaited()
    job.optim.step()
    assert job.is_awaited()
    handle.result()


def test_a_state_that_a_captured_step_may_write_is_waited_for_at_once(job: Job) -> None:
    for group in job.optim.param_groups:
        group["capturable"] = True
    job.save().result()
    assert job.is_awaited() and not devices.has_deferred_waits()


class _CopyError(Exception):
    pass


@pytest.mark.parametrize("at", ["_put", "_copy_deferred"])
def test_a_save_that_fails_while_it_copies_leaves_no_writer_waiting(
    job: Job, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    put = getattr(StagingArea, at)

    def put_and_fail(*args: Any, **options: Any) -> None:
        put(*args, **options)
        raise _CopyError

    monkeypatch.setattr(StagingArea, at, put_and_fail)
    with pytest.raises(_CopyError):
        job.save().result()
    assert not devices.has_deferred_waits() and job.is_awaited()


def test_a_state_may_be_freed_during_the_copies(job: Job) -> None:
    handle = job.save()
    job.model = job.optim = None
    handle.result()


def test_hooks_of_modules_go_once_the_copies_are_done(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = job.save()
    assert all(module._load_state_dict_pre_hooks for module in job.model.modules())
    pickle.loads(pickle.dumps(job.model))
    monkeypatch.setattr(type(next(iter(devices._deferred.values()))), "query", lambda _: True)
    job.optim.step()
    handle.result()
    assert not devices.has_deferred_waits()
    assert not any(module._load_state_dict_pre_hooks for module in job.model.modules())


def test_a_compiled_step_waits_too(job: Job) -> None:
    handle = job.save()
    step = torch.compile(job.optim.step, backend="eager")
    step()
    assert job.is_awaited()
    handle.result()


def test_on_devices_without_streams_there_are_no_hooks(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    shardckpt.async_save({"model": model}, tmp_path / "step", overlap_staging=True).result()
    assert not model._load_state_dict_pre_hooks and not devices.has_deferred_waits()


def test_the_option_must_be_a_bool(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="overlap_staging"):
        shardckpt.async_save({"n": 1}, tmp_path / "step", overlap_staging="yes")  # type: ignore[arg-type]


def test_a_checkpointer_takes_the_option(job: Job) -> None:
    handle = shardckpt.Checkpointer(job.folder).async_save(1, job.state, overlap_staging=True)
    assert not job.is_awaited()
    job.optim.step()
    handle.result()


# ------------------------------------------------------------------------------------------ what only steps write


def find_step_written(state: dict[str, Any]) -> set[str]:
    return {".".join(map(str, path)) for path in flatten_state(state, 0, 1).find_step_written()}


def stepped(model: nn.Module, make: Callable[..., Any] = torch.optim.AdamW) -> Any:
    optim = make(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()
    return optim


def test_parameters_and_states_of_optimizers_are_written_by_steps_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    state = {"model": model, "optim": stepped(model), "n": torch.ones(1), "rank": shardckpt.PerRank(torch.ones(2))}
    slots = {f"optim.state.0.weight.{slot}" for slot in ("step", "exp_avg", "exp_avg_sq")}
    assert find_step_written(state) == {"model.0.weight", *slots}


def test_memory_that_a_buffer_or_a_plain_tensor_shares_is_not() -> None:
    model = nn.Linear(2, 2, bias=False)
    assert find_step_written({"model": model, "w": model.weight.data}) == set()
    assert find_step_written({"w": model.weight.data, "model": model}) == set()
    assert find_step_written({"model": model, "row": model.weight.data[0]}) == set()
    model.register_buffer("shared", model.weight.data)
    assert find_step_written({"model": model}) == set()


@pytest.mark.parametrize("make", [lambda: nn.Embedding(4, 2, max_norm=1.0), lambda: AveragedModel(nn.Linear(2, 2))])
def test_parameters_that_a_module_writes_itself_are_not(make: Callable[[], nn.Module]) -> None:
    assert find_step_written({"model": nn.Sequential(make(), nn.Linear(2, 2))}) == set()


def test_averages_of_weights_are_not() -> None:
    model, average = nn.Linear(2, 2), nn.Linear(2, 2)
    state = {"model": model, "ema": shardckpt.Variant(average, of=model)}
    assert find_step_written(state) == {"model.weight", "model.bias"}


def test_the_state_of_an_optimizer_without_hooks_is_not() -> None:
    class Own(torch.optim.AdamW):
        """Its `step` is replaced, so that torch calls no hooks."""

    model = nn.Linear(2, 2)
    optim = stepped(model, Own)
    Own.step = lambda self, closure=None: None  # type: ignore[method-assign]
    assert find_step_written({"model": model, "optim": optim}) == {"model.weight", "model.bias"}


def test_hooks_are_installed_once() -> None:
    write_hooks.install_write_hooks([])
    first = write_hooks._step_hook
    write_hooks.install_write_hooks([nn.Linear(2, 2)])
    assert write_hooks._step_hook is first
