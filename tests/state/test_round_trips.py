"""States go round on any number of ranks and to any other, in every form, and training goes on as if nothing was."""

from __future__ import annotations

import copy
import itertools
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed import fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh

from shardckpt import core as ours
from shardckpt.state import (
    StateMismatchError,
    load_model_state_dict,
    load_optim_state_dict,
    model_state_dict,
    optim_state_dict,
)
from tests.kit.models.states import (
    FRONT_ENDS,
    PARALLEL,
    Net,
    differing,
    flat,
    in_place,
    kept_differs,
    quiet,
    step,
    whole,
    wrapper,
)
from tests.kit.ranks.harness import run

KINDS = ("FULL", "first", "SHARDED", "LOCAL")
HALVES = (("FULL", "SHARDED"), ("first", "LOCAL"))
LOW = ours.MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
POLICY = ours.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
PRECISIONS = ("whole", "mixed", "low")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
OPTIMIZERS = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),  # keeps two numbers of each parameter
}


@dataclass(frozen=True)
class Way:
    """One way in which the model is sharded and trained."""

    name: str
    shard: object
    optimizer: str = "AdamW"
    dtype: torch.dtype = torch.float32
    mesh: tuple[int, ...] = ()
    axes: tuple[str, ...] = field(default=())
    kinds: tuple[str, ...] = KINDS

    @property
    def gain(self) -> tuple[int, ...]:
        """torch shards no scalars."""
        return (1,) if "torch" in self.name else ()

    def net(self) -> Net:
        torch.manual_seed(0)
        return Net(self.gain).to(self.dtype)

    def sharded(self, mesh):
        return quiet(self.shard, self.net(), mesh)

    def optim(self, model):
        return OPTIMIZERS[self.optimizer](model.parameters())


def product(*, every: bool = False) -> list[Way]:
    """Return every strategy in every precision; front ends and halves of the kinds in turn, or all `every` time.

    Each kind comes together with each strategy, precision and front_end. Optimizers take turns too.
    """
    ways = []
    for (turn, strategy), orig, precision in itertools.product(enumerate(STRATEGIES), (False, True), PRECISIONS):
        both = turn + PRECISIONS.index(precision)
        if not every and both % 2 != orig:
            continue
        settings = {"use_orig_params": orig, "sharding_strategy": ours.ShardingStrategy[strategy]}
        settings |= {"mixed_precision": LOW} if precision == "mixed" else {}
        name = f"{'orig' if orig else 'flat'} {strategy} {precision}"
        optimizer, dtype = turns(turn + orig, precision), low_or_not(precision)
        kinds = KINDS if every or optimizer == "AdamW" else HALVES[both % 3 == 0]
        ways.append(Way(name, wrapper(ours, **settings), optimizer, dtype, kinds=kinds))
    for frees, precision in itertools.product((True, False), PRECISIONS):
        settings = {"reshard_after_forward": frees, **({"mp_policy": POLICY} if precision == "mixed" else {})}
        shard, name = in_place(ours, **settings), f"in place {frees} {precision}"
        optimizer = {(True, "whole"): "AdamW", (False, "low"): "NAdam"}.get((frees, precision), "momentum")
        is_alone = every or optimizer != "momentum"
        kinds = KINDS if is_alone else HALVES[(frees + PRECISIONS.index(precision)) % 2]
        ways.append(Way(name, shard, optimizer, low_or_not(precision), kinds=kinds))
    return [
        *ways,
        *(Way(name, FRONT_ENDS[name], "momentum", kinds=HALVES[1]) for name in ("plain", "ddp")),
        *(Way(name, FRONT_ENDS[name], "momentum") for name in ("torch in place", "offloaded")),
        Way("wrapped inside", FRONT_ENDS["wrapped inside"], "momentum", kinds=("SHARDED",)),  # it takes long to compile
    ]


def turns(turn: int, precision: str) -> str:
    return list(OPTIMIZERS)[(turn + PRECISIONS.index(precision)) % len(OPTIMIZERS)]


def low_or_not(precision: str) -> torch.dtype:
    return torch.bfloat16 if precision == "low" else torch.float32


