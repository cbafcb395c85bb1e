"""The plan of a round of an exchange: pure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardckpt.errors import FormatError
from shardckpt.tiers.peers.exchange_round import (
    PIECE_BYTES,
    ROUND_BYTES,
    FilePiece,
    RoundAnswer,
    RoundRequest,
    plan_round,
)

WORLD = 3
RANKS, SIZES = st.integers(0, WORLD - 1), st.sampled_from([1, 1000, PIECE_BYTES])
PIECES = st.builds(FilePiece, RANKS, st.sampled_from("ab"), st.integers(0, 99), SIZES)
REQUESTS = st.builds(RoundRequest, st.lists(PIECES, max_size=20).map(tuple), st.just(()), st.booleans())


@given(st.lists(REQUESTS, min_size=WORLD, max_size=WORLD))
def test_what_is_sent_is_what_was_accepted_in_one_order_and_within_bounds(requests):
    answers = plan_round([RoundRequest.decode(request.encode(), WORLD) for request in requests])
    assert [RoundAnswer.decode(answer.encode()) for answer in answers] == answers
    taken = [[requests[rank].pieces[index] for index in answers[rank].accepted] for rank in range(WORLD)]
    for rank in range(WORLD):
        for peer in range(WORLD):
            sent = [piece for piece in answers[peer].sends if piece.peer == rank]
            assert [piece._replace(peer=peer) for piece in sent] == [
                piece for piece in taken[rank] if piece.peer == peer
            ]
        for pieces in (taken[rank], answers[rank].sends):
            assert len(pieces) <= 1 or sum(piece.nbytes for piece in pieces) <= ROUND_BYTES
    assert any(answer.accepted for answer in answers) is any(request.pieces for request in requests)
    is_over = all(request.is_done and not request.pieces for request in requests)
    assert {answer.is_over for answer in answers} == {is_over}


def test_every_rank_deletes_what_one_asks_for():
    answers = plan_round([RoundRequest((), ("step-1",)), RoundRequest((), ("step-1", "step-2"))])
    assert [answer.deleted for answer in answers] == [("step-1", "step-2")] * 2


@pytest.mark.parametrize(
    "data",
    [
        b"", b"x", b"[]", b"[[], [], 0, 0]", b"[[[0, 1, 2, 3]], [], false]", b'[[[3, "a", 0, 1]], [], false]',
        b'[[[0, "a", -1, 1]], [], false]', b'[[[0, "a", 0, 0]], [], false]', b'[[[0, "a", 0, 99999999]], [], false]',
        b'[[[true, "a", 0, 1]], [], false]', b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_request_of_other_bytes_is_a_typed_error(data):
    with pytest.raises(FormatError, match="request"):
        RoundRequest.decode(data, WORLD)
