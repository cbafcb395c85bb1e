"""Checkpoints laid out as DeepSpeed lays them out, of any stage and world size, without DeepSpeed."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

Tensors = Mapping[str, torch.Tensor]
STEPS = 3


@dataclass(frozen=True)
class Run:
    """What was trained.

    Attributes:
        groups: The optimizer's groups: name to master weights.
        held: Further tensors of the module: buffers, and what is frozen.
        frozen: Names in `held` that are parameters.
        order: Names in state-dict order; groups first where it is empty.
        shared: Further names of parameters.
        live: Type of the module's own weights; that of the masters where it is None.
    """

    groups: Sequence[Tensors]
    held: Tensors = field(default_factory=dict)
    frozen: Sequence[str] = ()
    order: Sequence[str] = ()
    shared: Mapping[str, str] = field(default_factory=dict)
    live: torch.dtype | None = torch.bfloat16

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        return {name: value for group in self.groups for name, value in group.items()}

    @property
    def names(self) -> list[str]:
        return list(self.order) or [*self.trained, *self.held, *self.shared]

    def module(self) -> dict[str, torch.Tensor]:
        """Return the module's state dict."""
        made: dict[str, torch.Tensor] = {}
        for name in self.names:
            first = self.shared.get(name, name)
            if first in made:
                made[name] = made[first]
            elif first in self.trained:
                made[name] = self.trained[first].to(self.live or self.trained[first].dtype)
            else:
                made[name] = self.held[first]
        return made

    def moments(self) -> dict[str, torch.Tensor]:
        """Return what the optimizer keeps, each a different function of its parameter."""
        made = {}
        for name, value in self.trained.items():
            made[f"{name}/exp_avg"] = value * 2 + 1
            made[f"{name}/exp_avg_sq"] = value * value
        return made


