"""Compare getting and setting the state of sharded models and optimizers with torch and with bare collectives.

    python benchmarks/state_dict.py [--cases full,sharded,optimizer,many] [--rows flat,originals,composable] [--record]

The benchmark uses two gloo ranks with one thread each. All compared methods run in the same two forked processes, in
alternating order, so other work on the machine affects all of them. The time of a turn is that of its slower rank.
Ratios are medians of the ratios of the rounds. CPU is the sum of both ranks and all threads. Before the first round
every method is checked: shardckpt and torch have to return the same names, shapes and values.

**full.** The FULL state of a bfloat16 Llama on rank 0. The baseline is `dist.gather` of as many bytes, unit by unit,
into memory that is kept. The limit is 1.5 times its time.

**sharded.** DTensors of the same model. The baseline of the wrapper is `dist.all_to_all_single` of as many bytes, unit
by unit, from the flat shard into new memory that is kept, as a state needs. The limits are 1.3 times its time, and half
of torch's time (on two ranks the bare collective takes a fifth of that). The same collective into preallocated memory,
which a state cannot use, is another row. `fully_shard` may take at most as long as torch's.

**optimizer.** Get Adam's FULL state on rank 0 and load it from there, compared with torch's functions.

**many.** Very many small parameters: get and load every kind of state of model and optimizer. Two methods have no
limit. For a SHARDED state of Adam, torch's fully_shard returns and takes live tensors, and we copy them. For loading a
LOCAL state, torch copies one flat tensor for each unit and does not check names.

Memory is the kernel's peak of resident memory in one more turn of each method, minus the memory before it. malloc
returns freed blocks immediately. The figure includes the result and the buffers of gloo. Rank 0 is listed first.
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
import torch._dynamo  # optimizers import it when they are created; import it once, before the fork
import torch.distributed as dist
from llama import Block, Llama, Shape
from options import add_selection
from ranks import LIBC, RANKS, median_ratio, read_status, return_freed_memory, run_ranks
from results import RESULTS, Lines, machine, record
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
"""Number of small parameters in a unit."""

PATTERN = torch.randn((1 << 20) + 7, generator=torch.Generator().manual_seed(0))


# ------------------------------------------------------------------------------------------------------------ models


@dataclass(frozen=True)
class Sizes:
    """Sizes and rounds.

    Attributes:
        model: Number of parameters of the bfloat16 model.
        trained: Number of parameters of the float32 model with an optimizer.
        many: Number of small parameters.
        rounds: Measured turns of each method.
    """

    model: int
    trained: int
    many: int
    rounds: int


@dataclass(frozen=True)
class FrontEnd:
    """A way to shard a module.

    Attributes:
        name: Printed name.
        shard: Makes a module an FSDP unit.
    """

    name: str
    shard: Callable[[nn.Module], nn.Module]


def wrap_module(package: Any, originals: bool, module: nn.Module) -> nn.Module:
    wrapper: nn.Module = package.FullyShardedDataParallel(
        module, use_orig_params=originals, device_id=torch.device("cpu")
    )
    return wrapper


def shard_in_place(package: Any, module: nn.Module) -> nn.Module:
    unit: nn.Module = package.fully_shard(module)
    return unit


ROWS = {
    "flat": (
        FrontEnd("shardckpt wrapper, flat", partial(wrap_module, ours, False)),
        FrontEnd("torch FSDP1", partial(wrap_module, theirs, False)),
    ),
    "originals": (
        FrontEnd("shardckpt wrapper, use_orig_params", partial(wrap_module, ours, True)),
        FrontEnd("torch FSDP1, use_orig_params", partial(wrap_module, theirs, True)),
    ),
    "composable": (
        FrontEnd("shardckpt fully_shard", partial(shard_in_place, ours)),
        FrontEnd("torch FSDP2", partial(shard_in_place, theirs)),
    ),
}


def choose_shape(numel: int) -> Shape:
    """Return the shape of a Llama with about `numel` parameters, at most a quarter of them in embedding and head."""
    hidden = 2048 if numel >= 10**9 else 1024 if numel >= 10**8 else 256 if numel >= 10**7 else 32
    block = 45 * hidden**2 // 4
    layers = max(1, -(-(numel - 32 * hidden**2) // block))
    return Shape(layers=layers, hidden=hidden, inner=hidden * 11 // 4, heads=hidden // 16, words=16 * hidden)


def materialize(module: nn.Module) -> nn.Module:
    """Allocate a module of the meta device and fill it with fixed values."""
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        fill(parameter.detach().view(-1))
    return module


def fill(values: torch.Tensor) -> None:
    for start in range(0, values.numel(), PATTERN.numel()):
        part = values[start : start + PATTERN.numel()]
        part.copy_(PATTERN[: part.numel()])


def llama(front_end: FrontEnd, shape: Shape, dtype: torch.dtype) -> nn.Module:
    """Return a Llama with one FSDP unit for each block and one for the rest; only one unit is full at a time."""
    with torch.device("meta"):
        model, blocks = Llama(replace(shape, layers=0)).to(dtype), [Block(shape).to(dtype) for _ in range(shape.layers)]
    materialize(model)
    for block in blocks:
        model.blocks.append(front_end.shard(materialize(block)))
    return front_end.shard(model)


def small_parameters(front_end: FrontEnd, number: int) -> nn.Module:
    """Return a model with `number` small parameters, sharded in units."""
    units = [nn.Sequential(*(nn.Linear(8, 8) for _ in range(UNIT // 2))) for _ in range(number // UNIT)]
    return front_end.shard(nn.Sequential(*(front_end.shard(materialize(unit)) for unit in units)))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an Adam optimizer with the state that it has after a step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        if parameter.numel():
            moments = {name: parameter.detach().clone() for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return optimizer


def count_unit_params(shape: Shape) -> list[int]:
    """Return the number of parameters of each unit."""
    with torch.device("meta"):
        block = sum(p.numel() for p in Block(shape).parameters())
        rest = sum(p.numel() for p in Llama(replace(shape, layers=0)).parameters())
    return [rest] + [block] * shape.layers


# ------------------------------------------------------------------------------------------------- states of torch


def torch_state(model: nn.Module, kind: str) -> Mapping[str, Any]:
    """Return the state of a model that torch sharded; the FULL one on rank 0 only."""
    if not isinstance(model, theirs.FullyShardedDataParallel):
        return dcp.get_model_state_dict(model, options=options(kind))
    with state_dict_type(model, kind):
        return model.state_dict()


def load_torch_state(model: nn.Module, state: Mapping[str, Any], kind: str) -> None:
    if isinstance(model, theirs.FullyShardedDataParallel):
        with state_dict_type(model, kind, rank0_only=False):
            model.load_state_dict(dict(state))
    else:
        dcp.set_model_state_dict(model, dict(state), options=options(kind, loads=True))


def torch_optim_state(model: nn.Module, optim: torch.optim.Optimizer, kind: str) -> Mapping[str, Any]:
    if not isinstance(model, theirs.FullyShardedDataParallel):
        return dcp.get_optimizer_state_dict(model, optim, options=options(kind))
    with state_dict_type(model, kind):
        state: Mapping[str, Any] = model.optim_state_dict(model, optim)
    return state


def load_torch_optim_state(model: nn.Module, optim: torch.optim.Optimizer, state: Mapping[str, Any], kind: str) -> None:
    state = copy_containers(state)
    if not isinstance(model, theirs.FullyShardedDataParallel):
        dcp.set_optimizer_state_dict(model, optim, state, options=options(kind, loads=True))
        return
    with state_dict_type(model, kind):
        optim.load_state_dict(model.optim_state_dict_to_load(model, optim, state))


def copy_containers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy the dicts and lists of a state, because torch's functions change their arguments."""
    return (
        {
            "state": {name: dict(slots) for name, slots in state["state"].items()},
            "param_groups": [{**group, "params": list(group["params"])} for group in state["param_groups"]],
        }
        if state
        else {}
    )


