"""The scenarios of `test_gpu` on the simulated device, and its processes on the CPU: they work when a GPU comes."""

from __future__ import annotations

import pytest

from tests.kit.ranks import gpu_ranks, late_collectives, sim
from tests.kit.ranks import gpu_scenarios as scenarios

SOME = pytest.mark.parametrize("front_end", ["flat", "in place"])


@SOME
def test_training_is_that_of_the_unsharded_model(front_end):
    assert sim.ranks(1, scenarios.train, "sim", front_end, 3) == [[]]


@pytest.mark.parametrize(("world", "late"), [(1, "collectives"), (2, "optimizer"), (4, "slices")])
def test_delays_can_be_put_in(world, late):
    assert sim.ranks(world, scenarios.train, "sim", "in place", 2, late) == [[]] * world


@SOME
def test_a_step_may_be_run_without_waits(front_end):
    assert sim.ranks(1, scenarios.step_without_waits, "sim", front_end) == [True]


@SOME
def test_states_are_taken_and_loaded(tmp_path, front_end):
    assert sim.ranks(2, scenarios.get_and_load_states, "sim", front_end, str(tmp_path)) == [[]] * 2


@SOME
def test_a_save_is_followed_by_a_step(tmp_path, front_end):
    assert sim.ranks(1, scenarios.save_behind_a_sleep, "sim", front_end, str(tmp_path)) == [[(True, True)] * 2]


def test_late_collectives_and_poison_change_nothing():
    cells = [("flat", "", False), ("orig", "checkpointing", True), ("in place", "no_sync", True)]
    cells += [("in place", "slices", False), ("in place", "offload", False)]
    found = sim.ranks(1, late_collectives.find_differences_on_rank, "sim", *cells)
    assert found == [[[]] * len(cells)]


@pytest.mark.shown_by("::test_states_are_taken_and_loaded")
def test_ranks_are_new_processes():
    assert gpu_ranks.run(1, "gloo", "cpu", "train", "in place", 2) == [[]]


@pytest.mark.slow
def test_ranks_may_fail():
    with pytest.raises(AssertionError, match=r"rank 0:\n(.|\n)*no_such_scenario"):
        gpu_ranks.run(1, "gloo", "cpu", "no_such_scenario")
