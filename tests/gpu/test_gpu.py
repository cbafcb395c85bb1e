"""The engine, states and saves on one GPU: `pytest -m gpu`. Every test is skipped without one.

NCCL does not put two ranks on one GPU: it runs with one rank, and several ranks share the GPU over gloo.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.kit.ranks import gpu_ranks

os.environ.setdefault(
    "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
)  # the check must not use CUDA in a process that forks others
if not torch.cuda.is_available():
    pytest.skip("no GPU: nothing is tested on CUDA; its scenarios run on the simulated device", allow_module_level=True)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

FRONT_ENDS = ("flat", "orig", "in place")
FRONTS = pytest.mark.parametrize("front_end", FRONT_ENDS)
SHARED = "cpu:gloo,cuda:gloo"


@FRONTS
@pytest.mark.parametrize("late", ["", "optimizer"])
def test_one_rank_over_nccl_trains_to_the_bits_of_the_unsharded_model(front_end, late):
    assert gpu_ranks.run(1, "nccl", "cuda", "train", front_end, 20, late) == [[]]


def test_late_collectives_over_nccl_change_nothing():
    assert gpu_ranks.run(1, "nccl", "cuda", "train", "in place", 20, "collectives") == [[]]


def test_memory_of_nccl_changes_nothing():
    found = gpu_ranks.run(1, "nccl", "cuda", "train", "in place", 20, "", True)
    if found == [["no allocator"]]:
        pytest.skip("NCCL cannot allocate on this GPU")
    assert found == [[]]


@FRONTS
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_share_a_gpu_train_to_the_values_of_the_unsharded_model(front_end, world):
    assert gpu_ranks.run(world, SHARED, "cuda", "train", front_end) == [[]] * world


@pytest.mark.parametrize("late", ["slices", "collectives", "optimizer"])
def test_late_kernels_on_ranks_that_share_a_gpu_change_nothing(late):
    assert gpu_ranks.run(4, SHARED, "cuda", "train", "in place", 6, late) == [[]] * 4


@FRONTS
def test_the_host_waits_for_nothing_in_forward_and_backward(front_end):
    assert gpu_ranks.run(1, "nccl", "cuda", "step_without_waits", front_end) == [True]


@FRONTS
@pytest.mark.parametrize(("world", "backend"), [(1, "nccl"), (2, "cuda:gloo")])
def test_states_work_with_a_group_that_has_no_backend_for_the_cpu(tmp_path, front_end, world, backend):
    found = gpu_ranks.run(world, backend, "cuda", "get_and_load_states", front_end, str(tmp_path))
    assert found == [[]] * world


@FRONTS
def test_the_sanitizer_of_torch_finds_no_race(front_end):
    assert gpu_ranks.run(1, "nccl", "cuda", "train", front_end, 3, TORCH_CUDA_SANITIZER="1") == [[]]


@FRONTS
def test_a_save_in_the_background_has_the_weights_from_before_the_step_behind_it(tmp_path, front_end):
    found = gpu_ranks.run(1, "nccl", "cuda", "save_behind_a_sleep", front_end, str(tmp_path))
    assert found == [(True, True)]
