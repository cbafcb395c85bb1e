"""The ledger of a holder: pure, checked against a simple model of files and writers."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.errors import NoSpaceError, StorageError, TargetExistsError, UnsafeError
from shardckpt.storage.store import Listed
from shardckpt.tiers.holder.holder_ledger import HolderLedger

CLIENTS = (1, 2, 3)


def make_ledger(max_bytes=100):
    """Return a ledger, and the list of numbers that it released."""
    released = []
    return HolderLedger(max_bytes, "COMMIT", released.append), released


def put(ledger, client, name, nbytes=1, *, is_new=False):
    number = ledger.create(client, name, is_new=is_new)
    ledger.reserve(client, number, nbytes)
    ledger.close(client, number, nbytes, 1.0)
    return number


def test_bytes_beyond_the_maximum_are_refused_and_change_nothing():
    ledger, _ = make_ledger(10)
    put(ledger, 1, "a", 6)
    number = ledger.create(1, "b", is_new=False)
    with pytest.raises(NoSpaceError, match="found 11 bytes; expected at most 10 bytes"):
        ledger.reserve(1, number, 5)
    assert ledger.nbytes == 6
    ledger.reserve(1, number, 4)
    assert ledger.nbytes == 10


def test_a_replaced_file_stays_until_the_new_one_is_closed_and_is_then_released():
    ledger, released = make_ledger()
    old = put(ledger, 1, "a", 6)
    number = ledger.create(1, "a", is_new=False)
    assert ledger.find("a").number == old and not released
    ledger.close(1, number, 0, 1.0)
    assert ledger.find("a").number == number and released == [old]


def test_a_client_cannot_touch_what_another_one_writes():
    ledger, released = make_ledger()
    number = ledger.create(1, "a", is_new=False)
    for act in (lambda: ledger.reserve(2, number, 1), lambda: ledger.close(2, number, 0, 1.0)):
        with pytest.raises(StorageError):
            act()
    with pytest.raises(StorageError):
        ledger.abort(2, number)
    assert not released


def test_a_file_larger_than_its_reserved_memory_does_not_appear():
    ledger, released = make_ledger()
    number = ledger.create(1, "a", is_new=False)
    with pytest.raises(StorageError, match="larger than its reserved memory"):
        ledger.close(1, number, 5, 1.0)
    assert ledger.list("") == [] and released == [number]


def test_a_name_that_leaves_the_root_is_refused():
    with pytest.raises(UnsafeError):
        make_ledger()[0].create(1, "../a", is_new=False)


def test_a_torn_folder_stays_while_a_writer_is_connected_and_goes_with_the_last():
    ledger, released = make_ledger()
    put(ledger, 1, "step-1/a")
    put(ledger, 2, "step-1/b")
    ledger.forget(1, {2})
    assert [entry.name for entry in ledger.list("step-1")] == ["step-1/a", "step-1/b"]
    ledger.forget(2, set())
    assert ledger.list("") == [] and len(released) == 2 and ledger.nbytes == 0


def test_a_complete_folder_and_a_file_at_the_root_survive_all_clients():
    ledger, released = make_ledger()
    for name in ("step-1/a", "step-1/COMMIT", "alone"):
        put(ledger, 1, name)
    ledger.forget(1, set())
    assert ledger.list("") == [Listed("alone", 1, False), Listed("step-1", 0, True)] and not released


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["create", "close", "abort", "delete", "delete_folder", "forget"]),
            st.sampled_from(CLIENTS),
            st.sampled_from(["s/a", "s/b", "t/a", "s/COMMIT", "t/COMMIT"]),
            st.integers(0, 60),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_memory_is_kept_exactly_as_long_as_a_file_or_a_writer_has_it(acts):
    ledger, released = make_ledger(100)
    made, writing = set(), {}
    for act, client, name, nbytes, is_new in acts:
        own = [number for number, owner in writing.items() if owner == client]
        if act == "create":
            number = ledger.create(client, name, is_new=is_new)
            made.add(number)
            writing[number] = client
            try:
                ledger.reserve(client, number, nbytes)
            except NoSpaceError:
                assert ledger.nbytes + nbytes > 100
        elif act in {"close", "abort"} and own:
            with contextlib.suppress(TargetExistsError):
                ledger.close(client, own[0], 0, 1.0) if act == "close" else ledger.abort(client, own[0])
            del writing[own[0]]
        elif act == "delete":
            ledger.delete(name)
        elif act == "delete_folder":
            ledger.delete_folder(name[0])
        elif act == "forget":
            ledger.forget(client, set(CLIENTS) - {client})
            writing = {number: owner for number, owner in writing.items() if owner != client}
        held = {ledger.find(entry.name).number for folder in "st" for entry in ledger.list(folder)}
        assert len(released) == len(set(released)), "nothing is released twice"
        assert made - set(released) == held | set(writing)
        assert ledger.nbytes <= 100
