"""Flat parameters of any unit, number of ranks and alignment are taken apart as FSDP1 put them together."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardckpt.boxes import Box
from shardckpt.errors import FormatError, NameCollisionError, OverlapError, UnsupportedError, UsageError
from shardckpt.manifest import Lazy, Manifest, Piece, TensorEntry
from shardckpt.plan.layout.coverage import locate, require_complete
from shardckpt.reader import ParamShapes, Reader
from shardckpt.readers.ranks.merge_dtensors import merge_dtensor_shards
from shardckpt.readers.ranks.rank_files import RankFile
from shardckpt.readers.registry import open_checkpoint
from shardckpt.readers.torchsave.dtensor_spec import SHARDED_TENSOR, ShardInfo, ShardList
from tests.kit.writers.materialise import assert_same
from tests.kit.writers.share_writers import as_rank, sharded

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")
Units = Mapping[str, Mapping[str, torch.Tensor]]
"""Prefix of each unit to its parameters, by whole names."""


def laid(members: Mapping[str, torch.Tensor], alignment: int, world: int) -> tuple[torch.Tensor, dict[str, int]]:
    """Return a unit's flat parameter and where each member begins: FSDP1's rule, written out."""
    parts: list[torch.Tensor] = []
    starts: dict[str, int] = {}
    at = 0
    for name, value in members.items():
        gap = -at % alignment
        starts[name] = at + gap
        parts += [torch.full((gap,), -1.0), value.reshape(-1)]
        at += gap + value.numel()
    if alignment > 1:
        parts.append(torch.full((-at % world,), -2.0))
    return torch.cat(parts), starts


def write(folder: Path, units: Units, world: int, alignment: int, copies: int = 1) -> None:
    """Write what each rank saves; `alignment` 1 is `use_orig_params=False`. Ranks beyond `world` are replicas."""
    folder.mkdir()
    flats = {prefix: laid(members, alignment, world) for prefix, members in units.items()}
    for rank in range(world * copies):
        place = rank % world
        model: dict[str, Any] = {"buffer": torch.arange(3.0)}
        state: dict[int, Any] = {}
        with as_rank(rank, world * copies):
            shares = {prefix: sharded(flat, place, world, rank // world) for prefix, (flat, _) in flats.items()}
            for prefix, (flat, starts) in flats.items():
                chunk = -(-flat.numel() // world)
                low, mine = place * chunk, flat[place * chunk : (place + 1) * chunk].clone()
                padded = torch.cat([mine, torch.zeros(chunk - mine.numel())])
                if alignment == 1:
                    state[len(state)] = {"exp_avg": 2 * padded, "step": torch.tensor(3.0)}
                for name, value in units[prefix].items() if alignment > 1 else ():
                    start, stop = starts[name] - low, starts[name] - low + value.numel()
                    model[name] = mine[max(start, 0) : max(stop, 0)]
                    if model[name].numel():
                        state[len(state)] = {"exp_avg": 2 * model[name], "step": torch.tensor(3.0)}
                    else:
                        state[len(state)] = {}
                model[f"{prefix}_flat_param"] = shares[prefix]
            torch.save(model, folder / f"model_rank{rank}.pt")
        kept = {number: slots for number, slots in state.items() if slots}
        torch.save({"state": kept, "param_groups": [{"params": list(state)}]}, folder / f"optim_rank{rank}.pt")


def shapes_of(units: Units, **more: Any) -> ParamShapes:
    shapes = {name: tuple(value.shape) for members in units.values() for name, value in members.items()}
    return ParamShapes({"buffer": (3,), **shapes}, "elsewhere", **more)


def opened(folder: Path, known: ParamShapes) -> Reader:
    reader = open_checkpoint(str(folder)).with_param_shapes(known)
    require_complete(reader.manifest, reader.manifest.tensors.values(), "here")
    return reader


def numbered(shapes: Mapping[str, Mapping[str, tuple[int, ...]]]) -> Units:
    """Return parameters of some shapes; each element is another number."""
    at, units = 1, {}
    for prefix, members in shapes.items():
        units[prefix] = {}
        for name, shape in members.items():
            units[prefix][name] = torch.arange(at, at + prod(shape), dtype=torch.float32).view(shape)
            at += prod(shape)
    return units


def test_two_names_that_differ_in_a_wrapper_alone_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a", numbered({"": {"p": (4,)}}), world=2, alignment=8)
    for rank in range(2):
        with as_rank(rank, 2):
            state = torch.load(tmp_path / "a" / f"model_rank{rank}.pt", weights_only=False)
            state["_fsdp_wrapped_module.buffer"] = torch.ones(3)
            torch.save(state, tmp_path / "a" / f"model_rank{rank}.pt")
    with pytest.raises(NameCollisionError, match="both be named 'buffer'"):
        open_checkpoint(str(tmp_path / "a"))


@st.composite
def modules(draw: st.DrawFn) -> Units:
    """Draw units, one inside the other or beside it, of parameters of odd shapes."""
    shape = st.lists(st.integers(1, 5), max_size=3).map(tuple)
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for prefix in draw(st.lists(st.sampled_from(["", "a.", "a.b.", "ab."]), min_size=1, unique=True)):
        shapes = draw(st.lists(shape, min_size=1, max_size=5))
        found[prefix] = {f"{prefix}p{i}": each for i, each in enumerate(shapes)}
    return numbered(found)


@settings(max_examples=40)
@given(units=modules(), world=st.integers(2, 8), alignment=st.sampled_from([1, 4, 8]), data=st.data())
def test_every_parameter_and_moment_is_found(
    units: Units, world: int, alignment: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Alignment 4 is that of float32, 8 that of float32 computed in bfloat16."""
    folder = tmp_path_factory.mktemp("flat") / "src"
    write(folder, units, world, alignment)
    known = shapes_of(units)
    ids = {}
    names = [n for m in units.values() for n in m] if alignment > 1 else [f"{prefix}_flat_param" for prefix in units]
    if data.draw(st.booleans()):
        ids = dict(enumerate(names))
    reader = opened(folder, ParamShapes(known.shapes, "elsewhere", ids=ids))
    has_names = ids or not any("numbers of" in warning for warning in reader.manifest.warnings)
    for members in units.values():
        for name, value in members.items():
            assert_same(reader, ("model", name), value)
            if has_names:
                assert_same(reader, ("optim", "state", name, "exp_avg"), 2 * value)
                assert_same(reader, ("optim", "state", name, "step"), torch.tensor(3.0))
    assert_same(reader, ("model", "buffer"), torch.arange(3.0))


