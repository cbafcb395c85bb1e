"""A series of pickles gives the results, the errors and the costs that each pickle gives by itself."""

import collections
import pickle
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.encodings.budget import ReadBudget
from shardckpt.encodings.pickle_reader import Dtype, InstanceStub, Limits, Ordered, TensorStub, load
from shardckpt.errors import ShardckptError
from shardckpt.readers.torchsave import pickle_series
from shardckpt.readers.torchsave.pickle_series import Hole, PickleSeries, TextHole


class Named:
    """Reduces to a call of an allowed name."""

    def __init__(self, kind, *args, state=None):
        self.parts = (kind, args) if state is None else (kind, args, state)

    def __reduce__(self):
        return self.parts


SMALL = st.integers(0, 255)
DEVICES = st.builds(lambda kind, index: Named(torch.device, kind, index), st.sampled_from(["cuda", "npu"]), SMALL)
KEYS = st.one_of(st.text(max_size=3), SMALL, st.tuples(SMALL, SMALL))
CALLS = (torch.Size, torch.device, bytes, set, frozenset, complex, float, collections.OrderedDict, list, range, slice)
VALUES = st.recursive(
    st.one_of(SMALL, DEVICES, st.none(), st.booleans(), st.text(max_size=4), st.binary(max_size=4), st.floats()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        inner.map(lambda value: [value, (value, value)]),
        st.dictionaries(KEYS, inner, max_size=4),
        st.sets(SMALL, max_size=4),
        st.builds(lambda kind, args: Named(kind, *args), st.sampled_from(CALLS), st.lists(inner, max_size=3)),
        st.builds(Named, st.sampled_from(CALLS), st.lists(inner, max_size=3)),
        st.builds(lambda state: Named(collections.OrderedDict, state={"a": state}), inner),
        st.builds(
            lambda *args: Named(torch._utils._rebuild_tensor_v2, *args),
            inner,
            SMALL,
            st.tuples(SMALL),
            st.tuples(SMALL),
            st.booleans(),
            inner,
        ),
    ),
    max_leaves=12,
)


def shape_of(value, seen):
    """Return a value as plain tuples, with the containers that are used again named by their first use."""
    if isinstance(value, tuple | list | dict | set | frozenset | InstanceStub):
        if id(value) in seen:
            return ("again", seen[id(value)])
        seen[id(value)] = len(seen)
    kind = type(value).__name__
    if isinstance(value, InstanceStub):
        return (kind, value.name, shape_of(value.args, seen), shape_of(value.state, seen))
    if isinstance(value, dict):
        items = [(shape_of(k, seen), shape_of(v, seen)) for k, v in value.items()]
        return (kind, items, shape_of(value.attributes, seen) if isinstance(value, Ordered) else None)
    if isinstance(value, tuple | list):
        return (kind, [shape_of(v, seen) for v in value])
    if isinstance(value, set | frozenset):
        return (kind, sorted(repr(shape_of(v, seen)) for v in value))
    if isinstance(value, TensorStub):
        return (kind, shape_of(value.storage, seen), value.offset, value.shape, value.strides, value.dtype, value.bits)
    return (kind, repr(value))


def outcome(read, raw, nbytes):
    budget = ReadBudget(nbytes)
    try:
        return shape_of(read(raw, where="x", budget=budget), {}), budget.left
    except ShardckptError as error:
        return type(error), str(error), budget.left


@settings(max_examples=120, deadline=None)
@given(VALUES, st.integers(0, 5), st.randoms(use_true_random=False), st.lists(st.integers(1, 4), max_size=6))
def test_each_pickle_of_a_series_gives_what_it_gives_alone(value, protocol, rng, edits):
    raw = pickle.dumps(value, protocol)
    numbers = [i + 1 for i, code in enumerate(raw[:-1]) if code == 0x4B]
    numbers += [i + 5 for i, code in enumerate(raw[:-6]) if code == 0x58]  # first characters of texts
    series = PickleSeries(lambda: None, Limits())
    series_raws = [raw]
    for count in edits:
        edited = bytearray(series_raws[-1])
        for _ in range(count):
            at = rng.choice(numbers) if numbers and rng.random() < 0.9 else rng.randrange(len(raw))
            edited[at] = rng.randrange(256)
        series_raws.append(bytes(edited))
    for each in series_raws:
        assert outcome(series.load, each, 1000) == outcome(load, each, 1000)


