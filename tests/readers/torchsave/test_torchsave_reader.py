"""Files of torch.save are views: every tensor is found where it lies, bit by bit, and nothing is executed."""

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import io
import json
import os
import pickle
import re
import struct
import uuid
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from lightning.fabric.utilities.data import AttributeDict
from omegaconf import OmegaConf

import shardckpt
from shardckpt.encodings.pickle_reader import InstanceStub
from shardckpt.errors import (
    CheckpointError,
    FormatError,
    IncompleteError,
    TruncatedError,
    UnsafeError,
    UnsupportedError,
)
from shardckpt.manifest import Encoded, Lazy, Span, Strided
from shardckpt.plan.layout.coverage import require_complete
from shardckpt.reader import Evidence, Reader, Source
from shardckpt.readers.frameworks.torch_files import FILE_FORMAT, open_file, recognize_file
from shardckpt.readers.registry import open_checkpoint
from shardckpt.storage.local import LocalStore
from tests.kit.damage.damage import change_bytes
from tests.kit.writers.materialise import assert_same, materialise, raw_items, truth

ZIP, LEGACY = True, False


class CountingStore(LocalStore):
    """Counts bytes read."""

    nbytes = 0

    def read(self, reads) -> None:
        self.nbytes += sum(len(r.buffer) for r in reads)
        super().read(reads)


def opened(file: Path) -> Reader:
    source = Source(LocalStore(str(file.parent)), file.name)
    assert recognize_file(source)
    return open_file(source)


def written(folder: Path, raw: bytes, name: str = "x.pt") -> Path:
    (folder / name).write_bytes(raw)
    return folder / name


def saved(value: object, *, container: bool = ZIP, protocol: int = 2) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=container, pickle_protocol=protocol)
    return buffer.getvalue()


def layouts(reader: Reader, *path: str | int) -> list[object]:
    return [piece.layout for piece in reader.resolve(reader.manifest.tensors[path].pieces)]


# ---------------------------------------------------------------- what real programs wrote


@pytest.mark.parametrize("case", ["torch_save_zip_nasty", "torch_save_legacy_nasty"])
def test_both_containers_hold_the_model_the_optimizer_and_the_views(fixtures: Path, case: str) -> None:
    reader = opened(fixtures / case / "ckpt" / "checkpoint.pt")
    tensors = reader.manifest.tensors
    model = truth(fixtures / case / "truth_model.safetensors")
    for name, expected in model.items():
        assert_same(reader, ("model", name), expected)
    assert {path[1] for path in tensors if path[0] == "model"} == set(model)
    views = truth(fixtures / case / "truth_views.safetensors")
    for name, expected in views.items():
        assert_same(reader, ("views", name), expected)
    names = json.loads((fixtures / case / "case.json").read_text())["optimizer_id_to_fqn"]
    state = {path: names[str(path[2])] for path in tensors if path[:2] == ("optimizer", "state")}
    optimizer = truth(fixtures / case / "truth_optim.safetensors")
    assert {f"{name}/{path[3]}" for path, name in state.items()} == set(optimizer)
    for path, name in state.items():
        assert_same(reader, path, optimizer[f"{name}/{path[3]}"])


def test_ties_are_known_and_other_values_are_kept(fixtures: Path) -> None:
    for case in ("torch_save_zip_nasty", "torch_save_legacy_nasty"):
        manifest = opened(fixtures / case / "ckpt" / "checkpoint.pt").manifest
        assert manifest.aliases == {("model", "head.weight"): ("model", "embed.weight")}
        assert manifest.objects["epoch",].value == 3
        assert manifest.objects["args", "name"].value == "run"
        groups = manifest.objects["optimizer", "param_groups"].value
        assert isinstance(groups, list)
        assert groups[0]["betas"] == (0.9, 0.999)


def test_a_fabric_file_is_read(fixtures: Path) -> None:
    case = fixtures / "fabric_fsdp_full_nasty_w2"
    reader = opened(case / "ckpt.ckpt")
    for name, expected in truth(case / "truth_model.safetensors").items():
        assert_same(reader, ("model", name), expected)
    for name, expected in truth(case / "truth_optim.safetensors").items():
        fqn, slot = name.rsplit("/", 1)
        assert_same(reader, ("optimizer", "state", fqn, slot), expected)


