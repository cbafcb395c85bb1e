"""Notes on flat parameters are read strictly: whatever they hold, it is what they say or a typed error."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from shardckpt.errors import CheckpointError, FormatError, UnsafeError
from shardckpt.reader import ParamShapes
from shardckpt.readers.ranks import fsdp1_flat_param
from shardckpt.readers.ranks.fsdp1_flat_param import read_metadata
from shardckpt.storage.local import LocalStore

NOTE: dict[str, Any] = {
    "world_size": 2,
    "rank": 0,
    "handles": [
        {"module": "", "fqns": ["e", "z"], "shapes": [[7, 3], []], "shared_params": [["head", "e"]]},
        {"module": "_fsdp_wrapped_module.a", "fqns": ["w"], "shapes": [[0, 4]], "shared_params": []},
    ],
}


def read(folder: Path, *notes: Any) -> ParamShapes | None:
    for rank, note in enumerate(notes):
        (folder / f"flat_param_metadata_rank{rank}.json").write_text(json.dumps(note))
    return read_metadata(LocalStore(str(folder)), {file.name: file.stat().st_size for file in folder.iterdir()})


def test_a_note_tells_names_shapes_units_and_ties(tmp_path: Path) -> None:
    known = read(tmp_path, NOTE, {**NOTE, "rank": 1})
    assert known is not None
    assert dict(known.shapes) == {"e": (7, 3), "z": (), "a.w": (0, 4)}
    assert dict(known.units) == {"_flat_param": ["e", "z"], "a._flat_param": ["a.w"]}
    assert dict(known.aliases) == {"head": "e"}


def test_where_there_is_none_nothing_is_told(tmp_path: Path) -> None:
    (tmp_path / "flat_param_metadata.json").write_text("{}")
    assert read(tmp_path) is None


def test_a_note_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsdp1_flat_param, "_MAX_BYTES", 10)
    with pytest.raises(UnsafeError, match="too large"):
        read(tmp_path, NOTE)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [path, *(place for key in inner for place in places(value[key], (*path, key)))]


@pytest.mark.parametrize("bad", [None, -1, 2**62, 1.5, True, "x", [], {}, [[]], [-1], [2**62] * 3, [1] * 100])
def test_hostile_notes_are_read_or_refused(bad: Any, tmp_path: Path) -> None:
    for place in places(NOTE)[1:]:
        note = copy.deepcopy(NOTE)
        at: Any = note
        for key in place[:-1]:
            at = at[key]
        at[place[-1]] = bad
        try:
            read(tmp_path, note)
        except CheckpointError as error:
            assert "\n" not in str(error)


def test_what_is_no_note_is_refused(tmp_path: Path) -> None:
    for note in (
        [],
        {},
        {"handles": {}},
        {"handles": [3]},
        {**NOTE, "handles": [*NOTE["handles"], NOTE["handles"][0]]},
    ):
        with pytest.raises(FormatError):
            read(tmp_path, note)
