"""Formats and targets of other distributions: the examples in docs, installed, and plugins with faults."""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import MappingProxyType
from typing import Any

import fsspec
import numpy as np
import pytest
from safetensors.numpy import save_file

import shardckpt
from shardckpt import plugins
from shardckpt.errors import FormatError, ShardckptError, UnknownFormatError, UnsupportedError, UsageError
from shardckpt.offline.targets.target_registry import BUILT_IN
from shardckpt.testing import ReaderSuite, TargetSuite
from shardckpt.testing.target_suite import write_source
from tests.kit.runs.command import ENVIRONMENT

PAGES = [Path(__file__).resolve().parents[2] / "docs" / name for name in ("extending.md", "plugins.md")]
TEXT = "".join(page.read_text(encoding="utf-8") for page in PAGES)
READER, TARGET, SUITES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
BOTH = "[shardckpt.formats]\nnpy = npy_reader:FORMAT\n[shardckpt.targets]\nnpy = npy_target:TARGET\n"


def install(folder: Path, points: str, name: str = "npy-files", **modules: str) -> None:
    """Write a distribution as pip would leave it."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)


@pytest.fixture
def site(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed distributions, empty."""
    folder = tmp_path_factory.mktemp("site")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    return folder


@pytest.fixture
def npy(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The two examples, installed."""
    for module in ("npy_reader", "npy_target"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    install(site, BOTH, npy_reader=READER, npy_target=TARGET)


def load(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of the example's format."""
    place = tmp_path / "npy"
    place.mkdir()
    np.save(place / "0.npy", np.arange(6, dtype=np.float32).reshape(2, 3))
    (place / "tensors.json").write_text('{"npy":{"w": "0.npy"}}')
    return place


@pytest.mark.usefixtures("npy")
class TestExampleReader(ReaderSuite):
    expected = MappingProxyType({"w": np.arange(6, dtype=np.float32).reshape(2, 3)})

    @pytest.fixture(autouse=True)
    def form_of_plugin(self, npy: None) -> None:
        self.form = load("npy_reader", "FORMAT")

    @pytest.fixture
    def checkpoint(self, folder: Path) -> Path:
        return folder


@pytest.mark.usefixtures("npy")
class TestExampleTarget(TargetSuite):
    @pytest.fixture(autouse=True)
    def target_of_plugin(self, npy: None) -> None:
        self.target = load("npy_target", "TARGET")


def test_the_examples_are_short() -> None:
    assert max(len(re.findall(r"^.*\S", example, re.MULTILINE)) for example in (READER, TARGET)) <= 40


def test_the_suites_on_the_page_are_those_that_run() -> None:
    assert "class TestNpyReader(ReaderSuite)" in SUITES
    assert "class TestNpyTarget(TargetSuite)" in SUITES


@pytest.mark.usefixtures("npy")
class TestInstalledPlugins:
    def test_a_reader_serves_every_verb(self, folder: Path, tmp_path: Path) -> None:
        assert shardckpt.inspect(folder).format == "npy"
        report = shardckpt.consolidate(folder, tmp_path / "out")
        assert report.format == "npy"
        assert shardckpt.load(folder)["w"].tolist() == [[0, 1, 2], [3, 4, 5]]

    def test_a_reader_is_listed_as_a_plugin(self) -> None:
        listed = {each.name: each.is_plugin for each in shardckpt.formats().formats}
        assert (listed["npy"], listed["dcp"]) == (True, False)

    def test_a_target_is_listed_and_written(self, tmp_path: Path) -> None:
        save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
        assert shardckpt.list_targets()[-1] == "npy"
        shardckpt.convert(tmp_path / "model.safetensors", tmp_path / "out", to="npy")
        assert np.load(tmp_path / "out" / "0-0.npy").tolist() == [1, 1, 1]

    def test_it_is_not_imported_for_a_checkpoint_of_a_built_in_format(self, tmp_path: Path) -> None:
        save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
        shardckpt.consolidate(tmp_path / "model.safetensors", tmp_path / "out")
        assert not {"npy_reader", "npy_target"} & set(sys.modules)

    def test_an_unknown_target_lists_it(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match=f"{[*BUILT_IN][-1]}, npy"):
            shardckpt.consolidate(tmp_path / "absent", tmp_path / "out", to="onnx")

    def test_an_unknown_folder_counts_it_among_the_formats(self, tmp_path: Path) -> None:
        (tmp_path / "x.txt").write_text("x")
        with pytest.raises(UnknownFormatError, match=rf"one of {len(shardckpt.formats().formats)} formats"):
            shardckpt.inspect(tmp_path)


def test_a_format_may_be_asked_first(site: Path, tmp_path: Path) -> None:
    source = READER.replace("is_ours = ", "is_ours = 'model.safetensors' in source.files or ")
    install(site, "[shardckpt.formats.first]\nnpy = npy_first:FORMAT\n", npy_first=source)
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises((FormatError, KeyError)):
        shardckpt.inspect(tmp_path)


FAULTS = {
    "no module": ("npy = npy_absent:FORMAT", "", "cannot be imported.*ModuleNotFoundError"),
    "an error": ("npy = npy_error:FORMAT", "1 / 0", "cannot be imported.*ZeroDivisionError"),
    "an exit": ("npy = npy_exit:FORMAT", "raise SystemExit(3)", "cannot be imported.*SystemExit"),
    "another type": ("npy = npy_type:FORMAT", "FORMAT = 3", "must be a (Format|Target).*found int"),
    "another name": ("zarr = npy_name:FORMAT", None, "must have its entry point's name"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_reader_is_a_warning_that_names_its_distribution(fault: str, site: Path, folder: Path) -> None:
    point, source, message = FAULTS[fault]
    module = point.split("= ")[1].split(":")[0]
    modules = {} if source == "" else {module: READER if source is None else source}
    install(site, f"[shardckpt.formats]\n{point}\n", "acme-formats", **modules)
    with pytest.warns(RuntimeWarning, match=f"(?s)'{point.split()[0]}' of acme-formats 1.0.*{message}"):  # noqa: SIM117
        with pytest.raises(UnknownFormatError):
            shardckpt.inspect(folder)
    save_file({"w": np.ones(3, np.float32)}, folder / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shardckpt.inspect(folder / "model.safetensors").format == "safetensors"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_target_is_an_error_that_names_its_distribution(fault: str, site: Path, folder: Path) -> None:
    point, source, message = FAULTS[fault]
    name = point.split()[0]
    module = f"target_{point.split('= ')[1].split(':')[0]}"
    modules = {} if source == "" else {module: TARGET.replace("TARGET =", "FORMAT =") if source is None else source}
    install(site, f"[shardckpt.targets]\n{name} = {module}:FORMAT\n", "acme-targets", **modules)
    with pytest.raises(UsageError, match=f"(?s)'{name}' of acme-targets 1.0.*{message}"):
        shardckpt.consolidate(folder, folder.parent / "out", to=name)
    assert "native" in shardckpt.list_targets(for_ranks=True)


def test_a_reader_that_fails_is_named(site: Path, folder: Path) -> None:
    install(site, "[shardckpt.formats]\nnpy = npy_fails:FORMAT\n", npy_fails=READER.replace("text =", "1 / 0; text ="))
    with pytest.raises(FormatError, match=r"(?s)the plugin 'npy' of npy-files 1\.0 failed to open.*ZeroDivisionError"):
        shardckpt.inspect(folder)


def test_a_reader_that_fails_to_look_does_not_stop_the_others(site: Path, folder: Path) -> None:
    source = READER.replace("is_ours =", "1 / 0; is_ours =")
    install(site, "[shardckpt.formats.first]\nnpy = npy_blind:FORMAT\n", npy_blind=source)
    save_file({"w": np.ones(3, np.float32)}, folder / "model.safetensors")
    with pytest.warns(RuntimeWarning, match=r"'npy' of npy-files 1\.0 failed to look"):
        assert shardckpt.inspect(folder / "model.safetensors").format == "safetensors"


def test_a_target_that_fails_is_named(site: Path, tmp_path: Path) -> None:
    source = TARGET.replace("selection = conversion.selection", "1 / 0")
    install(site, "[shardckpt.targets]\nnpy = npy_no_plan:TARGET\n", npy_no_plan=source)
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match=r"(?s)the plugin 'npy' of npy-files 1\.0 failed to plan.*ZeroDivisionError"):
        shardckpt.consolidate(tmp_path / "model.safetensors", tmp_path / "out", to="npy")


def test_the_command_prints_a_warning_in_one_line(site: Path, folder: Path) -> None:
    install(site, "[shardckpt.formats]\nnpy = npy_reader:FORMAT\n", npy_reader="1 / 0")
    command = [sys.executable, "-m", "shardckpt_cli", "inspect", str(folder)]
    result = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = result.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == ["warning", "shardckpt"]
    assert "'npy' of npy-files 1.0 cannot be imported" in lines[0]


def test_names_that_clash_are_refused_with_both_named(site: Path, folder: Path) -> None:
    install(site, "[shardckpt.formats]\nnpy = one:FORMAT\ndcp = one:FORMAT\n", "acme-one", one=READER)
    install(site, "[shardckpt.formats.first]\nnpy = two:FORMAT\n", "acme-two", two=READER)
    with pytest.warns(RuntimeWarning) as caught, pytest.raises(UnknownFormatError):
        shardckpt.inspect(folder)
    messages = " ".join(str(each.message) for each in caught)
    assert re.search(r"'npy' is used by acme-\w+ 1.0 and by acme-\w+ 1.0: no plugin of this name is used", messages)
    assert "'dcp' is used by shardckpt and by acme-one 1.0" in messages


MUTANTS = {
    "another size": (
        "tensor.nbytes, 1, encode",
        "tensor.nbytes + 1, 1, encode",
        "the_files_are_those_that_were_planned",
    ),
    "a tensor less": ("stream.write_tensors([tensor], writer)", "0", "the_files_are_those_that_were_planned"),
    "other bytes": (
        "stream.write_tensors([tensor], writer)",
        "writer.write(bytes(tensor.nbytes))",
        "every_value_is_read_back",
    ),
    "any file": (r"\d+(-\w+)?\.npy", ".*", "only_its_own_checkpoint_is_replaced"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_suite_finds_a_broken_target(
    mutant: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, name = MUTANTS[mutant]
    assert old in TARGET
    for module in ("npy_reader", "npy_target"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    install(site, BOTH, npy_reader=READER, npy_target=TARGET.replace(old, new))
    suite = TargetSuite()
    suite.target = load("npy_target", "TARGET")
    source = write_source(tmp_path / "source", {"w": np.arange(6, dtype=np.float32).reshape(2, 3)})
    given = {"verb": "convert", "max_shard_size": "5GB"} if name == "every_value_is_read_back" else {}
    with pytest.raises((AssertionError, pytest.fail.Exception, UsageError)):
        getattr(suite, f"test_{name}")(source=source, out=tmp_path / "out", **given)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('f"{i}-{unique_suffix or 0}.npy"', '"0.npy"', r"must have different names; found 0\.npy twice"),
        ('f"{i}-{unique_suffix or 0}.npy"', '"tensors.json"', r"must have different names; found tensors\.json twice"),
        ("tensor.nbytes, 1, encode", "tensor.nbytes + 1, 1, encode", "as many bytes as it plans.*found 152 bytes"),
        ("stream.write_tensors([tensor], writer)", "writer.write(b'')", "as many bytes as it plans"),
        ("stream.write_tensors([tensor], writer)", "writer.abort()", "abort"),
    ],
)
def test_a_target_that_breaks_its_plan_publishes_nothing(
    old: str, new: str, message: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert old in TARGET
    monkeypatch.delitem(sys.modules, "npy_target", raising=False)
    install(site, "[shardckpt.targets]\nnpy = npy_target:TARGET\n", npy_target=TARGET.replace(old, new))
    source = write_source(tmp_path / "source", {"v": np.ones(6, np.float32), "w": np.ones(6, np.float32)})
    with pytest.raises((UsageError, AttributeError), match=message):
        shardckpt.convert(source, tmp_path / "out", to="npy")
    assert not (tmp_path / "out").exists()


def test_a_target_without_its_last_file_is_refused_where_that_file_publishes(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "npy_target", raising=False)
    source = TARGET.replace('"tensors.json", build_layout', '"index.json", build_layout')
    install(site, "[shardckpt.targets]\nnpy = npy_target:TARGET\n", npy_target=source)
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(
        UsageError, match=r"must plan its last file; found 0-\w+\.npy, tensors\.json; expected index\.json"
    ):
        shardckpt.convert(tmp_path / "model.safetensors", f"memory://{tmp_path.name}", to="npy")


def test_entry_points_that_cannot_be_read_leave_the_built_in_formats(site: Path, tmp_path: Path) -> None:
    install(site, "[shardckpt.formats]\nnpy = npy_reader:FORMAT\n", npy_reader=READER)
    install(site, "[console_scripts]\njunk\n", "junk")
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.warns(RuntimeWarning, match=r"no plugin of junk is used: its entry_points\.txt cannot be read"):
        shardckpt.consolidate(tmp_path / "model.safetensors", tmp_path / "out", to="dcp")
    assert shardckpt.inspect(tmp_path / "out").format == "dcp"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("dtype.name, (Piece", "dtype, (Piece", "the dtype of w must be a name such as float32"),
        ("dtype.name, (Piece", "'<f4', (Piece", "the dtype of w must be a name such as float32, got '<f4'"),
        ("(name,), shape,", "(name,), list(shape),", r"the shape of w must be a tuple of integers, got \[2, 3\]"),
        ("(name,), shape,", "(name,), (2.0, 3.0),", "the shape of w must be a tuple of integers"),
        ("return Reader(source.store, ", "return (", "must return a Reader, got Manifest"),
        ("    head = io", "    raise SystemExit(7)\n    head = io", "SystemExit: 7"),
    ],
)
def test_a_reader_that_returns_other_types_is_named(old: str, new: str, message: str, site: Path, folder: Path) -> None:
    assert old in READER
    install(site, "[shardckpt.formats]\nnpy = npy_other:FORMAT\n", npy_other=READER.replace(old, new))
    try:
        with pytest.raises(FormatError, match=rf"the plugin 'npy' of npy-files 1\.0 failed to open this; .*{message}"):
            shardckpt.inspect(folder)
    finally:
        sys.modules.pop("npy_other", None)


def test_a_target_that_fails_later_is_named(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "npy_target", raising=False)
    source = TARGET.replace("        names = {tensor", "        1 / 0\n        names = {tensor")
    install(site, "[shardckpt.targets]\nnpy = npy_target:TARGET\n", npy_target=source)
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(
        UsageError, match=r"the plugin 'npy' of npy-files 1\.0 failed to plan its files; .*ZeroDivisionError"
    ):
        shardckpt.convert(tmp_path / "model.safetensors", tmp_path / "out", to="npy")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("array", [np.asfortranarray(np.ones((2, 3))), np.ones(3, ">f4"), np.array(["a"])])
def test_the_example_refuses_arrays_whose_bytes_it_cannot_describe(array: np.ndarray, site: Path, folder: Path) -> None:
    install(site, BOTH, npy_reader=READER, npy_target=TARGET)
    np.save(folder / "0.npy", array)
    with pytest.raises(UnsupportedError, match=r"0\.npy"):
        shardckpt.inspect(folder)


READER_MUTANTS = {
    "everything is ours": ("is_ours = ", "is_ours = True or ", "it_recognizes_nothing_else"),
    "another offset": ("Span(start", "Span(start - 4", "values_are_read_bit_by_bit"),
    "half of a tensor": ("full_box(shape)", "full_box((1, *shape[1:]))", "every_element_is_in_the_files"),
    "untyped errors": (
        "except (ValueError, LookupError",
        "except (LookupError",
        "damaged_files_never_make_it_raise_an_untyped_error",
    ),
}


@pytest.mark.parametrize("mutant", READER_MUTANTS)
def test_the_suite_finds_a_broken_reader(mutant: str, site: Path, folder: Path, tmp_path: Path) -> None:
    old, new, name = READER_MUTANTS[mutant]
    assert old in READER
    install(site, "[shardckpt.formats]\n", npy_mutant=READER.replace(old, new))
    suite = TestExampleReader()
    suite.form = load("npy_mutant", "FORMAT")
    sys.modules.pop("npy_mutant")
    given = {"tmp_path": tmp_path} if name == "it_recognizes_nothing_else" else {"checkpoint": folder}
    if name.startswith("damaged"):
        given["content"] = b"{"  # type: ignore[assignment]
    with pytest.raises((AssertionError, ShardckptError, ValueError)):
        getattr(suite, f"test_{name}")(**given)


def test_without_plugins_nothing_looks_for_them(tmp_path: Path) -> None:
    """`importlib.metadata` takes 0.03 s to import and as long to look."""
    save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    code = (
        "import sys, shardckpt\n"
        f"shardckpt.inspect({str(tmp_path)!r})\n"
        "print('importlib.metadata' in sys.modules, 'pytest' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def _write_model(folder: Path) -> Path:
    save_file({"w": np.ones(3, np.float32)}, folder / "model.safetensors")
    return folder / "model.safetensors"


TARGET_FAULTS = {
    "encode": ("        writer.write(head.getvalue())", "        1 / 0", "write its files"),
    "encode with an exit": ("        writer.write(head.getvalue())", "        raise SystemExit(3)", "write its files"),
    "check": ("DTYPES.__contains__)", "DTYPES.__contains__, check=lambda options: 1 / 0)", "check the options"),
    "holds_dtype": ("DTYPES.__contains__)", "lambda dtype: 1 / 0)", "say what it can hold"),
    "holds_value": (
        "DTYPES.__contains__)",
        "DTYPES.__contains__, holds_value=lambda value: 1 / 0)",
        "say what it can hold",
    ),
    "find_kept": ("conversion.nbytes)", "conversion.nbytes, lambda target: 1 / 0)", "plan its files"),
}


@pytest.mark.parametrize("fault", TARGET_FAULTS)
@pytest.mark.parametrize("jobs", [1, 2])
def test_whatever_a_target_raises_names_it(
    fault: str, jobs: int, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, action = TARGET_FAULTS[fault]
    assert old in TARGET
    monkeypatch.delitem(sys.modules, "npy_target", raising=False)
    install(site, "[shardckpt.targets]\nnpy = npy_target:TARGET\n", npy_target=TARGET.replace(old, new))
    source = write_source(tmp_path / "source", {"v": np.ones(6, np.float32), "w": np.ones(6, np.float32)})
    with pytest.raises(
        UsageError, match=rf"/out: the plugin 'npy' of npy-files 1\.0 failed to {action}; found (Zero|SystemExit)"
    ):
        shardckpt.consolidate(
            source, tmp_path / "out", to="npy", overwrite=True, part="all" if "value" in fault else "model", jobs=jobs
        )
    assert not (tmp_path / "out").exists()


def test_ranks_that_a_target_fails_to_plan_name_it(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "npy_target", raising=False)
    source = TARGET.replace("DTYPES.__contains__)", "DTYPES.__contains__, plan_ranks=lambda reader, options: 1 / 0)")
    install(site, "[shardckpt.targets]\nnpy = npy_target:TARGET\n", npy_target=source)
    with pytest.raises(UsageError, match=r"the plugin 'npy' of npy-files 1\.0 failed to plan its files"):
        shardckpt.reshard(_write_model(tmp_path), tmp_path / "out", world_size=2, to="npy")


@pytest.mark.usefixtures("npy")
@pytest.mark.parametrize("jobs", [1, 2])
def test_what_the_caller_raises_while_a_target_writes_reaches_the_caller(jobs: int, tmp_path: Path) -> None:
    def stop(_: shardckpt.results.Progress) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough") as caught:
        shardckpt.convert(_write_model(tmp_path), tmp_path / "out", to="npy", on_progress=stop, jobs=jobs)
    assert not isinstance(caught.value, ShardckptError)


LATER = """

class NpyReader(Reader):
    def resolve(self, pieces):
        LAZY
        return [p._replace(layout=Span(128, 24)) for p in pieces]

    def load_object(self, entry):
        OBJECT
        return 3

    def checksums(self):
        SUMS
        return iter(())


def open_later(source):
    from dataclasses import replace
    from shardckpt.manifest import UNREAD, Lazy, ObjectEntry
    found = open_folder(source).manifest
    tensors = {
        path: entry._replace(pieces=tuple(p._replace(layout=Lazy(0, 152)) for p in entry.pieces))
        for path, entry in found.tensors.items()
    }
    objects = {("step",): ObjectEntry(("step",), UNREAD)}
    return NpyReader(source.store, replace(found, tensors=tensors, objects=objects))


FORMAT = Format("npy", "a folder of npy files", "a list", recognize, open_later)
"""


def _later(place: str = "", code: str = "") -> str:
    """Return the source of a reader that finds its tensors when they are asked for, with code in one of its methods."""
    source = LATER.replace(place, code) if place else LATER
    return re.sub("LAZY|OBJECT|SUMS", "", source)


@pytest.mark.parametrize(
    ("place", "new", "call", "action"),
    [
        ("LAZY", "1 / 0", shardckpt.load, "find its tensors"),
        ("OBJECT", "1 / 0", shardckpt.load, "read a value"),
        ("LAZY", "return pieces[:0]", shardckpt.load, "find its tensors"),
        ("LAZY", "return [None]", shardckpt.load, "find its tensors"),
    ],
)
def test_a_reader_that_fails_later_is_named(
    place: str, new: str, call: Any, action: str, site: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "npy_later", raising=False)
    source = _later(place, new)
    install(site, "[shardckpt.formats]\nnpy = npy_later:FORMAT\n", npy_later=READER + source)
    with pytest.raises(FormatError, match=rf"the plugin 'npy' of npy-files 1\.0 failed to {action}"):
        call(folder)


def test_a_reader_that_answers_later_is_read(site: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "npy_later", raising=False)
    source = READER + _later()
    install(site, "[shardckpt.formats]\nnpy = npy_later:FORMAT\n", npy_later=source)
    assert shardckpt.load(folder)["step"] == 3
    assert shardckpt.load(folder)["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert shardckpt.verify(folder).ok


MANIFESTS: dict[str, tuple[str | None, str, str]] = {
    "an unknown kind of checksum": (
        None,
        "iter([__import__('shardckpt.reader').reader.Checksum('0.npy', 0, 9, 'md5', 1)])",
        "0.npy has checksums with an unknown algorithm: md5",
    ),
    "checksums that fail": (None, "(1 / 0 for _ in 'a')", "failed to list its checksums"),
    "a name outside": (
        'Manifest("npy", files',
        'Manifest("npy", {**files, "../0.npy": 152}',
        "leaves the checkpoint's folder",
    ),
    "a size beyond the file": (
        'Manifest("npy", files',
        'Manifest("npy", dict.fromkeys(files, 4096)',
        "0.npy has 152 bytes, not 4096",
    ),
    "a file that is not there": (
        'Manifest("npy", files',
        'Manifest("npy", {**files, "deep/1.npy": 5}',
        "deep/1.npy is missing",
    ),
    "an unknown codec": ("span),))", 'Encoded("lz4", 128, 24, span)),))', "no decoder for 'lz4'"),
    "a fraction": (
        'Manifest("npy", files',
        'Manifest("npy", dict.fromkeys(files, 1.5)',
        "the size of 0.npy",
    ),
    "a negative size": ('Manifest("npy", files', 'Manifest("npy", dict.fromkeys(files, -5)', "the size of 0.npy"),
    "a resolved name outside": (None, '[p._replace(file="../x", layout=Span(128, 24)) for p in pieces]', r"\.\./x"),
    "a resolved unknown codec": (
        None,
        '[p._replace(layout=Encoded("lz4", 128, 24, Span(0, 24))) for p in pieces]',
        "no decoder for 'lz4'",
    ),
}


@pytest.mark.parametrize("fault", MANIFESTS)
def test_verify_does_not_believe_the_manifest_of_a_plugin(
    fault: str, site: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, message = MANIFESTS[fault]
    source = READER.replace("Manifest, Piece", "Encoded, Manifest, Piece")
    if old is None:
        place = "SUMS" if "checksum" in fault else "LAZY"
        source += _later(place, f"return {new}")
    else:
        assert old in source
        source = source.replace(old, new)
    monkeypatch.delitem(sys.modules, "npy_wrong", raising=False)
    install(site, "[shardckpt.formats]\nnpy = npy_wrong:FORMAT\n", npy_wrong=source)
    found = shardckpt.verify(folder)
    assert not found.ok
    assert re.search(message, found.problems[0].message)


HELPS = ["consolidate", "convert", "merge-adapter", "reshard"]


@pytest.mark.parametrize("verb", HELPS)
def test_the_help_lists_a_plugin_without_importing_it(verb: str, site: Path) -> None:
    install(
        site,
        "[shardckpt.targets]\nnpy = npy_target:TARGET\n",
        npy_target="import sys; print('imported', file=sys.stderr)",
    )
    code = (
        "import sys\n"
        "from shardckpt_cli.app import main\n"
        f"sys.argv = ['shardckpt', {verb!r}, '--help']\n"
        "try:\n    main()\nfinally:\n    print({'npy_target', 'torch'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(site), ENVIRONMENT["PYTHONPATH"]])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert re.search(r"native,([\w-]+,)*npy", re.sub(r"[│\s]+", "", done.stdout))
    assert done.stderr.strip() == "set()"


ONE_FILE = """
import io
import fsspec
import numpy as np
from shardckpt.offline.targets.base import Target
from shardckpt.offline.write.conversion import Layout, PlannedFiles
from shardckpt.offline.write.stream import OutputFile
from shardckpt.storage.replaceable import FileKind


def plan(conversion):
    [tensor] = conversion.selection.model
    head = b"ONE1"

    def encode(stream, writer):
        writer.write(head)
        stream.write_tensors([tensor], writer)
        return ()

    file = OutputFile(conversion.file_name, len(head) + tensor.nbytes, 1, encode)
    kind = FileKind("a one file", lambda head: head.startswith(b"ONE1"))
    return PlannedFiles(kind, "", lambda *_: Layout((file,), {}), conversion.nbytes)


TARGET = Target("one", "a one file", "`*.one`", "nobody", plan, lambda dtype: True, suffixes=(".one",))
"""


def test_a_target_without_a_name_is_found_by_the_suffix_of_a_plugin(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "one_target", raising=False)
    install(site, "[shardckpt.targets]\none = one_target:TARGET\n", "one-files", one_target=ONE_FILE)
    source = _write_model(tmp_path)
    shardckpt.consolidate(source, tmp_path / "step-1.5")
    assert (tmp_path / "step-1.5").is_dir()
    shardckpt.consolidate(source, tmp_path / "out.one")
    assert (tmp_path / "out.one").read_bytes() == b"ONE1" + np.ones(3, np.float32).tobytes()


def test_a_broken_plugin_does_not_stop_a_target_that_is_not_its_own(site: Path, tmp_path: Path) -> None:
    install(site, "[shardckpt.targets]\none = one_broken:TARGET\n", "one-files", one_broken="1 / 0")
    with pytest.warns(RuntimeWarning, match="'one' of one-files 1.0 cannot be imported"):
        shardckpt.consolidate(_write_model(tmp_path), tmp_path / "step-1.5")
    assert (tmp_path / "step-1.5").is_dir()


def _read_npy(folder: Path) -> dict[str, np.ndarray]:
    names = json.loads((folder / "tensors.json").read_text())["npy"]
    return {name: np.load(folder / file) for name, file in names.items()}


class TestExampleTargetAlone(TargetSuite):
    """The target without a reader of what it writes."""

    @pytest.fixture(autouse=True)
    def target_alone(self, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "npy_target", raising=False)
        install(site, "[shardckpt.targets]\nnpy = npy_target:TARGET\n", npy_target=TARGET)
        self.target = load("npy_target", "TARGET")

    def read_model(self, place: str | Path) -> dict[str, np.ndarray]:
        if str(place).startswith("memory://"):
            filesystem = fsspec.filesystem("memory")
            names = json.loads(filesystem.cat(f"{place}/tensors.json"))["npy"]
            return {name: np.load(io.BytesIO(filesystem.cat(f"{place}/{file}"))) for name, file in names.items()}
        return _read_npy(Path(place))


@pytest.mark.parametrize("mutant", ["other bytes", "a tensor less"])
def test_the_suite_finds_a_broken_target_without_a_reader(
    mutant: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, _ = MUTANTS[mutant]
    monkeypatch.delitem(sys.modules, "npy_target", raising=False)
    install(site, "[shardckpt.targets]\nnpy = npy_target:TARGET\n", npy_target=TARGET.replace(old, new))
    suite = TestExampleTargetAlone()
    suite.target = load("npy_target", "TARGET")
    source = write_source(tmp_path / "source", {"w": np.arange(6, dtype=np.float32).reshape(2, 3)})
    with pytest.raises((AssertionError, UsageError)):
        suite.test_every_value_is_read_back("convert", "5GB", source, tmp_path / "out")


@pytest.fixture
def downloaded(tmp_path: Path) -> Path:
    """A checkpoint beside a module and an entry point of it, which nobody installed."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    save_file({"w": np.ones(3, np.float32)}, folder / "model.safetensors")
    points = "[shardckpt.formats.first]\nnotes = notes:FORMAT\n[fsspec.specs]\nmemory = notes:FORMAT\n"
    install(folder, points, "notes", notes="print('executed')", safetensors="print('executed')")
    return folder


def run_there(folder: Path, *command: str, path: str = "") -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env = kept | ({"PYTHONPATH": path} if path else {})
    done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


INSPECT = "import shardckpt; print(shardckpt.inspect({!r}).format); print(*shardckpt.list_targets())"


def test_nothing_in_the_working_directory_runs_in_a_program(downloaded: Path) -> None:
    (downloaded / "safetensors.py").unlink()  # Python itself looks there first for a module that a program imports
    for path in ("", ".", os.pathsep, str(downloaded)):
        assert "executed" not in run_there(downloaded, "-c", INSPECT.format("."), path=path)


def test_the_command_as_a_module_imports_nothing_from_the_working_directory(downloaded: Path) -> None:
    assert "executed" not in run_there(downloaded, "-m", "shardckpt_cli", "inspect", ".")
    run_there(downloaded, "-m", "shardckpt_cli", "consolidate", ".", "memory://out")


def test_a_plugin_beside_the_script_or_in_an_earlier_working_directory_is_not_used(downloaded: Path) -> None:
    (downloaded / "safetensors.py").unlink()
    (downloaded / "script.py").write_text(INSPECT.format(str(downloaded)))
    assert "executed" not in run_there(downloaded.parent, str(downloaded / "script.py"))
    code = "import os; os.chdir('..'); " + INSPECT.format(str(downloaded))
    assert "executed" not in run_there(downloaded, "-c", f"import sys; sys.path[0] = {str(downloaded)!r}; {code}")


def test_a_plugin_in_a_folder_that_site_packages_name_is_used(
    site: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a legacy editable install writes it; files that Python cannot read are ignored, as Python does."""
    monkeypatch.delenv("PYTHONPATH")
    install(site, "[shardckpt.formats]\nnpy = npy_reader:FORMAT\n", npy_reader=READER)
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "a-removed.pth").symlink_to("missing")
    (packages / "b-folder.pth").mkdir()
    monkeypatch.setattr("site.getsitepackages", lambda: [str(packages), str(tmp_path / "missing")])
    monkeypatch.setattr(plugins, "_find_site_folders", plugins._find_site_folders.__wrapped__)
    with pytest.raises(UnknownFormatError):
        shardckpt.inspect(folder)
    (packages / "easy-install.pth").write_text(f"# folders\nimport os\n{site}\n")
    monkeypatch.syspath_prepend(str(packages))
    assert shardckpt.inspect(folder).format == "npy"
