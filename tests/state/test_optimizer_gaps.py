"""What optimizers keep besides two moments of everything: subsets, settings, factored states, types of their own."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from shardckpt.state import (
    ConflictError,
    OpaqueStateError,
    StateMismatchError,
    load_model_state_dict,
    load_optim_state_dict,
    model_state_dict,
    optim_state_dict,
)
from tests.kit.models.states import FRONT_ENDS, Net, differing, flat, kept_differs, local, over, refused, step, whole
from tests.kit.ranks.harness import raised_everywhere, run

FORMS = ("flat", "orig", "in place")


def parts(model) -> tuple[list, list, list]:
    """Parameters of the two blocks, and the others."""
    named = list(model.named_parameters())
    blocks = [[p for n, p in named if f"blocks.{i}" in n] for i in range(2)]
    return (*blocks, [p for n, p in named if "blocks" not in n])


def names_of(*, block: int | None) -> list[str]:
    named = [name for name, _ in Net().named_parameters()]
    return [n for n in named if (f"blocks.{block}" in n if block is not None else "blocks" not in n)]


def moments(net=None) -> dict:
    """Of a plain model, with three groups."""
    torch.manual_seed(0)
    net = net or Net()
    a, b, rest = parts(net)
    groups = [{"params": a, "lr": 0.1}, {"params": b, "lr": 0.2}, {"params": rest, "lr": 0.3, "betas": (0.5, 0.6)}]
    optim = torch.optim.Adam(groups)
    step(net, optim)
    return optim_state_dict(net, optim)


def of(state: dict, names: list[str]) -> dict:
    return {key: value for key, value in flat(state).items() if key[0] in names}


def test_g1_reordered_split_and_merged_groups():
    def body(rank, world, front_ends):
        source, target = front_ends
        torch.manual_seed(0)
        model = FRONT_ENDS[source](Net())
        a, b, rest = parts(model)
        optim = torch.optim.Adam([{"params": a, "lr": 0.1}, {"params": b, "lr": 0.2}, {"params": rest, "lr": 0.1}])
        step(model, optim)
        wrong = []
        for kind in ("FULL", "SHARDED"):
            saved = optim_state_dict(model, optim, kind)
            expected = {k: v for k, v in flat(saved).items() if k[0] != "group"}
            other = FRONT_ENDS[target](Net())
            a, b, rest = parts(other)
            shapes = {
                "reordered": [{"params": rest}, {"params": b}, {"params": a}],
                "split": [{"params": a[:1]}, {"params": a[1:]}, {"params": b}, {"params": []}, {"params": rest}],
                "merged": [{"params": [*rest, *a]}, {"params": b}],
            }
            for shape, groups in shapes.items():
                again = torch.optim.Adam([g for g in groups if g["params"] or shape == "split"], lr=9.0)
                load_optim_state_dict(other, again, saved)
                back = optim_state_dict(other, again)
                wrong += [
                    (shape, w) for w in differing({k: v for k, v in flat(back).items() if k[0] != "group"}, expected)
                ]
                for group in again.param_groups:
                    rate = 0.2 if any(p is each for p in group["params"] for each in b) else 0.1
                    if group["params"] and group["lr"] != rate:
                        wrong.append((shape, group["lr"]))
                step(other, again)
            told = refused(load_optim_state_dict, other, torch.optim.Adam(other.parameters(), lr=9.0), saved)
            wrong += [] if "ConflictError" in told and "lr=0.1" in told and "lr=0.2" in told else [told]
        return wrong

    assert issubclass(ConflictError, ValueError)
    over([*itertools.product(("flat", "orig"), repeat=2), ("in place", "orig"), ("flat", "in place")], body)


def test_g14_optimizers_of_parts_of_a_model_each_have_their_own():
    def body(rank, world, front_end):
        saved = moments()
        model = FRONT_ENDS[front_end](Net())
        a, b, rest = parts(model)
        first, second = torch.optim.Adam(a, lr=1.0), torch.optim.Adam([{"params": b}, {"params": rest}], lr=1.0)
        load_optim_state_dict(model, first, saved)
        load_optim_state_dict(model, second, saved)
        one, two = optim_state_dict(model, first), optim_state_dict(model, second)
        wrong = differing(
            {**of(one, names_of(block=0)), **of(two, names_of(block=1) + names_of(block=None))},
            {k: v for k, v in flat(saved).items() if k[0] != "group"},
        )
        wrong += [] if set(one["state"]) == set(names_of(block=0)) else ["the first has others"]
        rates = [g["lr"] for g in [*first.param_groups, *second.param_groups]], second.param_groups[1]["betas"]
        wrong += [] if rates == ([0.1, 0.2, 0.3], (0.5, 0.6)) else [rates]
        for p in a:
            p.requires_grad_(False)  # frozen later: what was kept of it stays
        step(model, second)
        kept = optim_state_dict(model, first)
        wrong += differing(of(kept, names_of(block=0)), of(saved, names_of(block=0)))
        fresh = torch.optim.Adam(b, lr=0.7)
        load_optim_state_dict(model, fresh, {"state": {}, "param_groups": saved["param_groups"]})
        wrong += [] if not fresh.state and fresh.param_groups[0]["lr"] == 0.2 else ["a state from nowhere"]
        some = {n: s for n, s in saved["state"].items() if n != "blocks.1.up.bias"}
        load_optim_state_dict(model, fresh, {**saved, "state": some}, missing="zeros")
        zeros = optim_state_dict(model, fresh)["state"]["blocks.1.up.bias"] if front_end != "flat" else None
        if zeros is not None and (zeros["exp_avg"].any() or zeros["step"] != 0):
            wrong.append("not zeros")
        return wrong

    over(FORMS, body)


def optimizers() -> dict:
    return {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "amsgrad": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), amsgrad=True),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    }


def test_states_of_other_optimizers_come_back_and_train_on():
    def body(rank, world, front_end):
        wrong = []
        kinds = itertools.cycle(("FULL", "SHARDED", "LOCAL") if front_end != "orig" else ("LOCAL", "FULL", "SHARDED"))
        for name, make in optimizers().items():
            if front_end == "in place" and name not in ("momentum", "amsgrad"):
                continue  # as the others, and each takes DTensors long
            torch.manual_seed(0)
            model = FRONT_ENDS[front_end](Net())
            optim = make(model.parameters())
            step(model, optim)
            saved = optim_state_dict(model, optim, next(kinds))
            other = FRONT_ENDS[front_end](Net())
            load_model_state_dict(other, copy.deepcopy(model_state_dict(model)))
            again = make(other.parameters())
            again.param_groups[0]["lr"] = 5.0
            load_optim_state_dict(other, again, saved)
            plain = Net()
            plain.load_state_dict(model_state_dict(model))
            last = make(plain.parameters())
            load_optim_state_dict(plain, last, optim_state_dict(model, optim))
            for each, of in ((model, optim), (other, again), (plain, last)):
                step(each, of, 1)
            # Without elements of a parameter adagrad counts no steps by itself; after a load it has the saved one.
            elsewhere = tuple(f"{n}/step" for n, p in model.named_parameters() if name == "adagrad" and not p.numel())
            found = kept_differs(model, optim, other, again)
            wrong += [(name, each) for each in found if not each.startswith(elsewhere)]
            mine = {n: whole(v) for n, v in model_state_dict(other).items()}
            wrong += [(name, each) for each in differing(mine, dict(plain.state_dict()), False)]
        return wrong

    over(FORMS, body)


def test_g30_moments_and_steps_keep_the_types_they_have():
    def body(rank, world, front_end):
        saved = moments()
        for index, (name, slots) in enumerate(saved["state"].items()):
            low = front_end == "flat" or index % 2
            slots["exp_avg"] = slots["exp_avg"].to(torch.bfloat16 if low else torch.float32)
            slots["step"] = 3.0 if front_end == "flat" or "bias" in name else torch.tensor(3, dtype=torch.int64)
            slots["note"] = "kept" if index % 2 or front_end == "flat" else None
        model = FRONT_ENDS[front_end](Net())
        a, b, rest = parts(model)
        optim = torch.optim.Adam([{"params": a}, {"params": b}, {"params": rest}])
        load_optim_state_dict(model, optim, saved)
        wrong = []
        for kind in ("FULL", "SHARDED"):
            wrong += differing(flat(optim_state_dict(model, optim, kind)), flat(saved))
        other = torch.optim.Adam([{"params": a}, {"params": b}, {"params": rest}])
        load_optim_state_dict(model, other, optim_state_dict(model, optim, "LOCAL"))
        wrong += differing(flat(optim_state_dict(model, other)), flat(saved))
        return wrong

    over(FORMS, body)


class Rows(torch.optim.Optimizer):
    """Keeps one number a row of what it sees, an object, and a table that is the same everywhere."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                part = local(p.detach())
                if p.grad is not None and part.numel():
                    rows = part.reshape(part.shape[0] if part.dim() else 1, -1).sum(1)
                    self.state[p].setdefault("rows", rows[:, None, None])
                    self.state[p].setdefault("table", torch.arange(4.0).view(2, 2))


