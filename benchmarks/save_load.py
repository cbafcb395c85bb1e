"""Saving and loading in a job, beside raw I/O, torch's DCP, torch_checkpointing, safetensors and torch.save.

    python benchmarks/save_load.py [--cases save,load,...] [--size 4GB] [--rounds 3] [--fsync both|neither] [--record]

On gloo ranks of one thread each, forked; what is compared takes turns in the same ranks, in alternating order, so that
whatever else the machine does hits neighbours alike. A turn takes as long as its slowest rank. Ratios are medians of
the rounds' own ratios, beside them that of the fastest turns; CPU is that of all ranks, all threads. Every way is
warmed up once; then what it read is compared with the truth. Inputs that are read lie in the page cache: the worst case
for whoever computes anything.

**save.** DTensors of 2 ranks, a file system's fsync within everybody's time, or in nobody's. The yardstick is `write`
of every tensor as it lies, a file a rank.

**load.** Into the memory of the same tensors at the same world size. The yardstick is `preadv` of the same bytes of the
same files into the same memory.

**reshard.** Saved by 2 ranks, loaded by 1 and by 4; the yardstick reads the same bytes by as many processes.

**replicas.** As for load, of half the size, all of it on both ranks; with `broadcast_reads=True` each reads half from
the page cache and takes the other half from the other rank.

**async.** How long a save in the background keeps the loop, its buffers there from the save before; the copy is
complete then. The yardstick is a copy of each tensor into memory that is there.

**many, very-many.** Very many small DTensors, on 2 ranks. The first save is told apart, since plans are kept. The slow
ones have one turn, without a warm-up.

**memory.** The peak of resident memory above what the job held, in ranks of their own, of the larger rank, as a share
of the state it holds.

**planning.** What the first rank does before a save that no plan is known for, with so many simulated ranks.

torch_checkpointing is an optional peer: install it, or put it on PYTHONPATH.
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
from ranks import LIBC, RANKS, median_ratio, read_status, return_freed_memory, run_ranks
from results import RESULTS, machine, record
from safetensors.torch import save_file
from state_dict import number
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardckpt
from shardckpt.boxes import Box, flat_to_boxes, intersect
from shardckpt.checkpoint.planning.save_plan import LocalSavePlan, create_global_plan
from shardckpt.format.registry import open_checkpoint
from shardckpt.plan.layout.write_plan import LocalTensor

Act = Callable[[], Any]
State = dict[str, DTensor]
SLICE = 4 << 20
HAS_PEER = importlib.util.find_spec("torch_checkpointing") is not None
SMALL = (16, 16)
"""Shape of one of many tensors."""


@dataclass(frozen=True)
class Sizes:
    """How large things are.

    Attributes:
        nbytes: Of the state.
        many: Number of small tensors.
        very_many: Number of them where peers are slow.
        rounds: Measured turns of each way.
        fsync: Whether what is written is brought to the disk within everybody's time.
    """

    nbytes: int
    many: int
    very_many: int
    rounds: int
    fsync: bool


# ------------------------------------------------------------------------------------------------------------ states


def truth(name: str, start: int, stop: int, shape: Sequence[int]) -> torch.Tensor:
    """Return rows of a tensor: every element follows from its name and place."""
    seed = zlib.crc32(name.encode()) % 1009
    rows = torch.arange(start, stop, dtype=torch.float32)
    if len(shape) == 1:
        return rows + seed
    return rows[:, None] * 0.25 + torch.arange(seed, seed + shape[1], dtype=torch.float32)[None, :] * 1024


def local(tensor: DTensor) -> torch.Tensor:
    return tensor.to_local().detach()


def sharded(shapes: Mapping[str, tuple[int, ...]], *, is_whole: bool = False) -> State:
    """Return this rank's rows of every tensor, or all of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = DeviceMesh("cpu", list(range(world)))
    placement = Replicate() if is_whole else Shard(0)
    made = {}
    for name, shape in shapes.items():
        each = shape[0] if is_whole else shape[0] // world
        first = 0 if is_whole else rank * each
        rows = truth(name, first, first + each, shape)
        stride = (shape[1], 1) if len(shape) > 1 else (1,)
        made[name] = DTensor.from_local(rows, mesh, [placement], shape=torch.Size(shape), stride=stride)
    return made