def test_full_state_dicts_of_fsdp1_are_read(fixtures: Path) -> None:
    case = fixtures / "fsdp1_full_llama_w2"
    model = opened(case / "ckpt" / "model.pt")
    for name, expected in truth(case / "truth_model.safetensors").items():
        assert_same(model, (name,), expected)
    by_name, by_id = (opened(case / "ckpt" / f"optim_param_{key}.pt") for key in ("name", "id"))
    names = json.loads((case / "case.json").read_text())["optimizer_id_to_fqn"]
    optimizer = truth(case / "truth_optim.safetensors")
    for name, expected in optimizer.items():
        fqn, slot = name.rsplit("/", 1)
        assert_same(by_name, ("state", fqn, slot), expected)
    for path in by_id.manifest.tensors:
        assert_same(by_id, path, optimizer[f"{names[str(path[1])]}/{path[2]}"])


@pytest.mark.parametrize(
    ("case", "file", "rank"),
    [
        ("fsdp2_dtensor_torchsave_llama_w2", "checkpoint_rank0.pt", 1),
        ("fsdp1_sharded_optim_nasty_w2", "optim_rank1.pt", 0),
    ],
)
def test_one_rank_file_is_not_taken_for_whole(fixtures: Path, case: str, file: str, rank: int) -> None:
    reader = open_checkpoint(str(fixtures / case / "ckpt" / file))
    with pytest.raises(IncompleteError, match=f"the file of rank {rank}"):
        require_complete(reader.manifest, reader.manifest.tensors.values(), "here")


# ---------------------------------------------------------------- what tensors there are


@pytest.mark.parametrize("container", [ZIP, LEGACY])
def test_every_dtype_is_found(tmp_path: Path, container: bool) -> None:
    dtypes = [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.uint16, torch.uint32, torch.uint64),
    ]
    if container is ZIP:  # torch cannot read these back from the legacy container
        dtypes += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
        dtypes += [torch.complex32]
        dtypes += [getattr(torch, name) for name in ("float8_e8m0fnu", "bcomplex32") if hasattr(torch, name)]
    generator = torch.Generator().manual_seed(1)
    value = {}
    for dtype in dtypes:
        noise = torch.randint(0, 2, (3, 4 * dtype.itemsize), dtype=torch.uint8, generator=generator)
        value[str(dtype)] = noise.view(dtype)
    reader = opened(written(tmp_path, saved(value, container=container)))
    for name, expected in value.items():
        assert_same(reader, (name,), expected)


@pytest.mark.parametrize("container", [ZIP, LEGACY])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_views_share_their_storage_and_are_found_in_it(tmp_path: Path, container: bool, protocol: int) -> None:
    base = torch.arange(120.0).reshape(2, 3, 4, 5)
    value = {
        "whole": base,
        "row": base[1],
        "slice": base[:, 1:, ::2],
        "permuted": base.permute(3, 1, 0, 2),
        "expanded": base[0, 0, 0].expand(7, 5),
        "one": base[1, 2, 3, 4],
        "last": base[..., 4:],
        "flipped": base.flip(0),
        "none": base[:0],
        "thin": base[:1].transpose(0, 1),
        "diagonal": torch.diagonal(base[0, 0, :4, :4]),
    }
    reader = opened(written(tmp_path, saved(value, container=container, protocol=protocol)))
    for name, expected in value.items():
        assert_same(reader, (name,), expected)
    assert len({layout.offset for name in ("whole", "slice", "permuted") for layout in layouts(reader, name)}) == 1


