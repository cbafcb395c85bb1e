"""Ranks that do not share a storage are told so, and no checkpoint appears."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardckpt
from shardckpt.checkpoint.save import session
from shardckpt.checkpoint.save.payload_writer import write_payloads
from shardckpt.offline.write import parallel
from shardckpt.storage.publish import JoinedPublication
from tests.kit.ranks.harness import Raised, raised_everywhere, run

Verb = Callable[[Any, str], object]

VERBS: dict[str, Verb] = {
    "save": shardckpt.save,
    "async_save": lambda state, path: shardckpt.async_save(state, path).result(),
    "Checkpointer": lambda state, path: shardckpt.Checkpointer(path).save(7, state),
    "dedup": lambda state, path: shardckpt.Checkpointer(path, dedup=True).save(7, state),
}


def sharded(world: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    return {"w": distribute_tensor(torch.arange(64.0), mesh, [Shard(0)]), "step": 3}


def everything_below(path: Path) -> list[str]:
    return [name for _, folders, files in os.walk(path) for name in (*folders, *files)]


@pytest.mark.parametrize("verb", VERBS)
def test_ranks_with_a_disk_each_are_named_and_nothing_is_left_on_either(tmp_path: Path, verb: str) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()

    def body(rank: int, world: int) -> None:
        def joined(place: str) -> JoinedPublication:
            return JoinedPublication(place.replace("first", "second"))

        with patch.object(session, "JoinedPublication", joined):
            VERBS[verb](sharded(world), str(tmp_path / "first" / "run"))

    first, second = raised_everywhere(2, body)
    assert "rank 1" in first.message and second.is_a(OSError)
    assert all("sees another folder of this name" in each.message for each in (first, second))
    assert [everything_below(tmp_path / name) for name in ("first", "second")] in ([[], []], [["run"], []])


@pytest.mark.parametrize("verb", VERBS)
def test_ranks_with_a_store_each_are_named(verb: str) -> None:
    def body(rank: int, world: int) -> list[str]:
        with pytest.raises((shardckpt.errors.StorageError, shardckpt.errors.RankError)) as caught:
            VERBS[verb](sharded(world), "memory://split/run")
        return [str(caught.value), *map(str, fsspec.filesystem("memory").find("split") if rank == 0 else [])]

    told = run(3, body)
    assert all("rank 0 does not see the files that ranks 1, 2 wrote" in each[0] for each in told)
    assert told[0][1:] == [], "no commit mark, and nothing of what the first rank wrote"


def lost(folder: Path, change: Callable[[Path], object]) -> list[Raised]:
    """Save while the second rank's file changes behind its back; return what the ranks raised."""

    def body(rank: int, world: int) -> None:
        def spoilt(publication: Any, *args: Any, **options: Any) -> Any:
            written = write_payloads(publication, *args, **options)
            for each in written if rank == 1 else ():
                change(Path(publication.staging_url) / each.payload.name)
            return written

        with patch.object(session, "write_payloads", spoilt):
            shardckpt.save(sharded(world), folder / "c")

    return raised_everywhere(2, body)


def test_a_file_that_the_first_rank_does_not_see_stops_the_save(tmp_path: Path) -> None:
    for raised in lost(tmp_path, Path.unlink):
        assert "rank 0 does not see the files that rank 1 wrote" in raised.message
    assert everything_below(tmp_path) == []


def test_a_file_that_the_first_rank_sees_cut_short_stops_the_save(tmp_path: Path) -> None:
    for raised in lost(tmp_path, lambda file: os.truncate(file, 5)):
        assert "missing or truncated" in raised.message and "-00001-00.safetensors" in raised.message
    assert everything_below(tmp_path) == []


def test_a_conversion_by_ranks_with_a_disk_each_is_refused_too(tmp_path: Path) -> None:

    torch.save({f"w{n}": torch.full((2000,), float(n)) for n in range(4)}, tmp_path / "src.pt")

    def body(rank: int, world: int) -> None:
        with patch.object(parallel, "JoinedPublication", lambda place: JoinedPublication(f"{tmp_path}/other/{place}")):
            shardckpt.consolidate(tmp_path / "src.pt", tmp_path / "out", max_shard_size=4000, parallel=True)

    first, second = raised_everywhere(2, body)
    assert "rank 1" in first.message
    assert all("sees another folder of this name" in each.message for each in (first, second))
    assert everything_below(tmp_path) == ["src.pt"]
