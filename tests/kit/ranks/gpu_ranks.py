"""Ranks for the tests of a GPU: new processes, since a process that was forked after CUDA was used cannot use it.

python tests/kit/ranks/gpu_ranks.py FOLDER RANK WORLD BACKEND DEVICE SCENARIO
"""

from __future__ import annotations

import datetime
import importlib
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TIMEOUT = 600.0  # seconds
MODULE = "gpu_scenarios"


def run(world: int, backend: str, device: str, scenario: str, *args: Any, **environment: str) -> list[Any]:
    """Run a scenario on new processes, and return what each rank gave.

    Args:
        world: Number of ranks.
        backend: As `init_process_group` takes it.
        device: Type of the device; all ranks share the first.
        scenario: Name of a function of `gpu_scenarios`.
        args: Its arguments behind rank, world and device; they are pickled.
        environment: More variables of the environment.

    Raises:
        AssertionError: A rank failed; the message has its output.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "args").write_bytes(pickle.dumps(args))
        more = {"PYTHONPATH": os.pathsep.join(sys.path), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, name, str(rank), str(world), backend, device, scenario],
                env={**os.environ, **more, **environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world)
        ]
        texts = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
        failed = [f"rank {rank}:\n{texts[rank][-8000:]}" for rank, each in enumerate(processes) if each.returncode]
        if failed:
            raise AssertionError("\n".join(failed))
        return [pickle.loads((folder / f"gave.{rank}").read_bytes()) for rank in range(world)]


def main() -> None:
    """Be one rank."""
    import torch
    import torch.distributed as dist

    name, rank, world, backend, device, scenario = sys.argv[1:]
    folder = Path(name)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if device == "cuda":
        torch.cuda.set_device(0)
    dist.init_process_group(
        backend,
        store=dist.FileStore(str(folder / "store"), int(world)),
        rank=int(rank),
        world_size=int(world),
        timeout=datetime.timedelta(seconds=120),
    )
    body = getattr(importlib.import_module(MODULE), scenario)
    value = body(int(rank), int(world), device, *pickle.loads((folder / "args").read_bytes()))
    (folder / f"gave.{rank}").write_bytes(pickle.dumps(value))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