def test_contiguous_views_are_spans_and_others_are_strided(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    reader = opened(
        written(tmp_path, saved({"row": base[1:], "column": base[:, 1], "one": base[:1, :2], "no": base[:0]}))
    )
    assert [type(layouts(reader, name)[0]) for name in ("row", "column", "one", "no")] == [Span, Strided, Span, Span]
    [strided] = layouts(reader, "column")
    assert (strided.start, strided.strides, strided.nbytes) == (1, (4,), 48)


def test_only_views_of_the_same_elements_are_ties(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    value = {
        "a": base,
        "b": base,
        "c": base.t(),
        "d": base.view(-1),
        "e": base.clone(),
        "f": {"g": base},
        "z": base[:0],
    }
    manifest = opened(written(tmp_path, saved(value | {"y": base[:0]}))).manifest
    assert manifest.aliases == {("b",): ("a",), ("f", "g"): ("a",)}


def test_parameters_buffers_and_bare_storages_are_tensors(tmp_path: Path) -> None:
    noted = torch.nn.Parameter(torch.ones(2))
    noted.note = 1  # type: ignore[attr-defined]
    value = {"p": torch.nn.Parameter(torch.zeros(3)), "n": noted, "b": torch.nn.Buffer(torch.ones(1))}
    reader = opened(written(tmp_path, saved(value | {"s": torch.arange(2.0).untyped_storage()})))
    for name, expected in value.items():
        assert_same(reader, (name,), expected.detach())
    assert_same(reader, ("s",), torch.arange(2.0).view(torch.uint8))


def test_names_are_paths_and_containers_with_tensors_are_entered(tmp_path: Path) -> None:
    t = torch.ones(1)
    value = {
        "a.b": t,
        "a": {"b": t, 0: t, 1.5: t},
        "l": [1, (t, "x")],
        "plain": [1, {"x": (2, 3)}],
        "no": {},
        "nil": [],
    }
    manifest = opened(written(tmp_path, saved(value))).manifest
    assert set(manifest.tensors) == {("a.b",), ("a", "b"), ("a", 0), ("a", "1.5"), ("l", 1, 0)}
    assert {path: entry.value for path, entry in manifest.objects.items()} == {
        ("l", 0): 1,
        ("l", 1, 1): "x",
        ("plain",): [1, {"x": (2, 3)}],
        ("no",): {},
        ("nil",): [],
    }


def test_a_lone_tensor_and_a_lone_value_have_names(tmp_path: Path) -> None:
    reader = opened(written(tmp_path, saved(torch.arange(3))))
    assert_same(reader, ("tensor",), torch.arange(3))
    assert opened(written(tmp_path, saved("text"))).manifest.objects["object",].value == "text"
    reader = opened(written(tmp_path, saved([torch.arange(3), 1])))
    assert_same(reader, (0,), torch.arange(3))


def test_keys_that_are_spelt_alike_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="alike"):
        opened(written(tmp_path, saved({1.5: torch.ones(1), "1.5": torch.ones(1)})))


def test_compressed_entries_are_decoded_as_a_stream(tmp_path: Path) -> None:
    value = {"a": torch.arange(100.0).reshape(10, 10), "t": torch.arange(100.0).reshape(10, 10).t()}
    with zipfile.ZipFile(io.BytesIO(saved(value))) as source:
        entries = {n: source.read(n) for n in source.namelist()}
    with zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as target:
        for name, data in entries.items():
            target.writestr(name, data)
    reader = opened(tmp_path / "x.pt")
    assert [type(layouts(reader, name)[0]) for name in value] == [Encoded, Encoded]
    for name, expected in value.items():
        assert_same(reader, (name,), expected)
    assert list(reader.checksums()) == []


def test_plain_pickles_are_objects(tmp_path: Path) -> None:
    file = written(tmp_path, pickle.dumps({"step": 3, "rng": (1, [2])}), "state.pkl")
    manifest = opened(file).manifest
    assert {path: e.value for path, e in manifest.objects.items()} == {("step",): 3, ("rng",): (1, [2])}


# ---------------------------------------------------------------- what cannot be read is named, and blocks nothing else


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "kind", "shape"),
    [
        (lambda: torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.quint8), "quantised", (3,)),
        (
            lambda: torch.quantize_per_channel(torch.randn(3, 2), torch.ones(3), torch.zeros(3), 0, torch.qint8),
            "quantised",
            (3, 2),
        ),
        (lambda: torch.eye(3).to_sparse(), "sparse", (3, 3)),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse", (3, 3)),
        (lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)]), "nested", None),
        (lambda: torch.nested.nested_tensor([torch.randn(2), torch.randn(3)], layout=torch.jagged), "nested", None),
        (lambda: torch.empty(3, 4, device="meta"), "meta", (3, 4)),
        (lambda: torch.zeros(2, dtype=torch.complex64).conj(), "conj", (2,)),
    ],
)
def test_tensors_that_cannot_be_read_are_named_when_they_are_asked_for(
    tmp_path: Path, make, kind: str, shape: tuple[int, ...] | None
) -> None:
    reader = opened(written(tmp_path, saved({"odd": {"one": make()}, "fine": torch.ones(2)})))
    assert_same(reader, ("fine",), torch.ones(2))
    assert any(kind in warning for warning in reader.manifest.warnings)
    entry = reader.manifest.tensors["odd", "one"]
    assert shape in (None, entry.shape)
    with pytest.raises(UnsupportedError, match=rf"'odd\.one' is .*{kind}"):
        reader.resolve(entry.pieces)


