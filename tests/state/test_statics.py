"""The wrapper's statics that shard give what torch's give, and torch's own wrapper keeps groups apart by name."""

from __future__ import annotations

import copy
import warnings

import torch
from torch.distributed import fsdp as theirs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import _NamedOptimizer

from shardckpt import core as ours
from shardckpt.state import load_model_state_dict, load_optim_state_dict, model_state_dict, optim_state_dict
from tests.kit.models.states import Net, differing, flat, over, quiet, refused, step, whole, wrapper

STYLES = {"flat": False, "orig": True}


def gathered(value):
    """Return nested tensors whole on the first rank, whatever class of sharded tensor they are."""
    if isinstance(value, dict):
        return {key: gathered(each) for key, each in value.items()}
    if hasattr(value, "local_shards"):
        made = torch.zeros(value.size()) if torch.distributed.get_rank() == 0 else None
        value.gather(0, made)
        return made
    return whole(value)


def by_slot(state) -> dict:
    made = {(name, slot): value for name, slots in state["state"].items() for slot, value in slots.items()}
    groups = [{**group, "params": sorted(group["params"])} for group in state["param_groups"]]
    return made | {("group", index): str(sorted(group.items())) for index, group in enumerate(groups)}


def test_sharded_states_of_optimizers_are_those_of_torch():
    def body(rank, world, style):
        mesh = init_device_mesh("cpu", (world,))
        torch.manual_seed(0)
        net = Net((1,))
        found = []
        for engine in (ours, theirs):
            fsdp = engine.FullyShardedDataParallel
            model = wrapper(engine, use_orig_params=STYLES[style], sharding_strategy=engine.ShardingStrategy.FULL_SHARD)
            model = model(copy.deepcopy(net), mesh)
            optim = torch.optim.Adam(model.parameters(), lr=0.1)
            step(model, optim, rank)
            with fsdp.state_dict_type(
                model,
                engine.StateDictType.SHARDED_STATE_DICT,
                engine.ShardedStateDictConfig(),
                engine.ShardedOptimStateDictConfig(),
            ):
                sharded = fsdp.sharded_optim_state_dict(model, optim)
                current = fsdp.optim_state_dict(model, optim)
                loaded = fsdp.optim_state_dict_to_load(model, optim, current)
            flattened = fsdp.flatten_sharded_optim_state_dict(sharded, model, optim)
            found.append({"sharded": gathered(sharded), "current": gathered(current)} if rank == 0 else {})
            if rank:
                gathered(sharded), gathered(current)
            found[-1] |= {"flattened": flattened, "loaded": loaded}
        mine, torchs = ({name: by_slot(state) for name, state in each.items()} for each in found)
        return [(name, each) for name in mine for each in differing(mine[name], torchs[name], exact=False)]

    over(STYLES, body)


def get_process_groups(model, order: str) -> list[dict]:
    rates = {"a": 0.1, "b": 0.2, "c": 0.3}
    named = list(model.named_parameters())
    of = {
        "a": [p for n, p in named if "blocks.0" in n],
        "b": [p for n, p in named if "blocks.1" in n],
        "c": [p for n, p in named if "blocks" not in n],
    }
    return [{"params": of[each], "lr": rates[each]} for each in order]


def test_g1_torchs_wrapper_gets_groups_of_another_order_by_name():
    def body(rank, world, way):
        source, target, style = way
        torch.manual_seed(0)
        net = Net((1,))
        model = wrapper(source, use_orig_params=STYLES[style])(copy.deepcopy(net))
        optim = torch.optim.Adam(get_process_groups(model, "abc"))
        step(model, optim)
        step(model, optim, 1)
        weights, moments = copy.deepcopy(model_state_dict(model)), copy.deepcopy(optim_state_dict(model, optim))
        other = wrapper(target, use_orig_params=STYLES[style])(Net((1,)))
        again = torch.optim.Adam([{**group, "lr": 9.0} for group in get_process_groups(other, "cab")])
        load_model_state_dict(other, weights)
        load_optim_state_dict(other, again, moments)
        rates = [group["lr"] for group in again.param_groups]
        wrong = [] if rates == [0.3, 0.1, 0.2] else [rates]
        back = flat({**optim_state_dict(other, again), "param_groups": []})
        wrong += differing(back, flat({**moments, "param_groups": []}))
        for each, of in ((model, optim), (other, again)):
            step(each, of, 2)
        return wrong + differing(dict(model_state_dict(other)), dict(model_state_dict(model)), exact=False)

    ways = [(source, theirs, style) for source in (theirs, ours) for style in STYLES]
    over([*ways, (theirs, ours, "flat")], lambda rank, world, way: quiet(body, rank, world, way))


