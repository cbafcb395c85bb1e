"""Taking and putting back the state of sharded models and optimizers, beside torch and beside the bare collectives.

    python benchmarks/state_dict.py [--cases full,sharded,optimizer,many] [--rows flat,originals,composable] [--record]

On two gloo ranks of one thread each. What is compared lives in one pair of forked processes and takes turns, in
alternating order, so that whatever else the machine does hits neighbours alike; a turn takes as long as its slower
rank. Ratios are medians of the rounds' own ratios. CPU is that of both ranks, all threads. Before the first round every
way is checked: shardckpt and torch have to give the same names, shapes and values.

**full.** The whole state of a bfloat16 Llama for the first rank. The yardstick is `dist.gather` of the same bytes, a
unit at a time, into memory that stays: 1.5 times its time is the limit.

**sharded.** DTensors of the same model. The yardstick of the wrapper is `dist.all_to_all_single` of the same bytes, a
unit at a time, from the shard as it lies (as many bytes, not the right ones) into new memory that stays, which is
what a state is made of. 1.3 times its time is the limit, and half of torch's (on two ranks the bare exchange takes a
fifth of that itself). The same into memory that is there already, which no state can be, stands beside it.
`fully_shard` may take no longer than torch's.

**optimizer.** Adam's whole state for the first rank, and back from there, beside torch's functions for the same.

**many.** Very many small parameters: every kind of state of model and optimizer, taken and put back. There is no limit
for a SHARDED state of Adam beside torch's fully_shard, which hands out and takes over live tensors where we copy, and
none for loading a LOCAL one, where torch copies a flat tensor a unit and looks at no names.

Memory is the kernel's own peak of resident memory in one more turn of each way, less what the process had before it,
with a malloc that gives freed blocks back at once: results are in it, and what gloo takes for itself. The first rank's
stands before the other's.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch._dynamo  # optimizers import it when they are made: once here, not in every rank
import torch.distributed as dist
from llama import Block, Llama, Shape
from ranks import LIBC, RANKS, median_ratio, read_status, return_freed_memory, run_ranks
from results import RESULTS, machine, record
from torch import nn
from torch.distributed import fsdp as theirs
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint import state_dict as dcp
from torch.distributed.tensor import DTensor

import shardckpt
from shardckpt import core as ours
from shardckpt.core.runtime.traversal import buckets
from shardckpt.state.redistribute.flat_to_rows import plan_exchange

Act = Callable[[], Any]
UNIT = 100
"""Small parameters of a unit."""

PATTERN = torch.randn((1 << 20) + 7, generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------------------------------ models


@dataclass(frozen=True)
class Sizes:
    """How large things are.

    Attributes:
        model: Parameters of the bfloat16 model.
        trained: Parameters of the float32 model that has an optimizer.
        many: Number of small parameters.
        rounds: Measured turns of each way.
    """

    model: int
    trained: int
    many: int
    rounds: int


@dataclass(frozen=True)
class Face:
    """A way to shard.

    Attributes:
        name: As printed.
        shard: Makes a unit of a module.
    """

    name: str
    shard: Callable[[nn.Module], nn.Module]


def wrapped(package: Any, originals: bool, module: nn.Module) -> nn.Module:
    made: nn.Module = package.FullyShardedDataParallel(module, use_orig_params=originals, device_id=torch.device("cpu"))
    return made


def in_place(package: Any, module: nn.Module) -> nn.Module:
    made: nn.Module = package.fully_shard(module)
    return made


ROWS = {
    "flat": (
        Face("shardckpt wrapper, flat", partial(wrapped, ours, False)),
        Face("torch FSDP1", partial(wrapped, theirs, False)),
    ),
    "originals": (
        Face("shardckpt wrapper, use_orig_params", partial(wrapped, ours, True)),
        Face("torch FSDP1, use_orig_params", partial(wrapped, theirs, True)),
    ),
    "composable": (
        Face("shardckpt fully_shard", partial(in_place, ours)),
        Face("torch FSDP2", partial(in_place, theirs)),
    ),
}


def shape_of(numel: int) -> Shape:
    """Return the shape of a Llama of about so many parameters; a quarter and less are the embedding and the head."""
    hidden = 2048 if numel >= 10**9 else 1024 if numel >= 10**8 else 256 if numel >= 10**7 else 32
    each = 45 * hidden**2 // 4
    layers = max(1, -(-(numel - 32 * hidden**2) // each))
    return Shape(layers=layers, hidden=hidden, inner=hidden * 11 // 4, heads=hidden // 16, words=16 * hidden)


def filled(module: nn.Module) -> nn.Module:
    """Give a module of the meta device values, the same ones each time."""
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        fill(parameter.detach().view(-1))
    return module


def fill(values: torch.Tensor) -> None:
    for at in range(0, values.numel(), PATTERN.numel()):
        place = values[at : at + PATTERN.numel()]
        place.copy_(PATTERN[: place.numel()])


def llama(face: Face, shape: Shape, dtype: torch.dtype) -> nn.Module:
    """Return a sharded Llama, a unit a block and one for the rest; one unit at a time is whole meanwhile."""
    with torch.device("meta"):
        model, blocks = Llama(replace(shape, layers=0)).to(dtype), [Block(shape).to(dtype) for _ in range(shape.layers)]
    filled(model)
    for block in blocks:
        model.blocks.append(face.shard(filled(block)))
    return face.shard(model)


def small_parameters(face: Face, number: int) -> nn.Module:
    """Return so many small parameters, sharded in units."""
    units = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(UNIT // 2))) for _ in range(number // UNIT)]
    return face.shard(nn.Sequential(*(face.shard(filled(unit)) for unit in units)))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer with the state it would have after a step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        if parameter.numel():
            moments = {name: parameter.detach().clone() for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return optimizer


def units_of(shape: Shape) -> list[int]:
    """Return the parameters of each unit."""
    with torch.device("meta"):
        block = sum(p.numel() for p in Block(shape).parameters())
        rest = sum(p.numel() for p in Llama(replace(shape, layers=0)).parameters())
    return [rest] + [block] * shape.layers


# ------------------------------------------------------------------------------------------------- states of torch's


def torch_state(model: nn.Module, kind: str) -> Mapping[str, Any]:
    """Return the state of a model that torch sharded; the whole one for the first rank."""
    if not isinstance(model, theirs.FullyShardedDataParallel):
        return dcp.get_model_state_dict(model, options=options(kind))
    with typed(model, kind):
        return model.state_dict()


def put_torch_state(model: nn.Module, state: Mapping[str, Any], kind: str) -> None:
    if isinstance(model, theirs.FullyShardedDataParallel):
        with typed(model, kind, rank0_only=False):
            model.load_state_dict(dict(state))
    else:
        dcp.set_model_state_dict(model, dict(state), options=options(kind, loads=True))


def torch_optim_state(model: nn.Module, optim: torch.optim.Optimizer, kind: str) -> Mapping[str, Any]:
    if not isinstance(model, theirs.FullyShardedDataParallel):
        return dcp.get_optimizer_state_dict(model, optim, options=options(kind))
    with typed(model, kind):
        found: Mapping[str, Any] = model.optim_state_dict(model, optim)
    return found


def put_torch_optim_state(model: nn.Module, optim: torch.optim.Optimizer, state: Mapping[str, Any], kind: str) -> None:
    given = copied(state)
    if not isinstance(model, theirs.FullyShardedDataParallel):
        dcp.set_optimizer_state_dict(model, optim, given, options=options(kind, loads=True))
        return
    with typed(model, kind):
        optim.load_state_dict(model.optim_state_dict_to_load(model, optim, given))


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state around the same tensors: torch's functions change what they are given."""
    return (
        {
            "state": {name: dict(slots) for name, slots in state["state"].items()},
            "param_groups": [{**group, "params": list(group["params"])} for group in state["param_groups"]],
        }
        if state
        else {}
    )