def test_tensors_that_were_pickled_without_torch_are_named(tmp_path: Path) -> None:
    reader = opened(written(tmp_path, pickle.dumps({"a": torch.ones(2), "n": 1}), "x.pkl"))
    with pytest.raises(UnsupportedError, match="'a' is a tensor"):
        reader.resolve(reader.manifest.tensors["a",].pieces)


def test_names_that_can_run_code_are_refused_and_nothing_runs(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/ran",)

    for container in (ZIP, LEGACY):
        with pytest.raises(UnsafeError, match=r"system"):
            opened(written(tmp_path, saved({"w": torch.ones(2), "x": [Payload()]}, container=container)))
    with pytest.raises(UnsafeError, match=r"system"):
        opened(written(tmp_path, pickle.dumps(Payload())))
    assert not (tmp_path / "ran").exists()


class Stage(enum.Enum):
    TRAIN = "train"
    TEST = "test"


class Point(collections.namedtuple("Point", "x y")):
    pass


class Attributes(dict):
    pass


@dataclasses.dataclass
class Settings:
    width: int = 3

    class Nested:
        pass


def odd_values() -> dict[str, object]:
    """Return values of classes whose content only their own library can read."""
    values = {
        "datetime": datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc),
        "uuid": uuid.UUID(int=5),
        "decimal": decimal.Decimal("0.1"),
        "regex": re.compile("a+"),
        "enum": Stage.TRAIN,
        "enum keys": {Stage.TRAIN: 1, Stage.TEST: 2},
        "namedtuple": Point(1, 2),
        "dataclass": Settings(),
        "nested class": Settings.Nested(),
        "dict": Attributes(a=1),
        "function": odd_values,
        "partial": functools.partial(odd_values, 3),
        "error": ValueError("x"),
        "generator": np.random.default_rng(0),
        "scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD([{"params": []}], 0.1), 1).__class__,
    }
    values["omegaconf"] = OmegaConf.create({"model": {"width": 3}, "list": [1, 2]})  # whose parts name their parents
    values["lightning"] = AttributeDict(lr=0.1)
    values["transformers"] = transformers.LlamaConfig()
    return values


@pytest.mark.parametrize("protocol", [2, 4])
def test_values_of_any_class_leave_the_tensors_beside_them_readable(tmp_path: Path, protocol: int) -> None:
    weights = {"layer.weight": torch.arange(6.0).reshape(2, 3)}
    for name, value in odd_values().items():
        file = written(tmp_path, saved({"state_dict": weights, "odd": value, "epoch": 3}, protocol=protocol))
        reader = opened(file)
        assert_same(reader, ("state_dict", "layer.weight"), weights["layer.weight"])
        with warnings.catch_warnings(record=True) as caught:
            loaded = shardckpt.load(str(file))
        assert loaded["epoch"] == 3
        assert not loaded.get("odd"), name
        assert "only the library that wrote them can read them: odd" in str(caught[-1].message)


class Name(str):
    pass


@pytest.mark.parametrize("key", [Stage.TRAIN, Name("layer.weight"), np.str_("layer.weight"), (Name("a"), 1)])
def test_a_weight_whose_name_only_a_library_knows_gets_no_other_name(tmp_path: Path, key: object) -> None:
    file = written(tmp_path, saved({key: torch.ones(2), "known": torch.zeros(2)}))
    with pytest.raises(UnsupportedError, match=r"is a value whose key only .*--exclude"):
        shardckpt.consolidate(file, tmp_path / "out")
    assert_same(opened(file), ("known",), torch.zeros(2))


def test_a_key_deep_in_a_value_is_an_error_where_it_is_read(tmp_path: Path) -> None:
    file = written(tmp_path, saved({"odd": [{Stage.TRAIN: 1}], "types": [{torch.float32: 1}], "w": torch.ones(2)}))
    with pytest.warns(UserWarning, match="only the library that wrote them can read them: odd"):
        loaded = shardckpt.load(str(file))
    assert loaded.keys() == {"types", "w"} and loaded["types"] == [{torch.float32: 1}]


