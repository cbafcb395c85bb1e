"""`read_numpy`: arrays in pickles are read as they were, and all else is left as a stub."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shardckpt.encodings import pickle_reader
from shardckpt.encodings.pickle_stubs import InstanceStub
from shardckpt.readers.opened.state_tree import read_numpy

ARRAYS = {
    "integers": np.arange(3),
    "bools": np.array([True, False]),
    "complex": np.array([1 + 2j]),
    "by columns": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "other byte order": np.arange(4, dtype=">f8"),
    "no dimension": np.array(3),
    "empty": np.zeros((0, 4)),
    "strided": np.arange(10)[::3],
}


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_of_any_protocol_is_read_with_memory_of_its_own(name: str, protocol: int) -> None:
    array = ARRAYS[name]
    found = read_numpy(pickle_reader.load(pickle.dumps(array, protocol), where="a pickle"))
    assert isinstance(found, np.ndarray) and found.dtype == array.dtype and found.flags.writeable
    assert np.array_equal(found, array) and found.flags.f_contiguous == np.array(array).flags.f_contiguous


@pytest.mark.parametrize("protocol", [0, 2, 5])
@pytest.mark.parametrize("number", [np.float64(1.5), np.bool_(True), np.int16(-3)])
def test_a_number_keeps_its_type(number: np.generic, protocol: int) -> None:
    found = read_numpy(pickle_reader.load(pickle.dumps(number, protocol), where="a pickle"))
    assert type(found) is type(number) and found == number


@pytest.mark.parametrize(
    "value",
    [
        np.array(["a"]),
        np.array([{}], dtype=object),
        np.zeros(2, dtype=[("a", "f4")]),
        np.ma.masked_array([1], [True]),
        np.array(["2020-01-01"], "M8[s]"),
    ],
)
def test_elements_that_are_no_plain_numbers_are_left(value: np.ndarray[Any, Any]) -> None:
    stub = pickle_reader.load(pickle.dumps(value, 2), where="a pickle")
    assert isinstance(stub, InstanceStub) and read_numpy(stub) is None


def _stub(change: Callable[[list[object]], object]) -> InstanceStub:
    stub = pickle_reader.load(pickle.dumps(np.arange(3), 2), where="a pickle")
    assert isinstance(stub, InstanceStub) and isinstance(stub.state, tuple)
    state: list[object] = [*stub.state]
    change(state)
    stub.state = tuple(state)
    return stub


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.__setitem__(1, (1 << 40,)),
        lambda state: state.__setitem__(1, (-3,)),
        lambda state: state.__setitem__(1, (True,) * 3),
        lambda state: state.__setitem__(1, (3, *(1,) * 100)),
        lambda state: state.__setitem__(1, "abc"),
        lambda state: state.__setitem__(3, None),
        lambda state: state.__setitem__(4, b"short"),
        lambda state: setattr(state[2], "args", ("i8,f4", False, True)),
        lambda state: setattr(state[2], "args", ("O", False, True)),
        lambda state: setattr(state[2], "state", (3, "<<", None)),
        lambda state: setattr(state[2], "state", (3, [], None)),
        lambda state: state.pop(),
    ],
)
def test_a_form_that_numpy_does_not_write_is_left(change: Callable[[list[object]], object]) -> None:
    assert read_numpy(_stub(change)) is None
