"""The recipes of docs/share-work.md: on Ray and Dask, and with the variables of Slurm and Kubernetes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

import shardckpt

pytestmark = [pytest.mark.full, pytest.mark.long]

PAGE = Path(__file__).parents[3] / "docs" / "share-work.md"
DEADLINE_S = 120


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "step"
    shardckpt.save({"model": {f"layers.{at}.w": torch.randn(50, 50) for at in range(8)}}, path)
    return path


@pytest.fixture
def plan(step: Path, tmp_path: Path) -> Path:
    """A plan of eight tasks; `one` is what one process writes."""
    shardckpt.consolidate(step, tmp_path / "one", max_shard_size=10_500)
    status = shardckpt.plan_tasks(tmp_path / "plan.json", "consolidate", step, tmp_path / "many", max_shard_size=10_500)
    assert status.task_count == 8
    return tmp_path / "plan.json"


def read_recipe(language: str, number: int = 0) -> str:
    """Return a block of the page."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)[number]


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def require_result(plan: Path) -> None:
    """Require what one process writes, and nothing else."""
    assert read_files(plan.with_name("many")) == read_files(plan.with_name("one"))
    assert not list(plan.parent.glob(".many*"))


def run_recipe(name: str, *arguments: str) -> subprocess.Popen[bytes]:
    recipes = [read_recipe("python", at) for at in range(3)]
    [script] = [text for text in recipes if f"import {name}\n" in text or f"from {name} " in text]
    return subprocess.Popen([sys.executable, "-c", script, *arguments])


def wait_for_a_task(plan: Path) -> None:
    """Wait until a task has ended."""
    deadline = time.monotonic() + DEADLINE_S
    while len(shardckpt.read_plan_status(plan).missing) == 8:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def start_tasks(command: str, variable: str, plan: Path, numbers: range) -> list[subprocess.Popen[bytes]]:
    """Start a process for each number, as the scheduler starts a container or an array task."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    command = re.sub(r"\S*/plan\.json", str(plan), command)
    return [
        subprocess.Popen(["sh", "-c", command], env={**os.environ, "PATH": path, variable: str(number)})
        for number in numbers
    ]


@pytest.mark.parametrize("scheduler", ["Slurm", "Kubernetes"])
def test_an_array_of_tasks_two_of_which_are_killed_is_repeated(scheduler, plan):
    if scheduler == "Slurm":
        command, variable = read_recipe("bash").splitlines()[-1], "SLURM_ARRAY_TASK_ID"
    else:
        job = yaml.safe_load(read_recipe("yaml"))
        command, variable = job["spec"]["template"]["spec"]["containers"][0]["command"][2], "JOB_COMPLETION_INDEX"
    tasks = start_tasks(command, variable, plan, range(8))
    for task in tasks[2:4]:
        os.kill(task.pid, signal.SIGKILL)
    codes = [task.wait(DEADLINE_S) for task in tasks]
    assert [code for code in codes if code not in (0, -signal.SIGKILL)] == []
    again = start_tasks(command, variable, plan, range(8))
    assert [task.wait(DEADLINE_S) for task in again] == [0] * 8
    shardckpt.commit_plan(plan)
    require_result(plan)


def test_dask_runs_the_tasks_although_a_worker_is_killed(plan):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, worker_dashboard_address=None
    ) as cluster:
        recipe = run_recipe("distributed", str(plan), cluster.scheduler_address)
        wait_for_a_task(plan)
        os.kill(next(iter(cluster.workers.values())).process.process.pid, signal.SIGKILL)
        assert recipe.wait(DEADLINE_S) == 0
    require_result(plan)


def test_ray_runs_the_tasks_although_a_node_is_removed(plan):
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    try:
        second = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
        os.environ["RAY_ADDRESS"] = cluster.address
        recipe = run_recipe("ray", str(plan))
        wait_for_a_task(plan)
        cluster.remove_node(second, allow_graceful=False)
        assert recipe.wait(DEADLINE_S) == 0
    finally:
        os.environ.pop("RAY_ADDRESS", None)
        cluster.shutdown()
    require_result(plan)