@pytest.mark.parametrize("look", [bool, len, hash, str, repr, format, lambda hole: hole == 1, lambda hole: hole != 1])
def test_nothing_can_look_at_a_hole(look):
    for kind in (Hole, TextHole):
        with pytest.raises(TypeError, match="the value of this part matters"):
            look(kind(lambda raw: raw[0]))


def read_alone(monkeypatch, values, protocol=2):
    """Read a series; return its results, and how many pickles were interpreted by themselves."""
    calls = []
    monkeypatch.setattr(pickle_series, "load", lambda *a, **k: calls.append(0) or load(*a, **k))
    series = PickleSeries(lambda: None, Limits())
    raws = [pickle.dumps(value, protocol) for value in values]
    return [series.load(raw, where="x", budget=ReadBudget(100)) for raw in raws], len(calls)


def test_pickles_that_differ_in_numbers_are_interpreted_once(monkeypatch):
    values = [{"rank": n, "at": (n,), "step": [3, {"dtype": torch.float32}]} for n in range(9)]
    found, alone = read_alone(monkeypatch, values)
    assert found == [{"rank": n, "at": (n,), "step": [3, {"dtype": Dtype("float32")}]} for n in range(9)]
    assert alone == 1


def test_pickles_that_differ_in_devices_are_interpreted_once(monkeypatch):
    texts = [f"cuda:{n}" for n in range(8)]
    found, alone = read_alone(monkeypatch, [[torch.device("cuda", n), text, text] for n, text in enumerate(texts)])
    assert found == [[text] * 3 for text in texts] and alone == 1


def test_a_later_result_leaves_an_earlier_one_as_it_is(monkeypatch):
    (one, two, three), _ = read_alone(monkeypatch, [[[n], {"a": (n, [7])}] for n in (1, 2, 3)])
    two[0].append(0)
    two[1]["a"] = 0
    assert one == [[1], {"a": (1, [7])}] and three == [[3], {"a": (3, [7])}]


def tensor(storage, flags):
    return Named(torch._utils._rebuild_tensor_v2, storage, 0, (1,), (1,), False, None, flags)


def pickled(*values):
    return [pickle.dumps(value, 2) for value in values]


def device(*args):
    return Named(torch.device, *args)


LONG = "x" * 300


@pytest.mark.parametrize(
    "raws",
    [
        pickled(*[tensor(None, {"conj": n}) for n in (0, 1, 0)]),
        pickled(*[tensor(n, None) for n in (0, 1, 2)]),
        pickled(*[tensor([n], None) for n in (0, 1, 2)]),
        pickled(*[{Named(slice, n): 0} for n in (0, 1, 2)]),
        pickled(*[{Named(slice, n)} for n in (0, 1, 2)]),
        pickled(*[[Named(slice, n, [3]), {}, n] for n in (0, 1, 2)]),
        [bytes((0x80, 2, 0x4B, a, 0x32, 0x86, 0x4B, b, 0x32, 0x86, 0x86, 0x2E)) for a, b in ((5, 6), (7, 8), (9, 9))],
        [b"\x80\x02\x01" + number + b"." for number in (b"a", b"b", b"c")],
        pickled(*[{letter: 0} for letter in "abc"]),
        pickled(*["K" + letter for letter in "abc"]),
        [b"\x80\x03B\x02\0\0\0a" + letter + b"." for letter in (b"a", b"b", b"c")],
        pickled(*[tensor(tensor([n], None), None) for n in (0, 1, 2)]),
        pickled(*[Named(collections.OrderedDict, [[Named(slice, n), 0]]) for n in (0, 1, 2)]),
        pickled(*[Named(types.SimpleNamespace, state={"a": n}) for n in (0, 1, 2)]),
        pickled(["x" * 9, 1], ["x" * 9, 2], ["", 3]),
        pickled(*[["ab", number] for number in (1.5, 2.5, 3.5)]),
        pickled(*[[[letter + LONG] * 9] * 9 for letter in "abc"]),
        pickled(*[[LONG, [[letter] * 9] * 99] for letter in "abc"]),
        pickled(*[Named(collections.defaultdict, letter * 9) for letter in "abc"]),
        [raw.replace(b"ab", text) for raw in pickled(["ab", 1]) for text in (b"ab", b"ac", b"\xc3\xa9", b"\xff\xff")],
        [b"\x80\x02X\x01\0\0\0" + text + b"0N." for text in (b"a", b"b", b"\xff")],
        pickled(*[device("cud" + letter, n) for n, letter in enumerate("abc")]),
        pickled(*[device("cuda", n, n) for n in (0, 1, 2)]),
        pickled(*[device("cuda", letter) for letter in "abc"]),
        pickled(*[[n, "x" * (n % 3)] for n in range(6)]),
        [pickle.dumps(n, 2) + b"K" for n in (1, 2, 3)],
        [b"K" + bytes((n,)) for n in (1, 2, 3)],
    ],
    ids=[
        *("flag of a tensor", "storage", "content of a storage", "in a key", "in a set", "beside what is equal"),
        *("integer used again", "opcode of a hole", "key", "text like an opcode", "bytes"),
        *(
            "tensor of a tensor",
            "in a key of an ordered dict",
            "state",
            "a shorter one",
            "number after a text",
            "long text",
            "beside a long text",
        ),
        *(
            "counted text",
            "malformed text",
            "malformed text that is dropped",
            "device of a text and a number",
            "device of three parts",
        ),
        *("device of two texts", "other lengths", "bytes after the end", "no end"),
    ],
)
def test_a_value_that_matters_is_read_from_each_pickle(raws):
    series = PickleSeries(lambda: None, Limits())
    for raw in raws:
        assert outcome(series.load, raw, 1000) == outcome(load, raw, 1000)


