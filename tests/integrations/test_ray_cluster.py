"""Ray Train on nodes of a real cluster: a worker killed in a step, a node lost with its memory, a node drained."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import shardckpt
from tests.kit.models.torch_limits import RUNS_FULLY_SHARD_ON_CPU

pytest.importorskip("ray.train", exc_type=ImportError)
import ray.train
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DRAIN_NODE_REASON_PREEMPTION
from ray.train.torch import TorchTrainer

# Ray starts some ten processes, and each attempt of a training two, which import torch.
pytestmark = [
    pytest.mark.full,
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not RUNS_FULLY_SHARD_ON_CPU, reason="torch's `fully_shard` of this torch runs on GPUs only"),
]
LAST, KILLED_IN, LOST_IN, SAVE_EVERY = 8, 3, 6, 4
WAIT_S = 300.0
ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {**os.environ, "MKL_CBWR": "COMPATIBLE", "OMP_NUM_THREADS": "1"}
"""Products of matrices do not depend on addresses and threads."""

NAMES = [f"ray-{os.getpid()}-{number}" for number in range(3)]


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))


def compute_loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    """Return the loss of a step's samples, the same on all ranks, so that means of gradients are exact."""
    samples = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    return functional.mse_loss(model(samples), samples.flip(1))


def train_alone() -> dict[int, float]:
    model = build_model()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), {}
    for step in range(1, LAST + 1):
        loss = compute_loss(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
    return losses


def train(config: dict[str, Any]) -> None:
    """Train on a worker; note the attempt's restored step, and each loss."""
    from shardckpt.events import RestoreEvent
    from shardckpt.integrations.ray import RayCheckpointer

    folder, rank, places = Path(config["folder"]), ray.train.get_context().get_world_rank(), []
    model = fully_shard(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optimizer": optimizer}
    ck = RayCheckpointer(
        save_every=SAVE_EVERY,
        tiers=[shardckpt.PeerMemory(every=1, copies=1, max_bytes="50MB")],
        keep_last=2,
        on_event=lambda event: places.append(event.tier) if isinstance(event, RestoreEvent) else None,
    )
    restored = ck.restore(state)
    if rank == 0:
        note(folder, restored=restored, place=places[-1] if places else "", node=os.environ["SHARDCKPT_NODE"])
    for step in range((restored or 0) + 1, LAST + 1):
        loss = compute_loss(model, step)
        loss.backward()
        if rank == 1 and is_first(folder, step):
            if step == KILLED_IN:
                os.kill(os.getpid(), signal.SIGKILL)
            ask_to_lose_this_node(folder)
            time.sleep(WAIT_S)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            note(folder, step=step, loss=loss.item())
        ck.save(step, state, metrics={"loss": loss.item()})
        ck.wait()


def note(folder: Path, **fields: object) -> None:
    with (folder / "notes.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(fields) + "\n")


def ask_to_lose_this_node(folder: Path) -> None:
    (folder / "lose.new").write_text(os.environ["SHARDCKPT_NODE"])
    (folder / "lose.new").rename(folder / "lose")


def is_first(folder: Path, step: int) -> bool:
    """Return whether an incident's step is trained for the first time."""
    if step not in (KILLED_IN, LOST_IN) or (folder / str(step)).exists():
        return False
    (folder / str(step)).touch()
    return True


@pytest.fixture
def nodes() -> Iterator[tuple[Cluster, dict[str, Any]]]:
    """A cluster, and its three nodes with a place for a worker each, by name."""
    size = {"object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **size})
    try:
        ray.init(address=cluster.address, log_to_driver=False)
        named = {
            name: cluster.add_node(num_cpus=1, env_vars={**SETTINGS, "SHARDCKPT_NODE": name}, **size) for name in NAMES
        }
        yield cluster, named
    finally:
        ray.shutdown()
        cluster.shutdown()
        for name in NAMES:
            shutil.rmtree(find_memory(name), ignore_errors=True)


def find_memory(node: str) -> Path:
    """Return the folder for the captures of a node; Ray's workers do not see what tests change in this process."""
    return Path(f"/dev/shm/shardckpt-{os.geteuid()}-{node}")


def wait_for_file(file: Path, content: str = "") -> None:
    deadline = time.monotonic() + WAIT_S
    while not (file.exists() and content in file.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)


def lose_a_node(cluster: Cluster, named: dict[str, Any], folder: Path) -> None:
    """Remove the node that a worker names, and its memory."""
    wait_for_file(folder / "lose")
    lost = (folder / "lose").read_text()
    cluster.remove_node(named[lost], allow_graceful=False)
    shutil.rmtree(find_memory(lost))


def test_memory_of_the_nodes_left_restores_after_a_killed_worker_and_a_lost_node(
    nodes: tuple[Cluster, dict[str, Any]], tmp_path: Path
) -> None:
    run = ray.train.RunConfig(
        name="run", storage_path=str(tmp_path / "store"), failure_config=ray.train.FailureConfig(max_failures=2)
    )
    scaling = ray.train.ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD")
    config = {"folder": str(tmp_path)}
    with ThreadPoolExecutor() as pool:
        incident = pool.submit(lose_a_node, *nodes, tmp_path)
        result = TorchTrainer(train, train_loop_config=config, scaling_config=scaling, run_config=run).fit()
        incident.result(WAIT_S)

    notes = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    attempts = [(each["restored"], each["place"]) for each in notes if "restored" in each]
    assert attempts == [(None, ""), (KILLED_IN - 1, "memory"), (LOST_IN - 1, "memory")]
    code = "import json; from tests.integrations.test_ray_cluster import train_alone; print(json.dumps(train_alone()))"
    alone = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=SETTINGS, stdout=subprocess.PIPE, check=True)
    expected = {int(step): loss for step, loss in json.loads(alone.stdout).items()}
    losses = {(each["step"], each["loss"]) for each in notes if "step" in each}  # those of repeated steps are equal
    assert losses == set(expected.items())
    assert result.metrics == {"step": LAST, "loss": expected[LAST]}
    steps = shardckpt.ls(tmp_path / "store" / "run" / "steps").complete
    assert [step.number for step in steps] == [4, 8]
    assert all(shardckpt.verify(step.path).ok for step in steps)


def train_on_a_node_that_is_taken_away(config: dict[str, Any]) -> None:
    """Train alone; ask the test to drain the node in step 2, and stop only when the node is gone."""
    from shardckpt.integrations.ray import RayCheckpointer

    folder, state = Path(config["folder"]), {"trained": torch.zeros(4)}
    ck = RayCheckpointer(save_every=1000)
    restored = ck.restore(state) or 0
    note(folder, restored=restored)
    with ck.save_on_signal():
        step = restored
        while not restored or step < restored + 2:
            step += 1
            state["trained"] += 1
            if step == 2:
                ask_to_lose_this_node(folder)
            if ck.should_save(step):
                ck.save(step, state)
                note(folder, saved=step)
            time.sleep(0.1)
    note(folder, trained=state["trained"].tolist(), ended=step)


def drain_a_node(cluster: Cluster, named: dict[str, Any], folder: Path) -> None:
    """Drain the node that a worker names, as an autoscaler does, and remove it once a step is saved."""
    wait_for_file(folder / "lose")
    lost = named[(folder / "lose").read_text()]
    client, deadline = ray._private.worker.global_worker.gcs_client, int(time.time() * 1000) + 200_000
    is_accepted, refusal = client.drain_node(lost.node_id, DRAIN_NODE_REASON_PREEMPTION, "spot", deadline)
    assert is_accepted, refusal
    wait_for_file(folder / "notes.jsonl", "saved")
    cluster.remove_node(lost, allow_graceful=False)


def test_a_drained_node_saves_its_step_and_another_continues_from_it(
    nodes: tuple[Cluster, dict[str, Any]], tmp_path: Path
) -> None:
    run = ray.train.RunConfig(
        name="run", storage_path=str(tmp_path / "store"), failure_config=ray.train.FailureConfig(max_failures=1)
    )
    with ThreadPoolExecutor() as pool:
        incident = pool.submit(drain_a_node, *nodes, tmp_path)
        scaling, config = ray.train.ScalingConfig(num_workers=1), {"folder": str(tmp_path)}
        TorchTrainer(
            train_on_a_node_that_is_taken_away, train_loop_config=config, scaling_config=scaling, run_config=run
        ).fit()
        incident.result(WAIT_S)
    first, saved, second, end = [json.loads(line) for line in (tmp_path / "notes.jsonl").read_text().splitlines()]
    step = saved["saved"]
    assert (first, second, step > 2) == ({"restored": 0}, {"restored": step}, True)
    assert end == {"trained": [step + 2.0] * 4, "ended": step + 2}
    assert [each.number for each in shardckpt.ls(tmp_path / "store" / "run" / "steps").complete] == [step]