def ways(world: int) -> list[Way]:
    """All on two ranks; elsewhere each front end, with 2-D meshes on four. Momentum is quick with DTensors.

    On three ranks, where pieces are of unequal sizes, all kinds; on one and on four the halves.
    """
    if world == 2:
        return product()
    one = ("flat", "orig", "in place", "torch in place", "whole") if world != 4 else ("flat", "in place")
    kinds = {True: KINDS, False: HALVES[world == 4]}
    found = [
        Way(name, FRONT_ENDS[name], "momentum" if "in place" in name else "NAdam", kinds=kinds[world == 3])
        for name in one
    ]
    if world == 4:
        both = {"optimizer": "momentum", "mesh": (2, 2)}
        hybrid = {**both, "axes": ("copies", "cut")}
        for name, turns_round in (("HYBRID_SHARD", 1), ("_HYBRID_SHARD_ZERO2", -1)):
            strategy = {"sharding_strategy": ours.ShardingStrategy[name]}
            flat_kind, orig_kind = (("first",), ("SHARDED",))[::turns_round]
            found.append(Way(f"flat {name}", wrapper(ours, **strategy), **hybrid, kinds=flat_kind))
            original = wrapper(ours, use_orig_params=True, **strategy)
            found.append(Way(f"orig {name}", original, **hybrid, kinds=orig_kind))
        hybrid["kinds"] = both["kinds"] = ("first", "SHARDED")
        found.append(Way("in place copies", in_place(ours), **hybrid))
        found.append(Way("torch in place copies", in_place(theirs), **hybrid))
        for name, shard in PARALLEL.items():
            found.append(Way(f"parallel {name}", shard, **both, axes=("dp", "tp")))
    return found


def truth(way: Way) -> tuple[dict, dict]:
    """Weights and moments of an unsharded model after two steps."""
    return unsharded(way.gain, way.dtype, way.optimizer)


@cache
def unsharded(gain: tuple[int, ...], dtype: torch.dtype, optimizer: str) -> tuple[dict, dict]:
    way = Way("torch" if gain else "", None, optimizer, dtype)
    net = way.net()
    optim = way.optim(net)
    step(net, optim)
    step(net, optim, 1)
    return copy.deepcopy(net.state_dict()), copy.deepcopy(optim_state_dict(net, optim))


def taken(model, optim, kind: str) -> tuple[dict, dict]:
    how = {"rank0_only": True, "offload_to_cpu": True} if kind == "first" else {}
    told = "FULL" if kind == "first" else kind
    return model_of_its_own(model_state_dict(model, told, **how)), optim_state_dict(model, optim, told, **how)


def model_of_its_own(state):
    """Return a state that does not share memory with the model."""
    made = type(state)((name, value.clone()) for name, value in state.items())
    made._metadata = state._metadata
    return made


def compared(found: tuple[dict, dict], expected: tuple[dict, dict]) -> list[str]:
    wrong = differing({name: whole(value) for name, value in found[0].items()}, expected[0])
    return wrong + differing(flat(found[1]), flat(expected[1]))


def goes_round(way: Way, mesh, rank: int) -> list[str]:
    """Take the state in each form, put it into another model, and let both train on."""
    expected = truth(way)
    model = way.sharded(mesh)
    optim = way.optim(model)
    load_model_state_dict(model, expected[0])
    load_optim_state_dict(model, optim, expected[1])
    states = {kind: taken(model, optim, kind) for kind in way.kinds}
    step(model, optim, 2 + rank)
    wrong, other = [], way.sharded(mesh)
    for kind, found in states.items():
        if kind == "first" and rank:
            wrong += [] if not found[0] and not found[1]["state"] else ["first: not the first rank's alone"]
        elif kind != "LOCAL":
            wrong += [f"{kind} {each}" for each in compared(found, expected)]
        again = way.optim(other)
        again.param_groups[0]["lr"] = 7.0
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        load_model_state_dict(other, found[0])
        load_optim_state_dict(other, again, found[1])
        step(other, again, 2 + rank)
        wrong += [f"after {kind} {each}" for each in kept_differs(model, optim, other, again)]
    return [f"{way.name}: {each}" for each in wrong]


SOURCES = ("flat", "orig", "in place")