def options(kind: str, loads: bool = False) -> dcp.StateDictOptions:
    is_full = kind == "FULL"
    return dcp.StateDictOptions(
        full_state_dict=is_full, cpu_offload=is_full and not loads, broadcast_from_rank0=is_full and loads
    )


def state_dict_type(model: nn.Module, kind: str, rank0_only: bool = True) -> Any:
    """Return torch's context manager for a kind of state."""
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


# --------------------------------------------------------------------------------------------------- compared methods


@dataclass(frozen=True)
class Method:
    """One implementation of an operation.

    Attributes:
        operation: Methods of the same operation are compared.
        name: Printed name.
        role: "shardckpt", "torch", "bare" for the baseline, or "floor" for a lower bound.
        act: Runs the operation and returns the state.
        limits: Largest time relative to the method of a role.
    """

    operation: str
    name: str
    role: str
    act: Act
    limits: Mapping[str, float] = field(default_factory=dict)


def full(row: str, sizes: Sizes, rank: int) -> list[Method]:
    """The FULL state of the model on rank 0."""
    mine, its = ROWS[row]
    shape = choose_shape(sizes.model)
    model, other = (llama(front_end, shape, torch.bfloat16) for front_end in (mine, its))
    operation = "model FULL"
    return [
        Method(operation, "bare gather", "bare", partial(gather, count_unit_params(shape), rank)),
        Method(operation, mine.name, "shardckpt", partial(our_state, model, "FULL"), {"bare": 1.5, "torch": 1.0}),
        Method(operation, its.name, "torch", partial(torch_state, other, "FULL")),
    ]