def test_a_pickle_with_less_budget_is_refused_as_it_is_alone():
    series, raws = PickleSeries(lambda: None, Limits()), [pickle.dumps([n, [[]] * 9, {}], 2) for n in range(3)]
    for raw, left in zip(raws, (10_000, 10_000, 100), strict=True):
        results = []
        for read in (series.load, load):
            budget = ReadBudget(100)
            budget.left = left
            try:
                results.append(read(raw, where="x", budget=budget))
            except ShardckptError as error:
                results.append(str(error))
    assert results[0] == results[1] and "would cost more" in results[0]


@pytest.fixture
def made(monkeypatch):
    """One entry for each skeleton that a series tries."""
    tried, real = [], pickle_series.load_holes
    monkeypatch.setattr(pickle_series, "load_holes", lambda *a, **k: tried.append(0) or real(*a, **k))
    return tried


def test_values_that_differed_before_stay_open(made):
    series = PickleSeries(lambda: None, Limits())
    for place in [(0, 0), (0, 1), (1, 1), (1, 0), (2, 1), (0, 3)]:
        assert series.load(pickle.dumps({"at": place}, 2), where="x", budget=ReadBudget(100)) == {"at": place}
    assert len(made) == 2


@pytest.mark.parametrize("value", [lambda n: n + 0.5, lambda n: [int(n == place) for place in range(9)]])
def test_pickles_that_never_fit_cost_six_tries(value, made):
    series = PickleSeries(lambda: None, Limits())
    for number in range(9):
        assert series.load(pickle.dumps(value(number), 2), where="x", budget=ReadBudget(100)) == value(number)
    assert len(made) == 6


@pytest.mark.parametrize(("size", "most"), [(640, 64 + 10), (6400, 64 + 100), (1 << 23, 1 << 16)])
def test_pickles_that_differ_in_very_many_values_are_not_tried(size, most, made):
    for count, tries in ((most, 1), (most + 1, 0)):
        made.clear()
        series = PickleSeries(lambda: None, Limits())
        for number in range(2):
            raw = b"\x80\x02(" + (b"K" + bytes((number,))) * count + b"l."
            raw = raw.ljust(size, b"\0")
            assert series.load(raw, where="x", budget=ReadBudget(10_000_000)) == [number] * count
        assert len(made) == tries


def test_the_limits_of_a_pickle_hold_in_a_series():
    series = PickleSeries(lambda: None, Limits(nbytes=5))
    for number in range(3):
        with pytest.raises(ShardckptError, match="more bytes than any checkpoint needs"):
            series.load(pickle.dumps([number], 2), where="x", budget=ReadBudget(100))


def test_a_series_needs_a_limit_of_depth():
    with pytest.raises(ValueError, match=r"limits\.depth must be at least 1, got 0"):
        PickleSeries(lambda: None, Limits(depth=0))
