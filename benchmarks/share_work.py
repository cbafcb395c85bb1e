"""Measure plans, tasks and commits: two tasks beside one process, and a checkpoint of 40 TB in 20,000 files.

    TMPDIR=/dev/shm python benchmarks/share_work.py [--cases large,pair] [--rounds 5] [--record]

`pair` casts 2 GB of float32 to bfloat16: one process on one core, and two tasks on a core each, from the start of their
processes to the end. (One process uses both cores if it may, and a slow disk hides the difference.) `large` has files
with real headers whose data are holes. Its tasks write nothing; results are made by hand, so that the commit finds what
4,096 tasks would leave.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from goal_cases import Cases, Row, run_cases

import shardckpt
from shardckpt.offline.tasks.part_results import PartResults
from shardckpt.offline.tasks.task_plan import read_plan
from shardckpt.storage import local_publication
from shardckpt.storage.publish import JoinedPublication
from shardckpt.storage.resolve_url import read_version

TENSORS, ROWS = 64, 8 << 20  # 2 GB of float32
FILES, TENSORS_A_FILE, FILE_BYTES, TASKS = 20_000, 5, 2 << 30, 4096
COMMAND = str(Path(sys.executable).with_name("shardckpt"))
OPTIONS = ["--dtype", "bf16", "--max-shard-size", "150MB", "--jobs", "1", "--quiet"]


def run_together(commands: Sequence[Sequence[str]]) -> float:
    """Return the seconds until all processes have ended, each on a core of its own."""
    start = time.perf_counter()
    processes = [
        subprocess.Popen(
            ["taskset", "-c", f"{core}", COMMAND, *words], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        for core, words in enumerate(commands)
    ]
    assert [process.wait() for process in processes] == [0] * len(processes)
    return time.perf_counter() - start


def pair(folder: Path, rounds: int) -> Iterator[Row]:
    """Measure two tasks beside one process."""
    source, ratios = str(folder / "step"), []
    shardckpt.save({"model": {f"w{at}": torch.randn(ROWS) for at in range(TENSORS)}}, source)
    for number in range(rounds + 1):
        one, many, plan = (str(folder / f"{name}{number}") for name in ("one", "many", "plan"))
        alone = run_together([["consolidate", source, one, *OPTIONS]])
        run_together([["consolidate", source, many, *OPTIONS, "--plan", plan]])
        ratios.append(run_together([["task", plan, "--share", f"{k}/2"] for k in (1, 2)]) / alone)
        run_together([["commit", plan]])
        assert shardckpt.diff(one, many).same
        for done in (one, many):
            subprocess.run(["rm", "-r", done], check=True)
    yield Row("shared work", "two tasks, each on a core", median(ratios[1:]), 0.6, "x one on a core")


def write_large(folder: Path) -> None:
    """Write files whose tensors are holes, and their index."""
    folder.mkdir()
    rows, weight_map = FILE_BYTES // TENSORS_A_FILE // 2 // 8192, {}
    for number in range(FILES):
        head, nbytes, name = {}, rows * 8192 * 2, f"model-{number:05d}.safetensors"
        for at in range(TENSORS_A_FILE):
            tensor = f"model.layers.{number}.mlp.experts.{at}.weight"
            offsets = [at * nbytes, (at + 1) * nbytes]
            head[tensor] = {"dtype": "BF16", "shape": [rows, 8192], "data_offsets": offsets}
            weight_map[tensor] = name
        text = json.dumps(head).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / name, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + TENSORS_A_FILE * nbytes)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


class Started(BaseException):
    """Ends a task where it would write."""


def stop(*_: object) -> None:
    raise Started


def large(folder: Path, rounds: int) -> Iterator[Row]:  # noqa: ARG001  (each call takes seconds)
    """Measure a plan, the start of a task, and a commit."""
    write_large(folder / "source")
    plan = str(folder / "plan.json")
    with mock.patch.object(local_publication, "require_space"):  # no disk here holds 40 TB
        start = time.process_time()
        shardckpt.plan_tasks(plan, "consolidate", folder / "source", folder / "target", tasks=TASKS)
        yield Row("shared work", "plan of 40 TB in 20,000 files", time.process_time() - start, 60)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        yield Row("shared work", "its memory, with torch", peak, 2, "GB")
        stored = read_plan(plan)
        results = PartResults(stored)
        for task in stored.tasks:
            for part in task:
                path = Path(stored.staging, part.name)
                path.touch()
                os.truncate(path, part.nbytes)
                results.write(part, {"version": read_version(stored.staging, part.name), "hashes": ""})
        path.unlink()  # the last task is left to start, all others have ended
        start = time.process_time()
        with mock.patch.object(JoinedPublication, "create", stop):
            try:
                shardckpt.run_task(plan, TASKS - 1)
            except Started:
                yield Row("shared work", "start of one of its 4,096 tasks", time.process_time() - start, 0.3)
        path.touch()
        os.truncate(path, part.nbytes)
        results.write(part, {"version": read_version(stored.staging, part.name), "hashes": ""})
        start = time.process_time()
        shardckpt.commit_plan(plan)
        yield Row("shared work", "its commit", time.process_time() - start, 60)


CASES: Cases = {"large": large, "pair": pair}  # the peak of the second one would count in the first

if __name__ == "__main__":
    run_cases(__doc__, "Shared work", CASES, rounds=5)
