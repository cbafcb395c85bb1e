"""What `inspect` shows, and what it does not read to show it."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import shardckpt
from shardckpt.errors import SourceNotFoundError, UnknownFormatError, UnsafeError
from shardckpt.storage.local import LocalStore
from shardckpt.storage.store import Read
from tests.kit.runs.cases import NAMES, read_case


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Every range of every file that is read."""
    seen: list[tuple[str, int, int]] = []
    real = LocalStore.read

    def counting(self: LocalStore, reads: Sequence[Read]) -> None:
        seen.extend((f"{self.url}/{r.name}", r.offset, len(r.buffer)) for r in reads)
        real(self, reads)

    monkeypatch.setattr(LocalStore, "read", counting)
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_shown_with_its_type_and_shape(name: str, fixtures: Path, tmp_path: Path) -> None:
    case = read_case(fixtures, name, tmp_path)
    found = shardckpt.inspect(str(case.source))
    shown = {t.name: t for t in found.tensors}
    kinds = sorted((str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in case.model.values())
    if not name.startswith("hf_pretrained"):
        stored = sorted((t.dtype, t.shape) for t in shown.values())
        assert not [kind for kind in kinds if kind not in stored]
    ids_by_order = [warning for warning in found.warnings if "--param-names" in warning]
    assert (list(found.warnings), bool(ids_by_order)) == (ids_by_order, name == "fsdp1_local_gpt2_w2")
    json.dumps(found.parts)


@pytest.mark.parametrize("name", NAMES)
def test_only_headers_and_metadata_are_read(
    name: str, fixtures: Path, tmp_path: Path, ranges: list[tuple[str, int, int]]
) -> None:
    source = read_case(fixtures, name, tmp_path).source
    shardckpt.inspect(str(source))
    assert len(ranges) == len(set(ranges)), "nothing is read twice"
    assert not [r for r in ranges if r[0].endswith(".distcp")], "slices are found by the metadata alone"


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_data_is_not_read_however_much_there_is(form: str, tmp_path: Path, ranges: list[tuple[str, int, int]]) -> None:
    tensors = {f"layers.{i}.w": torch.ones(1 << 18) for i in range(8)}
    if form == "torch":
        torch.save(tensors, tmp_path / "a.pt")
    else:
        save_file(tensors, tmp_path / "a.safetensors")
    assert shardckpt.inspect(str(tmp_path)).nbytes == 8 << 20
    assert sum(n for _, _, n in ranges) < 150_000


def test_parts_ties_and_values_are_reported(fixtures: Path) -> None:
    found = shardckpt.inspect(str(fixtures / "torch_save_zip_nasty" / "ckpt" / "checkpoint.pt"))
    assert found.parts["model"] == ("model",)
    assert found.parts["optimizer"] == ("optimizer",)
    assert set(found.parts["other"]) == {"views", "epoch", "args"}
    assert found.ties["model.head.weight"] == "model.embed.weight"
    assert found.nbytes < sum(t.nbytes for t in found.tensors), "a tied tensor counts once"
    assert found.objects["epoch"].isdigit()


def test_a_long_or_odd_value_is_cut_to_a_line(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "note": "a\nb" * 1000}, tmp_path / "a.pt")
    [shown] = [v for k, v in shardckpt.inspect(str(tmp_path / "a.pt")).objects.items() if k == "note"]
    assert shown.isprintable()
    assert len(shown) < 100


def test_missing_and_unknown_sources_have_different_errors(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError):
        shardckpt.inspect(str(tmp_path / "none"))
    with pytest.raises(UnknownFormatError, match=r": this folder is empty$"):
        shardckpt.inspect(str(tmp_path))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UnknownFormatError, match=r"found notes\.txt.*`shardckpt formats`"):
        shardckpt.inspect(str(tmp_path))


@pytest.mark.parametrize(
    ("mark", "message"),
    [("manifest.ocdbt", "Orbax"), ("latest_checkpointed_iteration.txt", "Megatron"), ("zero_to_fp32.py", "DeepSpeed")],
)
def test_folders_of_others_are_named(tmp_path: Path, mark: str, message: str) -> None:
    (tmp_path / mark).write_text("x")
    with pytest.raises(UnknownFormatError, match=message):
        shardckpt.inspect(str(tmp_path))


def test_objects_that_would_run_code_are_refused(tmp_path: Path) -> None:
    class Bad:
        def __reduce__(self) -> tuple[object, ...]:
            return eval, ("1",)

    torch.save({"w": torch.ones(1), "bad": Bad()}, tmp_path / "a.pt")
    with pytest.raises(UnsafeError, match="eval"):
        shardckpt.inspect(str(tmp_path / "a.pt"))


def test_looking_at_local_safetensors_imports_neither_numpy_nor_fsspec(fixtures: Path) -> None:
    folder = str(fixtures / "hf_pretrained_llama" / "ckpt")
    code = (
        f"import sys, shardckpt; shardckpt.inspect({folder!r});"
        "print([m for m in ('numpy', 'torch', 'fsspec') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


def test_looking_at_many_tensors_runs_no_garbage_collection(tmp_path: Path) -> None:
    save_file({f"w{number}": torch.zeros(1) for number in range(2000)}, tmp_path / "model.safetensors")
    runs: list[str] = []
    threshold = gc.get_threshold()

    def count(phase: str, _info: dict[str, int]) -> None:
        runs.append(phase)

    gc.set_threshold(100, 10, 10)
    gc.collect()
    gc.callbacks.append(count)
    try:
        found = shardckpt.inspect(str(tmp_path))
        ran = len(runs)
    finally:
        gc.callbacks.remove(count)
        gc.set_threshold(*threshold)
    assert len(found.tensors) == 2000
    assert ran < 10, "of more than 100 without a pause"


def test_flat_parameters_are_shown_as_their_members(fixtures: Path, tmp_path: Path) -> None:
    """FSDP1's LOCAL states beside the note that tells their layout, and without it with shapes from elsewhere."""
    source = fixtures / "fsdp1_local_gpt2_w2"
    for file in (source / "ckpt").glob("*.pt"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    flat = {tensor.name for tensor in shardckpt.inspect(tmp_path).tensors}
    assert "model.transformer.h.0._flat_param" in flat
    note = json.loads((source / "ckpt" / "flat_param_metadata_rank0.json").read_text())
    model = {
        ".".join(filter(None, (handle["module"], name))): torch.zeros(shape)
        for handle in note["handles"]
        for name, shape in zip(handle["fqns"], handle["shapes"], strict=True)
    }
    torch.save(model, tmp_path.parent / "shapes.pt")
    shown = shardckpt.inspect(tmp_path, shapes_from=tmp_path.parent / "shapes.pt")
    told = shardckpt.inspect(source / "ckpt")
    assert {t.name: t.shape for t in shown.tensors} == {
        t.name: t.shape for t in told.tensors if "lm_head" not in t.name
    }