def rows_of(tensor: DTensor) -> tuple[int, int]:
    """Return the first of the rows that lie here, and how many there are."""
    count = local(tensor).shape[0]
    return (0 if count == tensor.shape[0] else dist.get_rank() * count), count


def small_shapes(count: int) -> dict[str, tuple[int, ...]]:
    return {f"layers.{at // 10}.part_{at % 10}.weight": SMALL for at in range(count)}


def spoil(state: State) -> None:
    for tensor in state.values():
        local(tensor).fill_(-1.0)


def check(state: State, by: str) -> None:
    """Stop where what was loaded is not the truth."""
    for name, tensor in state.items():
        first, count = rows_of(tensor)
        if not torch.equal(local(tensor), truth(name, first, first + count, tensor.shape)):
            raise SystemExit(f"{by} loaded another {name} than was saved")


# ------------------------------------------------------------------------------------------------------------- tools


@dataclass
class Tool:
    """What saves and loads a state.

    Attributes:
        name: As printed.
        save: Saves this rank's part of a state into a folder that is not there.
        load: Fills a state.
        syncs: Whether its saves end on the disk.
    """

    name: str
    save: Callable[[State, Path], Any]
    load: Callable[[State, Path], Any]
    syncs: bool = True


def own_file(folder: Path, end: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"rank-{dist.get_rank()}.{end}"


def write_raw(state: State, folder: Path) -> None:
    """Write every tensor as it lies into a file."""
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


def copy_in(state: State, found: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in state.items():
        local(tensor).copy_(found[name])


def load_torch(state: State, folder: Path) -> None:
    copy_in(state, torch.load(own_file(folder, "pt")))


def load_safetensors(state: State, folder: Path) -> None:
    from safetensors.torch import load_file  # noqa: PLC0415  (beside its twin above)

    copy_in(state, load_file(own_file(folder, "safetensors")))


def ours(name: str, *, checksums: bool = True, **how: Any) -> Tool:
    return Tool(
        name,
        lambda state, folder: shardckpt.save({"model": state}, str(folder), checksums=checksums),
        lambda state, folder: shardckpt.load({"model": state}, str(folder), **how),
    )


def with_dcp() -> Tool:
    return Tool(
        "DCP",
        lambda state, folder: dcp.save({"model": state}, checkpoint_id=folder),
        lambda state, folder: dcp.load({"model": state}, checkpoint_id=folder),
    )


def with_torch_checkpointing() -> Tool:
    """Return the peer, with one manager as in a job: its second save is faster than its first."""
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
    """Return those that save sharded tensors."""
    return [with_dcp(), *([with_torch_checkpointing()] if HAS_PEER else [])]


def bring_to_disk(folder: Path) -> None:
    """Fsync this rank's share of the files in a folder."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file())[dist.get_rank() :: dist.get_world_size()]:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


# -------------------------------------------------------------------------------------------------- what is compared


def nothing(*_told: Any) -> None:
    """Stand for what is not needed."""


@dataclass(frozen=True)
class Way:
    """One way to do something.

    Attributes:
        what: What is done; ways of one name are compared.
        by: Who does it, as printed.
        role: "bare" for the yardstick, "shardckpt", or "peer".
        act: Does it.
        before: Prepares a turn, outside of its time; given whether this is the first.
        after: Tidies up, outside of its time; given whether this is the first, and what `act` returned.
        limits: By printed name: how many times as long as that one it may take.
        is_slow: One turn is enough, without a warm-up.
    """

    what: str
    by: str
    role: str
    act: Act
    before: Callable[[bool], Any] = nothing
    after: Callable[[bool, Any], Any] = nothing
    limits: Mapping[str, float] = field(default_factory=dict)
    is_slow: bool = False


def saving(what: str, tool: Tool, role: str, state: State, folder: Path, sizes: Sizes, **more: Any) -> Way:
    """Return a save into a folder that is removed after each turn."""

    def act() -> None:
        tool.save(state, folder)
        if sizes.fsync and not tool.syncs:
            dist.barrier()
            bring_to_disk(folder)

    def remove(_first: bool, _made: Any) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)

    return Way(what, tool.name, role, act, settle, remove, **more)


def settle(_first: bool) -> None:
    """Leave nothing to be written back by whoever comes next."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()


def loading(what: str, tool: Tool, role: str, state: State, folder: Path, **more: Any) -> Way:
    """Return a load of what lies in a folder, where it is saved first if need be; checked once."""

    def prepare(first: bool) -> None:
        if first and not folder.exists():
            dist.barrier()
            tool.save(state, folder)
        dist.barrier()
        if first:
            spoil(state)

    def checked(first: bool, _made: Any) -> None:
        if first:
            check(state, tool.name)

    return Way(what, tool.name, role, lambda: tool.load(state, folder), prepare, checked, **more)


def raw_reads(state: State, folder: Path) -> Callable[[State, Path], None]:
    """Return what reads the bytes of a state from the files that a save of ours left, planned beforehand."""
    plan = []
    tensors = open_checkpoint(str(folder)).manifest.tensors
    for name, tensor in state.items():
        first, each = rows_of(tensor)
        wanted = Box((first, *[0] * (tensor.dim() - 1)), (each, *tensor.shape[1:]))
        memory = memoryview(local(tensor).view(-1).view(torch.uint8).numpy())
        row = len(memory) // each
        for piece in tensors["model", name].pieces:
            inner = intersect(piece.box, wanted)
            if inner is not None:
                at, start = inner.offset[0] - wanted.offset[0], inner.offset[0] - piece.box.offset[0]
                place = memory[at * row : (at + inner.size[0]) * row]
                plan.append((piece.file, piece.layout.offset + start * row, place))  # type: ignore[union-attr]

    def read(_state: State, folder: Path) -> None:
        open_files: dict[str, int] = {}
        for file, offset, place in plan:
            fd = open_files.get(file)
            if fd is None:
                fd = open_files[file] = os.open(folder / file, os.O_RDONLY)
            while place:
                count = os.preadv(fd, [place[:SLICE]], offset)
                place, offset = place[count:], offset + count
        for fd in open_files.values():
            os.close(fd)

    return read


def save(sizes: Sizes, folder: Path) -> list[Way]:
    state = sharded(inputs.shapes("large", sizes.nbytes))
    given = (state, folder / "out", sizes)
    return [
        saving("save", RAW_WRITE, "bare", *given),
        saving("save", ours("shardckpt"), "shardckpt", *given, limits={"raw write": 1.25}),
        saving(
            "save", ours("shardckpt, checksums=False", checksums=False), "shardckpt", *given, limits={"raw write": 1.15}
        ),
        *(saving("save", tool, "peer", *given) for tool in (*peers(), SAFETENSORS, TORCH_SAVE)),
    ]


def load(sizes: Sizes, folder: Path) -> list[Way]:
    state = sharded(inputs.shapes("large", sizes.nbytes))
    return loads("load", state, folder, {False: 1.1, "read": 1.5})


def loads(what: str, state: State, folder: Path, limits: Mapping[Any, float]) -> list[Way]:
    """Return loads of a checkpoint of ours and, where they are there, of the peers'."""
    raw = Tool("raw read", write_raw, raw_reads(state, folder / "shardckpt"))
    ways = [loading(what, raw, "bare", state, folder / "shardckpt")]
    for verify in (False, "read"):
        tool = ours("shardckpt" if verify else "shardckpt, verify=False", verify=verify)
        more = {"limits": {"raw read": limits[verify]}} if verify in limits else {}
        ways.append(loading(what, tool, "shardckpt", state, folder / "shardckpt", **more))
    return ways + [loading(what, tool, "peer", state, folder / tool.name) for tool in peers()]


def reshard(sizes: Sizes, folder: Path) -> list[Way]:
    state = sharded(inputs.shapes("large", sizes.nbytes))
    ways = loads(f"{RANKS} ranks to {dist.get_world_size()}", state, folder, {"read": 1.5})
    by_peers = {way.by: 1.0 for way in ways if way.role == "peer"}
    return [replace(way, limits={**way.limits, **by_peers}) if way.by == "shardckpt" else way for way in ways]


def replicas(sizes: Sizes, folder: Path) -> list[Way]:
    state = sharded(inputs.shapes("large", sizes.nbytes // 2), is_whole=True)
    ways = loads("replicas", state, folder, {})
    shared = ours("shardckpt, broadcast_reads=True", broadcast_reads=True)
    ways.insert(3, loading("replicas", shared, "shardckpt", state, folder / "shardckpt"))
    return [way for way in ways if way.by != "torch_checkpointing"]  # every rank's file is read whole by all


def written(sizes: Sizes, folder: Path, rank: int) -> None:  # noqa: ARG001
    """Write what loads read, by every tool that writes sharded checkpoints."""
    stay_off_the_disk(sizes.fsync)
    state = sharded(inputs.shapes("large", sizes.nbytes))
    for tool in (ours("shardckpt"), *peers()):
        tool.save(state, folder / tool.name)


def stalls(sizes: Sizes, folder: Path) -> list[Way]:
    """Return how long saves in the background keep the loop."""
    state = sharded(inputs.shapes("large", sizes.nbytes))
    places = [torch.ones_like(local(tensor)) for tensor in state.values()]

    def copy() -> None:
        for place, tensor in zip(places, state.values(), strict=True):
            place.copy_(local(tensor))

    def begin() -> Any:
        return shardckpt.async_save({"model": state}, str(folder / "out"))

    return [
        Way("stall", "memcpy", "bare", copy),
        Way("stall", "shardckpt", "shardckpt", begin, settle, partial(ended, folder), limits={"memcpy": 1.3}),
    ]


def stalls_of_dcp(sizes: Sizes, folder: Path) -> list[Way]:
    """Return the same of DCP, apart, since buffers of all of them do not fit."""
    ways = stalls(sizes, folder)[:1]
    state = sharded(inputs.shapes("large", sizes.nbytes))

    def begin() -> Any:
        return dcp.async_save({"model": state}, checkpoint_id=folder / "out")

    return [*ways, Way("stall", "DCP", "peer", begin, settle, partial(ended, folder))]


def ended(folder: Path, _first: bool, handle: Any) -> None:
    """Wait for a save in the background, and remove what it wrote."""
    handle.result()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "out")


def many(sizes: Sizes, folder: Path) -> list[Way]:
    """Return saves and loads of many small tensors."""
    title = f"{sizes.many:,} tensors"
    limits = {"torch_checkpointing": 0.5} if HAS_PEER else {}
    ways = of_many(title, sizes.many, sizes, folder, [SAFETENSORS, *peers()], limits)
    return [replace(way, is_slow=way.by == "DCP") for way in ways]


def very_many(sizes: Sizes, folder: Path) -> list[Way]:
    """Return the same of more of them, beside DCP alone."""
    title = f"{sizes.very_many:,} tensors"
    slow = of_many(title, sizes.very_many, sizes, folder, [SAFETENSORS, with_dcp()], {"DCP": 0.1}, {"DCP": 0.1})
    return [replace(way, is_slow=way.by == "DCP") for way in slow]


def of_many(
    title: str,
    count: int,
    sizes: Sizes,
    folder: Path,
    tools: Sequence[Tool],
    save_limits: Mapping[str, float],
    load_limits: Mapping[str, float] | None = None,
) -> list[Way]:
    state = sharded(small_shapes(count))
    mine, roles = ours("shardckpt"), {"safetensors": "bare"}
    ways = []
    for tool in (mine, *tools):
        role = "shardckpt" if tool is mine else roles.get(tool.name, "peer")
        more = {"limits": save_limits} if tool is mine else {}
        ways.append(saving(f"save {title}", tool, role, state, folder / "out", sizes, **more))
    for tool in (mine, *tools):
        role = "shardckpt" if tool is mine else roles.get(tool.name, "peer")
        more = {"limits": load_limits or {}} if tool is mine else {}
        ways.append(loading(f"load {title}", tool, role, state, folder / tool.name, **more))
    return ways


def stay_off_the_disk(fsync: bool) -> None:
    """Let nobody sync, where that is asked for."""
    if not fsync:
        os.fsync = os.fdatasync = lambda _fd: None


# -------------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Measured:
    """What a way took.

    Attributes:
        way: The way, without what does it.
        first: Seconds of the first turn, the warm-up where there was one.
        seconds: Of each turn, of the slowest rank.
        cpu: Seconds of the same, of all ranks.
    """

    way: Way
    first: float
    seconds: tuple[float, ...]
    cpu: tuple[float, ...]


Case = Callable[[Sizes, Path], list[Way]]


def take_turns(case: Case, sizes: Sizes, folder: Path, rank: int) -> list[tuple[Way, list[tuple[float, float]]]]:
    """Do everything that a case compares, in turn; the first turn of each is its warm-up."""
    stay_off_the_disk(sizes.fsync)
    ways = case(sizes, folder)
    taken: list[list[tuple[float, float]]] = [[] for _ in ways]
    for round_number in range(sizes.rounds + 1):
        order = range(len(ways)) if round_number % 2 else range(len(ways) - 1, -1, -1)
        for at in order:
            if round_number and ways[at].is_slow:
                continue
            taken[at].append(turn(ways[at], first=not round_number))
            if rank == 0:
                note = f"round {round_number} of {sizes.rounds}: {ways[at].what} by {ways[at].by}"
                print(f"  {note}, {taken[at][-1][0]:.2f} s", file=sys.stderr, flush=True)
    told = [replace(way, act=nothing, before=nothing, after=nothing) for way in ways]
    return list(zip(told, taken, strict=True))


def turn(way: Way, *, first: bool) -> tuple[float, float]:
    way.before(first)
    gc.collect()
    dist.barrier()
    begun = time.perf_counter(), time.process_time()
    made = way.act()
    ended_at = time.perf_counter(), time.process_time()
    dist.barrier()
    way.after(first, made)
    return ended_at[0] - begun[0], ended_at[1] - begun[1]


def measure(case: Case, sizes: Sizes, folder: Path, world: int = RANKS) -> list[Measured]:
    """Compare in ranks of their own."""
    found = []
    for ranks in zip(*run_ranks(partial(take_turns, case, sizes, folder), world), strict=True):
        way = ranks[0][0]
        turns = [
            (max(t[0] for t in each), sum(t[1] for t in each)) for each in zip(*(r[1] for r in ranks), strict=True)
        ]
        kept = turns if way.is_slow else turns[1:]
        found.append(Measured(way, turns[0][0], tuple(t[0] for t in kept), tuple(t[1] for t in kept)))
    return found


def peak_of(act: Callable[[State, Path], Any], sizes: Sizes, folder: Path, rank: int) -> float:  # noqa: ARG001
    """Return the peak of memory above what the job held, as a share of this rank's state."""
    stay_off_the_disk(sizes.fsync)
    state = sharded(inputs.shapes("large", sizes.nbytes))
    small = sharded({"warm": SMALL})
    act(small, folder / "warm")  # imports and groups are made
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


def in_background(state: State, folder: Path) -> None:
    shardckpt.async_save({"model": state}, str(folder)).result()


def in_background_of_dcp(state: State, folder: Path) -> None:
    dcp.async_save({"model": state}, checkpoint_id=folder).result()  # type: ignore[union-attr]


PEAKS: list[tuple[str, Callable[[State, Path], Any], float | None]] = [
    ("shardckpt.save", ours("").save, 0.1),
    ("shardckpt.async_save", in_background, 1.1),
    ("DCP save", with_dcp().save, None),
    ("DCP async_save", in_background_of_dcp, None),
]


def draft(rank: int, world: int, arrays: int, flat: bool) -> bytes:
    """Return what one of many ranks tells of its state: rows of every array, or a flat range of all of them."""
    if flat:
        held = ((3, 4099, world), arrays)
        return LocalSavePlan(tuple(_flat(rank, world, *held)), frozenset(), {}).encode()
    rows = tuple(
        LocalTensor(("model", f"layer.{at}"), (world, 4096), "float32", (Box((rank, 0), (1, 4096)),))
        for at in range(arrays)
    )
    return LocalSavePlan(rows, frozenset(), {}).encode()


def _flat(rank: int, world: int, shape: tuple[int, ...], arrays: int) -> Iterator[LocalTensor]:
    total = shape[0] * shape[1] * shape[2]
    share = -(-total // world)
    for at in range(arrays):
        boxes = flat_to_boxes(shape, min(rank * share, total), min((rank + 1) * share, total))
        yield LocalTensor(("model", f"layer.{at}"), shape, "float32", tuple(boxes))


def planned(world: int, arrays: int, *, flat: bool) -> tuple[float, int]:
    """Return the seconds from what ranks tell to what they are told, and the boxes that were planned."""
    told = [draft(rank, world, arrays, flat) for rank in range(world)]
    gc.collect()
    gc.disable()
    start = time.perf_counter()
    plan = create_global_plan([LocalSavePlan.decode(each) for each in told])
    for rank_plan in plan.rank_plans:
        rank_plan.encode()
    seconds = time.perf_counter() - start
    gc.enable()
    return seconds, sum(len(rank_plan.chunks) for rank_plan in plan.rank_plans)


# ----------------------------------------------------------------------------------------------------------- report


class Report:
    """What is printed, kept for the record, and failed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failed: list[str] = []

    def say(self, line: str = "") -> None:
        """Print a line and keep it."""
        print(line, flush=True)
        self.lines.append(line)

    def table(self, title: str, found: Sequence[Measured]) -> None:
        """Print what was compared: the yardstick of each kind first."""
        bare = {each.way.what: each for each in found if each.way.role == "bare"}
        mine = {each.way.what: each for each in reversed(found) if each.way.role == "shardckpt"}
        self.say(f"\n### {title}\n")
        self.say("| | | ms (least - most) | first | CPU ms | x yardstick | of the fastest | shardckpt is faster |")
        self.say("|---|---|---|---|---|---|---|---|")
        for each in sorted(found, key=lambda each: ("bare", "shardckpt", "peer").index(each.way.role)):
            ms, way = [turn_ * 1e3 for turn_ in each.seconds], each.way
            stick, own = bare.get(way.what), mine.get(way.what)
            of_bare = ["", ""] if stick in (None, each) else [f"{r:.2f}" for r in ratios(each, stick)]
            of_mine = "" if own is None or way.role != "peer" else f"{ratios(each, own)[0]:.1f} x"
            self.say(
                f"| {way.what} | {way.by} | {median(ms):.0f} ({min(ms):.0f} - {max(ms):.0f}) | {each.first * 1e3:.0f} "
                f"| {median(each.cpu) * 1e3:.0f} | {of_bare[0]} | {of_bare[1]} | {of_mine} |"
            )
        self.judge(found)

    def judge(self, found: Sequence[Measured]) -> None:
        """Note what takes longer than it may."""
        of = {(each.way.what, each.way.by): each for each in found}
        for each in found:
            for by, limit in each.way.limits.items():
                other = of.get((each.way.what, by))
                if other is not None and (measured := ratios(each, other)[0]) > limit:
                    said = f"{each.way.what} by {each.way.by} takes {measured:.2f} times that of {by}"
                    self.failed.append(f"{said}; {limit:g} is the limit")


def ratios(over: Measured, under: Measured) -> tuple[float, float]:
    """Return the median of the rounds' own ratios, and the ratio of the fastest turns."""
    fastest = min(over.seconds) / min(under.seconds)
    if len(over.seconds) != len(under.seconds):
        return median(over.seconds) / median(under.seconds), fastest
    return median_ratio(over.seconds, under.seconds), fastest


def gb(sizes: Sizes) -> str:
    return f"{sizes.nbytes / 1e9:g} GB"


def run_save(report: Report, sizes: Sizes, folder: Path) -> None:
    report.table(f"Saving {gb(sizes)}, {RANKS} ranks", measure(save, sizes, folder))


def run_load(report: Report, sizes: Sizes, folder: Path) -> None:
    run_ranks(partial(written, sizes, folder))
    report.table(f"Loading {gb(sizes)}, {RANKS} ranks", measure(load, sizes, folder))


def run_reshard(report: Report, sizes: Sizes, folder: Path) -> None:
    run_ranks(partial(written, sizes, folder))
    for world in (1, 2 * RANKS):
        report.table(f"Loading {gb(sizes)} of {RANKS} ranks on {world}", measure(reshard, sizes, folder, world))


def run_replicas(report: Report, sizes: Sizes, folder: Path) -> None:
    run_ranks(partial(written, replace(sizes, nbytes=sizes.nbytes // 2), folder))
    report.table(f"Loading all of {sizes.nbytes / 2e9:g} GB on each of {RANKS} ranks", measure(replicas, sizes, folder))


def run_async(report: Report, sizes: Sizes, folder: Path) -> None:
    found = measure(stalls, sizes, folder)
    report.table(f"Stall of a save of {gb(sizes)} in the background, {RANKS} ranks", found)
    found = measure(stalls_of_dcp, replace(sizes, rounds=min(sizes.rounds, 2)), folder)
    report.table("The same of DCP", found)


def run_many(report: Report, sizes: Sizes, folder: Path) -> None:
    report.table(f"{sizes.many:,} tensors of {SMALL[0]} x {SMALL[1]}, {RANKS} ranks", measure(many, sizes, folder))


def run_very_many(report: Report, sizes: Sizes, folder: Path) -> None:
    title = f"{sizes.very_many:,} tensors of {SMALL[0]} x {SMALL[1]}, {RANKS} ranks"
    report.table(title, measure(very_many, sizes, folder))


def run_memory(report: Report, sizes: Sizes, folder: Path) -> None:
    report.say(f"\n### Peak of memory beside the state, {gb(sizes)}, {RANKS} ranks\n\n| | x state |\n|---|---|")
    for name, act, limit in PEAKS:
        share = max(run_ranks(partial(peak_of, act, sizes, folder)))
        report.say(f"| {name} | {share:.2f} |")
        shutil.rmtree(folder / "warm")
        if limit is not None and share > limit:
            report.failed.append(f"{name} needs {share:.2f} times its state in memory; {limit:g} is the limit")


PLANS = (
    (1024, 1000, False),
    (1024, 1000, True),
    (8, 500, False),
    (64, 500, False),
    (512, 500, False),
    (4096, 500, False),
)
PLAN_SECONDS = 10.0
FLAT = 2.0
"""How many times as long a rank's part may take among 4,096 as among 8."""


def run_planning(report: Report, sizes: Sizes, folder: Path) -> None:  # noqa: ARG001
    head = "| ranks | arrays | boxes | seconds | us a rank and array |\n|---|---|---|---|---|"
    report.say(f"\n### Planning a first save\n\n{head}")
    each = {}
    for world, arrays, flat in PLANS:
        seconds, boxes = planned(world, arrays, flat=flat)
        each[world, arrays] = micro = seconds / world / arrays * 1e6
        kind = "flat ranges" if flat else "rows"
        report.say(f"| {world:,} | {arrays:,}, {kind} | {boxes:,} | {seconds:.2f} | {micro:.1f} |")
        if seconds > PLAN_SECONDS and world <= 1024:
            report.failed.append(f"planning {boxes:,} boxes takes {seconds:.1f} s; {PLAN_SECONDS:g} is the limit")
    if each[4096, 500] > FLAT * each[8, 500]:
        report.failed.append(
            f"a rank's plan takes {each[4096, 500] / each[8, 500]:.1f} times as long among 4,096 as of 8"
        )


CASES: dict[str, Callable[[Report, Sizes, Path], None]] = {
    "save": run_save,
    "load": run_load,
    "reshard": run_reshard,
    "replicas": run_replicas,
    "async": run_async,
    "many": run_many,
    "very-many": run_very_many,
    "memory": run_memory,
    "planning": run_planning,
}


def run(case: str, sizes: Sizes, parent: str | None) -> Report:
    """Measure and print one case."""
    report = Report()
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    with tempfile.TemporaryDirectory(prefix="shardckpt-bench-", dir=parent) as name:
        where = f"{machine()}, {file_system(Path(name))}"
        report.say(f"{today}, {where}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}.")
        report.say(f"{sizes.rounds} rounds, fsync: {'both' if sizes.fsync else 'neither'}.")
        if not HAS_PEER:
            report.say("torch_checkpointing is not installed, and left out.")
        CASES[case](report, sizes, Path(name))
    return report


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="some of: %(default)s")
    parser.add_argument("--size", type=parse_size, default=parse_size("4GB"), help="bytes of the large state")
    parser.add_argument("--many", type=number, default=number("10K"), help="small tensors")
    parser.add_argument("--very-many", type=number, default=number("50K"), help="small tensors where peers are slow")
    parser.add_argument("--rounds", type=int, default=3, help="measured turns of each way")
    parser.add_argument("--fsync", choices=("both", "neither"), default="both", help="for every tool, or for none")
    parser.add_argument("--folder", help="where checkpoints go, instead of the temporary folder")
    parser.add_argument("--record", action="store_true", help=f"write the tables into {RESULTS.name}")
    given = parser.parse_args()
    cases = given.cases.split(",")
    if unknown := set(cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    sizes = Sizes(given.size, given.many, given.very_many, given.rounds, given.fsync == "both")
    failed = []
    for case in cases:
        report = run(case, sizes, given.folder)
        failed += report.failed
        if given.record:
            record(f"Save and load, {case}", report.lines)
    for line in failed:
        print(f"FAILED: {line}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
