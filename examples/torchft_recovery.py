"""A replica of torchft that joins later receives the state of another one, without pickle.

    pip install '.[torchft]'
    python examples/torchft_recovery.py                              # two replicas on the CPU, one thread each

The first replica trains alone. After its third step the second one joins, with other weights. torchft notices that it
is behind, and the state travels through `ShardckptTransport`. At the end both have the same weights, bit for bit.
"""

from __future__ import annotations

import os

os.environ.setdefault("RUST_LOG", "error")  # before torchft is imported: no log of its servers

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from shardckpt.integrations.torchft import ShardckptTransport

STEPS, JOINED_AT, LIMIT = 8, 3, timedelta(seconds=30)


def train(replica: int, lighthouse: str, may_join: threading.Event, has_joined: threading.Event) -> list[torch.Tensor]:
    """Train one replica, and return its weights."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def get_state() -> dict[str, Any]:
        return {"model": model.state_dict(), "optim": plain.state_dict()}

    def load_state(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optim"])
        print(f"replica {replica} received the state of another one", flush=True)

    manager = Manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        load_state_dict=load_state,
        state_dict=get_state,
        min_replica_size=1,
        replica_id=f"replica{replica}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        lighthouse_addr=lighthouse,
        checkpoint_transport=ShardckptTransport(LIMIT, host="localhost"),  # was: HTTPTransport, the default
    )
    model_of_all, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, plain)
    if replica:
        has_joined.set()
    try:
        while manager.current_step() < STEPS:
            if not replica and manager.current_step() == JOINED_AT:
                print(f"replica 0 is at step {JOINED_AT}", flush=True)
                may_join.set()
                has_joined.wait(LIMIT.total_seconds())
                time.sleep(1)  # the lighthouse hears of the other replica
            optimizer.zero_grad()
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * manager.current_step() + replica))
            model_of_all(inputs).square().mean().backward()
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]
    finally:
        manager.shutdown(wait=False)


def main() -> None:
    """Train two replicas, and compare them."""
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=2000)
    events = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(train, 0, lighthouse.address(), *events)
        events[0].wait(LIMIT.total_seconds())
        second = pool.submit(train, 1, lighthouse.address(), *events)
        same = all(map(torch.equal, first.result(), second.result()))
    lighthouse.shutdown()
    print(f"weights after step {STEPS}: {'equal, bit for bit' if same else 'DIFFERENT'}", flush=True)
    if not same:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
