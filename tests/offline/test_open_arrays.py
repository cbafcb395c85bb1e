"""`open(..., framework="numpy")` gives the elements that torch's tensors have, bit by bit."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardckpt
from shardckpt.errors import AmbiguousError, ChecksumError, UnsupportedError, UsageError
from shardckpt.storage.local import LocalStore
from tests.kit.runs.cases import NAMES
from tests.kit.writers.samples import SAMPLES

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
VARIANTS = [(form, variant) for form, variants in SAMPLES.items() for variant in variants]


def open_arrays(path: Path, **options: Any) -> Any:
    return shardckpt.open(path, framework="numpy", **options)


def bits_of(value: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Return type, shape and bytes of a tensor or an array."""
    if isinstance(value, torch.Tensor):
        raw = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        return str(value.dtype).removeprefix("torch."), tuple(value.shape), raw.tobytes()
    return value.dtype.name, value.shape, value.tobytes()


def read(opened: Any, path: tuple[Any, ...]) -> Any:
    """Return the bits of a tensor, a plain value as text, or that it cannot be read."""
    try:
        found = opened[path]
        return bits_of(found[...]) if hasattr(found, "shape") else repr(found)
    except UnsupportedError:
        return UnsupportedError


def assert_same(source: Path) -> None:
    """Compare a checkpoint that is opened both ways: names, types, shapes and bits."""
    tensors, arrays = shardckpt.open(source), open_arrays(source)
    assert list(arrays) == list(tensors)
    paths = tensors._source.saved.paths
    different = {path for path in paths if read(arrays, path) != read(tensors, path)}
    lacking = {path for path in different if read(arrays, path) is UnsupportedError}
    assert different == {path for path in lacking if tensors[path].dtype == torch.complex32}
    assert len(lacking) < len(paths)


@pytest.mark.parametrize("name", NAMES)
def test_every_fixture_opens_alike(name: str) -> None:
    folder = FIXTURES / name
    assert_same(folder / "ckpt" if (folder / "ckpt").exists() else folder / "ckpt.ckpt")


@pytest.mark.parametrize(("form", "variant"), VARIANTS)
def test_every_format_opens_alike(form: str, variant: str, tmp_path: Path) -> None:
    assert_same(SAMPLES[form][variant](tmp_path / "sample"))


@pytest.fixture
def step(tmp_path: Path) -> Path:
    state = {
        "deep": {"t": torch.arange(60.0).reshape(5, 4, 3), "half": torch.ones(3, dtype=torch.bfloat16)},
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "array": np.arange(4, dtype=np.int16),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "number": np.float32(1.5),
        "odd": torch.zeros(2, dtype=torch.complex32),
        "a.b": 1,
        "a": {"b": 2},
        "ordered": OrderedDict(z=1, y=(2, [3])),
    }
    shardckpt.save(state, tmp_path / "step")
    return tmp_path / "step"


INDICES = [
    0,
    -1,
    slice(1, 3),
    slice(None),
    (slice(0, 5, 3), -2),
    (..., slice(2, None)),
    (3, 2, 1),
    (),
    ...,
    slice(4, 2),
]


@pytest.mark.parametrize("index", INDICES)
def test_a_slice_is_what_the_tensor_would_give(step: Path, index: Any) -> None:
    found = open_arrays(step)["deep.t"]
    assert (found.shape, found.dtype) == ((5, 4, 3), np.dtype(np.float32))
    piece = found[index]
    assert type(piece) is np.ndarray
    assert bits_of(piece) == bits_of(shardckpt.open(step)["deep.t"][index])
    assert piece.base is None or piece.base.size == piece.size, "it holds no more than what was asked for"


@pytest.mark.parametrize("index", [5, (0, 0, 0, 0), slice(None, None, -1), "x", (..., ...)])
def test_an_index_out_of_range_is_an_error_as_for_tensors(step: Path, index: Any) -> None:
    for opened in (open_arrays(step), shardckpt.open(step)):
        with pytest.raises(IndexError):
            opened["deep.t"][index]


def test_values_are_those_that_python_and_numpy_have(step: Path) -> None:
    opened = open_arrays(step)
    assert (opened["size"], opened["device"], opened["dtype"].name) == ((2, 3), "cpu", "bfloat16")
    assert (opened["number"], type(opened["number"])) == (1.5, np.float32)
    assert opened["ordered"] == OrderedDict(z=1, y=(2, [3]))
    assert opened["scalar"][...].shape == ()
    assert opened["empty"][...].shape == (0, 3)
    assert repr(opened["deep.half"]) == "SavedArray('deep.half', shape=[3], dtype=bfloat16)"