def test_named_optimizers_get_back_what_they_had():
    def body(rank, world, style):
        torch.manual_seed(0)
        model = wrapper(ours, use_orig_params=STYLES[style])(Net())
        optim = _NamedOptimizer(
            model.named_parameters(), torch.optim.Adam, [{"params": model.parameters()}], model, lr=0.1
        )
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optim.step()
        fsdp = ours.FullyShardedDataParallel
        kept = copy.deepcopy(fsdp.optim_state_dict(model, optim))
        model(torch.randn(4, 5)).sum().backward()
        optim.step()
        optim.load_state_dict(fsdp.optim_state_dict_to_load(model, optim, kept, is_named_optimizer=True))
        return differing(by_slot(fsdp.optim_state_dict(model, optim)), by_slot(kept))

    over(STYLES, body)


def test_states_without_groups_have_none_after_either_call():
    def body(rank, world, style):
        model = wrapper(ours, use_orig_params=STYLES[style])(Net())
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        step(model, optim, rank)
        fsdp = ours.FullyShardedDataParallel
        bare = fsdp.optim_state_dict(model, optim, optim_state_dict={"state": optim.state_dict()["state"]})
        loaded = fsdp.optim_state_dict_to_load(model, optim, bare)
        optim.load_state_dict({**loaded, "param_groups": optim.state_dict()["param_groups"]})
        groups = [name for state in (bare, loaded) for name in state if name != "state"]
        return groups + differing(
            flat({**bare, "param_groups": []}), flat({**optim_state_dict(model, optim), "param_groups": []})
        )

    over(STYLES, body)


def test_optim_input_is_deprecated():
    def body(rank, world, style):
        model = wrapper(ours, use_orig_params=STYLES[style])(Net())
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        fsdp, given = ours.FullyShardedDataParallel, list(model.parameters())
        kept = quiet(fsdp.full_optim_state_dict, model, optim, rank0_only=False)
        silent = []
        for call in (
            lambda: fsdp.full_optim_state_dict(model, optim, given),
            lambda: fsdp.shard_full_optim_state_dict(kept, model, given),
            lambda: fsdp.scatter_full_optim_state_dict(kept, model, given),
            lambda: fsdp.rekey_optim_state_dict(kept, ours.OptimStateKeyType.PARAM_ID, model, given),
        ):
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                call()
            silent += [] if any("`optim_input` argument is deprecated" in str(each.message) for each in heard) else [1]
        return silent

    over(STYLES, body)


def test_ranks_that_have_no_state_may_give_none_as_accelerate_does():
    def body(rank, world, front_end):
        model, optim = trained(front_end)
        kinds = {"FULL": ours.StateDictType.FULL_STATE_DICT, "SHARDED": ours.StateDictType.SHARDED_STATE_DICT}
        configs = ours.FullStateDictConfig(rank0_only=True), ours.FullOptimStateDictConfig(rank0_only=True)
        quiet(ours.FullyShardedDataParallel.set_state_dict_type, model, kinds["FULL"], *configs)
        state = ours.FullyShardedDataParallel.optim_state_dict(model, optim)
        other, again = trained(front_end, steps=0)
        quiet(ours.FullyShardedDataParallel.set_state_dict_type, other, kinds["FULL"], *configs)
        load = ours.FullyShardedDataParallel.optim_state_dict_to_load
        again.load_state_dict(load(other, again, state if rank == 0 else None))
        wrong = differing(flat(optim_state_dict(other, again)), flat(optim_state_dict(model, optim)))
        told = refused(load, other, again, None if rank == 0 else state)
        wrong += [] if "not an optimizer's state" in told else [told]
        quiet(ours.FullyShardedDataParallel.set_state_dict_type, other, kinds["SHARDED"])
        told = refused(load, other, again, None)
        return wrong + ([] if "not an optimizer's state" in told else [told])

    def trained(front_end, steps=2):
        torch.manual_seed(0)
        model = wrapper(ours, use_orig_params=front_end == "orig")(Net((1,)))
        optim = torch.optim.AdamW(model.parameters(), lr=0.01)
        for number in range(steps):
            step(model, optim, number)
        return model, optim

    over(["flat", "orig"], body)