def test_a_class_as_a_key_is_named_as_it_is(tmp_path: Path) -> None:
    reader = opened(written(tmp_path, saved({torch.nn.Linear: torch.ones(2)})))
    assert_same(reader, ("torch.nn.modules.linear.Linear",), torch.ones(2))


@pytest.mark.parametrize("value", [torch.nn.Linear(2, 2), Point(torch.ones(2), 1), Attributes(w=torch.ones(2))])
def test_a_value_with_tensors_in_it_is_an_error_where_it_is_read(tmp_path: Path, value: object) -> None:
    reader = opened(written(tmp_path, saved({"odd": value, "w": torch.ones(2)})))
    name = type(value).__name__
    assert any(re.search(rf"odd is a .*{name} and cannot be read", each) for each in reader.manifest.warnings)
    with pytest.raises(UnsupportedError, match=rf"'odd' is a .*{name}.*save its state dict"):
        reader.resolve(reader.manifest.tensors["odd",].pieces)
    assert_same(reader, ("w",), torch.ones(2))


@pytest.mark.parametrize("value", [torch.nn.Linear(2, 2), Attributes(w=torch.ones(2))])
def test_a_load_of_all_and_a_verification_warn_of_a_value_with_tensors(tmp_path: Path, value: object) -> None:
    file = written(tmp_path, saved({"hyper_parameters": {"net": value, "lr": 0.1}, "w": torch.ones(2)}))
    with pytest.warns(UserWarning, match=r"only the library that wrote them can read them: hyper_parameters\.net$"):
        loaded = shardckpt.load(str(file))
    assert loaded["hyper_parameters"] == {"lr": 0.1} and torch.equal(loaded["w"], torch.ones(2))
    found = shardckpt.verify(file)
    assert not found.problems and any(
        re.match(r"hyper_parameters\.net is .* cannot be read", each) for each in found.warnings
    )
    with pytest.raises(shardckpt.errors.MismatchError, match=r"hyper_parameters\.net"):
        shardckpt.load({"hyper_parameters": {"net": torch.ones(2), "lr": 0.0}, "w": torch.zeros(2)}, str(file))


def test_a_file_of_nothing_but_such_a_value_is_an_error(tmp_path: Path) -> None:
    file = written(tmp_path, saved({"net": torch.nn.Linear(2, 2), "epoch": 3}))
    with pytest.raises(UnsupportedError, match=r"'net' is a torch\.nn\.modules\.linear\.Linear"):
        shardckpt.load(str(file))
    assert shardckpt.verify(file).problems


def test_a_module_that_names_itself_still_counts_its_tensors(tmp_path: Path) -> None:
    module = torch.nn.Linear(2, 2)
    module.__dict__["owner"] = [module]
    reader = opened(written(tmp_path, saved({"odd": module})))
    assert ("odd",) in reader.manifest.tensors


def test_objects_of_listed_classes_stay_inert(tmp_path: Path) -> None:
    import argparse

    manifest = opened(written(tmp_path, saved({"args": argparse.Namespace(lr=1), "w": torch.ones(1)}))).manifest
    args = manifest.objects["args",].value
    assert isinstance(args, InstanceStub)
    assert args.state == {"lr": 1}


def test_torchscript_tar_and_big_endian_files_are_refused_by_name(tmp_path: Path) -> None:
    with zipfile.ZipFile(io.BytesIO(saved({"a": torch.ones(1)}))) as source:
        entries = {n: source.read(n) for n in source.namelist()}

    def rezipped(**changes: bytes) -> bytes:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as target:
            for name, data in {**entries, **{f"archive/{k}": v for k, v in changes.items()}}.items():
                target.writestr(name, data)
        return buffer.getvalue()

    with pytest.raises(UnsupportedError, match="big-endian"):
        opened(written(tmp_path, rezipped(byteorder=b"big")))
    with pytest.raises(UnsupportedError, match="TorchScript"):
        opened(written(tmp_path, rezipped(**{"constants.pkl": b""})))
    with pytest.raises(UnsupportedError, match="tar"):
        opened(written(tmp_path, bytes(257) + b"ustar" + bytes(250)))
    legacy = saved({"a": torch.ones(1)}, container=LEGACY)
    with pytest.raises(UnsupportedError, match="big-endian"):
        opened(written(tmp_path, legacy.replace(b"little_endianq\x02\x88", b"little_endianq\x02\x89")))
    with pytest.raises(FormatError, match=r"not from torch\.save"):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as target:
            target.writestr("x/readme", b"")
        opened(written(tmp_path, buffer.getvalue()))


