"""Folders of Meta's torch_checkpointing: the metadata says which files there are, and what they hold together."""

from __future__ import annotations

import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shardckpt.errors import CheckpointError, FormatError, IncompleteError, UnsafeError, UnsupportedError
from shardckpt.plan.layout.coverage import require_complete
from shardckpt.readers.frameworks import torch_checkpointing
from shardckpt.readers.registry import detect, open_checkpoint, open_source
from tests.kit.writers.materialise import assert_same
from tests.kit.writers.samples import MODEL, OPTIM, SAMPLES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return SAMPLES["torch-checkpointing"]["ranks"](tmp_path / "src")


def edit(folder: Path, change: Callable[[Any], object]) -> None:
    said = pickle.loads((folder / "metadata.pkl").read_bytes())
    change(said)
    (folder / "metadata.pkl").write_bytes(pickle.dumps(said, protocol=4))


def test_items_are_whole_and_keep_their_names(folder: Path) -> None:
    torch.save({"step": 4}, folder / "loop_1.pt")
    source = open_source(str(folder))
    assert detect(source) is torch_checkpointing.FORMAT
    reader = torch_checkpointing.open_source(source)
    require_complete(reader.manifest, reader.manifest.tensors.values(), "here")
    for name, value in MODEL.items():
        assert_same(reader, ("model", name), value)
    assert_same(reader, ("optim", "state", "a.w", "exp_avg"), OPTIM["state"]["a.w"]["exp_avg"])
    assert reader.manifest.objects["loop", "step"].value == 3
    assert any("loop_1.pt and 0 more are other ranks' own" in text for text in reader.manifest.warnings)


def test_files_may_have_names_of_their_own(folder: Path) -> None:
    (folder / "model_1.pt").rename(folder / "weights-b.pt")
    edit(folder, lambda s: s["metadata"]["model"]["rank_to_layout_info"].update({1: {"file_path": "weights-b.pt"}}))
    assert_same(open_checkpoint(str(folder)), ("model", "a.w"), MODEL["a.w"])


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "model_1.pt").unlink()
    with pytest.raises(IncompleteError, match=r"rank 1 of 'model' is not there.*expected model_1\.pt"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda s: s.update(world_size=1 << 40), FormatError, "names no ranks"),
        (lambda s: s.update(world_size=3), IncompleteError, "rank 2 of 'model'"),
        (lambda s: s["metadata"].update(model=3), FormatError, "must be a dict"),
        (
            lambda s: s["metadata"]["model"]["rank_to_layout_info"].update({1: {"file_path": "a/../b.pt"}}),
            UnsupportedError,
            "is not in torch.save files",
        ),
        (
            lambda s: s["metadata"]["model"]["rank_to_layout_info"].update({1: {"file_path": "model_0.pt"}}),
            FormatError,
            "two ranks one file",
        ),
        (
            lambda s: s["metadata"]["model"]["nested_path_to_metadata"].update({'["gone"]': []}),
            FormatError,
            "model.gone' is not as in its metadata; found nothing",
        ),
        (
            lambda s: s["metadata"]["model"]["nested_path_to_metadata"].update({"[{}]": []}),
            FormatError,
            "must be a list with texts and integers; found [{}]",
        ),
        (
            lambda s: s["metadata"]["model"]["nested_path_to_metadata"]['["a.w"]'][0]["sharding_metadata"][
                "data"
            ].update(global_shape=[8, 4]),
            FormatError,
            "model.a.w' is not as in its metadata",
        ),
    ],
    ids=["world", "fewer", "item", "outside", "twice", "gone", "path", "shape"],
)
def test_metadata_that_lies_is_refused(
    change: Callable[[Any], object], kind: type[CheckpointError], message: str, folder: Path
) -> None:
    edit(folder, change)
    with pytest.raises(kind) as caught:
        open_checkpoint(str(folder))
    assert message in str(caught.value)


def test_metadata_is_never_run(folder: Path) -> None:
    edit(folder, lambda s: s.update(extra=subprocess.run))
    with pytest.raises(UnsafeError, match=r"subprocess\.run"):
        open_checkpoint(str(folder))