def options(kind: str, loads: bool = False) -> dcp.StateDictOptions:
    whole = kind == "FULL"
    return dcp.StateDictOptions(
        full_state_dict=whole, cpu_offload=whole and not loads, broadcast_from_rank0=whole and loads
    )


def typed(model: nn.Module, kind: str, rank0_only: bool = True) -> Any:
    """Return torch's context in which states are of a kind."""
    model_kinds = {
        "FULL": theirs.FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
        "SHARDED": theirs.ShardedStateDictConfig(),
        "LOCAL": theirs.LocalStateDictConfig(),
    }
    optim_kinds = {
        "FULL": theirs.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True),
        "SHARDED": theirs.ShardedOptimStateDictConfig(offload_to_cpu=False),
        "LOCAL": theirs.LocalOptimStateDictConfig(offload_to_cpu=False),
    }
    return theirs.FullyShardedDataParallel.state_dict_type(
        model, theirs.StateDictType[f"{kind}_STATE_DICT"], model_kinds[kind], optim_kinds[kind]
    )


# ------------------------------------------------------------------------------------------------ what is compared


@dataclass(frozen=True)
class Way:
    """One way to do something.

    Attributes:
        what: What is done; ways of one name are compared.
        by: Who does it, as printed.
        role: "shardckpt", "torch", "bare" for the yardstick, or "floor" for what stands beside it.
        act: Does it, and returns the state: what was taken, or what there is afterwards.
        limits: How many times as long it may take as the way of a role.
    """

    what: str
    by: str
    role: str
    act: Act
    limits: Mapping[str, float] = field(default_factory=dict)


