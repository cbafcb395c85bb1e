"""Late collectives of a fake world of 8 give the bits of prompt ones, although freed memory turns into NaN."""

from __future__ import annotations

import pytest
import torch

from tests.kit.ranks import late_collectives as late

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def steps(device):
    return 20 if device == "cuda" else 2


@pytest.fixture(scope="module", autouse=True)
def world(device):
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # memory is as the allocator gives it
    with late.fake_world():
        yield
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["", "checkpointing", "no_sync", "offload"])
@pytest.mark.parametrize("front_end", ["flat", "orig", "in place"])
def test_late_collectives_give_the_bits_of_prompt_ones(device, steps, front_end, way, low):
    assert late.find_differences(device, front_end, way, low, steps) == []


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16"])
def test_slices_of_late_gathers_have_the_bits_of_prompt_ones(device, steps, low):
    assert late.find_differences(device, "in place", "slices", low, steps) == []


def test_a_gather_that_is_not_awaited_is_found(device):
    assert late.differs_without_waits(device) is (device == "cuda"), "without streams nothing is late"
