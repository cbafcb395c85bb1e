"""Pickles are read as CPython reads them, and nothing in them ever runs."""

import argparse
import collections
import contextlib
import io
import os
import pathlib
import pickle
import pickletools
import random
import struct
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorProperties

from shardckpt.encodings.pickle_reader import (
    Dtype,
    InstanceStub,
    Limits,
    Ordered,
    StorageType,
    TensorStub,
    load,
    load_at,
)
from shardckpt.errors import CheckpointError, FormatError, TruncatedError, UnsafeError

PLAIN = {
    "none": None,
    "bools": [True, False],
    "ints": [0, 1, 255, 256, 65535, 65536, -1, 2**31 - 1, -(2**31), 2**31, 2**63, -(2**200)],
    "floats": [0.0, -1.5, 1e300, float("inf")],
    "texts": ["", "a", "gr\u00fc\u00dfe", "\U0001f600", "x" * 300, "line\nbreak", "\ud800"],
    "bytes": [b"", b"\0\1\2", b"y" * 300],
    "nest": {"a": {"b": [1, (2,), (3, 4), (5, 6, 7), (8, 9, 10, 11), ()]}, 3: "three", (1, "t"): "tuple"},
    "sets": [set(), {1, 2}, frozenset({"x"})],
    "complex": 1 + 2j,
}


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_come_out_as_cpython_reads_them(protocol: int) -> None:
    for name, value in PLAIN.items():
        raw = pickle.dumps(value, protocol=protocol)
        assert load(raw, where=name) == value, name


@pytest.mark.parametrize("protocol", range(6))
def test_random_nests_come_out_as_cpython_reads_them(protocol: int) -> None:
    rng = random.Random(protocol)

    def nest(depth: int) -> object:
        kind = rng.randrange(8 if depth else 4)
        if kind < 4:
            return rng.choice([rng.getrandbits(rng.randrange(1, 90)), rng.random(), "k" * rng.randrange(300), None])
        items = [nest(depth - 1) for _ in range(rng.randrange(6))]
        return {4: items, 5: tuple(items), 6: dict(enumerate(items)), 7: {str(i): v for i, v in enumerate(items)}}[kind]

    for _ in range(200):
        value = nest(5)
        assert load(pickle.dumps(value, protocol=protocol), where="nest") == value


def test_a_value_used_twice_is_one_value() -> None:
    inner = ["shared"]
    value = load(pickle.dumps([inner, inner]), where="x")
    assert isinstance(value, list)
    assert value[0] is value[1]


def test_pickles_optimised_by_pickletools_and_python_2_memos_are_read() -> None:
    value = {"a": [1, 2], "b": ("x", "x")}
    assert load(pickletools.optimize(pickle.dumps(value, protocol=4)), where="x") == value
    assert load(b"\x80\x02]q\x01U\x03abcq\x02a.", where="memo starts at 1") == ["abc"]
    assert load(b"(lp1\nS'it\\'s'\np2\naI01\naL5L\naF1.5\na.", where="protocol 0") == ["it's", True, 5, 1.5]


def test_several_pickles_in_a_row_are_read_one_by_one() -> None:
    raw = pickle.dumps("one") + pickle.dumps([2]) + b"rest"
    first, at = load_at(raw, 0, where="x")
    second, end = load_at(raw, at, where="x")
    assert (first, second, raw[end:]) == ("one", [2], b"rest")


def test_containers_of_the_standard_library_become_plain_ones() -> None:
    ordered = collections.OrderedDict(a=1)
    ordered._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    value = load(pickle.dumps(ordered), where="x")
    assert isinstance(value, Ordered)
    assert value == {"a": 1}
    assert value.attributes == {"_metadata": {"": {"version": 1}}}
    assert load(pickle.dumps(collections.defaultdict(list, a=[1])), where="x") == {"a": [1]}
    assert load(pickle.dumps(collections.Counter("aab")), where="x") == {"a": 2, "b": 1}
    assert load(pickle.dumps(collections.deque([1, 2], maxlen=5)), where="x") == [1, 2]
    assert load(pickle.dumps(bytearray(b"ab"), protocol=2), where="x") == b"ab"
    assert load(pickle.dumps(b"\xff\x00", protocol=2), where="x") == b"\xff\x00"


