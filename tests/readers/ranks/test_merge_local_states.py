"""Rank files are one checkpoint: what each rank says of its part is checked, and never trusted."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shardckpt.errors import CheckpointError, FormatError, IncompleteError, UnsupportedError
from shardckpt.layout import DimLayout, FlatLayout, ParamSpec
from shardckpt.manifest import UNREAD
from shardckpt.offline.consolidate import consolidate
from shardckpt.offline.verify import verify
from shardckpt.plan.layout.coverage import require_complete
from shardckpt.reader import Reader
from shardckpt.readers.registry import open_checkpoint
from tests.kit.writers.materialise import assert_same

WORLD = 3
FLAT = {"a": torch.arange(35.0).view(5, 7), "b": torch.arange(4.0), "c": torch.tensor(9.0)}
ROWS = {"r": torch.arange(20).view(4, 5), "t": torch.arange(6.0).view(2, 3)}
BUFFER = torch.tensor([1, 2], dtype=torch.int16)


def spec(name: str, value: torch.Tensor, order: tuple[int, ...] = ()) -> ParamSpec:
    return ParamSpec(name, tuple(value.shape), str(value.dtype)[6:], order)


def entries(values: dict[str, torch.Tensor], aliases: dict[str, list[str]]) -> list[dict[str, Any]]:
    return [
        {"name": n, "aliases": aliases.get(n, []), "shape": list(v.shape), "dtype": str(v.dtype)[6:]}
        for n, v in values.items()
    ]


def rank_state(rank: int, world: int = WORLD, *, flat: str | None = "_flat") -> OrderedDict[str, Any]:
    """Return what rank `rank` holds: a flat unit, one cut by rows, a buffer."""
    laid = FlatLayout(tuple(spec(n, v) for n, v in FLAT.items()), world, 4)
    whole = torch.zeros(laid.chunk * world)
    for at, value in zip(laid.offsets, FLAT.values(), strict=True):
        whole[at : at + value.numel()] = value.reshape(-1)
    shard = whole[rank * laid.chunk : (rank + 1) * laid.chunk]
    rows = DimLayout(tuple(spec(n, v) for n, v in ROWS.items()), world, (0, 1))
    state: OrderedDict[str, Any] = OrderedDict()
    if flat:
        state[flat] = shard[: laid.get_unpadded_size(rank)]
    else:
        found = {run.index: shard[run.offset : run.offset + run.numel] for run in laid.runs(rank)}
        state.update({n: found.get(i, shard[:0]) for i, n in enumerate(FLAT)})
    for index, (name, value) in enumerate(ROWS.items()):
        box = rows.box(index, rank)
        state[name] = value[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size, strict=True))].clone()
    state["buffer"] = BUFFER
    units = [
        {"entries": entries(FLAT, {"b": ["tied"]}), "layout": laid.to_json(), "place": rank, "flat": flat},
        {"entries": entries(ROWS, {}), "layout": rows.to_json(), "place": rank},
    ]
    note = {"version": 1, "kind": "LOCAL", "aliases": {"tied": "b"}, "rank": rank, "world": world, "units": units}
    state._metadata = OrderedDict(shardckpt=note)  # type: ignore[attr-defined]
    return state


def write(folder: Path, states: dict[int, Any]) -> None:
    for rank, state in states.items():
        torch.save(state, folder / f"rank{rank}.pt")


def said(state: Any) -> dict[str, Any]:
    found: dict[str, Any] = state._metadata["shardckpt"]
    return found


def opened(folder: Path) -> Reader:
    reader = open_checkpoint(str(folder))
    require_complete(reader.manifest, reader.manifest.tensors.values(), "here")
    return reader


@pytest.mark.parametrize("flat", ["_flat", None])
@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_parts_become_whole_tensors(tmp_path: Path, world: int, legacy: bool, flat: str | None) -> None:
    for rank in range(world):
        state = rank_state(rank, world, flat=flat)
        torch.save(state, tmp_path / f"x{rank}.bin", _use_new_zipfile_serialization=not legacy)
    reader = opened(tmp_path)
    for name, value in {**FLAT, **ROWS, "tied": FLAT["b"], "buffer": BUFFER}.items():
        assert_same(reader, (name,), value)
    assert reader.manifest.aliases == {("tied",): ("b",)}
    assert reader.manifest.format == "local"
    assert len(reader.manifest.tensors) == 7
    assert verify(str(tmp_path)).problems == ()


def test_names_come_in_the_order_of_the_unsharded_model(tmp_path: Path) -> None:
    states = {rank: rank_state(rank) for rank in range(WORLD)}
    names = ["c", "buffer", "r", "a", "t", "b", "tied"]
    for state in states.values():
        said(state)["names"] = names
    write(tmp_path, states)
    assert [path[0] for path in opened(tmp_path).manifest.tensors] == ["c", "buffer", "r", "a", "t", "b", "tied"]


def test_a_parameter_in_another_memory_order_is_turned_back(tmp_path: Path) -> None:
    value = torch.arange(2 * 3 * 4 * 5.0).view(2, 3, 4, 5)
    layout = FlatLayout((spec("x", FLAT["b"]), spec("w", value, (0, 2, 3, 1))), WORLD)
    shards = torch.cat([FLAT["b"], value.permute(0, 2, 3, 1).reshape(-1), torch.zeros(9)]).split(layout.chunk)
    for rank in range(WORLD):
        state = OrderedDict(flat=shards[rank][: layout.get_unpadded_size(rank)].clone())
        unit = {"entries": entries({"x": FLAT["b"], "w": value}, {}), "layout": layout.to_json(), "place": rank}
        note = {"version": 1, "kind": "LOCAL", "rank": rank, "world": WORLD, "units": [{**unit, "flat": "flat"}]}
        state._metadata = {"shardckpt": note}  # type: ignore[attr-defined]
        torch.save(state, tmp_path / f"{rank}.pt")
    assert_same(opened(tmp_path), ("w",), value)


def test_states_may_lie_in_something_larger_beside_other_files(tmp_path: Path) -> None:
    write(tmp_path, {rank: {"model": rank_state(rank), "step": 3, "seed": rank} for rank in range(WORLD)})
    torch.save({"x": torch.ones(2)}, tmp_path / "extra.pt")
    reader = opened(tmp_path)
    assert_same(reader, ("model", "a"), FLAT["a"])
    assert_same(reader, ("extra.pt", "x"), torch.ones(2))
    assert reader.manifest.objects[("step",)].value == 3
    assert "seed: the values differ between ranks" in reader.manifest.warnings[0]
    assert "rank0.pt than in rank1.pt" in repr(reader.manifest.objects[("seed",)].value)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("name", ["_flat", "t", "buffer"])
def test_replicas_that_differ_are_refused(name: str, legacy: bool, tmp_path: Path) -> None:
    """Two replicas of three ranks; or experts of two ranks under one name."""
    for rank in range(2 * WORLD):
        state = rank_state(rank % WORLD, flat="_flat")
        said(state).update(rank=rank, world=2 * WORLD)
        torch.save(state, tmp_path / f"rank{rank}.pt", _use_new_zipfile_serialization=not legacy)
    assert verify(str(tmp_path)).ok
    state[name] = state[name] + 1
    torch.save(state, tmp_path / f"rank{rank}.pt", _use_new_zipfile_serialization=not legacy)
    problems = verify(str(tmp_path)).problems
    assert problems and all(each.kind == "overlap" and f"rank{rank}.pt" in each.message for each in problems)
    assert {each.tensors for each in problems} == {(n,) for n in ((*FLAT, "tied") if name == "_flat" else [name])}


def optimizer_state(rank: int, flat: str | None) -> OrderedDict[str, Any]:
    model = rank_state(rank, flat=flat)
    keys = [name for name in model if name != "buffer"]
    slots = {name: {"m": 2 * model[name], "step": torch.tensor(4.0), "n": 5} for name in keys}
    slots[keys[0]]["odd"] = torch.ones(2, 2)
    state = OrderedDict(state=slots, param_groups=[{"lr": 0.5, "params": ["a", "b", "c", "r", "t"]}])
    state._metadata = model._metadata  # type: ignore[attr-defined]
    return state


@pytest.mark.parametrize("flat", ["_flat", None])
def test_an_optimizer_is_put_together_by_names(tmp_path: Path, flat: str | None) -> None:
    write(tmp_path, {rank: optimizer_state(rank, flat) for rank in range(WORLD)})
    write(tmp_path, {rank + 10: rank_state(rank, flat=flat) for rank in range(WORLD)})
    reader = open_checkpoint(str(tmp_path))
    for name, value in {**FLAT, **ROWS}.items():
        assert_same(reader, ("model", name), value)
        assert_same(reader, ("optimizer", "state", name, "m"), 2 * value)
        assert_same(reader, ("optimizer", "state", name, "step"), torch.tensor(4.0))
        assert reader.manifest.objects["optimizer", "state", name, "n"].value == 5
    assert reader.manifest.objects["optimizer", "param_groups"].value is not UNREAD
    odd = reader.manifest.tensors["optimizer", "state", "a", "odd"]
    with pytest.raises(UnsupportedError, match="not shaped like its parameter"):
        reader.resolve(odd.pieces)


def test_slots_and_groups_that_differ_between_ranks_are_not_one_value(tmp_path: Path) -> None:
    states = {rank: optimizer_state(rank, None) for rank in range(WORLD)}
    states[1]["state"]["a"]["n"] = 6
    states[2]["param_groups"][0]["params"] = ["a", "b", "c", "r", "t", "x"]
    write(tmp_path, states)
    objects = open_checkpoint(str(tmp_path)).manifest.objects
    assert "rank0.pt than in rank1.pt" in repr(objects["state", "a", "n"].value)
    assert objects["param_groups",].value == [{"lr": 0.5, "params": ["a", "b", "c", "r", "t", "x"]}]


def test_a_missing_rank_is_named_with_what_it_held(tmp_path: Path) -> None:
    write(tmp_path, {0: rank_state(0), 2: rank_state(2)})
    reader = open_checkpoint(str(tmp_path))
    assert reader.manifest.warnings == ("of 3 ranks, rank 1 left no file here",)
    with pytest.raises(IncompleteError, match="the file of rank 1"):
        require_complete(reader.manifest, reader.manifest.tensors.values(), "here")
    assert any("the file of rank 1" in problem.message for problem in verify(str(tmp_path)).problems)


def test_one_file_of_several_is_not_taken_for_whole(tmp_path: Path) -> None:
    write(tmp_path, {0: rank_state(0)})
    assert "the file of rank 2" in str(verify(str(tmp_path / "rank0.pt")).problems)
    with pytest.raises(IncompleteError, match="one file of several: put them into one folder and point at that"):
        consolidate(str(tmp_path / "rank0.pt"), str(tmp_path / "out"))


def test_ranks_of_which_others_hold_other_parameters_cannot_be_missing(tmp_path: Path) -> None:
    states = {rank: rank_state(rank, 1) for rank in (0, 1)}
    for rank, state in states.items():
        said(state)["rank"], said(state)["world"] = rank, 3
        said(state)["units"][0]["place"] = said(state)["units"][1]["place"] = 0
        for unit in said(state)["units"]:
            for each in (*unit["entries"], *unit["layout"]["params"]):
                each["name"] += f".{rank}"
                each.pop("aliases", None)
    for rank, state in states.items():
        renamed = OrderedDict((f"{n}.{rank}" if n in ROWS else n, v) for n, v in rank_state(0, 1).items())
        renamed._metadata = state._metadata  # type: ignore[attr-defined]
        torch.save(renamed, tmp_path / f"{rank}.pt")
    with pytest.raises(IncompleteError, match="the file of rank 2 of 3"):
        opened(tmp_path)


def mixed_worlds(states: dict[int, Any]) -> None:
    states[1] = rank_state(1, 2)


def twice(states: dict[int, Any]) -> None:
    states[7] = rank_state(1)


def short(states: dict[int, Any]) -> None:
    states[1]["_flat"] = states[1]["_flat"][:-1]


def other_rows(states: dict[int, Any]) -> None:
    states[0]["r"] = states[0]["r"].T.contiguous()


def other_type(states: dict[int, Any]) -> None:
    states[1]["t"] = states[1]["t"].half()


def other_layout(states: dict[int, Any]) -> None:
    said(states[2])["units"][0]["layout"]["alignment"] = 2


def without_layout(states: dict[int, Any]) -> None:
    said(states[2])["units"][0].pop("layout")


def beyond_the_world(states: dict[int, Any]) -> None:
    said(states[2])["rank"] = 3


def beyond_the_unit(states: dict[int, Any]) -> None:
    said(states[2])["units"][0]["place"] = 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (mixed_worlds, "different saves .* found 3 ranks in rank0.pt and 2 in rank1.pt"),
        (twice, "different saves .* found rank 1 in rank1.pt and in rank7.pt"),
        (short, "the shard of rank 1 of 'a' does not fit its layout"),
        (other_rows, "the shard of rank 0 of 'r' does not fit its layout"),
        (other_type, "several dtypes; .*rank1|rank1.*several dtypes"),
        (other_layout, "the unit of 'a' in different ways"),
        (without_layout, "nothing says how"),
        (beyond_the_world, "found rank 3"),
        (beyond_the_unit, "found part 3"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: Callable[[dict[int, Any]], None], message: str) -> None:
    states = {rank: rank_state(rank) for rank in range(WORLD)}
    change(states)
    write(tmp_path, states)
    with pytest.raises(FormatError, match=message):
        opened(tmp_path)


def test_a_shard_of_a_shard_is_refused_by_name(tmp_path: Path) -> None:
    states = {rank: rank_state(rank) for rank in range(WORLD)}
    for state in states.values():
        said(state)["units"][1]["entries"][0]["shape"] = [8, 5]
    write(tmp_path, states)
    with pytest.raises(UnsupportedError, match="'r' is sharded in more than one way"):
        open_checkpoint(str(tmp_path))


HOSTILE: tuple[Any, ...] = (None, -1, 2**62, 2**2000, 1.5, True, "x", [], {}, [[]], [-1], [2**62] * 3, [1] * 5000)


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from leaves(inner, (*path, key))


def test_hostile_notes_are_refused_or_read_and_nothing_else(tmp_path: Path) -> None:
    """Every value of a note is replaced by every hostile one; a wrong shape or number is a typed error, at once."""
    good = said(rank_state(0, 2))
    write(tmp_path, {1: rank_state(1, 2)})
    for path in list(leaves(good))[1:]:
        for bad in HOSTILE:
            state = rank_state(0, 2)
            note = copy.deepcopy(said(state))
            place: Any = note
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = bad
            state._metadata = {"shardckpt": note}  # type: ignore[attr-defined]
            write(tmp_path, {0: state})
            try:
                reader = open_checkpoint(str(tmp_path))
            except CheckpointError as error:
                assert "\n" not in str(error), path
            else:
                assert verify(str(tmp_path)).tensor_count == len(reader.manifest.tensors)
