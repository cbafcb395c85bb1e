"""Ranks on a simulated device, "sim": its own memory, poisoned when it is given and freed; copies to the host counted.

`sim.cpp` is the device. Ranks load it after they were forked: the parent and its other tests never see it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sysconfig
import tempfile
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from tests.kit.ranks import harness

NAME = "shardckpt_sim"
SOURCE = pathlib.Path(__file__).with_name("sim.cpp")
CONSTRAINTS = pathlib.Path(__file__).resolve().parents[3] / "constraints.txt"
FLAGS = ("-std=c++17", "-O0", "-fPIC", "-shared", "-w", f"-DSIM_MODULE={NAME}")

# ------------------------------------------------------------------------------------------------------------ build


def folder() -> pathlib.Path:
    """Return a folder of this user for what one compiler makes of this source, torch and Python."""
    words = (torch.__version__, platform.python_version(), sysconfig.get_platform(), *FLAGS)
    key = hashlib.sha256(SOURCE.read_bytes() + " ".join(words).encode()).hexdigest()[:16]
    made = pathlib.Path(tempfile.gettempdir()) / f"shardckpt-sim-{os.getuid()}" / key
    made.mkdir(parents=True, exist_ok=True, mode=0o700)
    if made.parent.stat().st_uid != os.getuid():
        pytest.skip(f"the simulated device needs a folder of its own, and {made.parent} is another user's")
    return made


@functools.cache
def library() -> pathlib.Path:
    """Return the compiled device; the first process compiles it, the others wait for that.

    A test that calls this is skipped without a compiler.
    """
    pinned = re.search(r"^torch==(\S+)$", CONSTRAINTS.read_text(encoding="utf-8"), re.MULTILINE)
    if pinned is None or torch.__version__.split("+")[0] != pinned[1]:
        pytest.skip(f"the simulated device is compiled against the C++ of the pinned torch, not {torch.__version__}")
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    headers = pathlib.Path(sysconfig.get_paths()["include"])
    if compiler is None:
        pytest.skip("the simulated device needs a C++ compiler: g++, or $CXX")
    if not (headers / "Python.h").exists():
        pytest.skip(f"the simulated device needs the headers of Python in {headers}")
    path = folder() / f"{NAME}.so"
    with (path.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            _compile(compiler, headers, path)
    return path


def _compile(compiler: str, headers: pathlib.Path, path: pathlib.Path) -> None:
    root = pathlib.Path(torch.__file__).parent
    places = [root / "include", root / "include/torch/csrc/api/include", headers]
    libraries = ["torch", "torch_cpu", "torch_python", "c10"]
    made = path.with_suffix(".new")
    command = [compiler, *FLAGS, *(f"-I{place}" for place in places), str(SOURCE), "-o", str(made)]
    command += [f"-L{root / 'lib'}", *(f"-l{each}" for each in libraries)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{SOURCE.name} does not compile with torch {torch.__version__}:\n{done.stderr[-4000:]}")
    made.replace(path)


# ------------------------------------------------------------------------------------------------------ in the ranks

_LOADED: types.ModuleType | None = None


def _load(path: pathlib.Path) -> types.ModuleType:
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(NAME, loader, origin=str(path)))
    loader.exec_module(module)
    return module


class Stream(torch.Stream):
    """What `torch.cuda.Stream` is for CUDA."""

    def __new__(cls, device: Any = None, priority: int = 0) -> Stream:
        return super().__new__(cls, device="sim:0", priority=priority)


class Event(torch.Event):
    """What `torch.cuda.Event` is for CUDA."""

    def __new__(cls, *_args: Any, **_settings: Any) -> Event:
        return super().__new__(cls, device="sim:0")


def _build_device_module() -> types.ModuleType:
    """Return `torch.sim`, in the words of `torch.cuda`."""
    made = types.ModuleType("torch.sim")
    made.Stream, made.Event = Stream, Event
    made.current_stream = lambda device=None: torch.accelerator.current_stream()
    made.stream = lambda stream: stream if stream is not None else contextlib.nullcontext()
    made.synchronize = lambda device=None: _LOADED.synchronize()
    made.device = lambda device: contextlib.nullcontext()
    made.device_count = lambda: 1
    made.current_device = lambda: 0
    made.set_device = lambda device: None
    made.is_available = made.is_initialized = lambda: True
    made._is_in_bad_fork = lambda: False
    made.manual_seed = made.manual_seed_all = lambda seed: None
    made.get_rng_state = lambda device=None: torch.get_rng_state()
    made.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    made.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return made


def _build_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return _LOADED.group(dist.ProcessGroupGloo(store, rank, size, timeout))


def enter(path: pathlib.Path) -> None:
    """Make "sim" a device of this process, and a backend that moves its tensors alone; join the ranks by it."""
    global _LOADED  # noqa: PLW0603
    _LOADED = _load(path)
    _LOADED.add_to_autograd()
    torch.utils.rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _build_device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    dist.Backend.register_backend("sim", _build_group, devices=["sim"])
    store, rank, world = _get_default_store(), dist.get_rank(), dist.get_world_size()
    timeout = dist.distributed_c10d._get_default_timeout("gloo")
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("sim", store=dist.PrefixStore("sim", store), rank=rank, world_size=world, timeout=timeout)


def ranks(world: int, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Run `body(rank, world, *args)` on forked ranks that have the device, joined by its own backend alone."""
    path = library()

    def entered(rank: int, world: int, *args: Any) -> Any:
        enter(path)
        return body(rank, world, *args)

    return harness.run(world, entered, *args)


# ------------------------------------------------------------------------------------------------------------ counts


@dataclass(frozen=True)
class Copies:
    """Copies between the device and the host since a moment.

    Attributes:
        blocking: Those that the host waited for by request.
        pageable: Non-blocking ones that it waited for all the same: the memory of the host was not pinned.
        pinned: Those that ran beside it.
        reads: Times it waited for a value: `item()`, `equal`, `nonzero`.
        syncs: Times it waited for an event, a stream or the device.
    """

    blocking: int = 0
    pageable: int = 0
    pinned: int = 0
    reads: int = 0
    syncs: int = 0

    @property
    def waits(self) -> int:
        """Times the host waited for a copy or a value."""
        return self.blocking + self.pageable + self.reads


@contextlib.contextmanager
def counted() -> Iterator[Callable[[], Copies]]:
    """Count copies inside the context; call what it yields for the counts."""
    _LOADED.reset()
    yield _counts


def unfinished() -> int:
    """Return how many copies to and from pinned memory nobody has waited for."""
    return _LOADED.unfinished()


def _counts() -> Copies:
    found = _LOADED.counts()
    both = {kind: found["to_host"][kind] + found["to_device"][kind] for kind in ("blocking", "pageable", "pinned")}
    return Copies(**both, reads=found["reads"], syncs=found["syncs"])


# ------------------------------------------------------------------------------------------------------------ memory


@contextlib.contextmanager
def refused(first: int, count: int = 1) -> Iterator[None]:
    """Refuse allocations on the device inside the context with `torch.OutOfMemoryError`.

    Args:
        first: The number of the first one, from 1.
        count: How many.
    """
    _LOADED.refuse(first, first + count)
    try:
        yield
    finally:
        _LOADED.refuse(0, 0)


def allocations(call: Callable[[], Any]) -> int:
    """Return the number of allocations on the device that a call makes."""
    _LOADED.refuse(0, 0)
    call()
    return _LOADED.allocations()


def peak(call: Callable[[], Any]) -> int:
    """Return the most bytes of the device that are in use at a time during a call, those from before it included."""
    _LOADED.reset_peak()
    call()
    return _LOADED.peak()
