"""Conformance suite for targets: atomic writes, reports of lossy values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from numpy.typing import NDArray

import shardckpt
from shardckpt.dtypes import SAFETENSORS_NAMES
from shardckpt.encodings.element_values import numpy_dtype
from shardckpt.encodings.safetensors import HeaderTensor, encode_header, file_order
from shardckpt.errors import TargetExistsError, UsageError
from shardckpt.offline.compare.canonical import read_canonical
from shardckpt.offline.targets.base import Target
from shardckpt.offline.targets.target_registry import choose_target
from shardckpt.plan.layout.coverage import locate
from shardckpt.readers.chunk_reader import read_blocks
from shardckpt.readers.registry import open_checkpoint

SHAPES: Mapping[str, tuple[int, ...]] = {
    "scalar": (),
    "empty": (0, 3),
    "row": (5,),
    "layers.0.weight": (7, 3),
    "layers.0.bias": (3,),
    "large": (700, 600),
}


class TargetSuite:
    """Tests for one `Target`. A subclass sets `target`, which must be installed.

    An installed format reads the written checkpoint. If there is none, the subclass overrides `read_model`.

    Attributes:
        target: The target under test.
        options: Options for the conversion, such as `{"part": "all"}`.
        is_deterministic: Whether two conversions write the same bytes.
        suffix: Suffix for written checkpoints, for a target that writes only one file.
        config: Content for `config.json` next to the source; empty for none.
        shapes: Shapes of the model's tensors, for a target that writes only known models.
        dtype_shapes: Shapes of a smaller model; its first tensor gets each dtype, the others stay float32.
    """

    target: Target
    options: Mapping[str, Any] = {}
    is_deterministic = True
    suffix = ""
    config: Mapping[str, Any] = {}
    shapes = SHAPES
    dtype_shapes: Mapping[str, tuple[int, ...]] = {"x": (4,), "y": (2,)}

    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        """Return a checkpoint of a model and its optimizer."""
        rng = np.random.default_rng(7)
        model = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in self.shapes.items()}
        return self.write_source(tmp_path / "source", model)

    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        """Return the path for a checkpoint to write."""
        return tmp_path / f"out{self.suffix}"

    def write_source(
        self, folder: Path, model: Mapping[str, np.ndarray[Any, Any]], dtypes: Mapping[str, str] | None = None
    ) -> Path:
        """Write a checkpoint to convert, next to the suite's `config.json`."""
        write_source(folder, model, dtypes)
        if self.config:
            (folder / "config.json").write_text(json.dumps(self.config))
        return folder

    def convert(self, source: Path, place: str | Path, **options: Any) -> shardckpt.results.Report:
        """Convert a checkpoint to the target under test."""
        return shardckpt.consolidate(source, place, to=self.target.name, **{**self.options, **options})

    def read_model(self, place: str | Path) -> Mapping[str, NDArray[Any]] | None:  # noqa: ARG002
        """Return a written model's tensors by name.

        Returns None if an installed format reads them.

        Args:
            place: The written checkpoint's path or URL.
        """
        return None

    def compare_model(self, source: Path, place: str | Path) -> dict[str, str]:
        """Compare with a written model: return name to `dtype`, `shape` or another difference."""
        found = self.read_model(place)
        if found is None:
            comparison = shardckpt.diff(source, place, part="model")
            assert not comparison.not_compared
            return {each.name: each.kind for each in comparison.differences}
        expected = read_tensors(source)
        kinds = {name: _compare(expected[name], found[name]) for name in expected.keys() & found.keys()}
        kinds |= dict.fromkeys(expected.keys() ^ found.keys(), "only in one")
        return {name: kind for name, kind in kinds.items() if kind}

    def test_it_is_installed_and_describes_itself(self) -> None:
        assert self.target.name in shardckpt.list_targets()
        assert choose_target(self.target.name, f"out{self.suffix}").title == self.target.title
        assert self.target.title and self.target.files and self.target.read_by

    def test_the_files_are_those_that_were_planned(self, source: Path, out: Path) -> None:
        planned = self.convert(source, out, dry_run=True)
        assert not out.exists()
        report = self.convert(source, out)
        if self.is_deterministic:
            assert report.files == planned.files
        written = read_files(out)
        assert {file.name: file.nbytes for file in report.files} | {
            name: len(written[name]) for name in report.carried
        } == {name: len(content) for name, content in written.items()}
        assert sum(file.nbytes for file in report.files) >= report.nbytes

    @pytest.mark.parametrize("max_shard_size", [64, "5GB"])
    @pytest.mark.parametrize("verb", ["consolidate", "convert"])
    def test_every_value_is_read_back(self, verb: str, max_shard_size: int | str, source: Path, out: Path) -> None:
        convert = getattr(shardckpt, verb)
        convert(source, out, to=self.target.name, **{**self.options, "max_shard_size": max_shard_size})
        assert self.compare_model(source, out) == {}
        if self.read_model(out) is None:
            assert shardckpt.diff(source, out, part="model").compared == len(self.shapes)
            assert shardckpt.verify(out).ok

    def test_a_cast_is_written_in_the_new_dtype(self, source: Path, out: Path) -> None:
        if not self.target.holds_dtype("float64"):
            pytest.skip("the target holds no float64")
        self.convert(source, out, dtype="float64")
        assert set(self.compare_model(source, out).values()) <= {"dtype"}

    def test_files_side_by_side_are_the_same_as_one_after_the_other(self, source: Path, tmp_path: Path) -> None:
        places = [tmp_path / name / f"out{self.suffix}" for name in ("one", "many")]
        for place, jobs in zip(places, (1, 3), strict=True):
            place.parent.mkdir()
            self.convert(source, place, jobs=jobs, max_shard_size=64)
        one, many = places
        if self.is_deterministic:
            assert read_files(one) == read_files(many)
        assert self.compare_model(source, many) == {}
        if self.read_model(one) is None:
            assert shardckpt.diff(one, many).same

    @pytest.mark.parametrize("dtype", sorted(SAFETENSORS_NAMES))
    def test_a_dtype_is_kept_or_refused(self, dtype: str, out: Path, tmp_path: Path) -> None:
        model = {name: np.ones(shape, np.float32) for name, shape in self.dtype_shapes.items()}
        first = next(iter(model))
        try:
            model[first] = model[first].astype(numpy_dtype(dtype))
        except TypeError:
            pytest.skip("numpy has no such type")
        source = self.write_source(tmp_path / "source", model, {first: dtype})
        if self.target.holds_dtype(dtype):
            self.convert(source, out)
            assert self.compare_model(source, out) == {}
            return
        with pytest.raises(UsageError, match=f"{re.escape(first)}, of type"):
            self.convert(source, out)
        assert not out.exists()

    def test_only_its_own_checkpoint_is_replaced(self, source: Path, out: Path) -> None:
        self.convert(source, out)
        with pytest.raises(TargetExistsError):
            self.convert(source, out)
        self.convert(source, out, overwrite=True)
        (out if out.is_file() else out / "notes.txt").write_text("mine")
        before = read_files(out)
        with pytest.raises(TargetExistsError, match="another file" if out.is_file() else "notes"):
            self.convert(source, out, overwrite=True)
        assert read_files(out) == before

    def test_a_conversion_that_is_stopped_leaves_nothing(self, source: Path, out: Path) -> None:
        class Stop(Exception):  # noqa: N818
            """Stops the conversion."""

        def stop(progress: shardckpt.results.Progress) -> None:
            if progress.done_bytes > progress.total_bytes // 2:
                raise Stop

        with pytest.raises(Stop):
            self.convert(source, out, on_progress=stop)
        assert [file.name for file in out.parent.iterdir()] == [source.name]

    def test_progress_ends_at_the_total(self, source: Path, out: Path) -> None:
        steps: list[shardckpt.results.Progress] = []
        self.convert(source, out, on_progress=steps.append)
        assert steps[-1].done_bytes == steps[-1].total_bytes

    def test_a_store_without_rename_gets_the_same_checkpoint(self, source: Path) -> None:
        folder = f"memory://shardckpt-{self.target.name}"
        place = f"{folder}/out{self.suffix}"
        try:
            for _ in range(2):
                self.convert(source, place, overwrite=True)
                assert self.compare_model(source, place) == {}
        finally:
            fsspec.filesystem("memory").rm(folder, recursive=True)

    def test_any_number_of_ranks_holds_the_same(self, source: Path, out: Path, tmp_path: Path) -> None:
        if self.target.plan_ranks is None:
            with pytest.raises(UsageError, match="reshard"):
                shardckpt.reshard(source, out, world_size=2, to=self.target.name)
            return
        for world_size in (1, 3):
            place = tmp_path / str(world_size)
            steps: list[shardckpt.results.Progress] = []
            report = shardckpt.reshard(
                source, place, world_size=world_size, to=self.target.name, allow_loss=True, on_progress=steps.append
            )
            assert len(report.files) >= world_size
            assert steps[-1].done_bytes == steps[-1].total_bytes
            assert self.compare_model(source, place) == {}
            if self.read_model(place) is None:
                assert shardckpt.diff(source, place).same