def same(found: dict, expected: dict) -> list:
    """Compare what two optimizers keep of parameters of the same names; objects too."""
    if found.keys() != expected.keys():
        return [("names", *(found.keys() ^ expected.keys()))]
    return [
        (name, slot)
        for name in found
        for slot in found[name].keys() | expected[name].keys()
        if not torch.equal(found[name].get(slot, torch.tensor(0)), expected[name].get(slot, torch.tensor(0)))
    ]


@pytest.mark.parametrize("world", [2, 3])
def test_g24_what_is_shaped_otherwise_is_refused_or_joined_as_told(world):
    def layout(name, slot, value):
        return 0 if slot == "rows" else "replicated"

    def body(rank, world, front_end):
        torch.manual_seed(0)
        model = FRONT_ENDS[front_end](Net((1,)))
        optim = Rows(model.parameters())
        step(model, optim)
        wrong = []
        told = refused(optim_state_dict, model, optim)
        wrong += [] if "OpaqueStateError" in told and "state_layout" in told else [told]
        other = Rows(model.parameters())
        load_optim_state_dict(model, other, optim_state_dict(model, optim, "LOCAL"))
        wrong += same(live(model, other), live(model, optim))
        told = refused(optim_state_dict, model, optim, state_layout=lambda *_: "rows")
        wrong += [] if "answer must describe a sharding" in told and "rows" in told else [told]
        if front_end == "flat":  # of a flat parameter's rows nobody knows whose they are
            told = refused(optim_state_dict, model, optim, state_layout=layout)
            return wrong + ([] if "OpaqueStateError" in told and "/rows" in told else [told])
        saved = optim_state_dict(model, optim, state_layout=layout)
        tables = [slots["table"] for slots in saved["state"].values()]
        wrong += [] if all(torch.equal(each, tables[0]) for each in tables) else ["tables differ"]
        for given in (saved, saved if rank == 0 else {}):
            told = refused(load_optim_state_dict, model, Rows(model.parameters()), given)
            wrong += [] if "size mismatch" in told and "/rows" in told else [told]
            told = refused(load_optim_state_dict, model, Rows(model.parameters()), given, state_layout=lambda *_: 1)
            wrong += [] if "size mismatch" in told else [told]
            other = Rows(model.parameters())
            load_optim_state_dict(model, other, given, state_layout=layout)
            wrong += same(live(model, other), live(model, optim))
        plain = Net((1,))
        last = Rows(plain.parameters())
        for given in (saved, saved if rank == 0 else {}):
            load_optim_state_dict(plain, last, given)  # nothing is sharded: nobody is asked
            wrong += same(live(plain, last), saved["state"])
        note = {"is": "an object"}
        for slots in saved["state"].values():
            slots["note"] = note
        load_optim_state_dict(plain, last, saved)
        wrong += [] if all(s["note"] == note and s["note"] is not note for s in last.state.values()) else ["the note"]
        told = refused(load_optim_state_dict, plain, last, saved if rank == 0 else {})
        return wrong + ([] if "note" in told and "Give the state to every rank" in told else [told])

    def live(model, optim):
        held = [(n, p) for n, p in model.named_parameters() if local(p).numel()]
        return {name: dict(optim.state[p]) for name, p in held if p in optim.state}

    def all_front_ends(rank, world):
        return [(front_end, each) for front_end in FORMS for each in body(rank, world, front_end)]

    assert issubclass(OpaqueStateError, RuntimeError)
    assert run(world, all_front_ends) == [[]] * world


