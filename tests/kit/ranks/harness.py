"""Ranks for tests: forked from a parent that has torch, joined by gloo; what each gave, raised, waits for."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import io
import multiprocessing
import os
import pathlib
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection
from typing import Any

import pytest
import torch

# What is imported when it is first used, by optimizers, wrappers, states and saves: once here, not in every rank.
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardckpt.checkpointer
import shardckpt.state.interop.torch_dcp_api  # noqa: F401
from shardckpt import core
from tests.kit.models.torch_limits import find_reason
from tests.kit.ranks.forks import make_forks_cheap
from tests.kit.ranks.stepping import keep_known_shapes, step_local_tensors
from tests.kit.ranks.streams import checked

for _name in ("torch.profiler._cupti_monitor", "torch.utils.serialization"):
    with contextlib.suppress(ImportError):  # torch 2.6 has no such modules
        importlib.import_module(_name)

# Starts autograd's engine. With torch 2.15 a compiler gives torch a device, for which the engine starts threads if that
# comes first, and then refuses every backward pass of a fork.
torch.ones((), requires_grad=True).backward()
torch.manual_seed(0)  # imports what it tells devices with: here too once for all

make_forks_cheap()
FORK = multiprocessing.get_context("fork")
# Seconds, long enough for a machine with other work: only what hangs waits for them.
TIMEOUT = 120.0  # after which ranks that gave nothing hang
GROUP_TIMEOUT = 20.0  # that a collective waits for the other ranks
JOIN_TIMEOUT = 60.0  # that ranks wait for each other to begin, however short the timeout of the test's group is
GRACE = 6.0  # that the other ranks get once one has raised
AROUND: list[Callable[[], contextlib.AbstractContextManager[Any]]] = []
"""Contexts in which every rank runs its body."""
if os.environ.get("SHARDCKPT_TEST_STREAMS"):
    AROUND.append(checked)


@dataclass(frozen=True)
class Call:
    """One collective as a rank issued it; sizes in elements of one rank."""

    op: str
    sent: int
    received: int
    dtype: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.op}({self.sent}->{self.received} {self.dtype} on {self.ranks})"


@dataclass(frozen=True)
class Raised:
    """An exception of a rank, as text: exceptions themselves need not survive pickling."""

    name: str
    bases: tuple[str, ...]
    message: str
    trace: str

    def is_a(self, kind: type[BaseException]) -> bool:
        """True when the exception was of `kind` or a class derived from it."""
        return kind.__name__ in self.bases


@dataclass(frozen=True)
class Outcome:
    """What became of one rank: a value, an exception, or neither (it hung or died)."""

    rank: int
    value: Any = None
    raised: Raised | None = None
    waits: str | None = None
    calls: list[str] = field(default_factory=list)


class RanksError(AssertionError):
    """Some ranks raised or hang; the message tells of each rank what it did last."""


# ----------------------------------------------------------------------------------------------- collectives


_LOG: list[Call] = []
_TRACE: io.RawIOBase | None = None

# Method of ProcessGroup -> (our name, position of what comes in, position of what goes out). Every Python collective
# ends in one of these, also those whose function an engine bound before the test began.
_METHODS = {
    "all_gather_single": ("all_gather", 0, 1),
    "_allgather_base": ("all_gather", 0, 1),
    "reduce_scatter_single": ("reduce_scatter", 0, 1),
    "_reduce_scatter_base": ("reduce_scatter", 0, 1),
    "allgather": ("all_gather", 0, 1),
    "reduce_scatter": ("reduce_scatter", 0, 1),
    "allreduce": ("all_reduce", 0, 0),
    "allreduce_coalesced": ("all_reduce", 0, 0),
    "all_gather_single_coalesced": ("all_gather", 0, 1),
    "allgather_into_tensor_coalesced": ("all_gather", 0, 1),
    "reduce_scatter_single_coalesced": ("reduce_scatter", 0, 1),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0, 1),
    "all_to_all_single": ("all_to_all", 0, 1),
    "alltoall_base": ("all_to_all", 0, 1),
    "alltoall": ("all_to_all", 0, 1),
    "broadcast": ("broadcast", 0, 0),
    "reduce": ("reduce", 0, 0),
    "gather": ("gather", 0, 1),
    "scatter": ("scatter", 0, 1),
    "send": ("send", 0, 0),
    "recv": ("recv", 0, 0),
    "barrier": ("barrier", None, None),
}


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _flat(item)] if isinstance(value, (list, tuple)) else []


def _call(name: str, group: Any, args: tuple[Any, ...]) -> Call:
    op, into, out = _METHODS[name]
    received = _flat(args[into]) if into is not None and len(args) > into else []
    sent = _flat(args[out]) if out is not None and len(args) > out else []
    dtype = str((sent or received)[0].dtype).removeprefix("torch.") if sent or received else "-"
    return Call(op, sum(t.numel() for t in sent), sum(t.numel() for t in received), dtype, group.size())


def _watched(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = _call(name, self, args or tuple(kwargs.values()))
        _LOG.append(call)
        if _TRACE is not None:
            _TRACE.write(f"{call}\n".encode())
        return original(self, *args, **kwargs)

    return watched


def _watch_collectives() -> None:
    for name in _METHODS:
        original = getattr(dist.ProcessGroup, name, None)
        if original is not None:
            setattr(dist.ProcessGroup, name, _watched(name, original))


@contextlib.contextmanager
def recorded() -> Iterator[list[Call]]:
    """Collect the collectives that this rank issues inside, in order; the list is filled when the context ends."""
    calls: list[Call] = []
    start = len(_LOG)
    try:
        yield calls
    finally:
        calls.extend(_LOG[start:])


def mark() -> int:
    """Where the log of this rank stands, for `since`."""
    return len(_LOG)


def since(start: int) -> list[Call]:
    """The collectives this rank issued since `mark()` gave `start`."""
    return _LOG[start:]


def note(text: str) -> None:
    """Write an event of the test's own between the collectives."""
    _LOG.append(Call(text, 0, 0, "-", 0))


