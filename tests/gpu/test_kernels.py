"""What only a GPU has or checks: extensions that copy, aligned addresses, float8, graphs."""

from __future__ import annotations

import pytest
import torch

from tests.kit.ranks import gpu_kernels as kernels
from tests.kit.ranks.late_collectives import fake_world

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def world(device):
    with fake_world():
        yield


def test_extensions_train_with_collectives_that_copy(device):
    assert kernels.train_with_extensions(device) == []


def test_grouped_products_behind_a_head_of_odd_size_have_aligned_weights(device):
    if missing := kernels.find_missing_grouped_mm(device):
        pytest.skip(missing)
    assert kernels.train_experts(device) == []


def test_weights_gathered_in_float8_train(device):
    if missing := kernels.find_missing_float8(device):
        pytest.skip(missing)
    assert kernels.train_in_float8(device) == []


@pytest.mark.parametrize(
    "settings", [{}, {"low": True}, {"keeps": True}, {"reshard_after_forward": 2}], ids=["", "low", "kept", "slices"]
)
def test_a_graph_replayed_three_times_trains_as_without_it(device, settings):
    torch.use_deterministic_algorithms(True)
    try:
        assert kernels.replay_graph(device, **settings) == []
    finally:
        torch.use_deterministic_algorithms(False)