def test_named_optimizers_keep_their_names():
    def body(rank, world):
        saved = moments()
        model = FRONT_ENDS["in place"](Net())
        optim = torch.optim.Adam(model.named_parameters(), lr=0.5)
        saved["param_groups"] = [{**saved["param_groups"][0], "params": list(saved["state"])}]
        load_optim_state_dict(model, optim, saved)
        by_number = optim.state_dict()
        other = torch.optim.Adam(model.parameters(), lr=0.7)
        load_optim_state_dict(model, other, by_number)
        wrong = differing(flat(optim_state_dict(model, other)), flat(optim_state_dict(model, optim)))
        return wrong, optim.param_groups[0]["param_names"] == [n for n, _ in model.named_parameters()]

    assert run(2, body) == [([], True)] * 2


@pytest.mark.parametrize("flags", [{"capturable": True}, {"fused": True}, {}])
def test_scalars_are_beside_their_parameters_if_the_optimizer_is_on_the_device_only(flags):
    """A state that was moved to the CPU to be saved; the device of another kind is the one without memory."""
    net = torch.nn.Linear(3, 2)
    optim = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.ones(1, 3)).sum().backward()
    optim.step()
    other = torch.nn.Linear(3, 2, device="meta")
    again = torch.optim.AdamW(other.parameters(), lr=0.1)
    again.param_groups[0].update(flags)
    saved = optim_state_dict(net, optim, offload_to_cpu=True)
    saved["param_groups"][0].update(flags)
    load_optim_state_dict(other, again, saved)
    devices = {slot: value.device.type for slot, value in again.state[other.weight].items()}
    assert devices == {"step": "meta" if flags else "cpu", "exp_avg": "meta", "exp_avg_sq": "meta"}


def test_states_are_in_one_order_on_all_ranks_whatever_the_order_of_groups():
    def body(rank, world, front_end):
        model = FRONT_ENDS[front_end](Net())
        given = list(model.parameters())
        optim = torch.optim.Adam(given if rank == 0 else given[::-1], lr=0.1)
        step(model, optim)
        return [list(optim_state_dict(model, optim, kind)["state"]) for kind in ("FULL", "SHARDED")]

    for front_end in FORMS:
        first, second = run(2, body, front_end)
        assert first == second
        assert first[0] == first[1] == [name for name, _ in Net().named_parameters()]


@pytest.mark.parametrize("front_end", FORMS)
def test_ranks_whose_optimizers_have_other_parameters_are_refused(front_end):
    def body(rank, world):
        model = FRONT_ENDS[front_end](Net())
        optim = torch.optim.Adam(list(model.parameters())[: -1 if rank else None], lr=0.1)
        step(model, optim)
        return optim_state_dict(model, optim)

    found = raised_everywhere(2, body)
    assert all(each.is_a(StateMismatchError) and "others on rank 1 than on rank 0" in each.message for each in found)