def count(calls: list[Call], op: str) -> int:
    """How many of `calls` are `op`."""
    return sum(call.op == op for call in calls)


# --------------------------------------------------------------------------------------------------- storage


def live_storages() -> dict[int, int]:
    """Address and bytes of every storage that a tensor of this rank holds, tensors made before the fork left out."""
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            with contextlib.suppress(NotImplementedError, RuntimeError):
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = max(storage.nbytes(), found.get(storage.data_ptr(), 0))
    outermost: dict[int, int] = {}
    end = 0
    for start in sorted(found):  # a storage may be a part of another
        if start + found[start] > end:
            outermost[start], end = found[start], start + found[start]
    return outermost


def stored_bytes() -> int:
    """Bytes of all storages that are held, each counted once.

    A backend's thread may hold what it sent for a moment after the collective was waited for: what goes by itself is
    not counted.
    """
    gc.collect()
    found, before = sum(live_storages().values()), -1
    while found != before:
        time.sleep(0.01)
        found, before = sum(live_storages().values()), found
    return found


# ----------------------------------------------------------------------------------------------------- ranks


def _raised(error: BaseException) -> Raised:
    bases = tuple(base.__name__ for base in type(error).__mro__)
    trace = "".join(traceback.format_exception(error))
    return Raised(type(error).__name__, bases, str(error), trace)


def _join(rank: int, world: int, folder: pathlib.Path, timeout: float) -> None:
    # DTensor keeps the mesh of each operation that it knows, with the name of the group of `warm_up`. A group that the
    # parent could not make has taken that name.
    distributed_c10d._world.group_count = 0
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), world),
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=JOIN_TIMEOUT),
    )
    distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout))  # torch has no public name for it


def wake_without_preemption() -> None:
    """Let threads of this process that wake wait for the thread that runs, where the system can.

    gloo's thread polls without a pause while another one holds the lock of a connection. If it preempts that one, as it
    does if there are more ranks than cores, it polls until its turn ends: up to a quarter of the CPU time of ranks.
    """
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _rank(
    body: Callable[..., Any],
    rank: int,
    world: int,
    args: tuple[Any, ...],
    folder: pathlib.Path,
    timeout: float,
    pipe: Any,
) -> None:
    """Life of a rank; it stays until the parent has heard of all, so that no rank sees another's connection break."""
    global _TRACE  # noqa: PLW0603
    wake_without_preemption()
    torch.set_num_threads(1)
    stack = (folder / f"stack.{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    faulthandler.disable()  # enabled twice, it would keep handlers that another test may have replaced
    faulthandler.enable(file=stack, all_threads=True)
    _TRACE = (folder / f"trace.{rank}").open("wb", buffering=0)
    _LOG.clear()
    try:
        _join(rank, world, folder, timeout)
        torch.default_generator.manual_seed(0)  # to note a seed for other devices takes 2 ms
        step_local_tensors()
        with contextlib.ExitStack() as stack:
            for each in AROUND:
                stack.enter_context(each())
            value = body(rank, world, *args)
        report = ("gave", pickle.dumps(value))
    except BaseException as error:  # noqa: BLE001
        report = ("raised", pickle.dumps(_raised(error)))
    pipe.send(report)
    pipe.poll(60.0)
    os._exit(0)


def _heard(pipes: dict[int, Any], timeout: float) -> dict[int, tuple[str, bytes]]:
    """Reports of the ranks until all gave one, one raised and the grace is over, or the time is up."""
    got: dict[int, tuple[str, bytes]] = {}
    end = time.monotonic() + timeout
    while len(got) < len(pipes) and time.monotonic() < end:
        waiting = {pipe: rank for rank, pipe in pipes.items() if rank not in got}
        for pipe in connection.wait(list(waiting), max(0.0, end - time.monotonic())):
            try:
                got[waiting[pipe]] = pipe.recv()
            except EOFError:
                got[waiting[pipe]] = ("died", b"")
            if got[waiting[pipe]][0] != "gave":
                end = min(end, time.monotonic() + GRACE)
    return got


def _outcome(rank: int, report: tuple[str, bytes] | None, folder: pathlib.Path) -> Outcome:
    calls = (folder / f"trace.{rank}").read_text().splitlines() if (folder / f"trace.{rank}").exists() else []
    kind, payload = report or ("hangs", b"")
    if kind == "gave":
        return Outcome(rank, value=pickle.loads(payload), calls=calls)
    if kind == "raised":
        return Outcome(rank, raised=pickle.loads(payload), calls=calls)
    stack = folder / f"stack.{rank}"
    return Outcome(rank, waits=f"{kind}:\n{stack.read_text() if stack.exists() else ''}", calls=calls)


@functools.cache
def warm_up() -> None:
    """Shard and train once in this process, over a group that sends nothing: what torch does at first use is done.

    A rank is forked with it: its first training step takes half the time.
    """
    _watch_collectives()
    keep_known_shapes()
    state = torch.get_rng_state()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for shard in (core.FullyShardedDataParallel, core.fully_shard):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        model = shard(model) if shard is core.fully_shard else shard(model, device_id=torch.device("cpu"))
        optim = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 4)).sum().backward()
        optim.step()
        optim.zero_grad()
    dist.destroy_process_group()
    gc.collect()
    torch.set_rng_state(state)


