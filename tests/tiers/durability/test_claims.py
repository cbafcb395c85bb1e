"""Claims of durability: which of them are withdrawn with an event."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from shardckpt.events import WithdrawalEvent
from shardckpt.native.step_copies import StepCopy
from shardckpt.tiers.durability.claims import DurabilityClaims

MEMORY = StepCopy("memory", "memory/step-00000001", ("process", "node"), None, save="1")
LOCAL = StepCopy("local", "local/step-00000001", ("process",), None, save="1")


class Finder:
    """Finder of a step with some copies."""

    group = None

    def __init__(self) -> None:
        self.copies: list[StepCopy] = []
        self.removed: dict[str, int] = {}

    def find_copies(self, step: int) -> list[StepCopy]:
        return self.copies

    def find_finder(self, path: str) -> Finder:
        return self


def list_withdrawn(after: list[StepCopy], *, is_removed: bool = False) -> list[tuple[str, tuple[str, ...]]]:
    """Return the withdrawn claims of a step that was in memory and in a folder, and has some copies now."""
    finder, events = Finder(), list[Any]()
    claims = DurabilityClaims(cast(Any, finder), events.append)
    finder.copies = [MEMORY, LOCAL]
    claims.claim(1)
    assert events == []
    finder.copies = after
    finder.removed = {"1": 1} if is_removed else {}
    for _ in range(2):
        claims.claim(1)
    assert all(isinstance(event, WithdrawalEvent) and event.step == 1 for event in events)
    return [(event.tier, event.survives) for event in events]


@pytest.mark.parametrize(
    ("after", "withdrawn"),
    [
        ([MEMORY, LOCAL], []),
        ([LOCAL], [("memory", ("process",))]),
        ([replace(MEMORY, survives=("process",)), LOCAL], [("memory", ("process",))]),
        ([replace(MEMORY, survives=("process", "node", "2 nodes")), LOCAL], []),
        ([replace(MEMORY, survives=()), replace(LOCAL, survives=())], [("memory", ()), ("local", ())]),
        ([replace(MEMORY, save="2"), LOCAL], [("memory", ("process", "node"))]),
        ([], [("memory", ()), ("local", ())]),
    ],
)
def test_a_claim_is_withdrawn_once_if_its_copy_is_lost_or_survives_less(after, withdrawn):
    assert list_withdrawn(after) == withdrawn


def test_a_copy_that_the_rules_have_removed_is_not_withdrawn():
    assert list_withdrawn([LOCAL], is_removed=True) == []


def test_a_copy_that_claimed_nothing_is_withdrawn_when_it_is_lost():
    finder, events = Finder(), list[Any]()
    claims = DurabilityClaims(cast(Any, finder), events.append)
    finder.copies = [replace(LOCAL, survives=())]
    claims.claim(1)
    finder.copies = []
    claims.claim(1)
    assert [event.tier for event in events] == ["local"]
