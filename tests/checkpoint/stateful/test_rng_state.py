"""The generators of a process and of its accelerator, of whatever kind, continue where they were saved."""

from __future__ import annotations

import random
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import shardckpt
from shardckpt.witness.digests import digest_random_states


class Accelerator:
    """An accelerator of a kind, with a generator of its own."""

    def __init__(self, kind: str, *, is_in_use: bool = True) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.device = torch.device(kind)
        self.module = types.ModuleType(f"torch.{kind}")
        self.module.is_available = lambda: True
        self.module.get_rng_state = self.generator.get_state
        self.module.set_rng_state = self.generator.set_state
        if kind != "mps":  # torch.mps cannot say that it is initialized
            self.module.is_initialized = lambda: is_in_use

    def draw(self) -> float:
        return float(torch.rand(1, generator=self.generator))


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Accelerator]]:
    def put(kind: str, **settings: bool) -> Accelerator:
        made = Accelerator(kind, **settings)
        monkeypatch.setattr("shardckpt.devices.find_accelerator", lambda: made.device)
        monkeypatch.setattr(torch, "get_device_module", lambda _: made.module)
        return made

    return put


@pytest.mark.parametrize("kind", ["cuda", "xpu", "npu", "hpu", "mps", "mtia"])
def test_the_generator_of_every_kind_of_accelerator_continues(kind: str, use: Callable, tmp_path: Path) -> None:
    device = use("privateuseone" if kind == "npu" else kind)  # torch_npu gives that its name
    device.draw()
    shardckpt.save({"rng": shardckpt.RNGState()}, tmp_path / "step")
    witness, expected = digest_random_states(), [device.draw(), random.random(), np.random.rand(), float(torch.rand(1))]
    assert device.draw() != expected[0]
    shardckpt.load({"rng": shardckpt.RNGState()}, tmp_path / "step")
    assert digest_random_states() == witness
    assert [device.draw(), random.random(), np.random.rand(), float(torch.rand(1))] == expected


def test_an_accelerator_that_is_not_in_use_is_left_alone(use: Callable) -> None:
    use("xpu", is_in_use=False)
    assert set(shardckpt.RNGState().state_dict()) == {"python", "numpy", "torch"}


def test_a_generator_that_cannot_be_restored_is_named(use: Callable) -> None:
    use("xpu")
    state = shardckpt.RNGState().state_dict()
    use("cuda")
    with pytest.warns(UserWarning, match="xpu is not available here, cuda was not saved"):
        shardckpt.RNGState().load_state_dict(state)