SMALL = numbered({"": {"e": (7, 3), "z": (2,)}, "a.": {"a.w": (5, 3), "a.b": (1,), "a.v": (5,), "a.u": (1,)}})


@pytest.mark.parametrize("alignment", [1, 4])
def test_of_hybrid_groups_one_replica_is_enough(alignment: int, tmp_path: Path) -> None:
    write(tmp_path / "src", SMALL, 2, alignment, copies=2)
    for file in (tmp_path / "src").glob("*rank[12].pt"):
        file.unlink()
    reader = opened(tmp_path / "src", shapes_of(SMALL))
    for members in SMALL.values():
        for name, value in members.items():
            assert_same(reader, ("model", name), value)
            assert_same(reader, ("optim", "state", name, "exp_avg"), 2 * value)


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("kind", ["model", "optim"])
def test_replicas_of_hybrid_groups_that_differ_are_refused(alignment: int, kind: str, tmp_path: Path) -> None:
    """As of pipeline stages whose flat parameters have one name."""
    write(tmp_path / "src", SMALL, 2, alignment, copies=2)
    reader = opened(tmp_path / "src", shapes_of(SMALL))
    assert len(locate(reader, reader.manifest, list(reader.manifest.tensors.values()))) == len(reader.manifest.tensors)
    other = numbered({prefix: {n: tuple(v.shape) for n, v in unit.items()} for prefix, unit in SMALL.items()})
    other["a."]["a.w"] += 1
    write(tmp_path / "other", other, 2, alignment, copies=2)
    shutil.copy(tmp_path / "other" / f"{kind}_rank2.pt", tmp_path / "src")
    reader = open_checkpoint(str(tmp_path / "src")).with_param_shapes(shapes_of(SMALL))
    with pytest.raises(OverlapError, match=rf"{kind}_rank2.pt: .* differs between ranks; .* in {kind}_rank0.pt"):
        locate(reader, reader.manifest, list(reader.manifest.tensors.values()))


