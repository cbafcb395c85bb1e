"""Which claims of durability a history requires, by the media that the nodes had when they were asked."""

from __future__ import annotations

import pytest

from shardckpt.native.step_copies import MEMORY, StepCopy
from shardckpt.tiers.peers.node_files import Node
from tests.simulation import run_history
from tests.simulation.scheduler import HistoryError
from tests.simulation.tier_claims import Claims

NODES = {name: Node(name, name, "rack0") for name in ("node0", "node1")}
COPY = StepCopy(MEMORY, "memory:run/step-00000001", ("process",), None)


class Memories:
    """File systems in memory of two nodes, whose files nobody can read any more once they are lost."""

    version = 0

    def __init__(self) -> None:
        self.living: dict[str, object] = {name: object() for name in NODES}

    def find_living(self) -> dict[str, object]:
        return dict(self.living)

    def list_files(self, _medium: object) -> dict[str, bytearray]:
        return {}


def lose(claims: Claims, memories: Memories, node: str) -> None:
    claims.lose(memories.living.pop(node))


def test_memory_may_go_between_the_report_of_its_node_and_the_answer() -> None:
    memories = Memories()
    claims = Claims(NODES, {MEMORY: memories})
    claims.start("call", 1, NODES, "node0")
    lose(claims, memories, "node0")
    claims.start("call", 1, NODES, "node1")
    claims.check("call", 1, COPY, NODES)


def test_memory_that_went_before_its_node_was_asked_has_no_claimed_copy() -> None:
    memories = Memories()
    claims = Claims(NODES, {MEMORY: memories})
    claims.start("call", 1, NODES, "node1")
    claims.start("call", 1, NODES, None)  # another rank of node0 does not report what it has
    lose(claims, memories, "node0")
    claims.start("call", 1, NODES, "node0")
    with pytest.raises(HistoryError, match=r"attempt 1 is claimed to survive \('process',\), but is on 0 machines"):
        claims.check("call", 1, COPY, NODES)


def test_memory_that_goes_after_its_report_may_be_claimed_by_all_ranks() -> None:
    assert run_history(1_143_782).failure is None