def saved(folder: Path, rank: int, world: int) -> None:
    """Leave the state for other numbers of ranks: whole, sharded by each front end, and each rank's own."""
    for front_end in SOURCES:
        way = Way(front_end, FRONT_ENDS[front_end])
        model = way.sharded(None)
        optim = way.optim(model)
        weights, moments = truth(way)
        load_model_state_dict(model, weights)
        load_optim_state_dict(model, optim, moments)
        sharded = model_state_dict(model, "SHARDED"), optim_state_dict(model, optim, "SHARDED")
        state = {"model": sharded[0], "optim": sharded[1]["state"]}
        quiet(dcp.save, state, checkpoint_id=str(folder / f"{front_end} {world}"))
        first, lying = taken(model, optim, "first"), taken(model, optim, "LOCAL")
        if rank == 0:
            torch.save(first, folder / f"{front_end} {world}.pt")
        torch.save(lying, folder / f"{front_end} {world} {rank}.pt")


def loaded(folder: Path, source: str, world: int, target: str, rank: int) -> list[str]:
    """Put what one front end left on some number of ranks into another front end on these."""
    way = Way(target, FRONT_ENDS[target])
    expected = truth(way)
    wrong = []

    def fresh():
        model = way.sharded(None)
        return model, torch.optim.AdamW(model.parameters(), lr=7.0)

    def put(how: str, weights, moments, **kwargs) -> None:
        model, optim = fresh()
        load_model_state_dict(model, weights, **kwargs)
        load_optim_state_dict(model, optim, moments, **kwargs)
        found = model_state_dict(model), optim_state_dict(model, optim)
        wrong.extend(f"{source} of {world} as {target}, {how}: {each}" for each in compared(found, expected))

    first = torch.load(folder / f"{source} {world}.pt", weights_only=False)
    ways_of_whole = {
        "flat": lambda: put("FULL", *first),
        "orig": lambda: put("first", *(first if rank == 0 else ({}, {}))),
        "in place": lambda: put("full pieces", *first, kind="SHARDED"),
    }
    ways_of_whole[source]()  # each source front_end another: they are checked together above
    model, optim = fresh()
    load_optim_state_dict(model, optim, expected[1])  # so that there is something to read into
    weights, moments = model_state_dict(model, "SHARDED"), optim_state_dict(model, optim, "SHARDED")
    for value in (v for slots in moments["state"].values() for v in slots.values()):
        value.zero_()
    state = {"model": weights, "optim": moments["state"]}
    quiet(dcp.load, state, checkpoint_id=str(folder / f"{source} {world}"))
    put("SHARDED", weights, moments)
    lying = torch.load(folder / f"{source} {world} {min(rank, world - 1)}.pt", weights_only=False)
    for load, args in ((load_model_state_dict, (model, lying[0])), (load_optim_state_dict, (model, optim, lying[1]))):
        try:
            load(*args)
            wrong.append(f"LOCAL of {world} was taken by {target}")
        except StateMismatchError as error:
            wrong += [] if "shardckpt consolidate" in str(error) and f" of {world}" in str(error) else [str(error)]
    return wrong


@pytest.fixture(scope="module")
def left(tmp_path_factory) -> Path:
    """What each number of ranks left."""
    folder = tmp_path_factory.mktemp("left")

    def body(rank, world):
        warnings.simplefilter("ignore")
        saved(folder, rank, world)

    for world in (1, 2, 3, 4):
        run(world, body, timeout=120)
    return folder


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_form_goes_round_and_training_goes_on_bit_for_bit(world):
    def body(rank, world):
        warnings.simplefilter("ignore")
        meshes = {w.axes: init_device_mesh("cpu", w.mesh, mesh_dim_names=w.axes) for w in ways(world) if w.axes}
        return [each for way in ways(world) for each in goes_round(way, meshes.get(way.axes), rank)]

    assert run(world, body, timeout=120) == [[]] * world


@pytest.mark.slow
def test_every_strategy_goes_round_in_every_precision_on_both_front_ends():
    """The full product, of which the test above has every two settings together."""

    def body(rank, world):
        warnings.simplefilter("ignore")
        return [each for way in product(every=True) for each in goes_round(way, None, rank)]

    assert run(2, body, timeout=240) == [[]] * 2


@pytest.mark.shown_by("::test_every_form_goes_round_and_training_goes_on_bit_for_bit", "4")
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_states_of_any_number_of_ranks_go_to_any_other(world, left):
    """Faces take turns, so that each goes to each."""

    def body(rank, world):
        warnings.simplefilter("ignore")
        wrong = []
        for turn, source in enumerate(each for each in (1, 2, 3, 4) if each != world):
            for at in (turn, turn + 1):
                wrong += loaded(left, SOURCES[at % 3], source, SOURCES[(at + world) % 3], rank)
        return wrong

    assert run(world, body, timeout=120) == [[]] * world
