"""What is sent and held to take states out and put them back, counted: nothing that nobody asked for."""

from __future__ import annotations

import weakref
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardckpt.core.comm.streams import FULL_BYTES
from shardckpt.core.runtime.traversal import buckets
from shardckpt.state import (
    iter_full_state_dict,
    load_model_state_dict,
    load_optim_state_dict,
    model_state_dict,
    optim_state_dict,
)
from tests.kit.models.states import FRONT_ENDS, Net, differing, flat, over, refused, step
from tests.kit.ranks.harness import Call, recorded

FORMS = ("flat", "orig", "in place")
UNITS = 3
OBJECTS = (
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
)


class Even(Net):
    """Without a scalar, which needs a broadcast of its own."""

    def __init__(self) -> None:
        super().__init__((1,))


def told(calls: list[Call]) -> list[str]:
    """The collectives that move tensors of the model: what ranks agree on is shorter."""
    return [call.op for call in calls if not _is_agreement(call)]


def _is_agreement(call: Call) -> bool:
    return call.op == "all_gather" and ((call.dtype == "int64" and call.sent == 1) or call.dtype == "uint8")


def agreements(calls: list[Call]) -> list[int]:
    """Bytes that a rank gives for each agreement."""
    return [call.sent * (8 if call.dtype == "int64" else 1) for call in calls if _is_agreement(call)]


def sent(calls: list[Call], op: str) -> int:
    """Bytes that a rank gives in collectives of one sort."""
    return sum(call.sent * getattr(torch, call.dtype).itemsize for call in calls if call.op == op)


@contextmanager
def no_objects():
    """Inside, nobody may send objects."""

    def refuse(*args, **kwargs):
        raise AssertionError("an object was sent")

    kept = {name: getattr(dist, name) for name in OBJECTS}
    try:
        for name in OBJECTS:
            setattr(dist, name, refuse)
        yield
    finally:
        for name, original in kept.items():
            setattr(dist, name, original)


def trained(front_end: str):
    model = FRONT_ENDS[front_end](Even())
    optim = torch.optim.Adam(model.parameters())
    step(model, optim)
    return model, optim


def test_sharded_states_cost_one_exchange_a_unit_and_nothing_in_place():
    def body(rank, world, front_end):
        model, optim = trained(front_end)
        shard = sum(bucket.shard.nbytes for bucket in buckets(model))
        log = {}
        with no_objects():
            with recorded() as log["take"]:
                taken = model_state_dict(model, "SHARDED")
            with recorded() as log["load"]:
                load_model_state_dict(model, taken)
            with recorded() as log["keep"]:
                kept = optim_state_dict(model, optim, "SHARDED")
            with recorded() as log["put"]:
                load_optim_state_dict(model, optim, kept)
            with recorded() as log["lie"]:
                model_state_dict(model, "LOCAL")
        exchanges = 0 if front_end == "in place" else UNITS
        surveys = (
            0 if front_end == "flat" else 2
        )  # the length and the content of what ranks keep of parameters not all have
        wrong = []
        for what, slots, most in (
            ("take", 1, 0),
            ("load", 1, 1),
            ("keep", 2, 1 + surveys),
            ("put", 2, 1),
            ("lie", 0, 0),
        ):
            calls = log[what]
            wrong += [] if told(calls) == ["all_to_all"] * (exchanges * slots) else [(what, *map(str, calls))]
            wrong += [] if len(agreements(calls)) <= most else [(what, "agreements", agreements(calls))]
            wrong += [] if all(given < 1024 for given in agreements(calls)) else [(what, agreements(calls))]
            wrong += (
                [] if sent(calls, "all_to_all") <= 1.1 * slots * shard else [(what, "sent", sent(calls, "all_to_all"))]
            )
        return wrong

    over(FORMS, body)