def full(row: str, sizes: Sizes, rank: int) -> list[Way]:
    """The whole model for the first rank."""
    mine, its = ROWS[row]
    shape = shape_of(sizes.model)
    model, other = (llama(face, shape, torch.bfloat16) for face in (mine, its))
    what = "model FULL"
    return [
        Way(what, "bare gather", "bare", partial(gathered, units_of(shape), rank)),
        Way(what, mine.name, "shardckpt", partial(our_state, model, "FULL"), {"bare": 1.5, "torch": 1.0}),
        Way(what, its.name, "torch", partial(torch_state, other, "FULL")),
    ]


def gathered(units: Sequence[int], rank: int) -> list[torch.Tensor]:
    """Gather so many elements of each unit to the first rank, from shards that are there."""
    shard = torch.zeros(-(-max(units) // RANKS), dtype=torch.bfloat16)
    kept = []
    for numel in units:
        part = shard[: -(-numel // RANKS)]
        rows = torch.empty(RANKS, part.numel(), dtype=part.dtype) if rank == 0 else None
        dist.gather(part, None if rows is None else list(rows), dst=0)
        kept += [] if rows is None else [rows]
    return kept


def sharded(row: str, sizes: Sizes, rank: int) -> list[Way]:
    """DTensors of the model."""
    mine, its = ROWS[row]
    shape = shape_of(sizes.model)
    model, other = (llama(face, shape, torch.bfloat16) for face in (mine, its))
    what = "model SHARDED"
    limits = {"torch": 1.0} if row == "composable" else {"bare": 1.3, "torch": 0.5}
    ways = [
        Way(what, mine.name, "shardckpt", partial(our_state, model, "SHARDED"), limits),
        Way(what, its.name, "torch", partial(torch_state, other, "SHARDED")),
    ]
    if row == "composable":
        return ways
    kept = exchanged(model, rank)
    return [
        Way(what, "bare all-to-all", "bare", partial(exchanged, model, rank)),
        Way(what, "bare all-to-all, memory that is there", "floor", partial(exchanged, model, rank, kept)),
        *ways,
    ]


def exchanged(model: nn.Module, rank: int, into: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Exchange as many elements of each unit as flat shards and rows have in common; into new memory or other."""
    taken: list[torch.Tensor] = []
    for number, bucket in enumerate(buckets(model)):
        plan = plan_exchange(bucket.layout, rank)  # type: ignore[arg-type]
        sends, takes = ([sum(span.numel for span in spans) for spans in side] for side in (plan.out, plan.into))
        out = bucket.shard.new_empty(sum(takes)) if into is None else into[number]
        given = bucket.shard.detach()[: sum(sends)]
        dist.all_to_all_single(out, given, takes, sends)
        taken.append(out)
    return taken


def optimizer(row: str, sizes: Sizes, rank: int) -> list[Way]:  # noqa: ARG001
    """Adam's whole state for the first rank, and back."""
    mine, its = ROWS[row]
    shape = shape_of(sizes.trained)
    model, other = (llama(face, shape, torch.float32) for face in (mine, its))
    return optimizer_ways(mine, its, (model, other), ("FULL",))


def optimizer_ways(mine: Face, its: Face, models: tuple[nn.Module, nn.Module], kinds: Sequence[str]) -> list[Way]:
    (model, other), (own, others) = models, (adam(each) for each in models)
    ways = []
    for kind in kinds:
        take, put = f"Adam {kind}", f"Adam {kind}, loaded"
        kept = our_optim_state(model, own, kind)
        limits = {} if kind == "SHARDED" and its.name == "torch FSDP2" else {"torch": 1.0}
        ways += [
            Way(take, mine.name, "shardckpt", partial(our_optim_state, model, own, kind), limits),
            Way(put, mine.name, "shardckpt", partial(put_our_optim_state, model, own, kept), limits),
        ]
        if has(its, kind, optimizer=True):
            given = kept if kind == "FULL" else torch_optim_state(other, others, kind)
            ways += [
                Way(take, its.name, "torch", partial(torch_optim_state, other, others, kind)),
                Way(put, its.name, "torch", partial(put_torch_optim_state, other, others, given, kind)),
            ]
    return ways


def many(row: str, sizes: Sizes, rank: int) -> list[Way]:  # noqa: ARG001
    """Every kind of state of very many small parameters, taken and put back."""
    mine, its = ROWS[row]
    model, other = (small_parameters(face, sizes.many) for face in (mine, its))
    ways = []
    for kind in ("FULL", "SHARDED", "LOCAL"):
        take, put = f"model {kind}", f"model {kind}, loaded"
        everywhere = kind == "FULL" and row != "composable"  # torch's wrapper loads nothing else
        loaded = {} if kind == "LOCAL" else {"torch": 1.0}
        kept = shardckpt.model_state_dict(model, kind, rank0_only=kind == "FULL" and not everywhere)
        ways += [
            Way(take, mine.name, "shardckpt", partial(our_state, model, kind), {"torch": 1.0}),
            Way(put, mine.name, "shardckpt", partial(put_our_state, model, kept), loaded),
        ]
        if has(its, kind, optimizer=False):
            given = kept if kind == "FULL" else torch_state(other, kind)
            ways += [
                Way(take, its.name, "torch", partial(torch_state, other, kind)),
                Way(put, its.name, "torch", partial(put_torch_state, other, given, kind)),
            ]
    return ways + optimizer_ways(mine, its, (model, other), ("FULL", "SHARDED", "LOCAL"))


def has(face: Face, kind: str, *, optimizer: bool) -> bool:
    """Tell whether torch knows a kind of state."""
    return kind != "LOCAL" or (face.name == "torch FSDP1" and not optimizer)


CASES: dict[str, Callable[[str, Sizes, int], list[Way]]] = {
    "full": full,
    "sharded": sharded,
    "optimizer": optimizer,
    "many": many,
}


def our_state(model: nn.Module, kind: str) -> Mapping[str, Any]:
    whole = kind == "FULL"
    return shardckpt.model_state_dict(model, kind, rank0_only=whole, offload_to_cpu=whole)


def put_our_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    shardckpt.load_model_state_dict(model, state)


def our_optim_state(model: nn.Module, optim: torch.optim.Optimizer, kind: str) -> Mapping[str, Any]:
    whole = kind == "FULL"
    return shardckpt.optim_state_dict(model, optim, kind, rank0_only=whole, offload_to_cpu=whole)


def put_our_optim_state(model: nn.Module, optim: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    shardckpt.load_optim_state_dict(model, optim, state)


# ------------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Measured:
    """What one rank, or the slower one, found of a way.

    Attributes:
        way: The way, without what does it.
        seconds: Of each turn.
        cpu: Seconds of the same.
        peaks: Bytes that one more turn needed, of each rank.
    """

    way: Way
    seconds: tuple[float, ...]
    cpu: tuple[float, ...]
    peaks: tuple[int, ...]


def take_turns(case: str, row: str, sizes: Sizes, rank: int) -> list[Measured]:
    """Do everything that a case compares, in turn."""
    ways = CASES[case](row, sizes, rank)
    check(ways)
    taken: list[list[tuple[float, float]]] = [[] for _ in ways]
    for number in range(sizes.rounds):
        order = range(len(ways)) if number % 2 else range(len(ways) - 1, -1, -1)
        for index in order:
            gc.collect()
            dist.barrier()
            begun = time.perf_counter(), time.process_time()
            made = ways[index].act()
            ended = time.perf_counter(), time.process_time()
            dist.barrier()
            taken[index].append((ended[0] - begun[0], ended[1] - begun[1]))
            del made
    return_freed_memory()
    rows = zip(ways, taken, strict=True)
    return [
        Measured(replace(way, act=done), *(tuple(each) for each in zip(*found, strict=True)), (peak_of(way.act),))
        for way, found in rows
    ]


def done() -> None:
    """Stand for what was done, where it is told to another process."""


def peak_of(act: Act) -> int:
    """Return the bytes that are needed to do something, its result among them."""
    gc.collect()
    LIBC.malloc_trim(0)
    dist.barrier()
    before = read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    made = act()
    peak = read_status("VmHWM") - before
    del made
    return peak


def check(ways: Sequence[Way]) -> None:
    """Do everything once.

    Raises:
        SystemExit: shardckpt and torch took different states.
    """
    seen: dict[str, dict[str, Any]] = {}
    for way in ways:
        found = way.act()
        if way.role in ("shardckpt", "torch") and found is not None:
            seen.setdefault(way.what, {})[way.by] = told(found)
        del found
    for what, each in seen.items():
        first, *others = each.values()
        if what.endswith("LOCAL"):
            continue  # lies differently
        if any(other != first for other in others):
            raise SystemExit(f"{what} is not the same for {' and '.join(each)}: {differences(first, others[0])}")


def told(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return names with whole shapes and types, and the sum of what all ranks have, bit for bit."""
    tensors = dict(flattened(state))
    total = sum(
        (sum_of(part) for value in tensors.values() for part in parts(value)), torch.zeros((), dtype=torch.int64)
    )
    dist.all_reduce(total)
    return {**{name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}, "sum": total.item()}


def flattened(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what has dimensions."""
    for name, value in state.get("state", state).items():
        for slot, each in value.items() if isinstance(value, Mapping) else [("", value)]:
            if isinstance(each, ShardedTensor) or each.dim():
                yield f"{name} {slot}".strip(), each


def parts(value: Any) -> list[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value.to_local() if isinstance(value, DTensor) else value]


def sum_of(part: torch.Tensor) -> torch.Tensor:
    words = torch.int16 if part.element_size() == 2 else torch.int32
    return part.detach().contiguous().view(words).sum(dtype=torch.int64)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{name}: {one.get(name)} and {other.get(name)}"
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    )[:500]


def measure(case: str, row: str, sizes: Sizes) -> list[Measured]:
    """Compare in ranks of their own."""
    return [
        Measured(
            ranks[0].way,
            tuple(max(turn) for turn in zip(*(each.seconds for each in ranks), strict=True)),
            tuple(sum(turn) for turn in zip(*(each.cpu for each in ranks), strict=True)),
            tuple(each.peaks[0] for each in ranks),
        )
        for ranks in zip(*run_ranks(partial(take_turns, case, row, sizes)), strict=True)
    ]


# ------------------------------------------------------------------------------------------------------------ report


TITLES = {
    "full": "FULL state of {model:.3g} billion bfloat16 parameters, for the first rank",
    "sharded": "SHARDED state of {model:.3g} billion bfloat16 parameters",
    "optimizer": "Adam of {trained:.0f} million float32 parameters, for the first rank and back",
    "many": "{many:,} small parameters",
}


class Report:
    """What is printed, kept for the record, and failed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failed: list[str] = []

    def say(self, line: str = "") -> None:
        """Print a line and keep it."""
        print(line, flush=True)
        self.lines.append(line)

    def head(self, title: str) -> None:
        """Begin a table."""
        self.say(f"\n### {title}\n\n| | | ms (least - most) | CPU ms | x bare | x torch | peak MB |")
        self.say("|---|---|---|---|---|---|---|")

    def add(self, found: Sequence[Measured]) -> None:
        """Print what was compared."""
        of = {(each.way.what, each.way.role): each for each in found}
        for each in sorted(found, key=lambda each: [other.way.what for other in found].index(each.way.what)):
            way, ms = each.way, [turn * 1e3 for turn in each.seconds]
            ratios = {
                role: median_ratio(each.seconds, of[way.what, role].seconds)
                for role in ("bare", "torch")
                if way.role not in ("bare", role) and (way.what, role) in of
            }
            columns = [f"{ratios[role]:.3f}" if role in ratios else "" for role in ("bare", "torch")]
            self.say(
                f"| {way.what} | {way.by} | {median(ms):.1f} ({min(ms):.1f} - {max(ms):.1f}) "
                f"| {median(each.cpu) * 1e3:.1f} | {' | '.join(columns)} "
                f"| {', '.join(f'{peak / 1e6:.0f}' for peak in each.peaks)} |"
            )
            for role, measured in ratios.items():
                if measured > way.limits.get(role, measured):
                    self.failed.append(
                        f"{way.what} of {way.by} takes {measured:.3f} times that of {of[way.what, role].way.by}; "
                        f"{way.limits[role]:g} is the limit"
                    )


def run(case: str, rows: Sequence[str], sizes: Sizes) -> Report:
    """Measure and print one case."""
    report = Report()
    numels = {"model": sum(units_of(shape_of(sizes.model))) / 1e9, "many": sizes.many // UNIT * UNIT}
    numels["trained"] = sum(units_of(shape_of(sizes.trained))) / 1e6
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    report.say(f"{today}, {machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}.")
    report.say(f"{RANKS} gloo ranks, {sizes.rounds} rounds.")
    report.head(TITLES[case].format(**numels))
    for row in rows:
        report.add(measure(case, row, sizes))
    return report


def number(text: str) -> int:
    """Return a number: `300M` are 300 million, `1.1B` 1.1 billion."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} is no number; 300M and 1.1B are")
    return int(float(found[1]) * {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}[found[2]])


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="some of: %(default)s")
    parser.add_argument("--rows", default=",".join(ROWS), help="some of: %(default)s")
    parser.add_argument("--size", type=number, default=number("1.1B"), help="parameters of the bfloat16 model")
    parser.add_argument("--trained", type=number, default=number("300M"), help="parameters under Adam")
    parser.add_argument("--many", type=number, default=number("10K"), help="small parameters")
    parser.add_argument("--rounds", type=int, default=5, help="measured turns of each way")
    parser.add_argument("--record", action="store_true", help=f"write the tables into {RESULTS.name}")
    given = parser.parse_args()
    cases, rows = given.cases.split(","), given.rows.split(",")
    if unknown := (set(cases) - set(CASES)) | (set(rows) - set(ROWS)):
        parser.error(f"no such case or row: {', '.join(sorted(unknown))}")
    failed = []
    for case in cases:
        report = run(case, rows, Sizes(given.size, given.trained, given.many, given.rounds))
        failed += report.failed
        if given.record:
            record(f"States, {case}", report.lines)
    for line in failed:
        print(f"FAILED: {line}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
