"""Train on two ranks and save to S3 in the background; then resume from the newest step on one rank.

    python examples/async_s3.py                                      # to a moto server that this program starts
    python examples/async_s3.py s3://bucket/run                      # credentials and endpoint as for boto3

Training waits for a copy in memory. A thread uploads it while training continues, and writes `COMMIT` last. So readers
of the bucket find complete steps only, even if the process is killed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch.nn import functional
from train_fsdp import Model, fork_ranks, make_batch, print_rank0

import shardckpt
from shardckpt.core import fully_shard

STEPS, EVERY = 12, 4


def train(root: str, steps: int) -> None:
    """Restore the newest step if there is one, then train on this rank and save in the background."""
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    state = {"model": model, "optim": optimizer}

    checkpoints = shardckpt.Checkpointer(root, keep_last=2, save_every=EVERY)
    start = checkpoints.restore(state) or 0
    print_rank0(f"world size {dist.get_world_size()}, from step {start}")
    handle = None
    for step in range(start + 1, start + steps + 1):
        ids = make_batch(step)
        loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        suffix = " (uploading meanwhile)" if handle is not None and not handle.done() else ""
        print_rank0(f"  step {step}: loss {loss.item():.3f}{suffix}")
        if checkpoints.should_save(step):
            handle = checkpoints.async_save(step, state)  # waits if the previous save is still running
    if handle is not None:
        handle.result()  # committed on all ranks; an error of the save is raised here
        times = handle.timings
        upload = times.write + times.publish
        print_rank0(f"  last save: training waited {times.stall:.2f} s, the upload took {upload:.2f} s")


@contextmanager
def serve_bucket() -> Iterator[str]:
    """Run moto's S3 server in this process and yield the URL of a folder in a bucket."""
    import boto3  # noqa: PLC0415  (not needed if a bucket is given)
    from moto.server import ThreadedMotoServer  # noqa: PLC0415

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # otherwise every request is logged
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


def run_jobs(root: str) -> None:
    """Run both jobs, then list the steps and read a part of a tensor."""
    fork_ranks(partial(train, root, STEPS), 2)
    fork_ranks(partial(train, root, 2), 1)
    checkpoints = shardckpt.Checkpointer(root)
    print(f"complete steps in {root}: {', '.join(map(str, checkpoints.steps()))}")
    weight = shardckpt.open(checkpoints.path(checkpoints.steps()[-1]))["model.head.weight"]
    print(f"head.weight: {weight}; norm of its first row, the only part that is read: {weight[0].norm():.3f}")


def main() -> None:
    """Use the given bucket, or start a server."""
    if len(sys.argv) > 1:
        run_jobs(sys.argv[1])
        return
    with serve_bucket() as root:
        run_jobs(root)


if __name__ == "__main__":
    main()