def test_whole_states_for_the_first_rank_are_sent_to_it_alone():
    def body(rank, world, front_end):
        model, optim = trained(front_end)
        bare = front_end == "torch in place"
        with no_objects():
            with recorded() as taking:
                taken = model_state_dict(model, rank0_only=True)
                kept = optim_state_dict(model, optim, rank0_only=True)
            with recorded() as loading:
                load_model_state_dict(model, taken)
                load_optim_state_dict(model, optim, kept)
        count = len(dict(model.named_parameters())) if bare else UNITS
        received = sum(call.received for call in taking if call.op == "gather")
        scatter_rows = [call for call in loading if call.op == "all_to_all"]
        elsewhere = sum(_elements_of(model, other) for other in range(1, world))
        wrong = [] if told(taking) == ["gather"] * (3 * count) else [told(taking)]
        wrong += [] if (received > 0) == (rank == 0) else [f"received {received}"]
        wrong += [] if {*told(loading)} <= {"broadcast", "all_to_all"} else [told(loading)]
        wrong += [] if len(scatter_rows) == 3 * count else [told(loading)]
        sent_here, taken_here = (3 * 4 * elsewhere, 0) if rank == 0 else (0, 3 * 4 * _elements_of(model, rank))
        wrong += (
            []
            if sent(scatter_rows, "all_to_all") == sent_here
            else [f"sent {sent(scatter_rows, 'all_to_all')} of {sent_here}"]
        )
        taken = sum(call.received for call in scatter_rows)
        wrong += [] if taken == taken_here else [f"took {taken} of {taken_here}"]
        return wrong

    over((*FORMS, "torch in place"), body)