def gather(units: Sequence[int], rank: int) -> list[torch.Tensor]:
    """Gather the elements of each unit to rank 0, from preallocated shards."""
    shard = torch.zeros(-(-max(units) // RANKS), dtype=torch.bfloat16)
    gathered = []
    for numel in units:
        part = shard[: -(-numel // RANKS)]
        rows = torch.empty(RANKS, part.numel(), dtype=part.dtype) if rank == 0 else None
        dist.gather(part, None if rows is None else list(rows), dst=0)
        gathered += [] if rows is None else [rows]
    return gathered


def sharded(row: str, sizes: Sizes, rank: int) -> list[Method]:
    """The SHARDED state of the model."""
    mine, its = ROWS[row]
    shape = choose_shape(sizes.model)
    model, other = (llama(front_end, shape, torch.bfloat16) for front_end in (mine, its))
    operation = "model SHARDED"
    limits = {"torch": 1.0} if row == "composable" else {"bare": 1.3, "torch": 0.5}
    methods = [
        Method(operation, mine.name, "shardckpt", partial(our_state, model, "SHARDED"), limits),
        Method(operation, its.name, "torch", partial(torch_state, other, "SHARDED")),
    ]
    if row == "composable":
        return methods
    kept = exchange(model, rank)
    return [
        Method(operation, "bare all-to-all", "bare", partial(exchange, model, rank)),
        Method(operation, "bare all-to-all, preallocated", "floor", partial(exchange, model, rank, kept)),
        *methods,
    ]


def exchange(model: nn.Module, rank: int, into: Sequence[torch.Tensor] | None = None) -> list[torch.Tensor]:
    """Exchange the elements of each unit between flat shards and rows, into new memory or into given buffers."""
    outputs: list[torch.Tensor] = []
    for number, bucket in enumerate(buckets(model)):
        plan = plan_exchange(bucket.layout, rank)  # type: ignore[arg-type]
        send_sizes, receive_sizes = (
            [sum(span.numel for span in spans) for spans in side] for side in (plan.out, plan.into)
        )
        out = bucket.shard.new_empty(sum(receive_sizes)) if into is None else into[number]
        shard = bucket.shard.detach()[: sum(send_sizes)]
        dist.all_to_all_single(out, shard, receive_sizes, send_sizes)
        outputs.append(out)
    return outputs


def optimizer(row: str, sizes: Sizes, rank: int) -> list[Method]:  # noqa: ARG001
    """Adam's FULL state on rank 0, and loading it from there."""
    mine, its = ROWS[row]
    shape = choose_shape(sizes.trained)
    model, other = (llama(front_end, shape, torch.float32) for front_end in (mine, its))
    return optimizer_methods(mine, its, (model, other), ("FULL",))


def optimizer_methods(
    mine: FrontEnd, its: FrontEnd, models: tuple[nn.Module, nn.Module], kinds: Sequence[str]
) -> list[Method]:
    (model, other), (our_optim, other_optim) = models, map(adam, models)
    methods = []
    for kind in kinds:
        get, load = f"Adam {kind}", f"Adam {kind}, loaded"
        kept = our_optim_state(model, our_optim, kind)
        limits = {} if kind == "SHARDED" and its.name == "torch FSDP2" else {"torch": 1.0}
        methods += [
            Method(get, mine.name, "shardckpt", partial(our_optim_state, model, our_optim, kind), limits),
            Method(load, mine.name, "shardckpt", partial(load_our_optim_state, model, our_optim, kept), limits),
        ]
        if supports(its, kind, optimizer=True):
            initial = kept if kind == "FULL" else torch_optim_state(other, other_optim, kind)
            methods += [
                Method(get, its.name, "torch", partial(torch_optim_state, other, other_optim, kind)),
                Method(load, its.name, "torch", partial(load_torch_optim_state, other, other_optim, initial, kind)),
            ]
    return methods


def many(row: str, sizes: Sizes, rank: int) -> list[Method]:  # noqa: ARG001
    """Get and load every kind of state of very many small parameters."""
    mine, its = ROWS[row]
    model, other = (small_parameters(front_end, sizes.many) for front_end in (mine, its))
    methods = []
    for kind in ("FULL", "SHARDED", "LOCAL"):
        get, load = f"model {kind}", f"model {kind}, loaded"
        on_all_ranks = kind == "FULL" and row != "composable"  # torch's wrapper needs it on all ranks
        loaded = {} if kind == "LOCAL" else {"torch": 1.0}
        kept = shardckpt.model_state_dict(model, kind, rank0_only=kind == "FULL" and not on_all_ranks)
        methods += [
            Method(get, mine.name, "shardckpt", partial(our_state, model, kind), {"torch": 1.0}),
            Method(load, mine.name, "shardckpt", partial(load_our_state, model, kept), loaded),
        ]
        if supports(its, kind, optimizer=False):
            initial = kept if kind == "FULL" else torch_state(other, kind)
            methods += [
                Method(get, its.name, "torch", partial(torch_state, other, kind)),
                Method(load, its.name, "torch", partial(load_torch_state, other, initial, kind)),
            ]
    return methods + optimizer_methods(mine, its, (model, other), ("FULL", "SHARDED", "LOCAL"))


def supports(front_end: FrontEnd, kind: str, *, optimizer: bool) -> bool:
    """Return True if torch supports a kind of state."""
    return kind != "LOCAL" or (front_end.name == "torch FSDP1" and not optimizer)


CASES: dict[str, Callable[[str, Sizes, int], list[Method]]] = {
    "full": full,
    "sharded": sharded,
    "optimizer": optimizer,
    "many": many,
}


def our_state(model: nn.Module, kind: str) -> Mapping[str, Any]:
    is_full = kind == "FULL"
    return shardckpt.model_state_dict(model, kind, rank0_only=is_full, offload_to_cpu=is_full)


def load_our_state(model: nn.Module, state: Mapping[str, Any]) -> None:
    shardckpt.load_model_state_dict(model, state)


def our_optim_state(model: nn.Module, optim: torch.optim.Optimizer, kind: str) -> Mapping[str, Any]:
    is_full = kind == "FULL"
    return shardckpt.optim_state_dict(model, optim, kind, rank0_only=is_full, offload_to_cpu=is_full)


def load_our_optim_state(model: nn.Module, optim: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    shardckpt.load_optim_state_dict(model, optim, state)


# ------------------------------------------------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Measurement:
    """Measurements of a method on one rank, or combined for all ranks.

    Attributes:
        method: The method, without its function.
        seconds: Seconds of each turn.
        cpu: CPU seconds of each turn.
        peaks: Peak memory of one more turn in bytes, of each rank.
    """

    method: Method
    seconds: tuple[float, ...]
    cpu: tuple[float, ...]
    peaks: tuple[int, ...]


def take_turns(case: str, row: str, sizes: Sizes, rank: int) -> list[Measurement]:
    """Run the methods of a case in turn."""
    methods = CASES[case](row, sizes, rank)
    check(methods)
    times: list[list[tuple[float, float]]] = [[] for _ in methods]
    for number in range(sizes.rounds):
        order = range(len(methods)) if number % 2 else range(len(methods) - 1, -1, -1)
        for index in order:
            gc.collect()
            dist.barrier()
            start = time.perf_counter(), time.process_time()
            result = methods[index].act()
            end = time.perf_counter(), time.process_time()
            dist.barrier()
            times[index].append((end[0] - start[0], end[1] - start[1]))
            del result
    return_freed_memory()
    return [
        Measurement(
            replace(method, act=placeholder),
            tuple(seconds for seconds, _ in turns),
            tuple(cpu for _, cpu in turns),
            (measure_peak(method.act),),
        )
        for method, turns in zip(methods, times, strict=True)
    ]


def placeholder() -> None:
    """Replace a method's function, so that the method can be sent to another process."""


def measure_peak(act: Act) -> int:
    """Return the peak memory of a function in bytes, with its result."""
    gc.collect()
    LIBC.malloc_trim(0)
    dist.barrier()
    before = read_status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    result = act()
    peak = read_status("VmHWM") - before
    del result
    return peak


def check(methods: Sequence[Method]) -> None:
    """Run each method once.

    Raises:
        SystemExit: shardckpt and torch returned different states.
    """
    summaries: dict[str, dict[str, Any]] = {}
    for method in methods:
        state = method.act()
        if method.role in ("shardckpt", "torch") and state is not None:
            summaries.setdefault(method.operation, {})[method.name] = summarize(state)
        del state
    for operation, by_name in summaries.items():
        first, *others = by_name.values()
        if operation.endswith("LOCAL"):
            continue  # the layouts differ
        if any(other != first for other in others):
            raise SystemExit(f"{operation} differs for {' and '.join(by_name)}: {differences(first, others[0])}")


def summarize(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return names with global shapes and dtypes, and the sum of the bits of all ranks."""
    tensors = dict(iterate_tensors(state))
    total = sum(
        (sum_bits(part) for value in tensors.values() for part in local_parts(value)),
        torch.zeros((), dtype=torch.int64),
    )
    dist.all_reduce(total)
    return {**{name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}, "sum": total.item()}


def iterate_tensors(state: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a state that are not scalars."""
    for name, value in state.get("state", state).items():
        for slot, tensor in value.items() if isinstance(value, Mapping) else [("", value)]:
            if isinstance(tensor, ShardedTensor) or tensor.dim():
                yield f"{name} {slot}".strip(), tensor


def local_parts(value: Any) -> list[torch.Tensor]:
    if isinstance(value, ShardedTensor):
        return [shard.tensor for shard in value.local_shards()]
    return [value.to_local() if isinstance(value, DTensor) else value]


def sum_bits(part: torch.Tensor) -> torch.Tensor:
    words = torch.int16 if part.element_size() == 2 else torch.int32
    return part.detach().contiguous().view(words).sum(dtype=torch.int64)


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{name}: {one.get(name)} and {other.get(name)}"
        for name in sorted(one.keys() | other.keys())
        if one.get(name) != other.get(name)
    )[:500]


def measure(case: str, row: str, sizes: Sizes) -> list[Measurement]:
    """Run a case on new ranks and combine their measurements."""
    return [
        Measurement(
            ranks[0].method,
            tuple(max(turn) for turn in zip(*(rank.seconds for rank in ranks), strict=True)),
            tuple(sum(turn) for turn in zip(*(rank.cpu for rank in ranks), strict=True)),
            tuple(rank.peaks[0] for rank in ranks),
        )
        for ranks in zip(*run_ranks(partial(take_turns, case, row, sizes)), strict=True)
    ]


# ------------------------------------------------------------------------------------------------------------ report


TITLES = {
    "full": "FULL state of {model:.3g} billion bfloat16 parameters, on rank 0",
    "sharded": "SHARDED state of {model:.3g} billion bfloat16 parameters",
    "optimizer": "Adam of {trained:.0f} million float32 parameters, to rank 0 and back",
    "many": "{many:,} small parameters",
}


class Report(Lines):
    """The table of a case."""

    def head(self, title: str) -> None:
        """Print the head of a table."""
        self.say(f"\n### {title}\n\n| | | ms (least - most) | CPU ms | x bare | x torch | peak MB |")
        self.say("|---|---|---|---|---|---|---|")

    def add(self, measurements: Sequence[Measurement]) -> None:
        """Print the rows of the methods."""
        by_role = {(row.method.operation, row.method.role): row for row in measurements}
        operations = [row.method.operation for row in measurements]
        for row in sorted(measurements, key=lambda row: operations.index(row.method.operation)):
            method, ms = row.method, [turn * 1e3 for turn in row.seconds]
            ratios = {
                role: median_ratio(row.seconds, by_role[method.operation, role].seconds)
                for role in ("bare", "torch")
                if method.role not in ("bare", role) and (method.operation, role) in by_role
            }
            columns = [f"{ratios[role]:.3f}" if role in ratios else "" for role in ("bare", "torch")]
            self.say(
                f"| {method.operation} | {method.name} | {median(ms):.1f} ({min(ms):.1f} - {max(ms):.1f}) "
                f"| {median(row.cpu) * 1e3:.1f} | {' | '.join(columns)} "
                f"| {', '.join(f'{peak / 1e6:.0f}' for peak in row.peaks)} |"
            )
            for role, to_peer in ratios.items():
                if to_peer > method.limits.get(role, to_peer):
                    self.failed.append(
                        f"{method.operation} of {method.name} takes {to_peer:.3f} times the time of "
                        f"{by_role[method.operation, role].method.name}; the limit is {method.limits[role]:g}"
                    )


def run(case: str, rows: Sequence[str], sizes: Sizes) -> Report:
    """Run a case and print its table."""
    report = Report()
    numels = {"model": sum(count_unit_params(choose_shape(sizes.model))) / 1e9, "many": sizes.many // UNIT * UNIT}
    numels["trained"] = sum(count_unit_params(choose_shape(sizes.trained))) / 1e6
    today = datetime.datetime.now(tz=datetime.timezone.utc).date()
    report.say(f"{today}, {machine()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}.")
    report.say(f"{RANKS} gloo ranks, {sizes.rounds} rounds.")
    report.head(TITLES[case].format(**numels))
    for row in rows:
        report.add(measure(case, row, sizes))
    return report


def number(text: str) -> int:
    """Return a number: `300M` is 300 million, `1.1B` is 1.1 billion."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    if not match:
        raise argparse.ArgumentTypeError(f"a number must be like 300M or 1.1B, got {text!r}")
    return int(float(match[1]) * {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}[match[2]])


def main() -> None:
    """Run the selected cases and rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_selection(parser, "--cases", CASES)
    add_selection(parser, "--rows", ROWS)
    parser.add_argument("--size", type=number, default=number("1.1B"), help="parameters of the bfloat16 model")
    parser.add_argument("--trained", type=number, default=number("300M"), help="parameters under Adam")
    parser.add_argument("--many", type=number, default=number("10K"), help="small parameters")
    parser.add_argument("--rounds", type=int, default=5, help="measured turns of each method")
    parser.add_argument("--record", action="store_true", help=f"write the tables into {RESULTS.name}")
    arguments = parser.parse_args()
    failed = []
    for case in arguments.cases:
        report = run(case, arguments.rows, Sizes(arguments.size, arguments.trained, arguments.many, arguments.rounds))
        failed += report.failed
        if arguments.record:
            record(f"States, {case}", report.lines)
    for line in failed:
        print(f"FAILED: {line}", file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
