"""Rank files that torch wrote are one checkpoint: every element is found, whatever wrapper, mesh and ranks."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardckpt
from shardckpt.errors import FormatError, IncompleteError, OverlapError, UnsafeError, UnsupportedError, UsageError
from shardckpt.manifest import TensorEntry
from shardckpt.readers import chunk_reader
from shardckpt.readers.chunk_reader import read_blocks
from shardckpt.readers.ranks.rank_files import parse_rank_names
from shardckpt.readers.registry import open_checkpoint
from shardckpt.readers.torchsave.pickle_series import PickleSeries
from tests.kit.ranks.harness import run
from tests.kit.writers.materialise import assert_same
from tests.kit.writers.rank_writers import (
    FOUR,
    SLOTS,
    TWO,
    Ignoring,
    built,
    four_ranks,
    ignoring_ranks,
    truth,
    two_ranks,
)
from tests.kit.writers.share_writers import as_rank, sharded


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of everything that two and four ranks saved, and of the model's shapes."""
    folder = tmp_path_factory.mktemp("ranks")
    run(2, two_ranks, folder, timeout=120)
    run(4, four_ranks, folder, timeout=120)
    torch.save(built().to("meta").state_dict(), folder / "shapes.pt")
    save_file({n: v for n, v in truth().items() if "/" not in n and n != "head.weight"}, folder / "sorted.safetensors")
    return folder


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copy a folder, to damage it."""
    return lambda name: Path(shutil.copytree(written / name, tmp_path / name))


def consolidated(
    source: Path, target: Path, **options: Any
) -> tuple[dict[str, torch.Tensor], shardckpt.results.Report]:
    report = shardckpt.consolidate(str(source), str(target), part="all", **options)
    found: dict[str, torch.Tensor] = {}
    for file in target.glob("*.safetensors"):
        found |= load_file(file)
    return {**found, **{name: found[kept] for name, kept in report.ties.items()}}, report


def skip_if_meshes_lack_ranks(file: Path) -> None:
    """Skip the test if the installed torch pickles device meshes that do not say whose they are."""
    if b"DeviceMesh" in file.read_bytes() and b"X\x05\x00\x00\x00_rank" not in file.read_bytes():
        pytest.skip("meshes that this torch pickles have no rank")


def differing(found: dict[str, torch.Tensor]) -> list[str]:
    expected = truth()
    wrong = sorted(expected.keys() ^ found.keys())
    return wrong + [n for n in expected.keys() & found.keys() if not torch.equal(found[n], expected[n])]


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_model_and_optimizer_come_out_bit_for_bit(name: str, written: Path, tmp_path: Path) -> None:
    found, report = consolidated(written / name, tmp_path / "out", shapes_from=str(written / "shapes.pt"))
    assert differing(found) == []
    is_told = "sharded" not in name  # torch cuts a shard out for each name, and nothing says that they are one
    assert report.ties == ({"head.weight": "embed.weight"} if is_told else {})
    groups = json.loads((tmp_path / "out" / "param_groups.json").read_text())["param_groups"]
    names = [name for group in groups for name in group["params"]]
    assert sorted(names) == sorted(name for name, _ in built().named_parameters())


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_rank_files_that_are_read_as_a_series_give_what_each_gives_alone(
    name: str, written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = open_checkpoint(str(written / name)).manifest
    monkeypatch.setattr(PickleSeries, "_make_skeleton", lambda *_: None)
    alone = open_checkpoint(str(written / name)).manifest
    assert together.tensors == alone.tensors and together.aliases == alone.aliases and together.files == alone.files
    assert repr(together.objects) == repr(alone.objects) and together.warnings == alone.warnings


@pytest.mark.parametrize("name", ["local-orig", "local-orig-bf16", "local-orig-4"])
def test_fragments_have_names_and_an_order_of_their_own(name: str, written: Path, tmp_path: Path) -> None:
    """With `use_orig_params=True` shapes are all that is lacking, and files without order tell those too."""
    found, _ = consolidated(written / name, tmp_path / "out", shapes_from=str(written / "sorted.safetensors"))
    assert differing(found) == []


def test_a_flat_parameter_needs_the_order_of_the_model(written: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"in which order parameters are in 'first._flat_param'"):
        consolidated(written / "local-flat", tmp_path / "out", shapes_from=str(written / "sorted.safetensors"))
    assert not (tmp_path / "out").exists()


def _to_file(source: Path, target: Path) -> None:
    shardckpt.consolidate(source, target / "shapes.pt")


def _to_folder(source: Path, target: Path) -> None:
    shardckpt.consolidate(source, target, to="torch")


def _to_step(source: Path, target: Path) -> None:
    shardckpt.consolidate(source, target, to="native")


def _to_ranks(source: Path, target: Path) -> None:
    shardckpt.reshard(source, target, world_size=1, to="torch")


@pytest.mark.parametrize("convert", [_to_file, _to_folder, _to_step, _to_ranks])
def test_a_file_that_was_made_of_sorted_names_has_no_order_of_the_model(
    convert: Callable[[Path, Path], None], written: Path, tmp_path: Path
) -> None:
    """Other orders of the members fit a flat parameter too, and would be taken apart wrongly."""
    convert(written / "sorted.safetensors", tmp_path / "shapes")
    with pytest.raises(UsageError, match=r"in which order parameters are in 'first._flat_param'"):
        consolidated(written / "local-flat", tmp_path / "out", shapes_from=str(tmp_path / "shapes"))


def test_a_file_that_is_sorted_by_types_and_names_has_no_order_of_the_model(written: Path, tmp_path: Path) -> None:
    state = load_file(written / "sorted.safetensors")
    name = next(name for name in state if name.endswith("bias"))
    save_file({**state, name: state[name].double()}, tmp_path / "shapes.safetensors")
    with pytest.raises(UsageError, match=r"in which order parameters are in"):
        consolidated(written / "local-flat", tmp_path / "out", shapes_from=str(tmp_path / "shapes.safetensors"))


def test_a_file_that_was_made_of_a_state_dict_keeps_its_order(written: Path, tmp_path: Path) -> None:
    torch.save(built().state_dict(), tmp_path / "state.pt")
    shardckpt.consolidate(tmp_path / "state.pt", tmp_path / "shapes.pt")
    found, _ = consolidated(written / "local-flat", tmp_path / "out", shapes_from=str(tmp_path / "shapes.pt"))
    assert differing(found) == []


@pytest.mark.parametrize("name", ["local-flat", "local-orig"])
def test_flat_parameters_without_shapes_are_shown_and_refused(name: str, written: Path, tmp_path: Path) -> None:
    shown = {tensor.name: tensor.shape for tensor in shardckpt.inspect(str(written / name)).tensors}
    assert "model.first._flat_param" in shown
    with pytest.raises(UsageError, match="Give --shapes-from SRC"):
        consolidated(written / name, tmp_path / "out")
    reader = open_checkpoint(str(written / name))
    with pytest.raises(UnsupportedError, match="Give --shapes-from SRC"):
        reader.resolve(reader.manifest.tensors["model", "first._flat_param"].pieces)
    assert not (tmp_path / "out").exists()


def other_width(state: dict[str, torch.Tensor]) -> None:
    state["first.up.weight"] = state["first.up.weight"][:, :4]


def one_lacks(state: dict[str, torch.Tensor]) -> None:
    del state["second.up.bias"]


def one_more(state: dict[str, torch.Tensor]) -> None:
    state["first.extra"] = torch.zeros(7)


@pytest.mark.parametrize("name", ["local-flat", "local-orig"])
@pytest.mark.parametrize(
    ("change", "unit"), [(other_width, "first"), (one_lacks, "second"), (one_more, "first")], ids=lambda v: str(v)[:12]
)
def test_shapes_of_another_model_are_refused_with_the_unit(
    name: str, change: Callable[[dict[str, torch.Tensor]], None], unit: str, written: Path, tmp_path: Path
) -> None:
    state = built().state_dict()
    change(state)
    torch.save(state, tmp_path / "shapes.pt")
    with pytest.raises(UsageError, match=rf"'{unit}._flat_param'.* found \d+ elements .* expected \d+ elements"):
        consolidated(written / name, tmp_path / "out", shapes_from=str(tmp_path / "shapes.pt"))
    assert not (tmp_path / "out").exists()


def test_a_note_beside_the_files_tells_shapes(copied: Callable[[str], Path], tmp_path: Path) -> None:
    source = copied("local-flat")
    handles = []
    for module in ("", "first", "second"):
        held = [(n, v) for n, v in built().named_parameters() if n.startswith((module, "embed")) and _of(n) == module]
        handles.append(
            {
                "module": module,
                "fqns": [n.removeprefix(f"{module}.") if module else n for n, _ in held],
                "shapes": [list(v.shape) for _, v in held],
                "shared_params": [] if module else [["head.weight", "embed.weight"]],
            }
        )
    for rank in range(2):
        note = {"world_size": 2, "rank": rank, "handles": handles}
        (source / f"flat_param_metadata_rank{rank}.json").write_text(json.dumps(note))
    found, report = consolidated(source, tmp_path / "out")
    assert differing(found) == []
    assert report.warnings == ()
    handles[1]["shapes"][0] = [1, 1, 1]  # type: ignore[index]
    (source / "flat_param_metadata_rank1.json").write_text(json.dumps({"handles": handles}))
    with pytest.raises(FormatError, match="store different layouts"):
        open_checkpoint(str(source))


def _of(name: str) -> str:
    first = name.partition(".")[0]
    return first if first in ("first", "second") else ""


@pytest.mark.parametrize("name", ["local-flat", "local-orig"])
def test_shapes_from_files_that_have_none_are_refused(name: str, written: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no shapes: it holds flat parameters itself"):
        consolidated(written / name, tmp_path / "out", shapes_from=str(written / name))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["local-flat", "local-orig"])
def test_flat_parameters_are_checked_and_compared(name: str, written: Path, tmp_path: Path) -> None:
    assert any("--shapes-from" in problem.message for problem in shardckpt.verify(written / name).problems)
    assert shardckpt.verify(written / name, shapes_from=written / "shapes.pt").ok
    torch.save({n: v for n, v in truth().items() if "/" not in n}, tmp_path / "whole.pt")
    found = shardckpt.diff(written / name, tmp_path / "whole.pt")
    assert {each.kind for each in found.differences} == {"only_in_a"}
    assert all("/" in each.name for each in found.differences)
    assert found.equal == found.compared == len([n for n in truth() if "/" not in n])


@pytest.mark.parametrize("name", ["local-flat", "local-orig"])
def test_flat_parameters_go_to_other_numbers_of_ranks(name: str, written: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--shapes-from"):
        shardckpt.reshard(written / name, tmp_path / "three", world_size=3)
    shapes = written / "shapes.pt"
    shardckpt.reshard(written / name, tmp_path / "three", world_size=3, shapes_from=shapes)
    found, _ = consolidated(tmp_path / "three", tmp_path / "out")
    assert differing(found) == []


# ------------------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize("name", ["local-flat", "local-orig", "sharded-orig", "fsdp2"])
def test_a_missing_rank_is_named_and_nothing_is_written(name: str, copied: Any, written: Path, tmp_path: Path) -> None:
    source = copied(name)
    for file in source.glob("*rank1.pt"):
        skip_if_meshes_lack_ranks(file)
        file.unlink()
    with pytest.raises(IncompleteError, match="the file of rank 1"):
        consolidated(source, tmp_path / "out", shapes_from=str(written / "shapes.pt"))
    assert not (tmp_path / "out").exists()
    assert any("rank 1 left no file here" in w for w in shardckpt.inspect(str(source)).warnings)


def test_replicas_make_a_missing_rank_good(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """Rank 1 of a 2 x 2 hybrid mesh has its twin in rank 3."""
    source = copied("fsdp2-hybrid")
    skip_if_meshes_lack_ranks(source / "rank1.pt")
    (source / "rank1.pt").unlink()
    found, report = consolidated(source, tmp_path / "out")
    assert differing(found) == []
    assert any("rank 1 left no file here" in w for w in report.warnings)
    (source / "rank3.pt").unlink()
    with pytest.raises(IncompleteError, match="the file of rank 1"):
        consolidated(source, tmp_path / "out2")


@pytest.mark.parametrize(("name", "other"), [("fsdp2", "fsdp2-4"), ("sharded-orig", "sharded-orig-4")])
def test_files_of_two_worlds_are_refused(name: str, other: str, copied: Any, written: Path) -> None:
    """Two ranks saved where four had saved before: their files lie beside the two that were left."""
    source = copied(name)
    for file in (written / other).glob("*rank[23].pt"):
        shutil.copy(file, source)
    with pytest.raises(FormatError, match=r"[Kk]eep each save"):
        open_checkpoint(str(source))


@pytest.mark.parametrize("name", ["fsdp2", "sharded-orig", "local-flat"])
def test_a_rank_that_is_there_twice_is_refused(name: str, copied: Callable[[str], Path]) -> None:
    source = copied(name)
    for file in source.glob("*rank0.pt"):
        skip_if_meshes_lack_ranks(file)
        shutil.copy(file, file.with_name(file.name.replace("rank0", "rank1")))
    with pytest.raises(FormatError, match=r"found rank 0 in (model_)?rank0.pt and in (model_)?rank1.pt"):
        open_checkpoint(str(source))


def test_ranks_of_different_steps_are_refused(copied: Callable[[str], Path]) -> None:
    source = copied("fsdp2")
    torch.save({"step": 4}, source / "counter_rank1.pt")
    torch.save({"step": 3}, source / "counter_rank0.pt")
    with pytest.raises(
        FormatError, match=r"different steps .* step is 3 in counter_rank0.pt and 4 in counter_rank1.pt"
    ):
        open_checkpoint(str(source))


def test_optimizers_of_different_steps_are_refused(copied: Callable[[str], Path]) -> None:
    source = copied("local-orig")
    state = torch.load(source / "optim_rank1.pt")
    for slots in state["state"].values():
        slots["step"] += 1
    torch.save(state, source / "optim_rank1.pt")
    with pytest.raises(FormatError, match=r"an optimizer's step differs in optim_rank0.pt and optim_rank1.pt"):
        open_checkpoint(str(source))


def test_moments_that_nothing_tells_the_layout_of_are_refused(copied: Callable[[str], Path], tmp_path: Path) -> None:
    """A SHARDED model beside the optimizer's own flat shards: those say nothing, and are not taken for whole."""
    source = copied("sharded-orig")
    for rank in range(2):
        slots = {"exp_avg": torch.full((4,), float(rank)), "step": torch.tensor(3.0)}
        torch.save({"state": {0: slots}, "param_groups": [{"params": [0]}]}, source / f"optim_rank{rank}.pt")
    reader = open_checkpoint(str(source))
    with pytest.raises(OverlapError, match=r"'optim.state.0.exp_avg' differs between ranks"):
        reader.resolve(reader.manifest.tensors["optim", "state", 0, "exp_avg"].pieces)
    found = shardckpt.consolidate(str(source), str(tmp_path / "out"))
    assert any("exp_avg" in warning for warning in found.warnings)