def test_param_groups_of_flat_ids_that_differ_name_no_parameter(tmp_path: Path) -> None:
    write(tmp_path / "src", SMALL, 2, 1)
    file = tmp_path / "src" / "optim_rank1.pt"
    state = torch.load(file)
    state["param_groups"][0]["lr"] = 0.5
    torch.save(state, file)
    manifest = open_checkpoint(str(tmp_path / "src")).with_param_shapes(shapes_of(SMALL)).manifest
    assert "optim_rank0.pt than in optim_rank1.pt" in repr(manifest.objects["optim", "param_groups"].value)


def test_numbers_that_fit_in_several_ways_are_left_to_the_caller(tmp_path: Path) -> None:
    """Two units of one size, of which the optimizer has one: nobody can tell which."""
    units = numbered({"a.": {"a.w": (4,)}, "b.": {"b.w": (4,)}})
    write(tmp_path / "src", units, 2, 1)
    for rank in range(2):
        file = tmp_path / "src" / f"optim_rank{rank}.pt"
        state = torch.load(file)
        torch.save({"state": {0: state["state"][1]}, "param_groups": [{"params": [0]}]}, file)
    reader = opened(tmp_path / "src", shapes_of(units))
    assert any("--param-names" in warning for warning in reader.manifest.warnings)
    with pytest.raises(UnsupportedError, match="--param-names"):
        reader.resolve(reader.manifest.tensors["optim", "state", 0, "exp_avg"].pieces)
    told = opened(tmp_path / "src", shapes_of(units, ids={0: "b.w"}))
    assert_same(told, ("optim", "state", "b.w", "exp_avg"), 2 * units["b."]["b.w"])


def test_a_tied_name_is_one_where_only_one_can_be(tmp_path: Path) -> None:
    write(tmp_path / "src", SMALL, 2, 1)
    known = shapes_of(SMALL)
    reader = opened(tmp_path / "src", ParamShapes({**known.shapes, "head": (7, 3)}, "elsewhere"))
    assert reader.manifest.aliases == {("model", "head"): ("model", "e")}
    assert any("no room for head" in warning for warning in reader.manifest.warnings)
    with pytest.raises(UsageError, match="'_flat_param'"):
        opened(tmp_path / "src", ParamShapes({**known.shapes, "y": (7, 3), "x": (7, 3)}, "elsewhere"))
    told = ParamShapes({**known.shapes, "head": (7, 3)}, "elsewhere", {"head": "e"})
    assert opened(tmp_path / "src", told).manifest.warnings == ()


def test_chunks_of_other_lengths_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "src", SMALL, 2, 1)
    with as_rank(1, 2):
        flat = torch.cat([value.reshape(-1) for value in SMALL["a."].values()])
        share = sharded(flat, 1, 2)
        share.metadata().shards_metadata[1].shard_offsets = [10]
        share.local_shards()[0].metadata.shard_offsets = [10]
        state = {"a._flat_param": share, "_flat_param": sharded(torch.zeros(23), 1, 2), "buffer": torch.arange(3.0)}
        torch.save(state, tmp_path / "src" / "model_rank1.pt")
    with pytest.raises(FormatError, match=r"the shard of rank 1 of 'a._flat_param' is not its chunk"):
        open_checkpoint(str(tmp_path / "src"))


def test_moments_of_other_lengths_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "src", SMALL, 2, 1)
    file = tmp_path / "src" / "optim_rank1.pt"
    state = torch.load(file)
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"][:-2].clone()
    torch.save(state, file)
    with pytest.raises(FormatError, match=r"the shard of rank 1 of .* does not fit '_flat_param'"):
        opened(tmp_path / "src", shapes_of(SMALL, ids={0: "_flat_param", 1: "a._flat_param"}))


def test_a_claim_of_many_ranks_is_refused(tmp_path: Path) -> None:
    """Shards of an unheard-of number of ranks, of which two are listed: not counted through."""
    listed = (Box((0,), (4,)), Box((4,), (4,)))
    cut = ShardList((8,), listed, (0, 1))
    share = ShardInfo(SHARDED_TENSOR, (8,), "float32", cut, None, 0, 1 << 24, 0, 1 << 24)
    entry = TensorEntry(("f", "_flat_param"), (8,), "float32", (Piece(listed[0], "f", Lazy(0, 0)),))
    manifest = Manifest("x", {"f": 1}, {entry.path: entry})
    with pytest.raises(FormatError, match="not split into equal chunks"):
        merge_dtensor_shards(manifest, {entry.path: share}, [RankFile("f", ("f",), (), 0)], "here", shapes_of(SMALL))
