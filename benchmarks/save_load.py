"""Compare saves and loads with raw I/O, torch's DCP, torch_checkpointing, safetensors and torch.save.

    python benchmarks/save_load.py [--cases save,load,...] [--size 4GB] [--rounds 3] [--fsync both|neither] [--record]

The benchmark uses forked gloo ranks with one thread each. All compared methods run in the same ranks, in alternating
order, so other work on the machine affects all of them. The time of a turn is that of its slowest rank. Ratios are
medians of the ratios of the rounds, and a second column has the ratio of the fastest turns. CPU is the sum of all ranks
and threads. Every method has one warm-up turn, and the tensors that it loads are compared with the expected ones.
Inputs are in the page cache, which is the worst case for methods that compute something.

**save.** DTensors on 2 ranks. The time of all methods includes fsync, or the time of none does. The baseline is `write`
of every local tensor, one file for each rank.

**load.** Into the memory of the same tensors, at the same world size. The baseline is `preadv` of the same bytes of the
same files into the same memory.

**reshard.** Saved by 2 ranks, loaded by 1 and by 4. The baseline reads the same bytes with as many processes.

**reshard-pieces.** The same on 4 ranks, with tensors of which each rank loads 1 MiB, less than a block.

**replicas.** Like load, with half the size, and full tensors on both ranks. With `broadcast_reads=True` each rank reads
half from the page cache and receives the other half from the other rank.

**async.** The time that an asynchronous save blocks training, with staging buffers from the previous save. The baseline
is a copy of each tensor into preallocated memory.

**small-stalls.** The same for many small tensors, and for a model of 4,000 small parameters with Adam, in one process.
The baseline clones the tensors.

**beside.** An asynchronous save of at most 1 GiB, from its call to its end, while the training loop only waits (the
baseline) and while it runs Python code. Training steps, which are products of matrices, without a save (the baseline)
and after a call of `async_save` has returned.

**many, very-many.** Very many small DTensors on 2 ranks. The first save has its own column, because plans are
cached. Slow methods have one turn and no warm-up.

**memory.** The peak of resident memory of the larger rank, minus the memory of the job, relative to its state. Each
method runs in new ranks.

**planning.** The work of rank 0 before a save without a cached plan, for many simulated ranks.

torch_checkpointing is optional: install it, or put it on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import inputs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from consolidate import file_system, parse_size
from options import add_disk_options, add_selection
from ranks import LIBC, RANKS, median_ratio, read_status, return_freed_memory, run_ranks
from results import RESULTS, Lines, machine, record
from safetensors.torch import save_file
from state_dict import number
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardckpt
from shardckpt.boxes import Box, flat_to_boxes, intersect
from shardckpt.checkpoint.planning.save_plan import LocalSavePlan, create_global_plan
from shardckpt.plan.layout.write_plan import LocalTensor
from shardckpt.readers.registry import open_checkpoint

Act = Callable[[], Any]
State = dict[str, DTensor]
Shapes = Mapping[str, tuple[int, ...]]
SLICE = 4 << 20
HAS_PEER = importlib.util.find_spec("torch_checkpointing") is not None
SMALL = (16, 16)
"""Shape of a small tensor."""


@dataclass(frozen=True)
class Sizes:
    """Sizes and rounds.

    Attributes:
        nbytes: Bytes of the state.
        many: Number of small tensors.
        very_many: Number of small tensors for the case with slow peers.
        rounds: Measured turns of each method.
        fsync: Whether the time of all methods includes fsync.
    """

    nbytes: int
    many: int
    very_many: int
    rounds: int
    fsync: bool


# ------------------------------------------------------------------------------------------------------------ states


def truth(name: str, start: int, stop: int, shape: Sequence[int]) -> torch.Tensor:
    """Return rows of a tensor; every element follows from the name and the position."""
    seed = zlib.crc32(name.encode()) % 1009
    rows = torch.arange(start, stop, dtype=torch.float32)
    if len(shape) == 1:
        return rows + seed
    return rows[:, None] * 0.25 + torch.arange(seed, seed + shape[1], dtype=torch.float32)[None, :] * 1024


def local(tensor: DTensor) -> torch.Tensor:
    return tensor.to_local().detach()


def sharded(shapes: Mapping[str, tuple[int, ...]], *, is_replicated: bool = False) -> State:
    """Return DTensors with this rank's rows, or with all rows."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = DeviceMesh("cpu", list(range(world)))
    placement = Replicate() if is_replicated else Shard(0)
    state = {}
    for name, shape in shapes.items():
        count = shape[0] if is_replicated else shape[0] // world
        first = 0 if is_replicated else rank * count
        rows = truth(name, first, first + count, shape)
        stride = (shape[1], 1) if len(shape) > 1 else (1,)
        state[name] = DTensor.from_local(rows, mesh, [placement], shape=torch.Size(shape), stride=stride)
    return state