def test_buffers_that_differ_are_listed_and_refused_where_they_are_read(tmp_path: Path) -> None:
    source = write_loops(tmp_path / "ranks", at="model.running")
    reader = open_checkpoint(str(source))
    assert reader.manifest.warnings == ("model.running: the values differ between ranks and cannot be read",)
    with pytest.raises(OverlapError, match=r"rank1.pt: 'model.running' .* \[0:5056\] than in .*rank0.pt"):
        reader.resolve(reader.manifest.tensors["model", "running"].pieces)
    assert any("model.running" in problem.message for problem in shardckpt.verify(source).problems)


@pytest.mark.parametrize("shape", [(3, 2), (5,), (10,)])
@pytest.mark.parametrize("width", [4, 6])
def test_ids_of_flat_and_ignored_parameters_get_names(shape: tuple[int, ...], width: int, tmp_path: Path) -> None:
    """Torch's FSDP1 with a parameter that it ignores, beside a buffer that looks like a unit."""
    run(2, ignoring_ranks, tmp_path / "ranks", shape, width, timeout=120)
    found, _ = consolidated(tmp_path / "ranks", tmp_path / "out")
    model = Ignoring(shape, width)
    for name, parameter in model.named_parameters():
        for slot, times in {"": 1, "/exp_avg": SLOTS["exp_avg"], "/exp_avg_sq": SLOTS["exp_avg_sq"]}.items():
            expected = torch.full_like(parameter, times * (1.0 + len(name)))
            assert torch.equal(found[name + slot], expected.detach()), name + slot