def read_tensors(checkpoint: Path) -> dict[str, NDArray[Any]]:
    """Return the model's tensors in a checkpoint, by name."""
    reader = open_checkpoint(str(checkpoint))
    tensors = read_canonical(reader, "model").tensors
    located = locate(reader, reader.manifest, list(tensors.values()))
    return {
        name: np.frombuffer(b"".join(read_blocks(reader, entry)), numpy_dtype(entry.stored)).reshape(entry.shape)
        for name, entry in zip(tensors, located, strict=True)
    }


def _compare(expected: NDArray[Any], found: NDArray[Any]) -> str:
    """Return the difference; empty for equal bits."""
    if expected.shape != found.shape:
        return "shape"
    if expected.dtype != found.dtype:
        return "dtype"
    return "" if expected.tobytes() == found.tobytes() else "value"


def write_source(
    folder: Path, model: Mapping[str, np.ndarray[Any, Any]], dtypes: Mapping[str, str] | None = None
) -> Path:
    """Write a model and an Adam-like optimizer as safetensors files."""
    dtypes = dtypes or {}
    trained = [name for name, value in model.items() if value.dtype == np.float32]
    state = {f"{name}/exp_avg": model[name] * np.float32(2) for name in trained}
    state |= {f"{name}/step": np.array(3, np.float32) for name in trained}
    folder.mkdir()
    for stem, tensors in (("model", model), ("optimizer", state)):
        order = file_order(HeaderTensor(n, dtypes.get(n, str(t.dtype)), t.shape) for n, t in tensors.items())
        data = b"".join(tensors[each.name].tobytes() for each in order)
        (folder / f"{stem}.safetensors").write_bytes(encode_header(order, {"format": "pt"}) + data)
    groups = {"param_groups": [{"lr": 0.1, "params": trained}], "non_tensor_state": {}}
    (folder / "param_groups.json").write_text(json.dumps(groups))
    index = {
        "metadata": {"optimizer_files": ["optimizer.safetensors"], "param_groups": "param_groups.json"},
        "weight_map": dict.fromkeys(model, "model.safetensors"),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    """Return each file's content by path, or one file's content."""
    if folder.is_file():
        return {folder.name: folder.read_bytes()}
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