def _elements_of(model, rank: int) -> int:
    """Elements of the parameters that a rank of two has: padding does not travel."""
    found = 0
    for bucket in buckets(model):
        found += sum(box.volume for _, box, _ in bucket.layout.boxes(rank))
    if not buckets(model):
        halves = ((p.shape[0], p.shape[0] // 2 + p.shape[0] % 2, p.numel()) for p in model.parameters())
        found = sum(numel // rows * (half if rank == 0 else rows - half) for rows, half, numel in halves)
    return found


def test_an_optimizer_that_has_stepped_is_loaded_into_the_tensors_that_it_has():
    def body(rank, world, front_end):
        model, optim = trained(front_end)
        kept = {p: {s: v for s, v in state.items() if v.dim()} for p, state in optim.state.items()}
        unit = max([4 * bucket.packing.all_gather_numel for bucket in buckets(model)] or [4 * 48])
        wrong = []
        for kind, how in (("FULL", {}), ("FULL", {"rank0_only": True}), ("SHARDED", {})):
            given = optim_state_dict(model, optim, kind, **how)
            for state in kept.values():
                for value in state.values():
                    value.zero_()
            with PeakMemory() as held:
                load_optim_state_dict(model, optim, given)
            again = optim_state_dict(model, optim, kind, **how)
            same = all(optim.state[p][slot] is value for p, state in kept.items() for slot, value in state.items())
            wrong += [] if same else [f"{kind} {how}: other tensors"]
            wrong += differing(flat(again), flat(given)) if given["state"] else []
            wrong += [] if held.peak <= 2 * unit + 1000 else [f"{kind} {how}: {held.peak}, unit {unit}"]
        return wrong

    over((*FORMS, "torch in place"), body)


def test_an_error_costs_one_agreement():
    def body(rank, world, front_end):
        model, optim = trained(front_end)
        weights, moments = model_state_dict(model), optim_state_dict(model, optim)
        bad = {**weights, "last.bias": torch.zeros(9)} if rank else weights
        strange = {**moments, "state": {**moments["state"], "odd": {}}} if rank else moments
        with recorded() as calls:
            refused(load_model_state_dict, model, bad)
            refused(load_optim_state_dict, model, optim, strange)
        return [] if agreements(calls) == [512, 512] and not told(calls) else [str(call) for call in calls]

    over(FORMS, body)


# ------------------------------------------------------------------------------------------------------- memory


def storages(values) -> list[torch.UntypedStorage]:
    found = [each for each in tree_leaves(values) if isinstance(each, torch.Tensor) and not isinstance(each, DTensor)]
    return [tensor.untyped_storage() for tensor in found]


class PeakMemory(TorchDispatchMode):
    """Adds up what storages that are made inside hold, after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, weakref.ref] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        before = {storage._cdata for storage in storages((args, kwargs))}
        for storage in storages(made):
            if storage._cdata not in before:
                self._storages[storage._cdata] = weakref.ref(storage)
        alive = [storage for storage in (each() for each in self._storages.values()) if storage is not None]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in alive))
        return made


class Large(Even):
    """With weights that small tensors do not hide."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(3):
            self.blocks.append(type(self.blocks[0])())
            self.blocks[-1].up = torch.nn.Linear(6, 3000 + index)
            self.blocks[-1].down = torch.nn.Linear(3000 + index, 6)


def test_a_whole_state_holds_itself_and_one_unit_and_elsewhere_one_unit_at_most():
    def body(rank, world, front_end):
        model = FRONT_ENDS[front_end](Large())
        optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step(model, optim)
        unit = max(4 * bucket.packing.all_gather_numel for bucket in buckets(model))
        shards = sum(bucket.shard.nbytes for bucket in buckets(model))
        whole = sum(value.nbytes for value in model_state_dict(model).values())
        slack = unit // 10  # rows that are padded, small things that are told
        wrong = []
        gone = 2 * unit  # where nothing is given: what was sent is held by the backend for a moment
        first = whole + 2 * unit if rank == 0 else gone
        for name, take, most in (
            ("FULL", lambda: model_state_dict(model), whole + unit),
            ("first", lambda: model_state_dict(model, rank0_only=True), whole + unit if rank == 0 else gone),
            ("one by one", lambda: [None for _ in iter_full_state_dict(model)], 2 * unit),
            ("first of them", lambda: [None for _ in iter_full_state_dict(model, rank0_only=True)], 2 * unit),
            ("optimizer", lambda: optim_state_dict(model, optim), whole + 2 * unit),
            ("first's", lambda: optim_state_dict(model, optim, rank0_only=True), first),
            ("SHARDED", lambda: model_state_dict(model, "SHARDED"), shards + unit),
            ("optimizer's", lambda: optim_state_dict(model, optim, "SHARDED"), shards + 2 * unit),
            ("LOCAL", lambda: model_state_dict(model, "LOCAL"), 0),
        ):
            with PeakMemory() as held:
                take()
            wrong += [] if held.peak <= most + slack else [f"{name}: {held.peak} of {most}, unit {unit}"]
        return wrong

    over(FORMS, body)


def test_a_whole_state_is_gathered_one_unit_at_a_time():
    def body(rank, world, front_end):
        model = FRONT_ENDS[front_end](Even())
        most = 4 * max(bucket.packing.all_gather_numel for bucket in buckets(model))
        before = FULL_BYTES.held
        FULL_BYTES.reset_peak()
        names = [name for name, _ in iter_full_state_dict(model)]
        whole = FULL_BYTES.peak - before
        FULL_BYTES.reset_peak()
        list(iter_full_state_dict(model, rank0_only=True))
        elsewhere = FULL_BYTES.peak - before
        optim = torch.optim.Adam(model.parameters())
        step(model, optim)
        before = FULL_BYTES.held
        FULL_BYTES.reset_peak()
        optim_state_dict(model, optim)
        kept = FULL_BYTES.peak - before
        FULL_BYTES.reset_peak()
        model_state_dict(model, "SHARDED")
        claims = {
            "names": sorted(names) == sorted(Even().state_dict()),
            "whole": 0 < whole <= most,
            "elsewhere": elsewhere <= (most if rank == 0 else 0),
            "kept": kept <= most,
            "sharded": FULL_BYTES.peak - before <= 4 * max(bucket.layout.chunk for bucket in buckets(model)),
        }
        return [name for name, holds in claims.items() if not holds]

    over(FORMS, body)