def test_torch_values_become_stand_ins() -> None:
    value = load(pickle.dumps([torch.float32, torch.bfloat16, torch.Size([2, 3]), torch.device("cuda", 1)]), where="x")
    assert value == [Dtype("float32"), Dtype("bfloat16"), (2, 3), "cuda:1"]
    assert load(pickle.dumps(torch.strided), where="x") == "torch.strided"
    assert load(b"ctorch\nFloatStorage\n.", where="x") == StorageType("float32")


def test_every_dtype_of_torch_is_known_by_name() -> None:
    dtypes = {v for v in vars(torch).values() if isinstance(v, torch.dtype)}
    for dtype in dtypes:
        assert load(pickle.dumps(dtype), where="x") == Dtype(str(dtype).removeprefix("torch."))


@pytest.mark.parametrize("make", [pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.Path])
def test_paths_become_text(make: type) -> None:
    assert load(pickle.dumps(make("/a/b")), where="x") == str(make("/a/b"))
    assert load(pickle.dumps(make("c")), where="x") == "c"
    assert load(b"\x80\x02cpathlib\nPureWindowsPath\nU\x05C:/ab\x85R.", where="x") == r"C:\ab"
    assert load(b"\x80\x02cpathlib._local\nPosixPath\nU\x01/U\x01a\x86R.", where="x") == "/a"


def test_listed_classes_become_inert_instances_with_their_state() -> None:
    value = load(pickle.dumps(argparse.Namespace(lr=0.1)), where="x")
    assert isinstance(value, InstanceStub)
    assert (value.name, value.args, value.state) == ("argparse.Namespace", (), {"lr": 0.1})
    assert isinstance(load(pickle.dumps(types.SimpleNamespace(a=1)), where="x"), InstanceStub)
    for protocol, function in ((4, "_reconstruct"), (5, "_frombuffer")):  # newer versions of Python write 5 by default
        array = load(pickle.dumps(np.arange(3), protocol), where="x")
        assert isinstance(array, InstanceStub)
        assert array.name.endswith(function)
    assert isinstance(load(pickle.dumps(random.getstate()), where="x"), tuple)
    assert isinstance(load(pickle.dumps(np.random.RandomState(0).get_state()), where="x"), tuple)
    assert isinstance(load(pickle.dumps(np.float64(1)), where="x"), InstanceStub)


def test_dcp_metadata_becomes_inert_instances() -> None:
    chunk = ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))
    value = load(pickle.dumps(Metadata({"a": chunk})), where="x")  # type: ignore[dict-item]
    assert isinstance(value, InstanceStub)
    assert value.name == "torch.distributed.checkpoint.metadata.Metadata"
    inner = value.state["state_dict_metadata"]["a"]  # type: ignore[index]
    assert inner.state == {"offsets": (0,), "sizes": (4,)}
    properties = load(pickle.dumps(TensorProperties(dtype=torch.float16)), where="x")
    assert isinstance(properties, InstanceStub)
    assert properties.state[0] == Dtype("float16")  # type: ignore[index]


def test_every_pickle_of_the_fixtures_is_read(fixtures: Path) -> None:
    seen = 0
    for file in sorted(fixtures.rglob("*")):
        if file.name == ".metadata":
            pickled = [file.read_bytes()]
        elif file.suffix in {".pt", ".bin", ".ckpt", ".pkl"} and zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                pickled = [archive.read(n) for n in archive.namelist() if n.endswith("/data.pkl")]
        else:
            continue
        for raw in pickled:
            load(raw, where=str(file), persistent=lambda key: key)
            seen += 1
    assert seen > 40


