"""Train on four ranks, go on on two, then on three, in the middle of an epoch: no sample twice, none left out.

    python examples/elastic_resume.py                                # forks gloo ranks on the CPU

The rule for data is `Order`: the order of samples depends on the seed and the epoch alone, a step takes the next
`BATCH` of them however many ranks there are, and each rank takes its share. So what a checkpoint has to keep of the
data is how many samples were consumed, a number that is the same on every rank. At the end one process trains on the
whole batches without any checkpoint, and the losses are compared.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from train_fsdp import WORDS, Block, Model, say

import shardckpt
from shardckpt.core import FullyShardedDataParallel
from shardckpt.core.wrap import ModuleWrapPolicy

SAMPLES, BATCH, SEED = 64, 12, 5
JOBS = ((4, 4), (2, 7), (3, 12))
"""Ranks of each job, and the step at which it saves and ends. An epoch has five steps."""


class Order:
    """The order of samples, as a batch sampler: each rank's share of each step, from where training stands.

    It does not advance by being iterated, since workers of a loader run ahead: training tells it what it has consumed.

    Args:
        samples: How many there are.
        batch: How many all ranks together take a step; what does not fill one is left out of that epoch.
        rank: This rank.
        world: Ranks there are now.
    """

    def __init__(self, samples: int, batch: int, rank: int, world: int) -> None:
        self.samples, self.batch, self.rank, self.world = samples, batch, rank, world
        self.consumed = 0

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this rank's part of every batch that is left of this epoch."""
        steps = self.samples // self.batch
        epoch, done = divmod(self.consumed // self.batch, steps)
        drawn = torch.randperm(self.samples, generator=torch.Generator().manual_seed(SEED + epoch))
        for step in range(done, steps):
            whole = drawn[step * self.batch : (step + 1) * self.batch]
            yield whole.tensor_split(self.world)[self.rank].tolist()

    def advance(self) -> None:
        """Count one step of all ranks."""
        self.consumed += self.batch

    def state_dict(self) -> dict[str, int]:
        """Return what every rank knows alike, so that any number of ranks can go on from it."""
        return {"samples": self.samples, "batch": self.batch, "consumed": self.consumed}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there.

        Args:
            state: As `state_dict` returned it.

        Raises:
            ValueError: Other samples, or batches of another size.
        """
        if (state["samples"], state["batch"]) != (self.samples, self.batch):
            raise ValueError(f"the order was of other samples or batches: {state}")
        self.consumed = state["consumed"]


class Counting(Dataset):
    """Sequences that count upwards; each tells its number, too."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        return number, (number * 37 + torch.arange(16)) % WORDS


def train(steps: shardckpt.Checkpointer | None, last: int) -> Iterator[tuple[int, float, list[int]]]:
    """Be one rank; yield each step's number, the loss over all ranks and the samples they had."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0 if steps is None else steps.latest() or 0)  # a resumed job begins with other weights, and loads
    model: nn.Module = Model()
    if steps is not None:
        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = Order(SAMPLES, BATCH, rank, world)
    loader = DataLoader(Counting(), batch_sampler=order)
    state: dict[str, Any] = {"model": model, "optim": optimizer, "order": order, "rng": shardckpt.RNGState()}
    step = (steps.restore(state) or 0) if steps is not None else 0
    while step < last:
        for numbers, ids in loader:
            loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            # Gradients are averaged over ranks: a rank with more samples than others counts for more.
            share = len(ids) * world / BATCH
            (loss * share).backward()
            optimizer.step()
            optimizer.zero_grad()
            order.advance()
            step += 1
            yield step, *over_all_ranks(loss.detach() * share, numbers)
            if step == last:
                break
    if steps is not None:
        steps.save(step, state)


def over_all_ranks(loss: torch.Tensor, numbers: torch.Tensor) -> tuple[float, list[int]]:
    """Return the mean loss of the whole batch, and the numbers of its samples."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (loss.item(), numbers.tolist()))
    return sum(each for each, _ in found) / len(found), [number for _, part in found for number in part]


def be_rank(rank: int, world: int, folder: Path, last: int, is_reference: bool, told: Any) -> None:
    """Be one of the forked ranks."""
    torch.set_num_threads(1)
    store = str(folder / f"store-{world}-{is_reference}")
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    warnings.simplefilter("ignore")  # that random numbers begin anew on other ranks; this model draws none
    found = []
    for step, loss, numbers in train(None if is_reference else shardckpt.Checkpointer(folder / "run"), last):
        found.append((loss, numbers))
        if not is_reference:
            say(f"  step {step:2}: loss {loss:.4f}, samples {' '.join(map(str, sorted(numbers)))}")
    if rank == 0:
        told.send(found)
    dist.destroy_process_group()


def job(world: int, folder: Path, last: int, *, is_reference: bool = False) -> list[tuple[float, list[int]]]:
    """Run a job to its end; return what each step's loss was, and which samples it had."""
    context = multiprocessing.get_context("fork")
    heard, told = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=be_rank, args=(rank, world, folder, last, is_reference, told)) for rank in range(world)
    ]
    for process in ranks:
        process.start()
    told.close()
    try:
        found = heard.recv()
    except EOFError:
        raise SystemExit("a rank failed") from None
    for process in ranks:
        process.join()
    return found


def main() -> None:
    """Run the jobs one after the other, and compare them with one that was never interrupted."""
    with tempfile.TemporaryDirectory() as name:
        folder, found = Path(name), []
        for world, last in JOBS:
            print(f"{world} ranks, from step {len(found) + 1} to {last}", flush=True)
            found += job(world, folder, last)
        expected = job(1, folder, JOBS[-1][1], is_reference=True)
    farthest = max(abs(loss - other) for (loss, _), (other, _) in zip(found, expected, strict=True))
    same = [sorted(numbers) for _, numbers in found] == [sorted(numbers) for _, numbers in expected]
    print(f"losses differ from those of one process without interruption by {farthest:.0e} at most")
    for epoch in range(2):
        seen = [number for _, numbers in found[5 * epoch : 5 * epoch + 5] for number in numbers]
        print(f"epoch {epoch}: {len(seen)} samples, {len(set(seen))} different ones")
    print(f"the samples of every step are {'the same' if same else 'OTHERS'}")
    if farthest > 1e-5 or not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
