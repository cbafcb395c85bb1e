"""Train on two ranks and save to S3 in the background; then go on from the newest step on one rank.

    python examples/async_s3.py                                      # to a server of moto, started here
    python examples/async_s3.py s3://bucket/run                      # keys and endpoint as boto3 finds them

The loop waits for a copy in memory. A thread uploads it, while training goes on, and puts `COMMIT` last: whatever ends
the process, a reader of the bucket finds whole steps and nothing else.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional
from train_fsdp import Model, batch, be_rank, say

import shardckpt
from shardckpt.core import fully_shard

STEPS, EVERY = 12, 4


def train(root: str, steps: int) -> None:
    """Be one rank: restore the newest step if there is one, then train and save in the background."""
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = {"model": model, "optim": optimizer}

    checkpoints = shardckpt.Checkpointer(root, keep_last=2, save_every=EVERY)
    start = checkpoints.restore(state) or 0
    say(f"world size {dist.get_world_size()}, from step {start}")
    handle = None
    for step in range(start + 1, start + steps + 1):
        ids = batch(step)
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        under_way = " (uploading meanwhile)" if handle is not None and not handle.done() else ""
        say(f"  step {step}: loss {loss.item():.3f}{under_way}")
        if checkpoints.should_save(step):
            handle = checkpoints.async_save(step, state)  # waits for the save before, should that take so long
    if handle is not None:
        handle.result()  # in place, on all ranks; what failed is raised here
        times = handle.timings
        say(f"  last save: the loop waited {times.stall:.2f} s, the upload took {times.write + times.publish:.2f} s")


def job(world: int, work: Callable[[], None]) -> None:
    """Fork ranks and wait for them."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=be_rank, args=(work, r, world, f"{folder}/store")) for r in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    if any(process.exitcode for process in ranks):
        raise SystemExit(1)


@contextmanager
def bucket() -> Iterator[str]:
    """Run moto's S3 server in this process, and yield the URL of a folder in a bucket of it."""
    import boto3  # noqa: PLC0415  (a bucket that is named needs neither)
    from moto.server import ThreadedMotoServer  # noqa: PLC0415

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # or every request is a line
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }
    boto3.client("s3").create_bucket(Bucket="training")
    try:
        yield "s3://training/run"
    finally:
        server.stop()


def story(root: str) -> None:
    """Run both jobs, and look at what they left."""
    job(2, partial(train, root, STEPS))
    job(1, partial(train, root, 2))
    checkpoints = shardckpt.Checkpointer(root)
    print(f"complete steps in {root}: {', '.join(map(str, checkpoints.steps()))}")
    weight = shardckpt.open(checkpoints.path(checkpoints.steps()[-1]))["model.head.weight"]
    print(f"head.weight there: {weight}; of its first row, which alone was read, the norm is {weight[0].norm():.3f}")


def main() -> None:
    """Use the bucket that is named, or one of our own."""
    if len(sys.argv) > 1:
        story(sys.argv[1])
        return
    with bucket() as root:
        story(root)


if __name__ == "__main__":
    main()
