"""States that are wrong on purpose: named checks of the suite must fail under each."""

from __future__ import annotations

from contextlib import contextmanager

import pytest

from shardckpt.ranks import group as ranks_group
from shardckpt.state.optim import load_optim_state_dict
from tests.kit.models.torch_limits import needs_silent_sharding
from tests.kit.ranks.harness import RanksError
from tests.state import test_errors, test_optimizer_state


def states_go_by_position(patch: pytest.MonkeyPatch) -> None:
    """The first saved parameter's state is the first live one's, whatever they are called."""
    original = load_optim_state_dict.fit

    def positional(model, optim, state, **how):
        of = load_optim_state_dict.map_optimizer_params(load_optim_state_dict.index_complete_model(model), optim)
        live = [name for names in of.groups for name in names]
        saved = [name for group in state["param_groups"] for name in group["params"]]
        renamed = dict(zip(saved, live, strict=False))
        moved = {renamed.get(name, name): slots for name, slots in state["state"].items()}
        groups = [{**group, "params": [renamed[n] for n in group["params"]]} for group in state["param_groups"]]
        return original(model, optim, {"state": moved, "param_groups": groups}, **how)

    patch.setattr(load_optim_state_dict, "fit", positional)


def steps_are_shared(patch: pytest.MonkeyPatch) -> None:
    """All parameters count in one tensor."""
    original = load_optim_state_dict._StateLoader._scalar

    def shared(self, held, index, name, slot):
        kept = self.__dict__.setdefault("kept", {})
        return kept.setdefault(name, original(self, held, index, name, slot))

    patch.setattr(load_optim_state_dict._StateLoader, "_scalar", shared)


def errors_stay_at_home(patch: pytest.MonkeyPatch) -> None:
    """A rank that fails tells nobody."""

    @contextmanager
    def alone(self, what):
        piggyback = ranks_group.Piggyback()
        yield piggyback
        piggyback.gathered = [piggyback.local.ljust(511, b"\0")] * self.size

    patch.setattr(ranks_group.Group, "collective", alone)


CAUGHT = [
    (
        states_go_by_position,
        test_optimizer_state.test_g1_groups_in_another_order_keep_their_own_settings_and_moments,
    ),
    (
        steps_are_shared,
        test_optimizer_state.test_training_goes_on_from_a_loaded_state_as_if_it_had_not_stopped,
    ),
    pytest.param(
        errors_stay_at_home,
        test_errors.test_what_fails_on_one_rank_leaves_both_optimizers_as_they_were,
        marks=needs_silent_sharding,
    ),
]


@pytest.mark.shown_by(
    "state/test_optimizer_state.py::test_training_goes_on_from_a_loaded_state_as_if_it_had_not_stopped"
)
@pytest.mark.parametrize(("mutant", "check"), CAUGHT, ids=lambda each: each.__name__)
def test_a_wrong_state_is_caught(mutant, check, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        check()
    assert not isinstance(caught.value, RanksError), "a finding, not a rank that fell over"
