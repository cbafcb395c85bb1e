"""A Trainer publishes its shards while it trains, and goes on with the stream after a restart; each way to shard."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import shardckpt
from shardckpt.errors import UsageError
from shardckpt.stream.format.stream_folder import StreamFolder
from tests.kit.ranks.harness import run

KINDS = [(1, "ddp"), (2, "ddp"), (2, "fsdp1"), (2, "fsdp2")]

Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def _imports() -> None:
    """Import what the ranks use in the process that they are forked from."""
    from tests.kit.runs import trainers

    assert trainers.Trainer


def train(rank: int, world: int, kind: str, folder: Path, every: int, steps: int, resume: bool) -> dict[int, Weights]:
    """Train, and gather the weights after each step as torch does."""
    from shardckpt.integrations.transformers import PublishCallback
    from tests.kit.runs import trainers

    class Gathered(trainers.TrainerCallback):
        def __init__(self) -> None:
            self.by_step: dict[int, Weights] = {}

        def on_step_end(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
            model, self.by_step[state.global_step] = trainer.model_wrapped, {}
            # FSDP1's `state_dict` of full tensors ends a process without an accelerator.
            with (
                FullyShardedDataParallel.summon_full_params(model, writeback=False)
                if kind == "fsdp1"
                else nullcontext()
            ):
                for name, value in model.named_parameters():
                    full = value.full_tensor() if isinstance(value, DTensor) else value
                    plain = name.replace("_fsdp_wrapped_module.", "").removeprefix("module.")
                    self.by_step[state.global_step][plain] = full.detach().bfloat16()

    trainers.be_rank(rank, world)
    gathered = Gathered()
    publish = PublishCallback(folder / "stream", every, anchors=shardckpt.Anchors(max_bytes=100))
    trainer, _ = trainers.build(kind, folder / "out", gathered, publish, dropout=0.0, max_steps=steps)
    trainer.train(resume_from_checkpoint=resume)
    return gathered.by_step


def receive(url: Path, number: int) -> Weights:
    return dict(shardckpt.Subscriber(url).stage(number).iter_tensors())


def are_equal(found: Weights, expected: Weights) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


@pytest.mark.parametrize(("world", "kind"), KINDS)
def test_versions_have_the_weights_of_their_steps(world: int, kind: str, tmp_path: Path) -> None:
    expected = run(world, train, kind, tmp_path, 2, 5, False)[0]
    for number in (2, 4):
        assert are_equal(receive(tmp_path / "stream", number), expected[number])
    assert StreamFolder(str(tmp_path / "stream")).list_folders() == [(1, 2), (1, 4)]


def test_a_training_that_goes_on_continues_the_stream(tmp_path: Path) -> None:
    first = run(2, train, "ddp", tmp_path, 1, 4, False)[0]  # the last checkpoint is of step 3
    assert are_equal(receive(tmp_path / "stream", 4), first[4])
    (tmp_path / "out" / "checkpoint-4").rename(tmp_path / "gone")
    second = run(2, train, "ddp", tmp_path, 1, 5, True)[0]
    assert list(second) == [4, 5]
    assert are_equal(receive(tmp_path / "stream", 4), second[4]), "the one that was trained last"
    assert are_equal(receive(tmp_path / "stream", 5), second[5])


def test_it_is_pickled_and_refuses_unknown_values(tmp_path: Path) -> None:
    from shardckpt.integrations.transformers import PublishCallback

    pickle.loads(pickle.dumps(PublishCallback(tmp_path)))
    for wrong in (0, 1.5, True):
        with pytest.raises(UsageError, match="`every` must be a number of steps"):
            PublishCallback(tmp_path, wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="`dtype` must be None or"):
        PublishCallback(tmp_path, dtype="int8")
