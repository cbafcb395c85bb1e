"""Resume in the middle of an epoch on four, two and three ranks: no sample is used twice.

    python examples/elastic_resume.py                                # forks gloo ranks on the CPU

`shardckpt.data.ElasticBatchSampler` decides which samples a rank gets. The order of samples depends on the seed and the
epoch only. A step takes the next `BATCH` samples at any world size, and each rank takes its part of them. So a
checkpoint only needs the number of consumed samples, which is the same on every rank. At the end one process trains on
the full batches without a checkpoint, and the losses are compared.
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
from train_fsdp import WORDS, Block, Model, print_rank0

import shardckpt
from shardckpt.core import FullyShardedDataParallel
from shardckpt.core.wrap import ModuleWrapPolicy
from shardckpt.data import ElasticBatchSampler

SAMPLES, BATCH, SEED = 64, 12, 5
JOBS = ((4, 4), (2, 7), (3, 12))
"""World size of each job, and the step at which it saves and ends. An epoch has five steps."""


class CountingSequences(Dataset):
    """Sequences that count upwards, each with its index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, torch.Tensor]:
        return number, (number * 37 + torch.arange(16)) % WORDS


def train(steps: shardckpt.Checkpointer | None, last: int) -> Iterator[tuple[int, float, list[int]]]:
    """Train on this rank; yield each step with the mean loss and the samples of all ranks."""
    # A resumed job starts with other weights, before it loads.
    torch.manual_seed(0 if steps is None else steps.latest() or 0)
    model: nn.Module = Model()
    if steps is not None:
        model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = ElasticBatchSampler(SAMPLES, BATCH, seed=SEED, drop_last=True)
    loader = DataLoader(CountingSequences(), batch_sampler=data)
    state: dict[str, Any] = {"model": model, "optim": optimizer, "data": data, "rng": shardckpt.RNGState()}
    step = (steps.restore(state) or 0) if steps is not None else 0
    while step < last:
        for numbers, ids in loader:
            loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            # Gradients are averaged over ranks, so a rank with more samples needs a larger weight.
            weight = data.loss_weight
            (loss * weight).backward()
            optimizer.step()
            optimizer.zero_grad()
            data.advance()
            step += 1
            yield step, *reduce_over_ranks(loss.detach() * weight, numbers)
            if step == last:
                break
    if steps is not None:
        steps.save(step, state)


def reduce_over_ranks(loss: torch.Tensor, numbers: torch.Tensor) -> tuple[float, list[int]]:
    """Return the mean loss of the full batch, and the indices of its samples."""
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, (loss.item(), numbers.tolist()))
    return sum(loss for loss, _ in results) / len(results), [number for _, part in results for number in part]


def run_rank(rank: int, world: int, folder: Path, last: int, is_reference: bool, sender: Any) -> None:
    """Run one of the forked ranks."""
    torch.set_num_threads(1)
    store = str(folder / f"store-{world}-{is_reference}")
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    warnings.simplefilter("ignore")  # about RNG states at another world size, which this model does not need
    results = []
    for step, loss, numbers in train(None if is_reference else shardckpt.Checkpointer(folder / "run"), last):
        results.append((loss, numbers))
        if not is_reference:
            print_rank0(f"  step {step:2}: loss {loss:.4f}, samples {' '.join(map(str, sorted(numbers)))}")
    if rank == 0:
        sender.send(results)
    dist.destroy_process_group()


def run_job(world: int, folder: Path, last: int, *, is_reference: bool = False) -> list[tuple[float, list[int]]]:
    """Run a job until it ends; return the loss and the samples of each step."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=run_rank, args=(rank, world, folder, last, is_reference, sender))
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    sender.close()
    try:
        results = receiver.recv()
    except EOFError:
        raise SystemExit("a rank failed") from None
    for process in ranks:
        process.join()
    return results


def main() -> None:
    """Run the jobs one after the other, and compare them with a job that is not interrupted."""
    with tempfile.TemporaryDirectory() as name:
        folder, results = Path(name), []
        for world, last in JOBS:
            print(f"{world} ranks, from step {len(results) + 1} to {last}", flush=True)
            results += run_job(world, folder, last)
        expected = run_job(1, folder, JOBS[-1][1], is_reference=True)
    difference = max(abs(loss - other) for (loss, _), (other, _) in zip(results, expected, strict=True))
    same = [sorted(numbers) for _, numbers in results] == [sorted(numbers) for _, numbers in expected]
    print(f"maximum difference to the losses of one process without interruption: {difference:.0e}")
    for epoch in range(2):
        samples = [number for _, numbers in results[5 * epoch : 5 * epoch + 5] for number in numbers]
        print(f"epoch {epoch}: {len(samples)} samples, {len(set(samples))} different ones")
    print(f"the samples of every step are {'the same' if same else 'DIFFERENT'}")
    if difference > 1e-5 or not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