def local_rows(tensor: DTensor) -> tuple[int, int]:
    """Return the first row of this rank and its number of rows."""
    count = local(tensor).shape[0]
    return (0 if count == tensor.shape[0] else dist.get_rank() * count), count


def small_shapes(count: int) -> dict[str, tuple[int, ...]]:
    return {f"layers.{at // 10}.part_{at % 10}.weight": SMALL for at in range(count)}


def spoil(state: State) -> None:
    for tensor in state.values():
        local(tensor).fill_(-1.0)


def check(state: State, by: str) -> None:
    """Exit if a loaded tensor differs from the expected one."""
    for name, tensor in state.items():
        first, count = local_rows(tensor)
        if not torch.equal(local(tensor), truth(name, first, first + count, tensor.shape)):
            raise SystemExit(f"{name} loaded by {by} differs from the saved tensor")


# ------------------------------------------------------------------------------------------------------------- tools


@dataclass
class Tool:
    """A library that saves and loads a state.

    Attributes:
        name: Printed name.
        save: Saves this rank's shards into a new folder.
        load: Loads into the tensors of a state.
        syncs: Whether its saves call fsync.
    """

    name: str
    save: Callable[[State, Path], Any]
    load: Callable[[State, Path], Any]
    syncs: bool = True


def own_file(folder: Path, end: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"rank-{dist.get_rank()}.{end}"


def write_raw(state: State, folder: Path) -> None:
    """Write the bytes of every local tensor to a file."""
    fd = os.open(own_file(folder, "bin"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for tensor in state.values():
        view = memoryview(local(tensor).view(-1).view(torch.uint8).numpy())
        while view:
            view = view[os.write(fd, view[:SLICE]) :]
    os.fsync(fd)
    os.close(fd)


def save_torch(state: State, folder: Path) -> None:
    torch.save({name: local(tensor) for name, tensor in state.items()}, own_file(folder, "pt"))


def save_safetensors(state: State, folder: Path) -> None:
    save_file({name: local(tensor) for name, tensor in state.items()}, own_file(folder, "safetensors"))


def copy_in(state: State, tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        local(tensor).copy_(tensors[name])


def load_torch(state: State, folder: Path) -> None:
    copy_in(state, torch.load(own_file(folder, "pt")))


def load_safetensors(state: State, folder: Path) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415  (only this tool needs it)

    copy_in(state, load_file(own_file(folder, "safetensors")))


def ours(name: str, *, checksums: bool = True, **how: Any) -> Tool:
    return Tool(
        name,
        lambda state, folder: shardckpt.save({"model": state}, str(folder), checksums=checksums),
        lambda state, folder: shardckpt.load({"model": state}, str(folder), **how),
    )


def dcp_tool() -> Tool:
    return Tool(
        "DCP",
        lambda state, folder: dcp.save({"model": state}, checkpoint_id=folder),
        lambda state, folder: dcp.load({"model": state}, checkpoint_id=folder),
    )


def torch_checkpointing_tool() -> Tool:
    """Return the peer, with one manager as in a job, because its second save is faster than its first."""
    manager = inputs.torch_checkpointing()
    return Tool(
        "torch_checkpointing",
        lambda state, folder: manager.save(str(folder), {"model": state}),
        lambda state, folder: manager.load(str(folder), into={"model": state}),
        syncs=False,
    )


RAW_WRITE = Tool("raw write", write_raw, lambda *_: None)
TORCH_SAVE = Tool("torch.save", save_torch, load_torch, syncs=False)
SAFETENSORS = Tool("safetensors", save_safetensors, load_safetensors, syncs=False)


def peers() -> list[Tool]:
    """Return the peers that save sharded tensors."""
    return [dcp_tool(), *([torch_checkpointing_tool()] if HAS_PEER else [])]


def bring_to_disk(folder: Path) -> None:
    """Fsync this rank's part of the files in a folder."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file())[dist.get_rank() :: dist.get_world_size()]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


# ----------------------------------------------------------------------------------------------------- compared methods


def nothing(*_args: Any) -> None:
    """Do nothing; the default of optional functions."""


@dataclass(frozen=True)
class Method:
    """One implementation of an operation.

    Attributes:
        operation: Methods of the same operation are compared.
        name: Printed name.
        role: "bare" for the baseline, "shardckpt", or "peer".
        act: Runs the operation.
        before: Prepares a turn, before its time starts. Gets whether it is the first.
        after: Cleans up, after its time ended. Gets whether it is the first, and the result of `act`.
        limits: Largest time relative to another method, by its printed name.
        is_slow: Run one turn, without a warm-up.
    """

    operation: str
    name: str
    role: str
    act: Act
    before: Callable[[bool], Any] = nothing
    after: Callable[[bool, Any], Any] = nothing
    limits: Mapping[str, float] = field(default_factory=dict)
    is_slow: bool = False


def saving(operation: str, tool: Tool, role: str, state: State, folder: Path, sizes: Sizes, **more: Any) -> Method:
    """Return a save into a folder that is removed after each turn."""

    def act() -> None:
        tool.save(state, folder)
        if sizes.fsync and not tool.syncs:
            dist.barrier()
            bring_to_disk(folder)

    def remove(_first: bool, _result: Any) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)

    return Method(operation, tool.name, role, act, settle, remove, **more)


def settle(_first: bool) -> None:
    """Write back dirty pages, so that they do not slow the next method."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()


def loading(operation: str, tool: Tool, role: str, state: State, folder: Path, **more: Any) -> Method:
    """Return a load from a folder, which is saved first if it is missing; the first load is checked."""

    def prepare(first: bool) -> None:
        if first and not folder.exists():
            dist.barrier()
            tool.save(state, folder)
        dist.barrier()
        if first:
            spoil(state)

    def check_first(first: bool, _result: Any) -> None:
        if first:
            check(state, tool.name)

    return Method(operation, tool.name, role, lambda: tool.load(state, folder), prepare, check_first, **more)


def raw_reads(state: State, folder: Path) -> Callable[[State, Path], None]:
    """Return a function that reads the bytes of a state from the files of a checkpoint; it is planned in advance."""
    plan = []
    tensors = open_checkpoint(str(folder)).manifest.tensors
    for name, tensor in state.items():
        first, count = local_rows(tensor)
        box = Box((first, *[0] * (tensor.dim() - 1)), (count, *tensor.shape[1:]))
        memory = memoryview(local(tensor).view(-1).view(torch.uint8).numpy())
        row = len(memory) // count
        for piece in tensors["model", name].pieces:
            inner = intersect(piece.box, box)
            if inner is not None:
                row_offset, start = inner.offset[0] - box.offset[0], inner.offset[0] - piece.box.offset[0]
                view = memory[row_offset * row : (row_offset + inner.size[0]) * row]
                plan.append((piece.file, piece.layout.offset + start * row, view))  # type: ignore[union-attr]

    def read(_state: State, folder: Path) -> None:
        open_files: dict[str, int] = {}
        for file, offset, view in plan:
            fd = open_files.get(file)
            if fd is None:
                fd = open_files[file] = os.open(folder / file, os.O_RDONLY)
            while view:
                count = os.preadv(fd, [view[:SLICE]], offset)
                view, offset = view[count:], offset + count
        for fd in open_files.values():
            os.close(fd)

    return read


def save(sizes: Sizes, folder: Path) -> list[Method]:
    state = sharded(inputs.shapes("large", sizes.nbytes))
    arguments = (state, folder / "out", sizes)
    return [
        saving("save", RAW_WRITE, "bare", *arguments),
        saving("save", ours("shardckpt"), "shardckpt", *arguments, limits={"raw write": 1.25}),
        saving(
            "save",
            ours("shardckpt, checksums=False", checksums=False),
            "shardckpt",
            *arguments,
            limits={"raw write": 1.15},
        ),
        *(saving("save", tool, "peer", *arguments) for tool in (*peers(), SAFETENSORS, TORCH_SAVE)),
    ]


def load(sizes: Sizes, folder: Path) -> list[Method]:
    state = sharded(inputs.shapes("large", sizes.nbytes))
    return loads("load", state, folder, {False: 1.1, "read": 1.3})


def loads(operation: str, state: State, folder: Path, limits: Mapping[Any, float]) -> list[Method]:
    """Return loads of our checkpoint and of the checkpoints of the peers."""
    raw = Tool("raw read", write_raw, raw_reads(state, folder / "shardckpt"))
    methods = [loading(operation, raw, "bare", state, folder / "shardckpt")]
    for verify in (False, "read"):
        tool = ours("shardckpt" if verify else "shardckpt, verify=False", verify=verify)
        more = {"limits": {"raw read": limits[verify]}} if verify in limits else {}
        methods.append(loading(operation, tool, "shardckpt", state, folder / "shardckpt", **more))
    return methods + [loading(operation, tool, "peer", state, folder / tool.name) for tool in peers()]


def large_shapes(nbytes: int) -> Shapes:
    return inputs.shapes("large", nbytes)


def piece_shapes(nbytes: int) -> Shapes:
    """Return tensors of which each of 4 ranks has 1 MiB, less than a block of the native format."""
    shape = (4 * (1 << 20) // (4 * inputs.COLUMNS), inputs.COLUMNS)
    return {f"layers.{at}.weight": shape for at in range(max(nbytes >> 22, 1))}


def reshard(shapes: Callable[[int], Shapes], what: str, sizes: Sizes, folder: Path) -> list[Method]:
    """Return loads on the ranks of this job of what other ranks saved.

    Args:
        shapes: Returns tensors of a number of bytes.
        what: Text about them for the operation.
        sizes: Sizes.
        folder: Folder of the checkpoints.
    """
    world = dist.get_world_size()
    methods = loads(f"{RANKS} ranks to {world}{what}", sharded(shapes(sizes.nbytes)), folder, {"read": 1.3})
    peer_limits = {method.name: 1.0 for method in methods if method.role == "peer"}
    if world > RANKS and HAS_PEER:
        peer_limits["torch_checkpointing"] = 0.7
    return [
        replace(method, limits={**method.limits, **peer_limits}) if method.name == "shardckpt" else method
        for method in methods
    ]


def replicas(sizes: Sizes, folder: Path) -> list[Method]:
    state = sharded(inputs.shapes("large", sizes.nbytes // 2), is_replicated=True)
    methods = loads("replicas", state, folder, {})
    shared = ours("shardckpt, broadcast_reads=True", broadcast_reads=True)
    methods.insert(3, loading("replicas", shared, "shardckpt", state, folder / "shardckpt"))
    # In torch_checkpointing every rank reads the files of all ranks completely.
    return [method for method in methods if method.name != "torch_checkpointing"]


def write_checkpoints(shapes: Callable[[int], Shapes], sizes: Sizes, folder: Path, rank: int) -> None:  # noqa: ARG001
    """Write the inputs of the loads, with every tool that saves sharded tensors."""
    disable_fsync(sizes.fsync)
    state = sharded(shapes(sizes.nbytes))
    for tool in (ours("shardckpt"), *peers()):
        tool.save(state, folder / tool.name)


def stalls(sizes: Sizes, folder: Path) -> list[Method]:
    """Return asynchronous saves; the time is the one that they block training."""
    state = sharded(inputs.shapes("large", sizes.nbytes))
    buffers = [torch.ones_like(local(tensor)) for tensor in state.values()]

    def copy() -> None:
        for buffer, tensor in zip(buffers, state.values(), strict=True):
            buffer.copy_(local(tensor))

    def begin() -> Any:
        return shardckpt.async_save({"model": state}, str(folder / "out"))

    return [
        Method("stall", "memcpy", "bare", copy),
        Method("stall", "shardckpt", "shardckpt", begin, settle, partial(finish, folder), limits={"memcpy": 1.3}),
    ]


def small_model(count: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of small parameters, and Adam after a step."""
    model = nn.ParameterDict({f"part_{at}": torch.rand(SMALL) for at in range(count)})
    optim = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()
    optim.zero_grad()
    return model, optim


def small_stalls(sizes: Sizes, folder: Path) -> list[Method]:
    """Return asynchronous saves of small tensors; the time is the one that they block training."""
    model, optim = small_model(4000)
    slots = [value for kept in optim.state.values() for value in kept.values()]
    methods = stalls_of(
        "4,000 parameters with Adam", {"model": model, "optim": optim}, [*model.parameters(), *slots], folder
    )
    for count in (sizes.many, sizes.very_many):
        tensors = {name: torch.rand(shape) for name, shape in small_shapes(count).items()}
        methods += stalls_of(f"{count:,} tensors", {"model": tensors}, list(tensors.values()), folder)
    return methods


def stalls_of(operation: str, state: Any, tensors: Sequence[torch.Tensor], folder: Path) -> list[Method]:
    @torch.no_grad()
    def clone() -> list[torch.Tensor]:
        return [tensor.clone() for tensor in tensors]

    def begin() -> Any:
        return shardckpt.async_save(state, str(folder / "out"))

    return [
        Method(operation, "clone", "bare", clone),
        Method(operation, "shardckpt", "shardckpt", begin, settle, partial(finish, folder), limits={"clone": 3.0}),
    ]


def beside(sizes: Sizes, folder: Path) -> list[Method]:
    """Return asynchronous saves beside a loop that waits and one that runs Python code, and steps beside a save."""
    state = sharded(inputs.shapes("large", min(sizes.nbytes, 1 << 30)))

    def begin() -> Any:
        return shardckpt.async_save({"model": state}, str(folder / "out"))

    def wait() -> Any:
        handle = begin()
        handle.result()
        return handle

    def run_python() -> Any:
        handle = begin()
        while not handle.done():
            sum(range(1000))
        return handle

    weights = torch.rand(1024, 1024)
    running: list[Any] = []

    def train() -> None:
        for _ in range(max(sum(local(tensor).nbytes for tensor in state.values()) >> 25, 1)):
            weights.mm(weights)

    def start(first: bool) -> None:
        settle(first)
        running.append(begin())

    def end(first: bool, _result: Any) -> None:
        finish(folder, first, running.pop())

    finished, name = partial(finish, folder), "beside Python code"
    return [
        Method("background save", "waiting", "bare", wait, settle, finished),
        Method("background save", name, "shardckpt", run_python, settle, finished, limits={"waiting": 2.0}),
        Method("training steps", "alone", "bare", train, settle),
        Method("training steps", "beside a save", "shardckpt", train, start, end, limits={"alone": 1.03}),
    ]


def stalls_of_dcp(sizes: Sizes, folder: Path) -> list[Method]:
    """Return the asynchronous save of DCP; it runs separately, because all buffers together do not fit."""
    methods = stalls(sizes, folder)[:1]
    state = sharded(inputs.shapes("large", sizes.nbytes))

    def begin() -> Any:
        return dcp.async_save({"model": state}, checkpoint_id=folder / "out")

    return [*methods, Method("stall", "DCP", "peer", begin, settle, partial(finish, folder))]


def finish(folder: Path, _first: bool, handle: Any) -> None:
    """Wait for an asynchronous save, and remove its files."""
    handle.result()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "out")


def many(sizes: Sizes, folder: Path) -> list[Method]:
    """Return saves and loads of many small tensors."""
    title = f"{sizes.many:,} tensors"
    limits = {"torch_checkpointing": 0.5} if HAS_PEER else {}
    methods = save_and_load_many(title, sizes.many, sizes, folder, [SAFETENSORS, *peers()], limits, limits)
    return [replace(method, is_slow=method.name == "DCP") for method in methods]


def very_many(sizes: Sizes, folder: Path) -> list[Method]:
    """Return saves and loads of very many small tensors, with DCP as the only peer."""
    title = f"{sizes.very_many:,} tensors"
    slow = save_and_load_many(
        title, sizes.very_many, sizes, folder, [SAFETENSORS, dcp_tool()], {"DCP": 0.1}, {"DCP": 0.1}
    )
    return [replace(method, is_slow=method.name == "DCP") for method in slow]


def save_and_load_many(
    title: str,
    count: int,
    sizes: Sizes,
    folder: Path,
    tools: Sequence[Tool],
    save_limits: Mapping[str, float],
    load_limits: Mapping[str, float] | None = None,
) -> list[Method]:
    state = sharded(small_shapes(count))
    mine, roles = ours("shardckpt"), {"safetensors": "bare"}
    methods = []
    for tool in (mine, *tools):
        role = "shardckpt" if tool is mine else roles.get(tool.name, "peer")
        more = {"limits": save_limits} if tool is mine else {}
        methods.append(saving(f"save {title}", tool, role, state, folder / "out", sizes, **more))
    for tool in (mine, *tools):
        role = "shardckpt" if tool is mine else roles.get(tool.name, "peer")
        more = {"limits": load_limits or {}} if tool is mine else {}
        methods.append(loading(f"load {title}", tool, role, state, folder / tool.name, **more))
    return methods


def disable_fsync(fsync: bool) -> None:
    """Disable fsync of all tools if `fsync` is False."""
    if not fsync:
        os.fsync = os.fdatasync = lambda _fd: None


# -------------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Measurement:
    """Measurements of a method.

    Attributes:
        method: The method, without its functions.
        first: Seconds of the first turn, which is the warm-up if there is one.
        seconds: Seconds of each turn on the slowest rank.
        cpu: CPU seconds of each turn, of all ranks.
    """

    method: Method
    first: float
    seconds: tuple[float, ...]
    cpu: tuple[float, ...]


Case = Callable[[Sizes, Path], list[Method]]


def take_turns(case: Case, sizes: Sizes, folder: Path, rank: int) -> list[tuple[Method, list[tuple[float, float]]]]:
    """Run the methods of a case in turn; the first turn of each is its warm-up."""
    disable_fsync(sizes.fsync)
    methods = case(sizes, folder)
    times: list[list[tuple[float, float]]] = [[] for _ in methods]
    for round_number in range(sizes.rounds + 1):
        order = range(len(methods)) if round_number % 2 else range(len(methods) - 1, -1, -1)
        for index in order:
            if round_number and methods[index].is_slow:
                continue
            times[index].append(run_turn(methods[index], first=not round_number))
            if rank == 0:
                note = f"round {round_number} of {sizes.rounds}: {methods[index].operation} by {methods[index].name}"
                print(f"  {note}, {times[index][-1][0]:.2f} s", file=sys.stderr, flush=True)
    stripped = [replace(method, act=nothing, before=nothing, after=nothing) for method in methods]
    return list(zip(stripped, times, strict=True))


def run_turn(method: Method, *, first: bool) -> tuple[float, float]:
    method.before(first)
    gc.collect()
    dist.barrier()
    start = time.perf_counter(), time.process_time()
    result = method.act()
    end = time.perf_counter(), time.process_time()
    dist.barrier()
    method.after(first, result)
    return end[0] - start[0], end[1] - start[1]


def measure(case: Case, sizes: Sizes, folder: Path, world: int = RANKS) -> list[Measurement]:
    """Run a case on new ranks and combine their measurements."""
    measurements = []
    for ranks in zip(*run_ranks(partial(take_turns, case, sizes, folder), world), strict=True):
        method = ranks[0][0]
        turns = [
            (max(t[0] for t in times), sum(t[1] for t in times)) for times in zip(*(r[1] for r in ranks), strict=True)
        ]
        kept = turns if method.is_slow else turns[1:]
        measurements.append(Measurement(method, turns[0][0], tuple(t[0] for t in kept), tuple(t[1] for t in kept)))
    return measurements


def measure_peak(act: Callable[[State, Path], Any], sizes: Sizes, folder: Path, rank: int) -> float:  # noqa: ARG001
    """Return the peak memory of a save, relative to this rank's state, without the memory of the job."""
    disable_fsync(sizes.fsync)
    state = sharded(inputs.shapes("large", sizes.nbytes))
    small = sharded({"warm": SMALL})
    act(small, folder / "warm")  # imports modules and creates groups
    return_freed_memory()
    gc.collect()
    LIBC.malloc_trim(0)
    dist.barrier()
    before = read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    act(state, folder / "out")
    peak = read_status("VmHWM") - before
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "out")
    return peak / sum(local(tensor).nbytes for tensor in state.values())


def async_save(state: State, folder: Path) -> None:
    shardckpt.async_save({"model": state}, str(folder)).result()


def dcp_async_save(state: State, folder: Path) -> None:
    dcp.async_save({"model": state}, checkpoint_id=folder).result()  # type: ignore[union-attr]


PEAKS: list[tuple[str, Callable[[State, Path], Any], float | None]] = [
    ("shardckpt.save", ours("").save, 0.1),
    ("shardckpt.async_save", async_save, 1.1),
    ("DCP save", dcp_tool().save, None),
    ("DCP async_save", dcp_async_save, None),
]


def encode_local_plan(rank: int, world: int, arrays: int, flat: bool) -> bytes:
    """Return the local plan of one of many ranks: rows of every array, or its flat range of each."""
    if flat:
        return LocalSavePlan(tuple(_flat(rank, world, (3, 4099, world), arrays)), frozenset(), {}).encode()
    rows = tuple(
        LocalTensor(("model", f"layer.{index}"), (world, 4096), "float32", (Box((rank, 0), (1, 4096)),))
        for index in range(arrays)
    )
    return LocalSavePlan(rows, frozenset(), {}).encode()


def _flat(rank: int, world: int, shape: tuple[int, ...], arrays: int) -> Iterator[LocalTensor]:
    total = shape[0] * shape[1] * shape[2]
    numel = -(-total // world)
    for index in range(arrays):
        boxes = flat_to_boxes(shape, min(rank * numel, total), min((rank + 1) * numel, total))
        yield LocalTensor(("model", f"layer.{index}"), shape, "float32", tuple(boxes))


def time_planning(world: int, arrays: int, *, flat: bool) -> tuple[float, int]:
    """Return the CPU seconds from encoded local plans to encoded rank plans, and the number of planned boxes."""
    messages = [encode_local_plan(rank, world, arrays, flat) for rank in range(world)]
    gc.collect()
    gc.disable()
    start = time.process_time()
    plan = create_global_plan([LocalSavePlan.decode(message) for message in messages])
    for rank_plan in plan.rank_plans:
        rank_plan.encode()
    seconds = time.process_time() - start
    gc.enable()
    return seconds, sum(len(rank_plan.chunks) for rank_plan in plan.rank_plans)


# ----------------------------------------------------------------------------------------------------------- report


class Report(Lines):
    """The tables of a case.

    Args:
        area: The area of its goals in the summary.
    """

    def __init__(self, area: str = "saves") -> None:
        super().__init__()
        self.area = area

    def table(self, title: str, measurements: Sequence[Measurement]) -> None:
        """Print the table of an operation, its baseline first."""
        baselines = {row.method.operation: row for row in measurements if row.method.role == "bare"}
        ours = {row.method.operation: row for row in reversed(measurements) if row.method.role == "shardckpt"}
        self.say(f"\n### {title}\n")
        self.say("| | | ms (least - most) | first | CPU ms | x baseline | of the fastest | shardckpt is faster |")
        self.say("|---|---|---|---|---|---|---|---|")
        for row in sorted(measurements, key=lambda row: ("bare", "shardckpt", "peer").index(row.method.role)):
            ms, method = [turn * 1e3 for turn in row.seconds], row.method
            baseline, own = baselines.get(method.operation), ours.get(method.operation)
            to_baseline = ["", ""] if baseline in (None, row) else [f"{r:.2f}" for r in ratios(row, baseline)]
            to_own = "" if own is None or method.role != "peer" else f"{ratios(row, own)[0]:.1f} x"
            self.say(
                f"| {method.operation} | {method.name} | {median(ms):.0f} ({min(ms):.0f} - {max(ms):.0f}) "
                f"| {row.first * 1e3:.0f} | {median(row.cpu) * 1e3:.0f} "
                f"| {to_baseline[0]} | {to_baseline[1]} | {to_own} |"
            )
        self.check_limits(measurements)

    def check_limits(self, measurements: Sequence[Measurement]) -> None:
        """Declare every limit of a method as a goal."""
        by_name = {(row.method.operation, row.method.name): row for row in measurements}
        for row in measurements:
            for name, limit in row.method.limits.items():
                peer = by_name.get((row.method.operation, name))
                if peer is not None:
                    what = f"{row.method.operation}, {row.method.name}"
                    self.goal(self.area, what, ratios(row, peer)[0], limit, f"x {name}")


def ratios(over: Measurement, under: Measurement) -> tuple[float, float]:
    """Return the median of the ratios of the rounds, and the ratio of the fastest turns."""
    fastest = min(over.seconds) / min(under.seconds)
    if len(over.seconds) != len(under.seconds):
        return median(over.seconds) / median(under.seconds), fastest
    return median_ratio(over.seconds, under.seconds), fastest


def gb(sizes: Sizes) -> str:
    return f"{sizes.nbytes / 1e9:g} GB"


def run_save(report: Report, sizes: Sizes, folder: Path) -> None:
    report.table(f"Saving {gb(sizes)}, {RANKS} ranks", measure(save, sizes, folder))


def run_load(report: Report, sizes: Sizes, folder: Path) -> None:
    run_ranks(partial(write_checkpoints, large_shapes, sizes, folder))
    report.table(f"Loading {gb(sizes)}, {RANKS} ranks", measure(load, sizes, folder))


def run_reshard(report: Report, sizes: Sizes, folder: Path) -> None:
    run_ranks(partial(write_checkpoints, large_shapes, sizes, folder))
    for world in (1, 2 * RANKS):
        case = partial(reshard, large_shapes, "")
        report.table(f"Loading {gb(sizes)} of {RANKS} ranks on {world}", measure(case, sizes, folder, world))


def run_reshard_pieces(report: Report, sizes: Sizes, folder: Path) -> None:
    run_ranks(partial(write_checkpoints, piece_shapes, sizes, folder))
    case, world = partial(reshard, piece_shapes, ", 1 MiB each"), 2 * RANKS
    title = f"Loading {gb(sizes)} of {RANKS} ranks on {world} in pieces of 1 MiB"
    report.table(title, measure(case, sizes, folder, world))


def run_replicas(report: Report, sizes: Sizes, folder: Path) -> None:
    run_ranks(partial(write_checkpoints, large_shapes, replace(sizes, nbytes=sizes.nbytes // 2), folder))
    report.table(
        f"Loading {sizes.nbytes / 2e9:g} GB of full tensors on each of {RANKS} ranks", measure(replicas, sizes, folder)
    )


def run_async(report: Report, sizes: Sizes, folder: Path) -> None:
    measurements = measure(stalls, sizes, folder)
    report.table(f"Stall of an asynchronous save of {gb(sizes)}, {RANKS} ranks", measurements)
    measurements = measure(stalls_of_dcp, replace(sizes, rounds=min(sizes.rounds, 2)), folder)
    report.table(f"Stall of DCP's async_save of {gb(sizes)}, {RANKS} ranks", measurements)


def run_small_stalls(report: Report, sizes: Sizes, folder: Path) -> None:
    report.table("Stall of an asynchronous save of small tensors, one process", measure(small_stalls, sizes, folder, 1))


def run_beside(report: Report, sizes: Sizes, folder: Path) -> None:
    report.table("An asynchronous save beside the training loop, one process", measure(beside, sizes, folder, 1))


def run_many(report: Report, sizes: Sizes, folder: Path) -> None:
    report.table(f"{sizes.many:,} tensors of {SMALL[0]} x {SMALL[1]}, {RANKS} ranks", measure(many, sizes, folder))


def run_very_many(report: Report, sizes: Sizes, folder: Path) -> None:
    title = f"{sizes.very_many:,} tensors of {SMALL[0]} x {SMALL[1]}, {RANKS} ranks"
    report.table(title, measure(very_many, sizes, folder))


def run_memory(report: Report, sizes: Sizes, folder: Path) -> None:
    report.say(f"\n### Peak of memory without the state, {gb(sizes)}, {RANKS} ranks\n\n| | x state |\n|---|---|")
    for name, act, limit in PEAKS:
        relative = max(run_ranks(partial(measure_peak, act, sizes, folder)))
        report.say(f"| {name} | {relative:.2f} |")
        shutil.rmtree(folder / "warm")
        if limit is not None:
            report.goal(report.area, f"peak memory of {name}", relative, limit, "x state")


PLANS = (
    (1024, 1000, False),
    (1024, 1000, True),
    (8, 500, False),
    (64, 500, False),
    (512, 500, False),
    (4096, 500, False),
    (4096, 1000, False),
)
PLAN_SECONDS = 5.0
"""Goal of each row."""

FLAT = 2.0
"""Largest time for each rank's part of 4,096, relative to that of 8."""


def run_planning(report: Report, sizes: Sizes, folder: Path) -> None:  # noqa: ARG001
    head = "| ranks | arrays | boxes | CPU s | us per rank and array |\n|---|---|---|---|---|"
    report.say(f"\n### Planning a first save\n\n{head}")
    micros = {}
    for world, arrays, flat in PLANS:
        seconds, boxes = time_planning(world, arrays, flat=flat)
        micros[world, arrays] = micro = seconds / world / arrays * 1e6
        kind = "flat ranges" if flat else "rows"
        report.say(f"| {world:,} | {arrays:,}, {kind} | {boxes:,} | {seconds:.2f} | {micro:.1f} |")
        what = f"plan of {world:,} ranks x {arrays:,} tensors, {kind}"
        report.goal(report.area, what, seconds, PLAN_SECONDS, "s of CPU")
    growth = micros[4096, 500] / micros[8, 500]
    report.goal(report.area, "plan of one of 4,096 ranks", growth, FLAT, "x of one of 8")


CASES: dict[str, Callable[[Report, Sizes, Path], None]] = {
    "save": run_save,
    "load": run_load,
    "reshard": run_reshard,
    "reshard-pieces": run_reshard_pieces,
    "replicas": run_replicas,
    "async": run_async,
    "small-stalls": run_small_stalls,
    "beside": run_beside,
    "many": run_many,
    "very-many": run_very_many,
    "memory": run_memory,
    "planning": run_planning,
}
AREAS = {
    "load": "loads",
    "reshard": "loads",
    "reshard-pieces": "loads",
    "replicas": "loads",
    "async": "background saves",
    "small-stalls": "background saves",
    "beside": "background saves",
    "planning": "planning",
}
"""Areas of the goals of cases in the summary; `saves` otherwise."""


def run(case: str, sizes: Sizes, parent: str | None) -> Report:
    """Run a case and print its tables."""
    report = Report(AREAS.get(case, "saves"))
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    with tempfile.TemporaryDirectory(prefix="shardckpt-bench-", dir=parent) as name:
        where = f"{machine()}, {file_system(Path(name))}"
        report.say(f"{today}, {where}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}.")
        report.say(f"{sizes.rounds} rounds, fsync: {'both' if sizes.fsync else 'neither'}.")
        if not HAS_PEER:
            report.say("torch_checkpointing is not installed.")
        CASES[case](report, sizes, Path(name))
    return report


def main() -> None:
    """Run the selected cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_selection(parser, "--cases", CASES)
    parser.add_argument("--size", type=parse_size, default=parse_size("4GB"), help="bytes of the large state")
    parser.add_argument("--many", type=number, default=number("10K"), help="small tensors")
    parser.add_argument(
        "--very-many", type=number, default=number("50K"), help="small tensors of the case with slow peers"
    )
    parser.add_argument("--rounds", type=int, default=3, help="measured turns of each method")
    add_disk_options(parser)
    parser.add_argument("--record", action="store_true", help=f"write the tables into {RESULTS.name}")
    arguments = parser.parse_args()
    sizes = Sizes(arguments.size, arguments.many, arguments.very_many, arguments.rounds, arguments.fsync == "both")
    failed = []
    for case in arguments.cases:
        report = run(case, sizes, arguments.folder)
        failed += report.failed
        if arguments.record:
            record(f"Save and load, {case}", report.lines, report.goals)
    for line in failed:
        print(f"FAILED: {line}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