# ---------------------------------------------------------------- recognition, bytes read, checksums


def test_files_are_recognized_by_their_first_bytes_and_else_by_name(tmp_path: Path) -> None:
    def evidence(raw: bytes, name: str) -> Evidence:
        file = written(tmp_path, raw, name)
        return FILE_FORMAT.recognize(Source(LocalStore(str(tmp_path)), file.name))

    value = {"a": torch.ones(1)}
    assert evidence(saved(value), "weights") is Evidence.STRUCTURE
    for protocol in (2, 4):
        assert evidence(saved(value, container=LEGACY, protocol=protocol), "weights") is Evidence.STRUCTURE
    assert evidence(b"", "x.pt") is Evidence.NAME
    assert evidence(b"PK\x03\x04", "x.bin") is Evidence.NAME
    assert evidence(b"anything", "readme.md") is Evidence.NONE
    assert evidence(saved(value), "__0_0.distcp") is Evidence.NONE
    assert FILE_FORMAT.recognize(Source(LocalStore(str(tmp_path)))) is Evidence.NONE


@pytest.mark.parametrize("container", [ZIP, LEGACY])
def test_opening_reads_no_tensor(tmp_path: Path, container: bool) -> None:
    value = {f"layer.{i}": torch.zeros(100_000) for i in range(20)}
    file = written(tmp_path, saved(value, container=container))
    store = CountingStore(str(tmp_path))
    reader = open_file(Source(store, file.name))
    assert store.nbytes < 16_000
    assert len(reader.manifest.tensors) == 20
    assert all(isinstance(e.pieces[0].layout, Lazy) for e in reader.manifest.tensors.values())
    reader.resolve(reader.manifest.tensors["layer.3",].pieces)
    assert store.nbytes < 16_100


def test_checksums_are_those_that_torch_computed(tmp_path: Path) -> None:
    value = {"a": torch.arange(5.0), "b": torch.zeros(0), "c": torch.ones(3)}
    raw = saved(value)
    found = list(opened(written(tmp_path, raw)).checksums())
    assert [(c.nbytes, c.algorithm) for c in found] == [(20, "crc32"), (12, "crc32")]
    import zlib

    assert all(zlib.crc32(raw[c.offset : c.offset + c.nbytes]) == c.value for c in found)
    config = pytest.importorskip("torch.utils.serialization").config
    try:
        config.save.compute_crc32 = False
        without = saved(value)
    finally:
        config.save.compute_crc32 = True
    assert list(opened(written(tmp_path, without)).checksums()) == []


# ---------------------------------------------------------------- damage