EXPERTS, DENSE = torch.arange(8 * 4 * 6.0).view(8, 4, 6), torch.arange(48.0).view(8, 6)


def write_experts(folder: Path, *, kind: str, is_replicated: bool = False, **options: Any) -> Path:
    """Write what four ranks save: two of `ep` with experts of their own, or equal ones, under one name."""
    folder.mkdir()
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))
            ep, dp = mesh.get_local_rank("ep"), mesh.get_local_rank("dp")
            mine = EXPERTS.chunk(2)[0 if is_replicated else ep]
            rows = mine.chunk(2, dim=1)[dp].clone()
            if kind == "padded":  # what a collective needs beside the elements differs
                rows = torch.cat([rows.view(-1), torch.full((5,), float(rank))])[: rows.numel()].view(rows.shape)
            local = mine.clone() if kind == "plain" else DTensor.from_local(rows, mesh["dp"], [Shard(1)])
            dense = DTensor.from_local(DENSE.chunk(4)[rank].clone(), init_device_mesh("cpu", (4,)), [Shard(0)])
            torch.save({"experts": local, "dense": dense}, folder / f"model_rank_{rank}.pt", **options)
    return folder


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", ["dtensor", "plain"])
def test_other_experts_under_one_name_are_refused_by_name_and_file(kind: str, legacy: bool, tmp_path: Path) -> None:
    source = write_experts(tmp_path / "ranks", kind=kind, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(OverlapError, match=r"model_rank_2.pt: 'experts' differs .* than in model_rank_0.pt"):
        shardckpt.consolidate(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [problem.kind for problem in shardckpt.verify(source).problems] == ["overlap"]
    with pytest.raises(OverlapError, match="'experts' differs"):
        shardckpt.load({"experts": torch.zeros(4, 4, 6)}, source, ignore_extra=True)
    warned = any("experts: the values differ" in warning for warning in shardckpt.inspect(source).warnings)
    assert warned is not legacy  # the other form has no checksums
    shardckpt.consolidate(source, tmp_path / "out", exclude=["experts"])
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["dense"], DENSE)


@pytest.mark.parametrize("kind", ["dtensor", "plain", "padded"])
def test_equal_tensors_of_meshes_that_do_not_know_each_other_are_one(kind: str, tmp_path: Path) -> None:
    source = write_experts(tmp_path / "ranks", kind=kind, is_replicated=True)
    shardckpt.consolidate(source, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(found["experts"], EXPERTS[:4]) and torch.equal(found["dense"], DENSE)
    assert shardckpt.verify(source).ok


@pytest.mark.parametrize(
    ("kind", "legacy", "compared"),
    [("dtensor", False, 0), ("plain", False, 0), ("padded", False, 4), ("plain", True, 6)],
)
def test_replicas_are_read_only_where_checksums_do_not_decide(
    kind: str, legacy: bool, compared: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"_use_new_zipfile_serialization": not legacy}
    source = write_experts(tmp_path / "ranks", kind=kind, is_replicated=True, **options)
    read: list[str] = []

    def count(reader: Any, entry: TensorEntry) -> Any:
        read.extend(piece.file for piece in entry.pieces)
        return read_blocks(reader, entry)

    monkeypatch.setattr(chunk_reader, "read_blocks", count)
    shardckpt.inspect(source)
    assert not read
    shardckpt.consolidate(source, tmp_path / "out")
    assert len(read) == compared


def write_stages(folder: Path, *, by_name: bool, **settings: Sequence[float]) -> Path:
    """Write what four ranks of two pipeline stages save, each over FSDP; a stage has one bias without decay."""
    folder.mkdir()
    for rank in range(4):
        with as_rank(rank, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
            stage, place = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
            names = [f"layers.{stage}.weight", f"layers.{stage}.bias"]
            keys: list[Any] = names if by_name else [0, 1]

            def shard(value: torch.Tensor, mesh: Any = mesh["dp"], place: int = place) -> DTensor:
                return DTensor.from_local(value.chunk(2)[place].clone(), mesh, [Shard(0)])

            model = {name: shard(torch.full((6, 6), float(stage))) for name in names}
            state = {key: {"step": torch.tensor(1.0), "m": shard(torch.full((6, 6), 2.0 + stage))} for key in keys}
            own = {key: values[stage] for key, values in settings.items()}
            groups = [{"decay": decay, **own, "params": [key]} for decay, key in zip([0.1, 0.0], keys, strict=True)]
            optim = {"state": state, "param_groups": groups}
            torch.save({"model": model, "optimizer": optim}, folder / f"checkpoint_rank_{rank}.pt")
    return folder


def test_param_groups_of_pipeline_stages_are_merged(tmp_path: Path) -> None:
    source = write_stages(tmp_path / "ranks", by_name=True)
    shardckpt.consolidate(source, tmp_path / "ids.pt", part="optim", optim_keys="ids")
    found = torch.load(tmp_path / "ids.pt")
    assert [(group["decay"], group["param_names"]) for group in found["param_groups"]] == [
        (0.1, ["layers.0.weight", "layers.1.weight"]),
        (0.0, ["layers.0.bias", "layers.1.bias"]),
    ]
    names = {
        number: name
        for group in found["param_groups"]
        for number, name in zip(group["params"], group["param_names"], strict=True)
    }
    assert {names[key]: slots["m"][0, 0].item() for key, slots in found["state"].items()} == {
        f"layers.{stage}.{kind}": 2.0 + stage for stage in (0, 1) for kind in ("weight", "bias")
    }


def test_stages_with_other_settings_keep_groups_of_their_own(tmp_path: Path) -> None:
    source = write_stages(tmp_path / "ranks", by_name=True, lr=[0.1, 0.2])
    groups = open_checkpoint(str(source)).manifest.objects["optimizer", "param_groups"].value
    assert [(group["lr"], group["params"]) for group in groups] == [  # type: ignore[attr-defined]
        (lr, [f"layers.{stage}.{kind}"]) for stage, lr in ((0, 0.1), (1, 0.2)) for kind in ("weight", "bias")
    ]


@pytest.mark.parametrize("settings", [{}, {"lr": [0.1, 0.2]}])
def test_ids_that_each_stage_counts_for_itself_are_refused(settings: dict[str, list[float]], tmp_path: Path) -> None:
    source = write_stages(tmp_path / "ranks", by_name=False, **settings)
    (tmp_path / "names.json").write_text(json.dumps(["layers.0.weight", "layers.0.bias"]))
    with pytest.raises((OverlapError, UnsupportedError), match=r"'optimizer[.a-z_0-9]*' differs between ranks"):
        shardckpt.consolidate(source, tmp_path / "out", part="all", param_names=tmp_path / "names.json")
    shardckpt.consolidate(source, tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {
        f"layers.{stage}.{kind}" for stage in (0, 1) for kind in ("weight", "bias")
    }


def test_a_value_that_differs_between_ranks_is_an_error_where_it_is_wanted(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    source = copied("fsdp2")
    for rank in range(2):
        torch.save({"seed": rank, "epochs": [1, {"n": 2}]}, source / f"loop_rank{rank}.pt")
    state = {"loop": {"epochs": None}}
    shardckpt.load(state, source, ignore_extra=True)
    assert state == {"loop": {"epochs": [1, {"n": 2}]}}
    with pytest.raises(
        UnsupportedError, match=r"'loop.seed' differs between ranks, .* in loop_rank0.pt than in loop_rank1.pt"
    ):
        shardckpt.load({"loop": {"seed": None}}, source, ignore_extra=True)
    assert any("loop.seed: the values differ" in warning for warning in shardckpt.inspect(source).warnings)
    for to in ("dcp", "native", "torch"):
        with pytest.raises(UsageError, match=r"found loop.seed, which differs between ranks\. Pass .*allow_loss"):
            shardckpt.reshard(source, tmp_path / "step", world_size=1, to=to)
    assert [each.name for each in shardckpt.diff(source, source).not_compared] == ["loop.seed"]


def write_loops(folder: Path, *, at: str, models: Sequence[str] = (), form: str = "zip") -> Path:
    """Write what two ranks save: models, averages and an optimizer, with the random state of each rank at a path."""
    folder.mkdir()
    torch.serialization.set_crc32_options(form != "without checksums")
    for rank in range(2):
        with as_rank(rank, 2):
            mesh = init_device_mesh("cpu", (2,))
            weight = DTensor.from_local(DENSE.chunk(2)[rank].clone(), mesh, [Shard(0)])
        optim = {"state": {"w": {"m": weight}}, "param_groups": [{"params": ["w"]}]}
        model = {"model": {"w": weight}}
        nets: dict[str, Any] = dict.fromkeys(models, model) or model
        state = {**nets, "ema": {"w": weight}, "optim": optim, "loop": {}, "step": 3}
        *roots, name = at.split(".")
        functools.reduce(dict.__getitem__, roots, state)[name] = torch.Generator().manual_seed(rank).get_state()
        torch.save(state, folder / f"rank{rank}.pt", _use_new_zipfile_serialization=form != "legacy")
    torch.serialization.set_crc32_options(True)
    return folder


@pytest.mark.parametrize("form", ["zip", "without checksums", "legacy"])
@pytest.mark.parametrize("at", ["rng", "loop.rng"])
def test_a_tensor_that_each_rank_has_is_an_error_only_where_it_is_wanted(at: str, form: str, tmp_path: Path) -> None:
    source = write_loops(tmp_path / "ranks", at=at, form=form)
    [warning] = shardckpt.inspect(source).warnings
    assert warning == f"{at}: the values differ between ranks and cannot be read"
    assert shardckpt.verify(source).ok
    state = {"model": {"w": torch.zeros(8, 6)}}
    shardckpt.load(state, source, ignore_extra=True)
    assert torch.equal(state["model"]["w"], DENSE)
    wanted: dict[str, Any] = {"rng": torch.zeros(5056, dtype=torch.uint8)}
    with pytest.raises(UnsupportedError, match=rf"'{at}' differs between ranks, .* in rank0.pt than in rank1.pt"):
        shardckpt.load({"loop": wanted} if "." in at else wanted, source, ignore_extra=True)
    for to in ("dcp", "native", "torch"):
        with pytest.raises(UsageError, match=rf"found {at}, which differs between ranks\. Pass .*allow_loss"):
            shardckpt.reshard(source, tmp_path / to, world_size=1, to=to)
        shardckpt.reshard(source, tmp_path / to, world_size=1, to=to, allow_loss=True)
        assert [(each.name, each.kind) for each in shardckpt.diff(source, tmp_path / to).differences] == []
    found, _ = consolidated(source, tmp_path / "out")
    assert torch.equal(found["w"], DENSE)


@pytest.mark.parametrize(
    ("at", "models"), [("model.running", ""), ("ema.running", ""), ("optim.state.w.n", ""), ("rng", "ab")]
)
def test_a_tensor_of_weights_or_optimizers_that_differs_is_a_problem(at: str, models: str, tmp_path: Path) -> None:
    """With two models, any part may be one."""
    source = write_loops(tmp_path / "ranks", at=at, models=models)
    [problem] = shardckpt.verify(source).problems
    assert problem.kind == "overlap" and repr(at) in problem.message
    with pytest.raises(OverlapError, match=at):
        shardckpt.reshard(source, tmp_path / "out", world_size=1, allow_loss=True)


class Names(list[str]):
    """A list of a class that only this module can make."""


def test_other_items_of_an_instance_are_other_values(copied: Callable[[str], Path]) -> None:
    source = copied("fsdp2")
    for rank in range(2):
        torch.save({"seen": Names([f"rank {rank}"]), "all": Names(["both"])}, source / f"loop_rank{rank}.pt")
    [warning] = [warning for warning in shardckpt.inspect(source).warnings if "the values differ" in warning]
    assert warning.startswith("loop.seen: ")


def test_an_unknown_class_is_named_and_never_made(copied: Callable[[str], Path]) -> None:
    source = copied("fsdp2")
    torch.save({"x": Path}, source / "extra_rank0.pt")
    torch.save({"x": shutil.rmtree}, source / "extra_rank1.pt")
    with pytest.raises(UnsafeError, match="shutil"):
        open_checkpoint(str(source))


# ----------------------------------------------------------------------------------------------------- names


def test_files_are_grouped_by_what_is_left_of_their_names() -> None:
    names = [f"{part}_world_size_2_rank_{rank}.pt" for part in ("model", "optim", "extra_state") for rank in range(2)]
    found = {file.name: (file.root, file.rank, file.world) for file in parse_rank_names([*names, "config.pt"], ())}
    assert found == {name: ((name.partition("_world")[0],), int(name[-4]), 2) for name in names}


@pytest.mark.parametrize(
    ("name", "rank"),
    [("rank_2.pt", 2), ("checkpoint_rank1.pt", 1), ("x-rank00012.bin", 12), ("frank1.pt", -1), ("7.pt", -1)],
)
def test_a_rank_stands_in_a_name(name: str, rank: int) -> None:
    assert [file.rank for file in parse_rank_names([name], [name])] == [rank]


def test_worlds_in_names_have_to_agree(copied: Callable[[str], Path]) -> None:
    source = copied("fsdp2")
    for rank in range(2):
        (source / f"rank{rank}.pt").rename(source / f"model_world_size_{2 + 2 * rank}_rank_{rank}.pt")
    with pytest.raises(FormatError, match=r"2 ranks in model_world_size_2_rank_0.pt and 4 in"):
        open_checkpoint(str(source))


def test_verl_names_are_model_and_optimizer(copied: Callable[[str], Path], tmp_path: Path) -> None:
    source = copied("sharded-mesh")
    for rank in range(2):
        for part in ("model", "optim"):
            (source / f"{part}_rank{rank}.pt").rename(source / f"{part}_world_size_2_rank_{rank}.pt")
        torch.save(
            {"lr_scheduler": {"last_epoch": 3}, "rng": rank}, source / f"extra_state_world_size_2_rank_{rank}.pt"
        )
    found, report = consolidated(source, tmp_path / "out")
    assert differing(found) == []
    assert report.left_out == ("extra_state",)


def test_tensor_parallel_pickles_of_the_fixtures_are_bit_exact(fixtures: Path) -> None:
    """Four ranks, tensor parallel by two under FSDP2 by two: strided placements, uneven rows, columns, submeshes."""
    reader = open_checkpoint(str(fixtures / "dcp_tp2_fsdp2_w4" / "ckpt_torch_save"))
    expected = load_file(fixtures / "dcp_tp2_fsdp2_w4" / "truth_model.safetensors")
    assert {path[1] for path in reader.manifest.tensors} == set(expected)
    for name, value in expected.items():
        assert_same(reader, ("model", name), value)


@pytest.mark.parametrize("is_padded", [True, False], ids=["padded", "lean"])
@pytest.mark.parametrize("buffer", [0, 9, 10], ids=["plain", "buffer-9", "buffer-10"])
@pytest.mark.parametrize("world", [3, 4])
def test_one_flat_number_is_the_one_flat_parameter(is_padded: bool, buffer: int, world: int, tmp_path: Path) -> None:
    """28 elements: on three ranks the last chunk is padded; a buffer may be as long as a chunk."""
    whole, moments = torch.arange(28.0), torch.arange(28.0) + 100
    chunk = -(-28 // world)
    source = tmp_path / "ckpt"
    source.mkdir()
    for rank in range(world):
        with as_rank(rank, world):
            model = {"_flat_param": sharded(whole, rank, world), **({"buf": torch.zeros(buffer)} if buffer else {})}
            torch.save(model, source / f"model_rank{rank}.pt")
        mine = moments[rank * chunk : (rank + 1) * chunk]
        if is_padded:
            mine = torch.nn.functional.pad(mine, (0, chunk - mine.numel()))
        state = {0: {"exp_avg": mine.clone(), "step": torch.tensor(3.0)}}
        torch.save({"state": state, "param_groups": [{"params": [0]}]}, source / f"optim_rank{rank}.pt")
        note = {"handles": [{"module": "", "fqns": ["a", "b"], "shapes": [[5, 5], [3]]}]}
        (source / f"flat_param_metadata_rank{rank}.json").write_text(json.dumps(note))
    shardckpt.consolidate(source, tmp_path / "out", part="all")
    found = load_file(tmp_path / "out" / "optimizer.safetensors")
    assert torch.equal(found["a/exp_avg"], moments[:25].reshape(5, 5))
    assert torch.equal(found["b/exp_avg"], moments[25:])