def write(
    folder: Path,
    run: Run,
    stage: int,
    world: int,
    *,
    tag: str = "global_step3",
    lean: bool = True,
    sub_group: int = 1 << 60,
    parameter_alignment: int = 1,
    is_old: bool = False,
    places: str = "",
) -> Path:
    """Write a checkpoint and `latest`; return the folder.

    Args:
        folder: Made where it is not there.
        run: What was trained.
        stage: 1, 2 or 3.
        world: Data-parallel ranks.
        tag: Name of the step's folder.
        lean: Leave padding out at the end of a group (stages 1 and 2), as DeepSpeed's own ZeRO optimizer does; its bf16
            optimizer writes it.
        sub_group: Elements of a flat tensor (stage 3).
        parameter_alignment: Elements that parameters start at multiples of (stages 1 and 2).
        is_old: Count all padding of a group as the last rank's, as versions before 0.15 do (stages 1 and 2, lean).
        places: Tell where parameters lie in each rank's part (stages 1 and 2): `flat`, as they do; `dealt`, counted in
            the order before `round_robin_gradients` dealt them out, which is what DeepSpeed then writes.
    """
    step = folder / tag
    step.mkdir(parents=True)
    (folder / "latest").write_text(tag)
    if stage == 3:
        units, shapes = _split(run, world, sub_group)
    else:
        units, shapes = _partitioned(run, world, parameter_alignment, is_old)
    for rank in range(world):
        state = _optim(run, units, rank, world, stage, lean)
        if places and stage != 3:
            state["param_slice_mappings"] = _places(run, units, rank, world, places)
        with patch.dict(sys.modules, _MODULES):
            torch.save({"optimizer_state_dict": state}, step / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3 or rank == 0:
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
            torch.save(_model(run, shapes, rank, world, stage), step / name)
    return folder


@dataclass(frozen=True)
class _Unit:
    """One flat tensor: every rank's part of the masters and moments, and which group it is of."""

    group: int
    parts: Mapping[str, list[torch.Tensor]]
    paddings: list[int]
    between: list[int]


def _kinds(run: Run, names: Sequence[str]) -> dict[str, list[torch.Tensor]]:
    moments = run.moments()
    kinds = {"master": [run.trained[name] for name in names]}
    for slot in ("exp_avg", "exp_avg_sq"):
        kinds[slot] = [moments[f"{name}/{slot}"] for name in names]
    return kinds


def dealt(names: Sequence[str], world: int) -> list[str]:
    """Return names as `round_robin_gradients` deals them out: in the order of the ranks that they are dealt to."""
    return [name for rank in range(world) for name in names[rank::world]]


@dataclass
class fragment_address:  # noqa: N801  (DeepSpeed's own)
    numel: int
    start: int


_HOME = ModuleType("deepspeed.utils.tensor_fragment")
_HOME.fragment_address = fragment_address  # type: ignore[attr-defined]
fragment_address.__module__ = _HOME.__name__
_MODULES = {
    "deepspeed": ModuleType("deepspeed"),
    "deepspeed.utils": ModuleType("deepspeed.utils"),
    _HOME.__name__: _HOME,
}
"""Where pickle looks for the class, while a file is written; others would take them for DeepSpeed."""


def _places(run: Run, units: list[_Unit], rank: int, world: int, kind: str) -> list[dict[str, fragment_address]]:
    told = []
    for unit, group in zip(units, run.groups, strict=True):
        each = unit.parts["master"][0].numel()
        spaces = dict(zip(group, unit.between, strict=True))
        names = list(group)
        if kind == "dealt":
            places = dealt(list(range(len(names))), world)  # type: ignore[arg-type]
            names = [name for _, name in sorted(zip(places, names, strict=True))]
            spaces = dict.fromkeys(names, 0)
        at, found = 0, OrderedDict()
        for name in names:
            start, stop = max(at, rank * each), min(at + group[name].numel(), (rank + 1) * each)
            if start < stop:
                found[name] = fragment_address(stop - start, start - rank * each)
            at += group[name].numel() + spaces[name]
        told.append(found)
    return told


def _partitioned(
    run: Run, world: int, alignment: int, is_old: bool = False
) -> tuple[list[_Unit], list[dict[str, torch.Size]]]:
    units, shapes = [], []
    for g, group in enumerate(run.groups):
        between, at = [], 0
        for value in group.values():
            at += value.numel()
            between.append((-at) % alignment)
            at += between[-1]
        between[-1] = 0
        parts, total = {}, 0
        for kind, values in _kinds(run, list(group)).items():
            spread = [torch.cat([v.reshape(-1), torch.full((n,), 7.0)]) for v, n in zip(values, between, strict=True)]
            flat = torch.cat(spread)
            total = flat.numel()
            flat = torch.nn.functional.pad(flat, (0, -total % (2 * world)), value=9.0)
            parts[kind] = list(flat.chunk(world)) if flat.numel() else [flat] * world
        each = parts["master"][0].numel()
        paddings = [min(max((rank + 1) * each - total, 0), each) for rank in range(world)]
        if is_old:
            paddings = [0] * (world - 1) + [each * world - total]
        units.append(_Unit(g, parts, paddings, between))
        shapes.append(OrderedDict((name, value.shape) for name, value in group.items()))
    return units, shapes


def _split(run: Run, world: int, sub_group: int) -> tuple[list[_Unit], list[dict[str, torch.Size]]]:
    units, shapes = [], []
    for g, group in enumerate(run.groups):
        chosen: list[str] = []
        size = 0
        for i, (name, value) in enumerate(group.items()):
            chosen.append(name)
            size += -(-value.numel() // world)
            if size >= sub_group or i == len(group) - 1:
                kinds = _kinds(run, chosen)
                parts = {
                    k: [torch.cat([_part(v, r, world) for v in vs]) for r in range(world)] for k, vs in kinds.items()
                }
                units.append(_Unit(g, parts, [0] * world, []))
                shapes.append(OrderedDict((n, group[n].shape) for n in chosen))
                chosen, size = [], 0
    return units, shapes


def _part(value: torch.Tensor, rank: int, world: int) -> torch.Tensor:
    each = -(-value.numel() // world)
    return torch.nn.functional.pad(value.reshape(-1), (0, each * world - value.numel()))[rank * each :][:each].clone()


def _optim(run: Run, units: list[_Unit], rank: int, world: int, stage: int, lean: bool) -> dict[str, Any]:
    def part(unit: _Unit, kind: str) -> torch.Tensor:
        flat = unit.parts[kind][rank]
        return flat[: flat.numel() - unit.paddings[rank]].clone() if lean else flat.clone()

    state = {
        i: {"step": torch.tensor(float(STEPS)), **{s: part(unit, s) for s in ("exp_avg", "exp_avg_sq")}}
        for i, unit in enumerate(units)
    }
    groups = [
        {"lr": 0.1 / (g + 1), "betas": (0.9, 0.99), "params": [i for i, u in enumerate(units) if u.group == g]}
        for g in range(len(run.groups))
    ]
    base = {"state": state, "param_groups": groups}
    masters = [part(unit, "master") for unit in units]
    said: dict[str, Any] = {"zero_stage": stage, "ds_version": "0.19.8"}
    if stage == 3:
        return {**said, "partition_count": world, "optimizer_state_dict": base, "fp32_flat_groups": masters}
    paddings = {"param_alignment_paddings": [unit.between for unit in units]} if lean else {}
    return {
        **said,
        **paddings,
        "partition_count": [world] * len(units),
        "group_paddings": [unit.paddings[rank] for unit in units],
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": masters,
    }


def _model(run: Run, shapes: list[dict[str, torch.Size]], rank: int, world: int, stage: int) -> dict[str, Any]:
    module: OrderedDict[str, torch.Tensor] = OrderedDict(run.module())
    frozen = OrderedDict((name, run.held[name]) for name in run.frozen)
    fragments = frozen
    if stage == 3:
        fragments = OrderedDict((name, _part(value, rank, world)) for name, value in frozen.items())
        for name, value in module.items():
            if name in frozen or name in run.trained or name in run.shared:
                module[name] = value.new_empty(0)
    return {
        "module": module,
        "buffer_names": [name for name in run.held if name not in run.frozen],
        "optimizer": None,
        "param_shapes": shapes,
        "frozen_param_shapes": OrderedDict((name, value.shape) for name, value in frozen.items()),
        "frozen_param_fragments": fragments,
        "shared_params": dict(run.shared) if rank == 0 else {},
        "global_steps": STEPS,
        "dp_world_size": world,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
        "epoch": 2,
    }


def write_universal(folder: Path, run: Run, stage: int, world: int) -> Path:
    """Write what `ds_to_universal.py` makes of a checkpoint, and `latest_universal`; return the folder.

    Stages 1 and 2 give every parameter in its shape, under `param`, and the module's other tensors as float32 too;
    stage 3 gives flat tensors with the padding of ranks, and its model files with placeholders.
    """
    step = folder / "global_step3_universal"
    (step / "zero").mkdir(parents=True)
    (folder / "latest_universal").write_text(step.name)
    units, shapes = _split(run, world, 1 << 60) if stage == 3 else _partitioned(run, world, 1)
    kinds = {"fp32": run.trained}
    for slot in ("exp_avg", "exp_avg_sq"):
        kinds[slot] = {name: run.moments()[f"{name}/{slot}"] for name in run.trained}
    for kind, values in kinds.items():
        for name, value in values.items():
            (step / "zero" / name).mkdir(exist_ok=True)
            flat = torch.cat([_part(value, rank, world) for rank in range(world)])
            content = flat if stage == 3 else {"cat_dim": 0, "param": value}
            torch.save(content, step / "zero" / name / f"{kind}.pt")
            if stage < 3:
                torch.save(torch.tensor(float(STEPS)), step / "zero" / name / "step.pt")
    if stage < 3:
        for name, value in run.module().items():
            if name not in run.trained:
                (step / "zero" / name).mkdir()
                torch.save({"param": value.float()}, step / "zero" / name / "fp32.pt")
    state = _optim(run, units, 0, world, stage, lean=True)
    base = state["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    if stage < 3:
        state = {k: v for k, v in state.items() if k not in {"base_optimizer_state", "single_partition_of_fp32_groups"}}
    torch.save({**state, "param_groups": base["param_groups"]}, step / "zero" / "optimizer_state.pt")
    for rank in range(world if stage == 3 else 1):
        name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" if stage == 3 else "mp_rank_00_model_states.pt"
        torch.save(_model(run, shapes, rank, world, stage), step / name)
    return folder