def outcomes(
    world: int, body: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, group_timeout: float = GROUP_TIMEOUT
) -> list[Outcome]:
    """Run `body(rank, world, *args)` on forked ranks and tell what became of each, in rank order.

    Args:
        world: Number of ranks.
        body: Any callable, closures included, as nothing of it is pickled; what it returns is.
        args: Passed on.
        timeout: Seconds after which ranks without a result are reported to hang.
        group_timeout: Seconds a collective waits for the other ranks.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = pathlib.Path(name)
        pipes, ranks = {}, []
        warm_up()
        for rank in range(world):
            ours, theirs = FORK.Pipe()
            process = FORK.Process(
                target=_rank, args=(body, rank, world, args, folder, group_timeout, theirs), daemon=True
            )
            process.start()
            theirs.close()
            pipes[rank], _ = ours, ranks.append(process)
        got = _heard(pipes, timeout)
        hanging = [ranks[rank] for rank in pipes if rank not in got]
        for process in hanging:
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3 if hanging else 0.0)
        found = [_outcome(rank, got.get(rank), folder) for rank in pipes]
        for rank, process in enumerate(ranks):
            if process in hanging:
                process.kill()
            with contextlib.suppress(OSError):
                pipes[rank].send("go")
        for rank, process in enumerate(ranks):
            process.join(10)
            pipes[rank].close()
            process.close()
    return found


def _told(outcome: Outcome) -> str:
    last = "; last collectives: " + (", ".join(outcome.calls[-4:]) or "none") + f" ({len(outcome.calls)} in all)"
    if outcome.raised is not None:
        return f"rank {outcome.rank} raised {outcome.raised.name}{last}\n{outcome.raised.trace}"
    if outcome.waits is not None:
        return f"rank {outcome.rank} {outcome.waits}{last}"
    return f"rank {outcome.rank} finished{last}"


def run(
    world: int, body: Callable[..., Any], *args: Any, timeout: float = TIMEOUT, group_timeout: float = GROUP_TIMEOUT
) -> list[Any]:
    """As `outcomes`, but give the values alone.

    Raises:
        RanksError: A rank raised, hangs or died; the message tells the last collectives and the stack of each.
    """
    found = outcomes(world, body, *args, timeout=timeout, group_timeout=group_timeout)
    if any(outcome.raised is not None or outcome.waits is not None for outcome in found):
        reason = find_reason([outcome.raised.message for outcome in found if outcome.raised is not None])
        if reason is not None:
            pytest.skip(reason)
        raise RanksError("\n".join(["not every rank finished", *map(_told, found)]))
    return [outcome.value for outcome in found]


def raised_everywhere(world: int, body: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Raised]:
    """The exception of each rank.

    Raises:
        RanksError: A rank finished, hangs or died instead.
    """
    found = outcomes(world, body, *args, **kwargs)
    if any(outcome.raised is None for outcome in found):
        raise RanksError("\n".join(["not every rank raised", *map(_told, found)]))
    return [outcome.raised for outcome in found if outcome.raised is not None]
