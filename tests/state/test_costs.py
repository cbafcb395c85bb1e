"""What is sent and held to take states out, counted: nothing that nobody asked for."""

from __future__ import annotations

import pytest
import torch
from harness import Call, recorded, run
from states import FACES, Net, step

from shardckpt.core.device import FULL_BYTES
from shardckpt.core.queries import buckets
from shardckpt.state import load_model_state_dict, load_optim_state_dict, model_state_dict, optim_state_dict
from shardckpt.state.model import iter_full_state_dict

UNITS = 3
MOST = {"take": 0, "load": 2, "keep": 3, "put": 2}
"""Agreements: that nobody failed, who has a state, and how much ranks tell of parameters that not all have."""


class Even(Net):
    """Without a scalar, which needs a broadcast of its own."""

    def __init__(self) -> None:
        super().__init__((1,))


def told(calls: list[Call]) -> list[str]:
    """The collectives that move tensors of the model: what ranks agree on is shorter."""
    return [call.op for call in calls if not _is_agreement(call)]


def _is_agreement(call: Call) -> bool:
    return call.op == "all_gather" and ((call.dtype == "int64" and call.sent == 1) or call.dtype == "uint8")


def agreed(calls: list[Call]) -> int:
    """Bytes that a rank gives for agreements."""
    return sum(call.sent * (8 if call.dtype == "int64" else 1) for call in calls if _is_agreement(call))


@pytest.mark.parametrize("face", ["flat", "orig", "in place"])
def test_sharded_states_cost_one_exchange_a_unit_and_nothing_in_place(face):
    def body(rank, world):
        model = FACES[face](Even())
        optim = torch.optim.Adam(model.parameters())
        step(model, optim)
        wrong = []
        with recorded() as taking:
            taken = model_state_dict(model, "SHARDED")
        with recorded() as loading:
            load_model_state_dict(model, taken)
        with recorded() as keeping:
            kept = optim_state_dict(model, optim, "SHARDED")
        with recorded() as restoring:
            load_optim_state_dict(model, optim, kept)
        with recorded() as lying:
            model_state_dict(model, "LOCAL")
        exchanges = 0 if face == "in place" else UNITS
        for what, calls, slots in (
            ("take", taking, 1),
            ("load", loading, 1),
            ("keep", keeping, 2),
            ("put", restoring, 2),
        ):
            if told(calls) != ["all_to_all"] * (exchanges * slots):
                wrong.append((what, [str(call) for call in calls]))
            agreements = sum(_is_agreement(call) for call in calls)
            if agreed(calls) > (0 if what == "take" else 1024) or agreements > MOST[what] + (face != "flat"):
                wrong.append((what, agreements, agreed(calls)))
        return wrong, len(lying)

    assert run(2, body) == [([], 0)] * 2


@pytest.mark.parametrize("face", ["flat", "orig", "in place"])
def test_whole_states_for_the_first_rank_are_sent_to_it_alone(face):
    def body(rank, world):
        model = FACES[face](Even())
        optim = torch.optim.Adam(model.parameters())
        step(model, optim)
        with recorded() as taking:
            taken = model_state_dict(model, rank0_only=True)
            kept = optim_state_dict(model, optim, rank0_only=True)
        received = sum(call.received for call in taking if call.op == "gather")
        with recorded() as loading:
            load_model_state_dict(model, taken)
            load_optim_state_dict(model, optim, kept)
        return set(told(taking)), len(told(taking)), received > 0, {op for op in told(loading) if op != "broadcast"}

    assert run(2, body) == [({"gather"}, 3 * UNITS, rank == 0, {"scatter"}) for rank in range(2)]


@pytest.mark.parametrize("face", ["flat", "orig", "in place"])
def test_a_whole_state_is_gathered_one_unit_at_a_time(face):
    def body(rank, world):
        model = FACES[face](Even())
        gathered = [bucket.packing.gathered for bucket in buckets(model)]
        copied = [0 if bucket.packing.direct else bucket.packing.whole for bucket in buckets(model)]
        most = 4 * max(a + b for a, b in zip(gathered, copied, strict=True))
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
        return (
            sorted(names) == sorted(Even().state_dict()),
            0 < whole <= most,
            elsewhere <= (most if rank == 0 else 0),
            kept <= most,
            FULL_BYTES.peak == before,
        )

    assert run(2, body) == [(True,) * 5] * 2
