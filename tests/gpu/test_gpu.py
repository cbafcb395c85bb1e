"""The engine, states and saves on one GPU, in processes of their own: `tests/gpu/run.sh` runs it with other checks.

NCCL does not put two ranks on one GPU: it runs with one rank, and several ranks share the GPU over gloo.
"""

from __future__ import annotations

import pytest

from tests.kit.ranks import gpu_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

FRONT_ENDS = ("flat", "orig", "in place")
FRONTS = pytest.mark.parametrize("front_end", FRONT_ENDS)
SHARED = "cpu:gloo,cuda:gloo"


def run(device, world, backend, scenario, *args, **environment):
    """Run a scenario on new processes, over gloo without a GPU."""
    return gpu_ranks.run(world, backend if device == "cuda" else "gloo", device, scenario, *args, **environment)


@FRONTS
@pytest.mark.parametrize("late", ["", "optimizer"])
def test_one_rank_over_nccl_trains_to_the_bits_of_the_unsharded_model(device, front_end, late):
    assert run(device, 1, "nccl", "train", front_end, 20, late) == [[]]


def test_late_collectives_over_nccl_change_nothing(device):
    assert run(device, 1, "nccl", "train", "in place", 20, "collectives") == [[]]


def test_memory_of_nccl_changes_nothing(device):
    found = run(device, 1, "nccl", "train", "in place", 20, "", True)
    if found == [["no allocator"]]:
        pytest.skip("NCCL cannot allocate on this GPU")
    assert found == [[]]


@FRONTS
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_a_gpu_train_to_the_values_of_the_unsharded_model(device, front_end, world):
    assert run(device, world, SHARED, "train", front_end) == [[]] * world


@pytest.mark.parametrize("late", ["slices", "collectives", "optimizer"])
def test_late_kernels_on_ranks_that_share_a_gpu_change_nothing(device, late):
    assert run(device, 4, SHARED, "train", "in place", 6, late) == [[]] * 4


@FRONTS
def test_the_host_waits_for_nothing_in_forward_and_backward(device, front_end):
    assert run(device, 1, "nccl", "step_without_waits", front_end) == [True]


@FRONTS
@pytest.mark.parametrize(("world", "backend"), [(1, "nccl"), (2, "cuda:gloo")])
def test_states_work_with_a_group_that_has_no_backend_for_the_cpu(device, tmp_path, front_end, world, backend):
    found = run(device, world, backend, "get_and_load_states", front_end, str(tmp_path))
    assert found == [[]] * world


@FRONTS
def test_the_sanitizer_of_torch_finds_no_race(device, front_end):
    assert run(device, 1, "nccl", "train", front_end, 3, TORCH_CUDA_SANITIZER="1") == [[]]


@FRONTS
def test_a_save_in_the_background_has_the_weights_from_before_the_step_behind_it(device, tmp_path, front_end):
    found = run(device, 1, "nccl", "save_behind_a_sleep", front_end, str(tmp_path))
    assert found == [[(True, True)] * 2]
