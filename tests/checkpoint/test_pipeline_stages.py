"""Pipeline stages save the parts of a model that each rank has, and load them by name on any number of stages."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed import fsdp as theirs
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, SplitPoint, pipeline
from torch.optim.swa_utils import AveragedModel

import shardckpt
from shardckpt import core as ours
from shardckpt.checkpoint.save.planner import SaveOptions
from shardckpt.checkpoint.save.session import Saver
from shardckpt.errors import MismatchError, RankError, UsageError
from shardckpt.ranks.process_group import get_ranks
from tests.kit.models.states import differing, looked_at, whole
from tests.kit.ranks.harness import mark, raised_everywhere, run, since

WIDTH, LAYERS = 6, 4


class Head(nn.Module):
    """A norm and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale what is normed."""
        return self.norm(x) * self.scale


class Model(nn.Module):
    """A model whose stages keep the whole model's names."""

    def __init__(self, first: int = 0, end: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = {str(number): nn.Linear(WIDTH, WIDTH) for number in range(LAYERS)}
        self.layers = nn.ModuleDict({str(number): whole[str(number)] for number in range(first, end)})
        if end == LAYERS:
            self.head = Head()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Pass through all layers."""
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return self.head(x) if hasattr(self, "head") else x


def cut(rank: int, stages: int) -> Model:
    size = LAYERS // stages
    return Model(rank * size, (rank + 1) * size)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Biases have no decay."""
    named = dict(model.named_parameters())
    plain = [value for name, value in named.items() if "bias" in name]
    decayed = [value for name, value in named.items() if "bias" not in name]
    return torch.optim.AdamW([{"params": decayed}, {"params": plain, "weight_decay": 0.0}], lr=0.01)


def train(rank: int, stages: int, model: nn.Module, optim: torch.optim.Optimizer, steps: range) -> None:
    """Train by torch's schedule of a pipeline."""
    stage = PipelineStage(model, rank, stages, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda found, target: (found - target).square().mean())
    for number in steps:
        torch.manual_seed(number)
        x, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        optim.zero_grad()
        schedule.step(*([x] if rank == 0 else []), **({"target": target} if rank == stages - 1 else {}))
        optim.step()


def values_of(model: nn.Module, optim: torch.optim.Optimizer) -> dict:
    """Return weights, buffers, moments and settings by name."""
    found = {name: whole(value.detach()) for name, value in model.state_dict().items()}
    names = {value: name for name, value in model.named_parameters()}
    for group in optim.param_groups:
        for parameter in group["params"]:
            kept = optim.state.get(parameter, {})
            found |= {f"{names[parameter]}/{slot}": whole(value) for slot, value in kept.items()}
            found[f"{names[parameter]}/decay"] = group["weight_decay"]
    return found


def save_trained(rank: int, world: int, path: Path) -> dict:
    model = cut(rank, world)
    optim = optimizer_of(model)
    train(rank, world, model, optim, range(2))
    shardckpt.save({"model": model, "optim": optim, "step": 2}, path)
    found = values_of(model, optim)
    train(rank, world, model, optim, range(2, 4))
    return {"saved": found, "later": values_of(model, optim)}


def resume(rank: int, world: int, path: Path) -> dict:
    model = fill(cut(rank, world), 0.0)
    optim = optimizer_of(model)
    state = {"model": model, "optim": optim, "step": 0}
    shardckpt.load(state, path)
    found = values_of(model, optim)
    if world > 1:
        train(rank, world, model, optim, range(2, 4))
    return {"saved": found, "later": values_of(model, optim), "step": state["step"]}


def joined(found: list[dict], key: str) -> dict:
    return {name: value for each in found for name, value in each[key].items()}


def test_stages_resume_bit_for_bit_on_more_and_fewer_stages(tmp_path: Path) -> None:
    saved = run(2, save_trained, tmp_path / "c")
    expected = joined(saved, "saved")
    assert len(expected) > LAYERS * 2 * 4
    again = run(2, resume, tmp_path / "c")
    assert [each["step"] for each in again] == [2, 2]
    for one, other in zip(saved, again, strict=True):
        assert differing(other["saved"], one["saved"]) == differing(other["later"], one["later"]) == []
    for stages in (1, 4):
        assert differing(joined(run(stages, resume, tmp_path / "c"), "saved"), expected) == []
    assert list(shardckpt.load(tmp_path / "c")["model"]) == list(Model().state_dict())


def test_stages_that_torch_cuts_are_loaded_into_the_whole_model(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        pipe = pipeline(fill(Model(), 3.0), (torch.ones(4, WIDTH),), split_spec={"layers.2": SplitPoint.BEGINNING})
        stage = pipe.build_stage(rank, torch.device("cpu"))
        optim = torch.optim.AdamW(stage.submod.parameters(), lr=0.5)
        shardckpt.save({"model": stage.submod, "optim": optim}, tmp_path / "c")

    run(2, body)
    model = Model()
    optim = torch.optim.AdamW(model.parameters())
    shardckpt.load({"model": model, "optim": optim}, tmp_path / "c")
    assert differing(model.state_dict(), fill(Model(), 3.0).state_dict()) == []
    assert optim.param_groups[0]["lr"] == 0.5
    shardckpt.consolidate(str(tmp_path / "c"), str(tmp_path / "whole"))
    assert load_file(tmp_path / "whole" / "model.safetensors").keys() == model.state_dict().keys()


SHARDS: dict[str, Callable] = {
    "in place": ours.fully_shard,
    "torch in place": theirs.fully_shard,
    "orig": lambda module, mesh: ours.FullyShardedDataParallel(module, device_mesh=mesh, use_orig_params=True),
}


@pytest.mark.parametrize("face", SHARDS)
def test_sharded_stages_are_loaded_into_stages_of_other_meshes(face: str, tmp_path: Path) -> None:
    def build(rank: int, world: int, per_stage: int) -> tuple[Model, torch.optim.Optimizer]:
        stages, stage = world // per_stage, rank // per_stage
        mesh = [DeviceMesh("cpu", list(range(at, at + per_stage))) for at in range(0, world, per_stage)][stage]
        model = SHARDS[face](cut(stage, stages), mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01)

    def save(rank: int, world: int) -> dict:
        model, optim = build(rank, world, 2)
        model(torch.randn(8, WIDTH)).square().mean().backward()
        optim.step()
        shardckpt.save({"model": model, "optim": optim}, tmp_path / "c")
        return looked_at_by_name(model, optim)

    def load(rank: int, world: int, per_stage: int) -> dict:
        model, optim = build(rank, world, per_stage)
        shardckpt.load({"model": model, "optim": optim}, tmp_path / "c", broadcast_reads=per_stage == 1)
        return looked_at_by_name(model, optim)

    expected = {name: value for found in run(4, save) for name, value in found.items()}
    for world, per_stage in ((4, 1), (3, 3), (2, 1)):
        found = {name: value for each in run(world, load, per_stage) for name, value in each.items()}
        assert differing(found, expected) == []


def looked_at_by_name(model: nn.Module, optim: torch.optim.Optimizer) -> dict:
    weights, moments = looked_at(model, optim)
    return weights | {"/".join(key): value for key, value in moments.items() if key[0] != "group"}


@pytest.mark.parametrize("kind", ["file", "dcp"])
def test_stages_take_their_parts_of_what_others_wrote(kind: str, tmp_path: Path) -> None:
    whole = Model().state_dict()
    path = tmp_path / ("model.safetensors" if kind == "file" else "folder")
    if kind == "file":
        save_file(whole, path)
    else:
        dcp.save({"model": whole}, checkpoint_id=path, no_dist=True)

    def body(rank: int, world: int) -> dict:
        stage = fill(cut(rank, world), 0.0)
        shardckpt.load({"model": stage}, path)
        head = nn.ModuleDict({"layers": nn.ModuleDict({"0": nn.Linear(WIDTH, WIDTH)})})
        with pytest.raises(MismatchError, match=r"unexpected: .*layers\.1"):
            shardckpt.load({"model": head}, path)
        return dict(stage.state_dict())

    first, second = run(2, body)
    assert differing(first | second, dict(whole)) == []


def test_a_checkpointer_saves_stages_in_the_background_and_captures_them(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> list[str]:
        model = cut(rank, world)
        optim = optimizer_of(model)
        state = {"model": model, "optim": optim, "step": 0, "rng": shardckpt.RNGState()}
        tiers = [shardckpt.PeerMemory(every=1, max_bytes="1GB")]
        checkpointer = shardckpt.Checkpointer(tmp_path / "run", save_every=2, tiers=tiers)
        for step in (1, 2, 3):
            train(rank, world, model, optim, range(step, step + 1))
            state["step"] = step
            checkpointer.save(step, state)
            checkpointer.wait()
        expected = values_of(model, optim)
        fill(model, 0.0)
        assert checkpointer.restore(state) == 3
        assert checkpointer.steps() == (2,)
        return [*differing(values_of(model, optim), expected), str(state["step"])]

    assert run(2, body) == [["3"], ["3"]]


RATES = (lambda number: 0.5, lambda number: 1 / (1 + number), lambda number: 0.25)


def test_layers_with_rates_of_their_own_keep_them_from_save_to_save(tmp_path: Path) -> None:
    def build(rank: int, world: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = cut(rank, world)
        return model, torch.optim.SGD([{"params": layer.parameters(), "lr": 0.0} for layer in model.layers.values()])

    def save(rank: int, world: int) -> None:
        model, optim = build(rank, world)
        saver = Saver(get_ranks(None))
        for step, rate in enumerate(RATES):
            for number, group in zip(model.layers, optim.param_groups, strict=True):
                group["lr"] = rate(int(number))
            options = SaveOptions(str(tmp_path / f"{step}"), overwrite=False, checksums=True, custom_metadata={})
            saver.save({"model": model, "optim": optim}, options)

    def load(rank: int, world: int) -> list[list[float]]:
        model, optim = build(rank, world)
        found = []
        for step in range(len(RATES)):
            shardckpt.load({"model": model, "optim": optim}, tmp_path / f"{step}")
            found.append([group["lr"] for group in optim.param_groups])
        return found

    run(2, save)
    for stages in (1, 2, 4):
        found = run(stages, load)
        for step, rate in enumerate(RATES):
            assert [lr for each in found for lr in each[step]] == [rate(number) for number in range(LAYERS)]


# Each layer's decay, in the order of its rank's param groups.
DECAYS = {
    "alike": ((0.1, 0.2), (0.1, 0.2)),
    "other order": ((0.1, 0.2), (0.2, 0.1)),
    "more on rank 1": ((0.1, 0.1), (0.2, 0.1)),
    "more on rank 0": ((0.1, 0.2), (0.2, 0.2)),
    "no group alike": ((0.1, 0.2), (0.3, 0.4)),
}


@pytest.mark.parametrize("order", DECAYS)
def test_rates_that_are_tensors_come_back_in_any_order_of_groups(order: str, tmp_path: Path) -> None:
    def build(rank: int, value: float) -> tuple[nn.Module, torch.optim.Optimizer]:
        model, groups = cut(rank, 2), {}
        for layer, decay in zip(model.layers.values(), DECAYS[order][rank], strict=True):
            groups.setdefault(decay, []).extend(layer.parameters())
        settings = [{"params": each, "weight_decay": decay * bool(value)} for decay, each in groups.items()]
        optim = torch.optim.AdamW(settings)
        for at, group in enumerate(optim.param_groups):
            group["lr"] = torch.tensor(value + at)
        return model, optim

    def settings_of(optim: torch.optim.Optimizer) -> list[tuple[float, float]]:
        return [(float(group["lr"]), group["weight_decay"]) for group in optim.param_groups]

    def body(rank: int, world: int) -> None:
        model, optim = build(rank, 1.0)
        checkpointer = shardckpt.Checkpointer(tmp_path / "run")
        for step in (1, 2, 3):
            for group in optim.param_groups:
                group["lr"] += 1
                group["weight_decay"] += step
            checkpointer.save(step, {"model": model, "optim": optim})
        checkpointer.wait()
        again, other = build(rank, 0.0)
        assert checkpointer.restore({"model": again, "optim": other}) == 3
        assert settings_of(other) == settings_of(optim)

    run(2, body)
    (step,) = (tmp_path / "run").glob("step-*3")
    assert shardckpt.verify(step).ok
    found = shardckpt.load(step)["optim"]["param_groups"]
    rates = {name: (float(group["lr"]), group["weight_decay"]) for group in found for name in group["params"]}
    expected = {}
    for rank in range(2):
        model, optim = build(rank, 1.0)
        names = {value: name for name, value in model.named_parameters()}
        for group in optim.param_groups:
            decay = group["weight_decay"] + 1 + 2 + 3
            expected |= {names[each]: (float(group["lr"]) + 3, decay) for each in group["params"]}
    assert rates == expected


def test_later_saves_of_stages_have_the_values_of_their_own_step(tmp_path: Path) -> None:
    def save(rank: int, world: int) -> list[dict]:
        model = cut(rank, world)
        optim = optimizer_of(model)
        saver, saved = Saver(get_ranks(None)), []
        for step in range(4):
            train(rank, world, model, optim, range(step, step + 1))
            optim.param_groups[0]["lr"] = 1 / (1 + step)
            options = SaveOptions(str(tmp_path / f"{step}"), overwrite=False, checksums=True, custom_metadata={})
            start = mark()
            saver.save({"model": model, "optim": optim, "step": step}, options)
            saved.append((values_of(model, optim), len(since(start))))
        return saved

    found = run(2, save)
    for step in range(4):
        model = Model()
        optim = optimizer_of(model)
        state = {"model": model, "optim": optim, "step": -1}
        shardckpt.load(state, tmp_path / f"{step}")
        expected = found[0][step][0] | found[1][step][0]
        assert (differing(values_of(model, optim), expected), state["step"]) == ([], step)
        assert optim.param_groups[0]["lr"] == 1 / (1 + step)
    calls = [count for _, count in found[0]]
    assert calls[3] == calls[2] < calls[0], "ranks send their parts once"


class Extra(nn.Module):
    """A module with a state of its own making."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.value = value

    def get_extra_state(self) -> int:
        return self.value

    def set_extra_state(self, value: int) -> None:
        self.value = value


def test_extra_state_of_each_stage_comes_back(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> int:
        model = nn.ModuleDict({f"stage{rank}": Extra(rank + 5)})
        shardckpt.save({"model": model}, tmp_path / "c")
        again = nn.ModuleDict({f"stage{rank}": Extra(0)})
        shardckpt.load({"model": again}, tmp_path / "c")
        return again[f"stage{rank}"].value

    assert run(2, body) == [5, 6]


def named(rank: int, **modules: nn.Module) -> nn.ModuleDict:
    """Return a stage with a layer of its own and others."""
    return nn.ModuleDict({f"layer{rank}": nn.Linear(2, 2), **modules})


def fill(module: nn.Module, value: float) -> nn.Module:
    """Return a module whose parameters, and buffers, have one value."""
    with torch.no_grad():
        for each in (*module.parameters(), *module.buffers()):
            each.fill_(value)
    return module


def shared_on_rank_0(rank: int) -> nn.Module:
    """Return a stage whose layers x and y have one weight on rank 0; rank 1 has its own y."""
    y = fill(nn.Linear(2, 2 + rank, bias=False), rank)
    if rank:
        return named(rank, y=y)
    model = named(rank, x=nn.Linear(2, 2, bias=False), y=y)
    model.x.weight = model.y.weight
    return model


def decayed(rank: int, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), weight_decay=rank / 10)


CLASHES = {
    "shapes": ("x.weight", lambda rank: {"model": named(rank, x=nn.Linear(2, 3 + rank))}),
    "values": ("x.weight", lambda rank: {"model": named(rank, x=fill(nn.Linear(2, 2), rank))}),
    "buffers": ("x.running_mean", lambda rank: {"model": named(rank, x=fill(nn.BatchNorm1d(2, affine=False), rank))}),
    "extra state": ("x._extra_state", lambda rank: {"model": named(rank, x=Extra(rank))}),
    "averages": ("x.weight", lambda rank: {"ema": AveragedModel(named(rank, x=fill(nn.Linear(2, 2), rank)))}),
    "one tensor on a rank": ("model.y.weight", lambda rank: {"model": shared_on_rank_0(rank)}),
    "same names": ("0.weight", lambda rank: {"model": fill(nn.Sequential(nn.Linear(2, 2)), rank)}),
    "same names, shapes": ("0.weight", lambda rank: {"model": nn.Sequential(nn.Linear(2, 2 + rank))}),
    "settings": (
        "optim.param_groups",
        lambda rank: {"model": (model := named(rank, x=fill(nn.Linear(2, 2), 1))), "optim": decayed(rank, model)},
    ),
}


@pytest.mark.parametrize("clash", CLASHES)
def test_stages_with_one_name_for_two_tensors_are_told_it_and_the_way(clash: str, tmp_path: Path) -> None:
    name, build = CLASHES[clash]
    raised = raised_everywhere(2, lambda rank, world: shardckpt.save(build(rank), tmp_path / "c"))
    for error in raised:
        assert error.is_a(UsageError) or error.is_a(RankError)
        assert name in error.message and "Pipeline stages need different names" in error.message
        assert "shardckpt.PerRank" in error.message
    assert not (tmp_path / "c").exists()


def test_a_tensor_that_stages_share_is_saved_if_it_is_equal(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        model = named(rank, embed=fill(nn.Linear(2, 2), 7))
        shardckpt.save({"model": model}, tmp_path / "c")
        with pytest.raises(UsageError, match=r"model\.embed\.weight: .*which only a save with checksums=True"):
            shardckpt.save({"model": model}, tmp_path / "unchecked", checksums=False)

    run(2, body)
    found = shardckpt.load(tmp_path / "c")["model"]
    assert torch.equal(found["embed.weight"], torch.full((2, 2), 7.0)) and len(found) == 6


def test_a_stage_on_two_ranks_and_one_on_another_do_not_share_a_name(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> None:
        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2])]
        model = named(rank // 2, x=ours.fully_shard(nn.Linear(2, 6), mesh=meshes[rank // 2]))
        shardckpt.save({"model": model}, tmp_path / "c")

    for error in raised_everywhere(3, body):
        assert "x.weight" in error.message and "Pipeline stages need different names" in error.message


@pytest.mark.parametrize("way", ["different names", "per rank"])
def test_the_ways_out_of_equal_names_are_loaded(way: str, tmp_path: Path) -> None:
    def body(rank: int, world: int) -> bool:
        states = []
        for value in (rank + 1.0, 0.0):
            stage = fill(nn.Sequential(nn.Linear(2, 2)), value)
            optim = torch.optim.AdamW(stage.parameters())
            stage(torch.ones(1, 2)).sum().backward()
            optim.step()
            if way == "per rank":
                states.append({"model": shardckpt.PerRank(stage), "optim": shardckpt.PerRank(optim)})
            else:
                states.append({"model": nn.ModuleDict({f"stage{rank}": stage}), "optim": optim})
        shardckpt.save(states[0], tmp_path / "c")
        shardckpt.load(states[1], tmp_path / "c")
        one, other = ([*holder_of(state).parameters()] for state in states)
        return all(map(torch.equal, one, other))

    def holder_of(state: dict) -> nn.Module:
        return state["model"].held if way == "per rank" else state["model"]

    assert run(2, body) == [True, True]


def test_what_no_stage_has_is_unexpected_on_all(tmp_path: Path) -> None:
    model = Model()
    optim = optimizer_of(model)
    model(torch.ones(2, WIDTH)).sum().backward()
    optim.step()
    shardckpt.save({"model": model, "optim": optim}, tmp_path / "c")

    def body(rank: int, world: int) -> list[str]:
        stage = cut(rank, 2)
        if rank:
            del stage.head
        before = copy.deepcopy(stage.state_dict())
        with pytest.raises(MismatchError) as caught:
            shardckpt.load({"model": stage, "optim": optimizer_of(stage)}, tmp_path / "c")
        assert differing(stage.state_dict(), before) == []
        return sorted(caught.value.problems)

    first, other = run(2, body)
    assert first == other
    assert {"unexpected: model.head.scale", "unexpected: optim.state.head.norm.bias"} <= set(first)
    assert not any("layers" in problem for problem in first)


def test_a_rank_with_a_part_of_another_ranks_names_is_warned_of(tmp_path: Path) -> None:
    def body(rank: int, world: int) -> list[str]:
        model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3 - rank)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shardckpt.save({"model": model}, tmp_path / "step")
        return [str(each.message) for each in caught if "pipeline stage" in str(each.message)]

    told = run(2, body)
    assert [len(each) for each in told] == [1, 0]
    assert "rank 1 lacks model.2.weight (one of 1 names), and rank 0 has all its names" in told[0][0]
