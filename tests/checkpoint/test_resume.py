"""Training that goes on from a checkpoint is the training that was never interrupted, bit for bit, in every style."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from harness import run
from states import FACES, Net, differing, flat, over, theirs, whole, wrapper
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import shardckpt
from shardckpt.state import model_state_dict, optim_state_dict

SAMPLES, BATCH, STEPS, SAVED_AT = 22, 4, 10, 3  # an epoch has six batches: resumed in the middle, and on into the next


class Noisy(Dataset):
    """Samples that are augmented by every generator there is."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        noise = random.random() + np.random.rand() + torch.rand(5)
        return number, torch.arange(5.0) * number / SAMPLES + 0.1 * noise


class Loader:
    """A rank's batches: a DataLoader with a generator of its own, and how far its epoch has come."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.began, self.at = self.generator.get_state(), 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        self.began = self.generator.get_state()
        order = torch.randperm(SAMPLES, generator=self.generator).split(BATCH)
        left = [numbers.tolist() for numbers in order[self.at :]]
        for batch in DataLoader(Noisy(), batch_sampler=left, generator=self.generator):
            self.at += 1
            yield batch
        self.at = 0

    def state_dict(self) -> dict:
        return {"began": self.began, "at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.generator.set_state(state["began"])
        self.at = state["at"]


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Job:
    """What one rank trains with; seeds differ between jobs, and between ranks but for the weights."""

    def __init__(self, face: str, rank: int, seed: int) -> None:
        seed_everything(seed)
        self.model = FACES[face](Net((1,)))
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=0.05, amsgrad=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optim, STEPS)
        seed_everything(100 * seed + rank)
        self.loader = Loader(100 * seed + rank)
        self.state = {"model": self.model, "optim": self.optim, "schedule": self.schedule, "step": 0}
        self.state |= {"rng": shardckpt.RNGState(), "loader": shardckpt.PerRank(self.loader)}

    def train(self) -> Iterator[tuple[float, list[int], float]]:
        """Go on to the end; yield the loss, the samples and the learning rate of each step."""
        while True:
            for numbers, x in self.loader:
                loss = functional.dropout(self.model(x), 0.3).square().mean()
                loss.backward()
                self.optim.step()
                self.optim.zero_grad()
                self.schedule.step()
                self.state["step"] += 1
                yield loss.item(), numbers.tolist(), self.schedule.get_last_lr()[0]
                if self.state["step"] == STEPS:
                    return

    def looked_at(self) -> dict:
        """Return all that training has changed, as values that can be compared."""
        numpy_ = np.random.get_state()
        weights = {f"weight {name}": whole(value) for name, value in model_state_dict(self.model, "FULL").items()}
        return {
            **weights,
            **flat(optim_state_dict(self.model, self.optim, "FULL")),
            "schedule": self.schedule.state_dict(),
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": (numpy_[1].tolist(), numpy_[2:]),
            "generator": self.loader.generator.get_state(),
        }


def unlike(rank: int, face: str, root: Path, left_out: str = "") -> list[str]:
    """Train to the end, saving on the way; train again from there, and name what differs in as much as one bit."""
    checkpoints = shardckpt.Checkpointer(root)
    job, expected, handle = Job(face, rank, 1), [], None
    for each in job.train():
        expected.append(each)
        if job.state["step"] == SAVED_AT:
            handle = checkpoints.async_save(SAVED_AT, job.state)  # training goes on while it is written
    handle.result()

    other = Job(face, rank, 2)
    wanted = {name: each for name, each in other.state.items() if name != left_out}
    assert checkpoints.restore(wanted, strict=not left_out) == SAVED_AT
    other.state["step"] = SAVED_AT
    found = list(other.train())
    wrong = [f"step {SAVED_AT + n}" for n, each in enumerate(found) if each != expected[SAVED_AT + n]]
    return wrong + differing(other.looked_at(), job.looked_at())


def test_training_that_resumes_is_training_that_was_never_interrupted(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(FACES, "torch wrapper", wrapper(theirs, use_orig_params=True))
    faces = ["flat", "orig", "in place", "torch in place", "torch wrapper", "ddp"]
    over(faces, lambda rank, world, face: unlike(rank, face, tmp_path / face))


def test_whatever_is_not_restored_is_seen(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> dict[str, int]:
        parts = ("optim", "schedule", "rng", "loader")
        return {part: len(unlike(rank, "flat", tmp_path / part, part)) for part in parts}

    for told in run(2, body):
        assert min(told.values()) > 1, told