def saved(value: object) -> bytes:
    """Return the pickle inside a file of torch.save."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read("archive/data.pkl")


def test_tensors_become_stubs() -> None:
    base = torch.arange(12.0)
    stub = load(saved(base[2:].view(5, 2).t()), where="x", persistent=lambda key: "the storage")
    assert stub == TensorStub("the storage", 2, (2, 5), (1, 2))
    stub = load(saved(torch.zeros(2, dtype=torch.float8_e4m3fn)), where="x", persistent=lambda key: "s")
    assert isinstance(stub, TensorStub)
    assert stub.dtype == "float8_e4m3fn"
    lazy = torch.zeros(2, dtype=torch.complex64).conj()
    stub = load(saved(lazy), where="x", persistent=lambda key: "s")
    assert isinstance(stub, TensorStub)
    assert stub.bits == ("conj",)


def test_parameters_and_tensors_with_attributes_are_their_tensors() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    assert isinstance(load(saved(parameter), where="x", persistent=lambda key: "s"), TensorStub)
    parameter.note = "kept by torch"  # type: ignore[attr-defined]
    assert isinstance(load(saved(parameter), where="x", persistent=lambda key: "s"), TensorStub)
    assert isinstance(load(saved(torch.nn.Buffer(torch.zeros(2))), where="x", persistent=lambda k: "s"), TensorStub)


class _Runs:
    """Pickles as a call of anything."""

    def __init__(self, what: object, *args: object) -> None:
        self.call = (what, args)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    ("payload", "named"),
    [
        (_Runs(os.system, "echo"), "posix.system"),
        (_Runs(eval, "1"), "builtins.eval"),
        (_Runs(exec, "1"), "builtins.exec"),
        (_Runs(getattr, _Runs(__import__, "os"), "system"), "builtins.__import__"),
        (_Runs(getattr, dict, "fromkeys"), "builtins.getattr"),
        ({"deep": [(1, {"er": _Runs(os.remove, "x")})]}, "posix.remove"),
        (_Runs(torch.load, "x"), "torch.serialization.load"),
        (_Runs(torch.hub.load, "x", "y"), "torch.hub.load"),
    ],
)
def test_calls_are_refused_by_name_and_never_run(payload: object, named: str, protocol: int) -> None:
    with pytest.raises(UnsafeError) as caught:
        load(pickle.dumps(payload, protocol=protocol), where="evil.pt")
    text = str(caught.value).replace("__builtin__", "builtins")
    assert named in text or named.replace("posix", "nt") in text
    assert "evil.pt" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "raw",
    [
        b"cos\nsystem\n(S'x'\ntR.",
        b"(S'x'\nios\nsystem\n.",
        b"(cos\nsystem\nS'x'\no.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01x\x85R.",
        b"cbuiltins\ngetattr\n(cbuiltins\ndict\nS'fromkeys'\ntR.",
        b"cbuiltins\ngetattr\n(ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\nS'__init__'\ntR.",
        b"ctorch\nload\n.",
        b"ctorch._utils\n_import_dotted_name\n.",
        b"cbuiltins\nobject\n)R.",
        b"I5\n)R.",
        b"]}b.",
        b"(dI1\nb.",
        b"S'x'\n(S'a'\nI1\nu.",
        b"S'x'\n(I1\ne.",
        b"]cbuiltins\nlist\nI1\na.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02\x84\x01\0\0\0.",
        b"\x80\x04ctorch\nfloat32\n}b.",
    ],
)
def test_opcodes_that_would_touch_something_alive_are_refused(raw: bytes) -> None:
    with pytest.raises(UnsafeError):
        load(raw, where="x")


def test_the_one_nested_class_that_torch_names_by_getattr_is_read() -> None:
    nested = b"(ctorch.distributed._shard.sharded_tensor.api\nShardedTensor\nS'ProcessGroupState'\nt"
    found = load(b"c__builtin__\ngetattr\n" + nested + b"R.", where="x")
    assert found.name.endswith("ShardedTensor.ProcessGroupState")  # type: ignore[attr-defined]


def test_an_unlisted_class_keeps_its_arguments_state_and_items() -> None:
    raw = b"cacme\nThing\nq\0(I1\nt\x81}U\x01aI2\nsbI3\naI4\naU\x01kI5\ns."
    found = load(raw, where="x")
    assert isinstance(found, InstanceStub)
    assert (found.name, found.args, found.state, found.items) == ("acme.Thing", (1,), {"a": 2}, [3, 4, "k", 5])
    assert "acme" not in sys.modules


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x04\x8c\x01a\x94\x8c\x02bc\x94" + b"h\0h\x01\x93" * 300_000 + b".",
        b"\x80\x04ca\nb\nq\0X\1\0\0\0xq\1cbuiltins\ngetattr\nq\2" + b"0h\2h\0h\1\x86R" * 300_000 + b".",
    ],
)
def test_many_unlisted_names_cost_what_they_take(raw: bytes) -> None:
    with pytest.raises(UnsafeError, match="would cost more"):
        load(raw, where="x")


@pytest.mark.parametrize("name", ["a" * 300, "a" * (1 << 20), "", "a b", "a..b", "1a"])
def test_a_name_that_python_cannot_have_is_refused(name: str) -> None:
    raw = b"\x80\x04\x8c\x01m\x8d" + struct.pack("<Q", len(name)) + name.encode() + b"\x93."
    with pytest.raises(UnsafeError, match="not a Python name") as caught:
        load(raw, where="x")
    assert len(str(caught.value)) < 800


def test_an_instance_that_contains_itself_is_kept_without_its_content() -> None:
    for name in (b"argparse\nNamespace", b"acme\nNode"):
        found = load(b"c" + name + b"\n)\x81q\0}U\x01kh\0sb.", where="cycle")
        assert isinstance(found, InstanceStub)
        assert found.parts == ()


def test_the_error_names_a_hostile_global_on_one_line() -> None:
    raw = b"\x80\x04\x8c\x03a\nb\x8c\x02\x1b[\x93."
    with pytest.raises(UnsafeError, match=r"a\\nb\.\\x1b\["):
        load(raw, where="x")


@pytest.mark.parametrize(
    "raw",
    [
        b"cbuiltins\nbytearray\n(I1000000000000\ntR.",
        b"cbuiltins\nbytes\n(I1000000000000\ntR.",
        b"cbuiltins\ncomplex\n(S'x'\ntR.",
        b"ccollections\nOrderedDict\n(I1\ntR.",
        b"ctorch\nSize\n(S'abc'\ntR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n)R.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(NI-1\n))\x89NtR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(NI0\n(I-1\nt(I1\nt\x89NtR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(NI0\n(I9223372036854775808\nt(I1\nt\x89NtR.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(NI0\n(I1\nt)\x89NtR.",
        b"(]I1\nd.",
        b"((dI1\nd.",
        b"(I1\nd.",
        b"\x80\x06N.",
        b"\xffN.",
        b"h\x05.",
        b"g5\n.",
        b"g-1\n.",
        b"Np-1\n.",
        b"0.",
        b"t.",
        b"R.",
        b".",
        b"Ix\n.",
        b"Sx\n.",
        b"X\x02\0\0\0\xff\xfe.",
        b"\x80\x02Q.",
        b"NQ.",
        b"Pabc\n.",
        b"\x97.",
        b"Nq\x05h\x02.",
        b"\x8b\xff\xff\xff\xff.",
        b"T\xff\xff\xff\xff.",
        b"(\x8f(]\x90.",
    ],
)
def test_malformed_pickles_are_format_errors(raw: bytes) -> None:
    with pytest.raises(FormatError) as caught:
        load(raw, where="bad.pkl")
    assert "bad.pkl" in str(caught.value)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_cut_at_any_byte_is_a_truncation(protocol: int) -> None:
    raw = pickle.dumps(
        {"a": [1.5, b"bytes" * 60, 7, 700, 70000, 2**70], "b": ("text" * 80, torch.float32)}, protocol=protocol
    )
    for end in range(len(raw)):
        with pytest.raises(TruncatedError):
            load(raw[:end], where="cut")


def test_a_changed_byte_is_read_or_a_typed_error() -> None:
    raw = saved({"w": torch.zeros(3), "o": {"x": [1, 2.5, "s"]}}) + pickle.dumps(Metadata({}))
    rng = random.Random(7)
    for _ in range(3000):
        changed = bytearray(raw)
        for _ in range(rng.randrange(1, 4)):
            changed[rng.randrange(len(raw))] = rng.randrange(256)
        with contextlib.suppress(CheckpointError):
            load(bytes(changed), where="fuzz", persistent=lambda key: key)


def test_lengths_that_lie_allocate_nothing() -> None:
    for raw in (b"\x8d" + struct.pack("<Q", 1 << 60), b"\x8e" + struct.pack("<Q", 1 << 62), b"B\xff\xff\xff\x7f"):
        with pytest.raises(TruncatedError):
            load(raw + b"xx.", where="x")
    with pytest.raises(UnsafeError, match="memo"):
        load(b"Nr\xff\xff\xff\x7f.", where="x")
    with pytest.raises(UnsafeError, match="integer"):
        load(b"\x8b\xff\xff\xff\x7f.", where="x")
    with pytest.raises(UnsafeError, match="digits"):
        load(b"I" + b"9" * 5000 + b"\n.", where="x")


@pytest.mark.parametrize(
    "raw",
    [
        b"(" * 100_000 + b"t" * 100_000 + b".",
        b")" + b"\x85" * 200_000 + b".",
        b"]" * 100_000 + b"a" * 99_999 + b".",
        b"".join(b"}U\x01k" for _ in range(100_000)) + b"N" + b"s" * 100_000 + b".",
        b"cargparse\nNamespace\n" * 1000 + b")" + b"R\x85" * 999 + b"R.",
    ],
)
def test_deep_nesting_is_refused(raw: bytes) -> None:
    with pytest.raises(UnsafeError, match="in one another"):
        load(raw, where="deep")


@pytest.mark.parametrize(
    "raw",
    [
        b"]q\0h\0a.",
        b"}q\0U\x01kh\0s.",
        b"]q\0h\0\x85a.",
        b"]2a.",
        b"ccollections\nOrderedDict\n)Rq\0}U\x01kh\0sb.",
        b"]q\0cargparse\nNamespace\n)\x81h\0ba.",
    ],
)
def test_a_container_that_contains_itself_is_refused(raw: bytes) -> None:
    with pytest.raises(UnsafeError, match="contains itself"):
        load(raw, where="cycle")


def nest(depth: int) -> bytes:
    """Return opcodes of an empty tuple within tuples, of which the outermost is in the memo."""
    return b")" + b"\x85" * (depth - 1) + b"q\0"


@pytest.mark.parametrize(
    ("depth", "above", "is_read"), [(200, 0, True), (201, 0, False), (150, 50, True), (150, 51, False)]
)
def test_the_depth_of_a_shared_container_counts_at_each_of_its_places(depth: int, above: int, is_read: bool) -> None:
    raw = nest(depth) + (b"0]h\0a" + b"h\0" + b"\x85" * (above - 1) + b"a" if above else b"") + b"."
    if is_read:
        load(raw, where="deep")
    else:
        with pytest.raises(UnsafeError, match="in one another"):
            load(raw, where="deep")


def test_data_above_the_limit_of_a_list_is_read_like_smaller_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardckpt.encodings.pickle_reader._MAX_LISTED", 0)
    for protocol in range(6):
        assert load(pickle.dumps(PLAIN, protocol=protocol), where="x") == PLAIN


def test_a_memo_bomb_is_refused() -> None:
    bomb = b"]q\x00" + b"".join(b"(" + b"h%c" % i * 10 + b"lq%c" % (i + 1) for i in range(60)) + b"."
    with pytest.raises(UnsafeError, match="would cost more"):
        load(bomb, where="bomb")


def test_a_tuple_that_takes_for_ever_to_hash_is_refused_as_a_key() -> None:
    key = b")q\x000" + b"".join(b"h%ch%c\x86q%c0" % (i, i, i + 1) for i in range(60)) + b"h\x3c"
    with pytest.raises(UnsafeError, match="as a key"):
        load(b"}" + key + b"Ns.", where="bomb")
    with pytest.raises(UnsafeError, match="as a key"):
        load(b"\x8f(" + key + b"\x90.", where="bomb")


def pairs_of_one_hash(count: int) -> list[tuple[int, int]]:
    """Return pairs of numbers that CPython hashes alike: its hash of tuples is undone for the second of each."""
    whole = 1 << 64
    p1, p2, p5 = 11400714785074694791, 14029467366897019727, 2870177450012600261

    def after(first: int) -> int:
        mixed = (p5 + first * p2) % whole
        return (((mixed << 31) | (mixed >> 33)) % whole) * p1 % whole

    target, inverse = after(1) + 2 * p2, pow(p2, -1, whole)
    found, first = [], 0
    while len(found) < count:
        first += 1
        second = (target - after(first)) * inverse % whole
        second -= whole if second > whole // 2 else 0
        if abs(second) <= 2**61 - 2 and second not in (-1, -2):
            found.append((first, second))
    assert len({hash(pair) for pair in found}) == 1
    return found


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize(
    "keys",
    [
        [n * (2**61 - 1) for n in range(1, 100)],
        [-n * (2**61 - 1) for n in range(1, 100)],
        [(n * (2**61 - 1), "a") for n in range(1, 100)],
        pairs_of_one_hash(100),
    ],
    ids=["numbers", "negative", "in tuples", "pairs"],
)
def test_many_keys_of_one_hash_are_refused(keys: list[object], protocol: int) -> None:
    for made in (dict.fromkeys(keys), set(keys), frozenset(keys), collections.OrderedDict.fromkeys(keys)):
        with pytest.raises(UnsafeError, match="one hash"):
            load(pickle.dumps(made, protocol), where="x")
        kept = type(made)(list(made)[:20]) if isinstance(made, set | frozenset) else dict.fromkeys(keys[:20])
        assert load(pickle.dumps(kept, protocol), where="x") == kept


def test_keys_that_are_merely_large_or_many_are_read() -> None:
    for fine in (
        {-1: 0, -2: 0, 2**60: 0, 0.5: 0, ("a", -1, (2, None)): 0, (0.5, -2): 0, 2**200: 0},
        {hash(str(n)) * 3: n for n in range(20_000)},
        {n * 0.1: n for n in range(20_000)},
        {(n, -n, n * 0.5): n for n in range(5_000)},
        {2.0**n: n for n in range(-1000, 1000)},
    ):
        assert load(pickle.dumps(fine), where="x") == fine


def test_limits_are_the_callers_to_set() -> None:
    raw = pickle.dumps([[1], [2], [3]])
    with pytest.raises(UnsafeError, match="bytes"):
        load(raw, where="x", limits=Limits(nbytes=10))
    with pytest.raises(UnsafeError, match="in one another"):
        load(raw, where="x", limits=Limits(depth=1))
    assert load(raw, where="x", limits=Limits(depth=2)) == [[1], [2], [3]]


def test_persistent_ids_go_to_the_caller() -> None:
    assert load(b"\x80\x02(U\x07storageK\x01tQ.", where="x", persistent=lambda key: [key]) == [("storage", 1)]
    with pytest.raises(FormatError, match="outside"):
        load(b"\x80\x02NQ.", where="x")


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_the_error_of_a_pickle_that_ends_early_has_its_length_and_the_last_byte_read(protocol: int) -> None:
    longest = 40  # bytes of an instruction
    raw = pickle.dumps({f"name-{number}": [number, number * 1.5] for number in range(60)}, protocol=protocol)
    for cut in range(len(raw)):
        with pytest.raises(TruncatedError) as caught:
            load(raw[:cut], where="f")
        assert caught.value.found.partition(" byte")[0] == str(cut)
        assert cut - longest <= int(str(caught.value).partition(":")[0].removeprefix("f, byte ")) <= cut
        if protocol > 2 and cut > 11:
            assert caught.value.expected == f"at least {len(raw)} bytes", "the frame has it"


def test_a_pickle_that_is_shorter_than_its_frame_is_refused() -> None:
    raw = bytearray(pickle.dumps({"a": 1}, protocol=4))
    raw[3] += 1
    with pytest.raises(TruncatedError, match=f"found {len(raw)} bytes; expected at least {len(raw) + 1} bytes"):
        load(bytes(raw), where="f")


def test_the_byte_of_an_error_counts_from_the_start_of_a_file_with_several_pickles() -> None:
    first, second = pickle.dumps([1, 2], protocol=2), pickle.dumps({"a": 1}, protocol=2)
    _, at = load_at(first + second[:-1], 0, where="f")
    with pytest.raises(TruncatedError, match=f"f, byte {len(first) + len(second) - 1}: "):
        load_at(first + second[:-1], at, where="f")
