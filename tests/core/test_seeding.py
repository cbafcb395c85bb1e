"""Seeds are noted without a stack, and give the same numbers."""

from __future__ import annotations

import sys
import traceback
from types import SimpleNamespace

import pytest
import torch

from tests.kit.ranks.seeding import DEVICES, seed_without_traces


def test_no_stack_is_taken_for_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[None] = []
    monkeypatch.setattr(traceback, "extract_stack", lambda *_, **__: taken.append(None) or [])
    torch.manual_seed(0)
    assert taken == []
    for device in DEVICES:
        if hasattr(sys.modules[f"torch.{device}"], "traceback"):
            monkeypatch.setattr(sys.modules[f"torch.{device}"], "traceback", traceback)
    torch.manual_seed(0)
    assert taken or torch.cuda.is_initialized()


def test_numbers_are_those_of_the_seed() -> None:
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)))


def test_nothing_is_done_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", {"torch.cuda": SimpleNamespace()})
    seed_without_traces()
