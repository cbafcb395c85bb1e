"""Measure the cost of a proven resume: the calls of a witness, its record, and the live check. Each row has a goal.

    python benchmarks/witness.py [--cases steps,record,live] [--rounds 9] [--record]

**Steps.** A small Llama trains on two gloo ranks with `fully_shard`. Behind each save, the processor time of a call of
`Checkpointer.witness` is divided by that of the training step before it; both are sums over the ranks. Other steps cost
nothing that can be measured. With `deep=0` no tensor is digested; *deep* steps digest all parameters and slots.

**Record.** The bytes of a record of one deep step of the Llama on 1,000 ranks, and the processor time in which rank 0
merges their messages.

**Live.** The processor time of `load(verify="live")` without that of a load, divided by that of the load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._dynamo  # optimizers import it at their first step; import it once, before the fork
import torch.distributed as dist
from goal_cases import Cases, Row, run_cases
from llama import Block, Llama, Shape
from planning import measure
from ranks import run_ranks

import shardckpt
from shardckpt.core import fully_shard
from shardckpt.witness.digests import digest_batch, digest_random_states
from shardckpt.witness.environment import describe_environment
from shardckpt.witness.files.record_file import encode_record
from shardckpt.witness.rank_message import RankStep, encode_rank_step, merge_rank_steps
from shardckpt.witness.records.step_records import TensorDigest, WitnessRecord
from shardckpt.witness.state_digests import StateReader
from shardckpt.witness.trained_objects import find_trained_objects

STEPS, RANKS, BATCH = 4, 1000, (2, 256)
"""Steps behind a save, ranks of the record, and sequences with tokens of a rank's batch."""


def build_state() -> tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]:
    """Return the state of a training of the Llama, and its training step."""
    model = Llama(Shape())
    if dist.is_initialized():
        for block in model.modules():
            if isinstance(block, Block):
                fully_shard(block)
        fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train_step(ids: torch.Tensor) -> torch.Tensor:
        loss = model(ids)
        loss.backward()
        optim.step()
        optim.zero_grad()
        return loss.detach()

    return {"model": model, "optim": optim, "rng": shardckpt.RNGState()}, train_step


def train_with_witness(folder: Path, rounds: int, rank: int) -> dict[int, list[tuple[float, float]]]:
    """Return the processor seconds of each step and of its witness, by the `deep` of the witness."""
    torch.manual_seed(rank)
    state, train_step = build_state()
    ids = torch.randint(0, Shape().words, BATCH)
    train_step(ids)
    seconds: dict[int, list[tuple[float, float]]] = {}
    for deep in (0, 1):
        options = shardckpt.Witness(steps=STEPS, deep=deep)
        checkpointer = shardckpt.Checkpointer(folder / str(deep), keep_last=1, witness=options)
        step = 0
        for _ in range(-(-rounds // STEPS)):
            checkpointer.save(step, state)
            for _ in range(STEPS):
                step += 1
                loss: list[torch.Tensor] = []
                of_step = measure(lambda loss=loss: loss.append(train_step(ids)))
                call = partial(checkpointer.witness, step, loss=loss[0], batch=ids)
                seconds.setdefault(deep, []).append((of_step, measure(call)))
    return seconds


def steps(folder: Path, rounds: int) -> Iterator[Row]:
    """Measure the calls behind a save."""
    ranks = run_ranks(partial(train_with_witness, folder, rounds))
    for deep, name, goal in ((0, "`witness` behind a save, deep=0", 0.01), (1, "`witness` of a deep step", 0.05)):
        pairs = zip(*(rank[deep] for rank in ranks), strict=True)
        ratios = [sum(call for _, call in pair) / sum(step for step, _ in pair) for pair in pairs]
        yield Row("proof of a resume", name, median(ratios), goal, "x step")


def record_(folder: Path, rounds: int) -> Iterator[Row]:  # noqa: ARG001
    """Measure the record of many ranks."""
    state, train_step = build_state()
    ids = torch.randint(0, Shape().words, BATCH)
    train_step(ids)
    objects = find_trained_objects(state)
    seen = StateReader(objects, 0, 1).digest(is_deep=True)
    environment = describe_environment(RANKS, objects, seen, deterministic=True)
    dice = torch.Generator().manual_seed(1)

    def draw() -> int:
        return int(torch.randint(1 << 32, (), generator=dice))

    messages = []
    for rank in range(RANKS):
        tensors = {name: TensorDigest(each.part, each.dtype, draw()) for name, each in seen.digests.tensors.items()}
        random = {name: draw() for name in digest_random_states()}
        drawn = {**random, "torch": draw()}
        batch = digest_batch(ids + rank)
        digests = replace(seen.digests, tensors=tensors)
        part = RankStep(1, environment, rank, rank, batch, batch, batch, random, drawn, None, digests)
        messages.append(encode_rank_step(part))
    merged = []
    seconds = median(measure(lambda: merged.append(merge_rank_steps(messages))) for _ in range(min(rounds, 3)))
    step = merged[0]
    batch = step.first_batch.join_ranks()
    made = WitnessRecord("0" * 15, 0, step.environment, (step.record,), batch, batch)
    yield Row("proof of a resume", f"record of a step of {RANKS:,} ranks", len(encode_record(made)) / 1e3, 64, "kB")
    yield Row("proof of a resume", f"merge of the messages of {RANKS:,} ranks", seconds, 1, "s of CPU")


def live(folder: Path, rounds: int) -> Iterator[Row]:
    """Measure the check of the memory after a load."""
    for name, tensors, shape, has_digests in (
        ("10,000 tensors of 16 kB", 10_000, (64, 64), True),
        ("32 tensors of 8 MB", 32, (2048, 1024), True),
        ("32 tensors of 8 MB, without digests", 32, (2048, 1024), False),
    ):
        state = {"model": {f"w{number}": torch.rand(shape) for number in range(tensors)}}
        path = str(folder / name)
        shardckpt.save(state, path, store_digests=has_digests)
        ratios = []
        for _ in range(rounds + 1):
            plain = measure(partial(shardckpt.load, state, path))
            checked = measure(partial(shardckpt.load, state, path, verify="live"))
            ratios.append((checked - plain) / plain)
        yield Row("proof of a resume", f"live check, {name}", median(ratios[1:]), 0.3, "x load")


CASES: Cases = {"steps": steps, "record": record_, "live": live}


def main() -> None:
    """Run the selected cases."""
    run_cases(__doc__, "Proof of a resume", CASES, rounds=9)


if __name__ == "__main__":
    main()