def test_a_subtree_is_a_mapping_of_unread_tensors(step: Path) -> None:
    for opened in (open_arrays(step), shardckpt.open(step)):
        deep = opened["deep"]
        assert (list(deep), len(deep), "t" in deep, "u" in deep) == (["t", "half"], 2, True, False)
        assert repr(deep["t"]) == repr(opened["deep.t"])
        assert deep["t"][1:3].tolist() == torch.arange(60.0).reshape(5, 4, 3)[1:3].tolist()
        assert deep[...]["t"].tolist() == torch.arange(60.0).reshape(5, 4, 3).tolist()
        opened.close()
        with pytest.raises(UsageError, match="is closed"):
            deep["t"]


def test_tensors_in_a_list_are_unread_too(tmp_path: Path) -> None:
    shardckpt.save({"rows": [torch.ones(2), {"w": torch.zeros(3)}, 5]}, tmp_path / "step")
    rows = open_arrays(tmp_path / "step")["rows"]
    assert (rows[0][...].tolist(), rows[1]["w"][...].tolist(), rows[2]) == ([1, 1], [0, 0, 0], 5)


@pytest.mark.parametrize("framework", ["numpy", "torch"])
@pytest.mark.parametrize("form", ["native", "safetensors", "torch", "dcp"])
def test_tensors_of_a_subtree_cost_the_reads_of_their_full_names(
    form: str, framework: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {f"layers.{at}.w": torch.full((1000,), float(at)) for at in range(6)}
    source = str(tmp_path / "step")
    shardckpt.save({"model": model, "optimizer": {"state": {}, "param_groups": []}}, source)
    if form != "native":
        shardckpt.convert(source, tmp_path / "out", to=form, part="all")
        source = str(tmp_path / "out")
    reads: list[tuple[str, int, int]] = []
    read, names = LocalStore.read, list(model)

    def count(store: LocalStore, items: Any) -> None:
        reads.extend((each.name, each.offset, len(each.buffer)) for each in items)
        read(store, items)

    monkeypatch.setattr(LocalStore, "read", count)
    opened = shardckpt.open(source, framework=framework)
    places = {name: next(key for key in opened if key.endswith(name)) for name in names}
    reads.clear()
    by_name = [opened[places[name]][...].tolist() for name in names]
    expected = [*reads]
    opened = shardckpt.open(source, framework=framework)
    part = opened[places[names[0]].removesuffix(f".{names[0]}")]
    assert list(part) == names
    reads.clear()
    assert [part[name][...].tolist() for name in names] == by_name
    assert reads == expected


def test_a_type_that_numpy_lacks_is_named(step: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"odd: numpy has no such type; found complex32"):
        open_arrays(step)["odd"][...]


def test_names_and_closing_are_as_for_tensors(step: Path) -> None:
    with open_arrays(step) as opened:
        kept = opened["deep.t"]
        with pytest.raises(AmbiguousError):
            opened["a.b"]
        assert (opened["a.b",], opened["a", "b"]) == (1, 2)
        assert "deep.u" not in opened
    with pytest.raises(UsageError, match="is closed"):
        kept[0]


def test_a_flipped_bit_is_found_unless_nothing_is_verified(step: Path) -> None:
    file = next(step.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ChecksumError):
        [open_arrays(step)[name][...] for name in ("deep.t", "deep.half", "scalar", "array")]
    assert open_arrays(step, verify=False)["deep.t"][...].shape == (5, 4, 3)


def test_a_tensor_is_read_and_cast_in_parts(step: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardckpt.offline.open_arrays._BATCH_BYTES", 16)
    opened = open_arrays(step)
    assert bits_of(opened["deep.t"][1:4]) == bits_of(shardckpt.open(step)["deep.t"][1:4])
    saved, entry = opened._source.saved, opened["deep.t"]._entry
    wide = saved.read(entry._replace(delivered="float64"), entry.pieces[0].box)
    assert (wide.dtype, wide.tolist()) == (np.float64, torch.arange(60.0).reshape(5, 4, 3).tolist())


@pytest.mark.parametrize("options", [{"framework": "jax"}, {"framework": "numpy", "verify": "full"}, {"verify": "all"}])
def test_an_unknown_option_is_refused(step: Path, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be"):
        shardckpt.open(step, **options)