def pickled(raw: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        return archive.read("archive/data.pkl")


def repickled(raw: bytes, old: bytes, new: bytes) -> bytes:
    """Return the archive with a part of its pickle replaced."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(buffer, "w") as target:
        for name in source.namelist():
            data = source.read(name)
            if name.endswith("data.pkl"):
                assert old in data
                data = data.replace(old, new, 1)
            target.writestr(name, data)
    return buffer.getvalue()


def test_views_beyond_their_storage_are_refused(tmp_path: Path) -> None:
    raw = saved({"w": torch.zeros(5, 7)})  # offset 0, shape (5, 7), strides (7, 1)
    view = b"K\x00K\x05K\x07\x86q\x08K\x07K\x01\x86"
    assert view in pickled(raw)
    lies = [
        (b"K\x00", b"K\x01"),
        (b"K\x05K\x07\x86", b"K\x06K\x07\x86"),
        (b"K\x05K\x07\x86", b"K\x05M\xff\xff\x86"),
        (b"K\x05K\x07\x86", b"J\xff\xff\xff\xffK\x07\x86"),
        (b"K\x05K\x07\x86", b"\x8a\x08" + b"\xff" * 7 + b"\x7fK\x07\x86"),
        (b"K\x05K\x07\x86", b"K\x05\x85"),
        (b"K\x07K\x01\x86", b"K\x08K\x01\x86"),
        (b"K\x07K\x01\x86", b"J\xff\xff\xff\xffK\x01\x86"),
        (b"K\x07K\x01\x86", b"\x8a\x08" + b"\xff" * 7 + b"\x7fK\x01\x86"),
    ]
    for old, new in lies:
        with pytest.raises(FormatError):
            opened(written(tmp_path, repickled(raw, view, view.replace(old, new, 1))))


def test_an_expanded_view_may_be_large_but_not_absurd(tmp_path: Path) -> None:
    raw = saved({"w": torch.zeros(1).expand(1 << 40)})
    assert opened(written(tmp_path, raw)).manifest.tensors["w",].shape == (1 << 40,)
    huge = b"\x8a\x08" + b"\xff" * 7 + b"\x7f"
    old = b"\x8a\x06" + (1 << 40).to_bytes(6, "little")
    with pytest.raises(FormatError, match="more elements"):
        opened(written(tmp_path, repickled(raw, old, huge)))


def test_storages_of_a_wrong_size_or_missing_are_refused(tmp_path: Path) -> None:
    raw = saved({"w": torch.zeros(5)})
    with pytest.raises(FormatError, match="wrong size"):
        opened(written(tmp_path, repickled(raw, b"K\x05tq", b"K\x06tq")))
    with pytest.raises(FormatError, match="wrong size"):
        opened(written(tmp_path, repickled(raw, b"FloatStorage", b"DoubleStorage")))
    with pytest.raises(FormatError, match="not in the file"):
        opened(written(tmp_path, repickled(raw, b"X\x01\0\0\x000", b"X\x01\0\0\x009")))
    with pytest.raises(FormatError, match="not a storage; found"):
        opened(written(tmp_path, repickled(raw, b"storage", b"storege")))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_legacy_file_cut_in_its_pickles_is_a_truncation(tmp_path: Path, protocol: int) -> None:
    raw = saved({"a": torch.arange(3.0), "b": torch.ones(2)}, container=LEGACY, protocol=protocol)
    data = len(raw) - (8 + 12) - (8 + 8)
    for end in range(14, data):
        with pytest.raises(TruncatedError):
            opened(written(tmp_path, raw[:end]))
    assert opened(written(tmp_path, raw[:data])).manifest.warnings


def test_a_legacy_file_cut_in_its_data_is_a_truncation_only_for_what_is_missing(tmp_path: Path) -> None:
    raw = saved({"a": torch.arange(3.0), "b": torch.ones(2)}, container=LEGACY)
    reader = opened(written(tmp_path, raw[:-1]))
    assert "ends early" in reader.manifest.warnings[0]
    outcomes = []
    for name, expected in (("a", torch.arange(3.0)), ("b", torch.ones(2))):
        try:
            outcomes.append(materialise(reader, (name,)).tobytes() == raw_items(expected).tobytes())
        except TruncatedError:
            outcomes.append(None)
    assert sorted(outcomes, key=str) == [None, True]


def test_a_legacy_storage_with_another_count_is_refused(tmp_path: Path) -> None:
    raw = saved({"a": torch.arange(3.0)}, container=LEGACY)
    at = len(raw) - 20
    reader = opened(written(tmp_path, raw[:at] + struct.pack("<q", 4) + raw[at + 8 :]))
    with pytest.raises(FormatError, match="wrong length"):
        reader.resolve(reader.manifest.tensors["a",].pieces)


def test_a_zip_cut_anywhere_is_a_truncation(tmp_path: Path) -> None:
    raw = saved({"a": torch.arange(3.0)})
    for end in range(4, len(raw), 11):
        with pytest.raises(TruncatedError):
            opened(written(tmp_path, raw[:end]))


@pytest.mark.parametrize("container", [ZIP, LEGACY])
def test_a_changed_byte_is_read_or_a_typed_error(tmp_path: Path, container: bool) -> None:
    raw = saved({"a": torch.arange(3.0), "b": {"c": [torch.ones(2).t(), 1]}}, container=container)
    for changed in change_bytes(raw, 500, seed=5):
        try:
            reader = opened(written(tmp_path, changed))
            for entry in reader.manifest.tensors.values():
                reader.resolve(entry.pieces)
        except CheckpointError as error:
            assert "\n" not in str(error)


def test_an_empty_file_and_text_with_a_torch_name_are_typed_errors(tmp_path: Path) -> None:
    for raw in (b"", b"PK", b"PK\x03\x04", b"hello world", b"version https://git-lfs.github.com/spec/v1\n"):
        with pytest.raises(CheckpointError):
            opened(written(tmp_path, raw))
