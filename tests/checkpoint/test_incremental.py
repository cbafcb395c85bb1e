"""A save with a base writes what that lacks and no more; every reader finds the rest; removing a step leaves it."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shardckpt
from shardckpt import Checkpointer
from shardckpt.checkpoint.dedup import BaseDedup
from shardckpt.checkpoint.save import planner, session
from shardckpt.core import fully_shard
from shardckpt.errors import (
    ChecksumError,
    IncompleteError,
    RankError,
    StorageError,
    TargetExistsError,
    UnsupportedError,
    UsageError,
)
from shardckpt.native import commit as native_commit
from shardckpt.native.commit import COMMIT
from shardckpt.native.run_directory import delete_steps, read_run, step_name
from shardckpt.plan import retention
from shardckpt.storage import retry
from shardckpt.storage.fsspec_store import FsspecStore
from shardckpt.storage.local import LocalStore
from shardckpt.storage.remote_publication import RemoteFolder
from shardckpt.storage.resolve_url import open_store
from tests.kit.ranks.harness import run
from tests.kit.stores.bucket import Bucket

NAMES = ("a", "b", "c")
EACH = 40_000
"""Bytes of a tensor."""


def state(a: float = 0.0, b: float = 0.0, c: float = 0.0) -> dict:
    return {"t": {name: torch.full((EACH // 4,), float(value)) for name, value in zip(NAMES, (a, b, c), strict=True)}}


def values(path: object) -> tuple[float, ...]:
    """Return what a step holds; each tensor of one value, or it is a mix."""
    found = shardckpt.load(path)["t"]
    assert all(len(found[name].unique()) == 1 for name in NAMES)
    return tuple(float(found[name][0]) for name in NAMES)


def payload_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix == ".safetensors")


def bases(folder: Path) -> dict[str, int]:
    """Return how many files of each other folder a step refers to."""
    commit = json.loads((folder / COMMIT).read_text().splitlines()[0])
    return {url: len(files) for url, files in commit.get("bases", [])}


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A run of two steps, of which the second differs in `b`."""
    shardckpt.save(state(1, 1, 1), tmp_path / "one", store_digests=True)
    shardckpt.save(state(1, 2, 1), tmp_path / "two", base=tmp_path / "one")
    return tmp_path


class TestWhatIsWritten:
    def test_of_an_unchanged_state_headers_and_a_manifest(self, tmp_path: Path) -> None:
        shardckpt.save(state(), tmp_path / "one", store_digests=True)
        shardckpt.save(state(), tmp_path / "two", base=tmp_path / "one")
        assert payload_bytes(tmp_path / "one") == 4096 + 3 * EACH
        assert payload_bytes(tmp_path / "two") == 4096
        assert sum(file.stat().st_size for file in (tmp_path / "two").iterdir()) < 8192
        assert values(tmp_path / "two") == (0, 0, 0)

    def test_of_a_changed_one_that_tensor(self, two: Path) -> None:
        assert payload_bytes(two / "two") == 4096 + EACH
        assert values(two / "two") == (1, 2, 1)

    def test_in_the_background_too_and_no_more_is_staged(self, two: Path) -> None:
        changing = state(1, 2, 3)
        handle = shardckpt.async_save(changing, two / "three", base=two / "two", max_staging_bytes="1MiB")
        for tensor in changing["t"].values():
            tensor.fill_(99)
        handle.result()
        assert payload_bytes(two / "three") == 4096 + EACH
        assert values(two / "three") == (1, 2, 3)

    def test_everything_where_the_base_has_no_digests(self, tmp_path: Path) -> None:
        shardckpt.save(state(), tmp_path / "one")
        shardckpt.save(state(), tmp_path / "two", base=tmp_path / "one")
        shardckpt.save(state(), tmp_path / "three", base=tmp_path / "two")
        assert [bases(tmp_path / name) for name in ("one", "two", "three")] == [{}, {}, {"../two": 1}]

    def test_a_tensor_of_another_type_or_shape_or_name_is_another(self, tmp_path: Path) -> None:
        zeros = torch.zeros(8, 8)
        shardckpt.save(
            {"a": zeros, "b": zeros + 0, "c": zeros.int(), "d": zeros - 0}, tmp_path / "one", store_digests=True
        )
        other = {"a": zeros.reshape(4, 16), "b": zeros.int(), "e": zeros + 1, "d": zeros.t().clone()}
        shardckpt.save(other, tmp_path / "two", base=tmp_path / "one")
        assert payload_bytes(tmp_path / "two") == 4096 + 3 * 256
        assert shardckpt.load(tmp_path / "two")["a"].shape == (4, 16)

    def test_ranks_write_what_changed_on_each_and_any_world_loads_it(self, tmp_path: Path) -> None:
        def body(rank: int, world: int) -> list[float]:
            torch.manual_seed(0)
            model = fully_shard(nn.Linear(64, 65, bias=False))
            state = {"model": model, "same": torch.arange(1000)}
            shardckpt.save(state, tmp_path / "one", store_digests=True)
            with torch.no_grad():
                if rank == 1:
                    model.weight.to_local()[-1] += 1
            shardckpt.save(state, tmp_path / "two", base=tmp_path / "one")
            shardckpt.async_save(state, tmp_path / "three", base=tmp_path / "two").result()
            return model.weight.full_tensor().tolist()

        found = torch.tensor(run(2, body)[0])
        sizes = sorted(file.stat().st_size for file in (tmp_path / "two").glob("*.safetensors"))
        assert sizes == [4096, 4096 + 32 * 64 * 4], "rank 0 the nest alone, rank 1 its rows"
        assert len(list((tmp_path / "three").glob("*.safetensors"))) == 1
        assert bases(tmp_path / "three") == {"../one": 2, "../two": 1}

        def other(rank: int, world: int) -> bool:
            model = fully_shard(nn.Linear(64, 65, bias=False))
            shardckpt.load({"model": model, "same": torch.zeros(1000, dtype=torch.int64)}, tmp_path / "three")
            return torch.equal(model.weight.full_tensor(), found)

        assert run(3, other) == [True] * 3
        assert torch.equal(shardckpt.load(tmp_path / "three")["model"]["weight"], found)


class TestReferences:
    def test_they_are_direct_however_often_it_is_saved(self, two: Path) -> None:
        shardckpt.save(state(1, 2, 3), two / "three", base=two / "two")
        shardckpt.save(state(1, 2, 3), two / "four", base=two / "three")
        assert bases(two / "four") == {"../one": 1, "../two": 1, "../three": 1}
        (two / "three" / COMMIT).unlink()
        assert values(two / "four") == (1, 2, 3), "no step on the way is looked at, only the files"

    def test_a_folder_of_which_nothing_is_needed_need_not_be_there(self, two: Path) -> None:
        shardckpt.save(state(5, 5, 5), two / "three", base=two / "two")
        assert bases(two / "three") == {}
        shutil.rmtree(two / "one")
        shutil.rmtree(two / "two")
        assert values(two / "three") == (5, 5, 5)

    def test_a_whole_run_can_be_moved(self, two: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
        moved = tmp_path_factory.mktemp("elsewhere") / "run"
        shutil.move(two, moved)
        assert values(moved / "two") == (1, 2, 1)
        assert shardckpt.verify(str(moved / "two")).ok

    def test_a_base_elsewhere_can_be_told_of_after_a_move(self, two: Path, tmp_path_factory) -> None:
        away = tmp_path_factory.mktemp("away")
        shardckpt.save(state(1, 1, 7), away / "three", base=two / "one")
        assert bases(away / "three") == {str(two / "one"): 1}
        os.rename(two / "one", two / "moved")
        with pytest.raises(IncompleteError, match=r"base that is missing.*pass its new path"):
            shardckpt.load(away / "three")
        into = state()
        shardckpt.load(into, away / "three", base=two / "moved")
        assert [float(into["t"][name][0]) for name in NAMES] == [1, 1, 7]
        named = {str(two / "one"): str(two / "moved")}
        assert float(shardckpt.open(away / "three", base=named)["t.a"][0]) == 1
        with pytest.raises(UsageError, match="no such base"):
            shardckpt.load(away / "three", base={"../nothing": "x"})

    def test_what_lies_in_the_step_itself_is_read_without_the_base(self, two: Path) -> None:
        shutil.rmtree(two / "one")
        assert float(shardckpt.open(two / "two")["t.b"][3]) == 2
        into = state()
        shardckpt.load(into, two / "two", base=False)
        assert [float(into["t"][name][0]) for name in NAMES] == [0, 2, 0]
        assert not shardckpt.verify(str(two / "two")).ok

    def test_another_folder_in_the_place_of_the_base_is_noticed(self, two: Path) -> None:
        [file] = (two / "one").glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-EACH] ^= 1
        file.write_bytes(data)
        with pytest.raises(ChecksumError, match="block 0"):
            shardckpt.load(two / "two")
        [problem] = shardckpt.verify(str(two / "two")).problems
        assert f"two/../one/{file.name}" in problem.message
        assert "t.a, t.c" in problem.message

    def test_a_release_that_knows_no_bases_refuses_by_name(self, two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native_commit, "FEATURES", frozenset())
        assert values(two / "one") == (1, 1, 1), "digests alone change nothing for it"
        with pytest.raises(UnsupportedError, match="needs the feature 'bases'"):
            shardckpt.load(two / "two")

    @pytest.mark.parametrize("how", ["gone", "cut"])
    def test_where_the_base_goes_while_the_save_runs_everything_is_written(self, how, two: Path, monkeypatch) -> None:
        write = session.write_payloads
        [payload] = (two / "one").glob("*.safetensors")

        def gone(*given, **named):
            if how == "gone":
                shutil.rmtree(two / "one", ignore_errors=True)
            else:
                os.truncate(payload, payload.stat().st_size - 1)
            return write(*given, **named)

        monkeypatch.setattr(session, "write_payloads", gone)
        shardckpt.save(state(1, 1, 2), two / "three", base=two / "one")
        assert (bases(two / "three"), values(two / "three")) == ({}, (1, 1, 2))

    def test_what_means_nothing_is_refused(self, two: Path) -> None:
        with pytest.raises(UsageError, match="cannot be its own base"):
            shardckpt.save(state(), two / "one", base=two / "one", overwrite=True)
        with pytest.raises(UsageError, match="needs checksums"):
            shardckpt.save(state(), two / "x", base=two / "one", checksums=False)
        with pytest.raises(UsageError, match="needs a base"):
            shardckpt.save(state(), two / "x", trainable_only=True)
        assert values(two / "one") == (1, 1, 1)


class TestVerbs:
    def test_resharding_and_converting_make_it_self_contained(self, two: Path) -> None:
        shardckpt.reshard(str(two / "two"), str(two / "r"), world_size=2)
        shardckpt.convert(str(two / "two"), str(two / "n"), to="native", model_key="t")
        shardckpt.consolidate(str(two / "two"), str(two / "m"), model_key="t")
        assert shardckpt.diff(str(two / "two"), str(two / "r")).equal
        shutil.rmtree(two / "one")
        shutil.rmtree(two / "two")
        assert values(two / "r") == (1, 2, 1)
        assert float(shardckpt.load(two / "n")["model"]["b"][0]) == 2
        assert float(shardckpt.load(two / "m")["a"][0]) == 1

    def test_inspect_shows_every_file(self, two: Path) -> None:
        found = shardckpt.inspect(str(two / "two"))
        assert [file.name.rpartition("/")[0] for file in found.files] == ["", "../one"]
        assert not found.warnings and not found.problems


def saved(ck: Checkpointer, *steps: int, **options: object) -> Checkpointer:
    """Save steps in which `b` is the number of the step and `a` the tens of it."""
    for number in steps:
        ck.save(number, state(number // 10, number, 0), **options)
    return ck


def folder(root: object, step: int) -> Path:
    return Path(str(root)) / step_name(step)


MOMENTS = ("before the manifest", "before the base is looked at", "before the commit")


@pytest.fixture(params=["local", "bucket"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.0)
    Bucket.reset()
    return str(tmp_path) if request.param == "local" else "bucket://b/run"


def meddle(monkeypatch: pytest.MonkeyPatch, moment: str, act: Callable[[], None]) -> None:
    """Do something once in the middle of a save."""
    owner, name = {
        "before the manifest": (session, "encode_manifest"),
        "before the base is looked at": (BaseDedup, "is_kept"),
        "before the commit": (session, "encode_commit"),
    }[moment]
    real, has_acted = getattr(owner, name), False

    def acting(*given: object) -> object:
        nonlocal has_acted
        if not has_acted:
            has_acted = True
            act()
        return real(*given)

    monkeypatch.setattr(owner, name, acting)


def remove_step(root: str, number: int) -> None:
    """Remove a step as retention does in another process."""
    store = open_store(root)
    delete_steps(store, read_run(store), [step_name(number)])


@pytest.mark.parametrize("moment", MOMENTS)
class TestTwoCheckpointers:
    """Another process removes the base of a save that is under way."""

    def test_a_saved_step_has_its_base_or_stands_alone(self, root: str, moment: str, monkeypatch) -> None:
        ck = Checkpointer(root, dedup=True)
        ck.save(1, state(0, 1, 0))
        meddle(monkeypatch, moment, lambda: remove_step(root, 1))
        ck.save(2, state(0, 2, 0))
        assert ck.steps() == (2,)
        assert values(ck.path(2)) == (0, 2, 0)
        steps = {step.number: step for step in read_run(open_store(root)).steps}
        assert bool(steps[2].refers) == (moment == "before the commit")

    def test_so_has_one_whose_base_refers_to_an_older_one(self, root: str, moment: str, monkeypatch) -> None:
        ck = Checkpointer(root, dedup=True)
        ck.save(1, state(0, 1, 0))
        ck.save(2, state(0, 2, 0))
        remove_step(root, 1)
        meddle(monkeypatch, moment, lambda: remove_step(root, 2))
        ck.save(3, state(0, 2, 3))
        assert (ck.steps(), values(ck.path(3))) == ((3,), (0, 2, 3))

    def test_one_in_the_background_fails_or_has_its_base(self, root: str, moment: str, monkeypatch) -> None:
        ck = Checkpointer(root, dedup=True)
        ck.save(1, state(0, 1, 0))
        meddle(monkeypatch, moment, lambda: remove_step(root, 1))
        handle = ck.async_save(2, state(0, 2, 0))
        if moment == "before the commit":
            handle.result()
            assert values(ck.path(2)) == (0, 2, 0)
        else:
            with pytest.raises(IncompleteError, match=r"base was removed .* during the save"):
                handle.result()
            assert ck.steps() == ()

    def test_so_it_is_on_two_ranks(self, tmp_path: Path, moment: str, monkeypatch) -> None:
        def body(rank: int, world: int) -> tuple:
            ck = Checkpointer(tmp_path, dedup=True)
            ck.save(1, state(0, 1, 0))
            if rank == 0:
                meddle(monkeypatch, moment, lambda: remove_step(str(tmp_path), 1))
            ck.save(2, state(0, 2, 0))
            return ck.steps()

        assert run(2, body) == [(2,)] * 2
        assert values(folder(tmp_path, 2)) == (0, 2, 0)


class TestTheBaseIsOverwritten:
    """Another process overwrites the base of a save that is under way."""

    @pytest.mark.parametrize("moment", MOMENTS)
    def test_a_saved_step_has_its_base_or_stands_alone(self, root: str, moment: str, monkeypatch) -> None:
        ck = Checkpointer(root, dedup=True)
        ck.save(1, state(0, 1, 0))
        meddle(monkeypatch, moment, lambda: shardckpt.save(state(7, 7, 7), ck.path(1), overwrite=True))
        ck.save(2, state(0, 2, 0))
        assert (values(ck.path(1)), values(ck.path(2))) == ((7, 7, 7), (0, 2, 0))

    def test_so_has_one_that_is_saved_after_the_references_were_listed(self, tmp_path: Path, monkeypatch) -> None:
        """On a disk the old step still has its name then."""
        ck = Checkpointer(tmp_path, dedup=True)
        ck.save(1, state(0, 1, 0))
        find = planner.read_referred_files

        def save_after(url: str) -> frozenset[str]:
            monkeypatch.setattr(planner, "read_referred_files", find)
            found = find(url)
            Checkpointer(tmp_path, dedup=True).save(2, state(0, 2, 0))
            return found

        monkeypatch.setattr(planner, "read_referred_files", save_after)
        shardckpt.save(state(7, 7, 7), ck.path(1), overwrite=True)
        assert (values(ck.path(1)), values(ck.path(2))) == ((7, 7, 7), (0, 2, 0))

    def test_so_has_one_on_a_store_before_the_old_files_are_removed(self, monkeypatch) -> None:
        """On a store without rename the old manifest is still there when the references were listed."""
        Bucket.reset()
        ck = Checkpointer("bucket://b/run", dedup=True)
        ck.save(1, state(0, 1, 0))
        unneeded: list[str] = []
        find = RemoteFolder._list_unneeded

        def overwrite_but_remove_later() -> None:
            with monkeypatch.context() as patch:
                patch.setattr(RemoteFolder, "_list_unneeded", lambda *given: unneeded.extend(find(*given)) or [])
                shardckpt.save(state(7, 7, 7), ck.path(1), overwrite=True)

        meddle(monkeypatch, "before the manifest", overwrite_but_remove_later)
        ck.save(2, state(0, 2, 0))
        for name in unneeded:
            open_store(ck.path(1)).delete(name)
        assert any(name.endswith(".safetensors") for name in unneeded)
        assert (values(ck.path(1)), values(ck.path(2))) == ((7, 7, 7), (0, 2, 0))


@pytest.fixture
def ck(monkeypatch: pytest.MonkeyPatch) -> Checkpointer:
    """A run in a bucket, whose requests are repeated at once."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    Bucket.reset()
    return Checkpointer("bucket://b/run", dedup=True)


class TestASaveFailsThatAnotherJobHasSeen:
    """Its `COMMIT` was there for a while: the other job's next step refers to its files."""

    def save_next(self, ck: Checkpointer, **options: int) -> None:
        """Save step 2 as the other job, before another request of the first one."""
        Bucket.fault = Bucket.answer = None
        Checkpointer(ck.root, dedup=True, **options).save(2, state(0, 2, 0))

    def test_they_stay_though_the_step_was_removed_meanwhile(self, ck: Checkpointer) -> None:
        def lose_answer(count: int, verb: str, path: str) -> None:
            if path.endswith(f"{step_name(1)}/{COMMIT}"):
                Bucket.fault, Bucket.answer = remove_step, None
                raise ConnectionResetError

        def remove_step(count: int, verb: str, path: str) -> None:
            if verb == "get":
                self.save_next(ck, keep_last=1)

        Bucket.answer = lose_answer
        with pytest.raises(TargetExistsError, match="meanwhile"):
            ck.save(1, state(0, 1, 0))
        assert (ck.steps(), values(ck.path(2))) == ((2,), (0, 2, 0))
        assert not [name for name in Bucket.objects if name.startswith(f"b/run/{step_name(1)}/") and "manifest" in name]

    def test_they_stay_though_the_save_removes_its_step(self, ck: Checkpointer) -> None:
        def refuse(count: int, verb: str, path: str) -> None:
            if path.endswith(f"{step_name(1)}/{COMMIT}"):
                self.save_next(ck)
                raise PermissionError("denied")

        Bucket.answer = refuse
        with pytest.raises(StorageError, match="denied"):
            ck.save(1, state(0, 1, 0))
        assert (ck.steps(), values(ck.path(2))) == ((2,), (0, 2, 0))


def save_earlier(ck: Checkpointer, saves: int) -> None:
    """Save step 1 once less than `saves`: the test makes the last of them."""
    for number in range(1, saves):
        ck.save(1, state(0, number, 0), overwrite=True)


class TestTheRequestForACommitIsRepeated:
    """Its answer was lost, and another job's retention removed the step before the request was repeated."""

    @pytest.mark.parametrize("saves", [1, 2])
    def test_it_leaves_no_step_without_files(self, ck: Checkpointer, saves: int) -> None:
        save_earlier(ck, saves)

        def lose_answer(count: int, verb: str, path: str) -> None:
            if verb == "put" and path.endswith(f"{step_name(1)}/{COMMIT}"):
                Bucket.answer = None
                Checkpointer(ck.root, keep_last=1).save(2, state(7, 7, 7))
                raise ConnectionResetError

        Bucket.answer = lose_answer
        with pytest.raises(StorageError, match="another process removed the files"):
            ck.save(1, state(0, 5, 0), overwrite=True)
        assert (ck.steps(), values(ck.path(2))) == ((2,), (7, 7, 7))
        assert not [name for name in Bucket.objects if name.endswith(f"{step_name(1)}/{COMMIT}")]

    def test_it_succeeds_while_its_files_are_there(self, ck: Checkpointer) -> None:
        def lose_answer(count: int, verb: str, path: str) -> None:
            if verb == "put" and path.endswith(COMMIT):
                Bucket.answer = None
                raise ConnectionResetError

        save_earlier(ck, 2)
        Bucket.answer = lose_answer
        ck.save(1, state(0, 5, 0), overwrite=True)
        assert Bucket.answer is None
        assert values(ck.path(1)) == (0, 5, 0)


class TestTheRequestForACommitComesLate:
    """Files of the save are gone when it succeeds; the save looks for them behind it."""

    @pytest.mark.parametrize("saves", [1, 2])
    def test_it_fails_if_the_request_comes_after_another_save_of_the_step_was_removed(
        self, ck: Checkpointer, saves: int
    ) -> None:
        save_earlier(ck, saves)

        def come_late(count: int, verb: str, path: str) -> None:
            if verb == "put" and path.endswith(f"{step_name(1)}/{COMMIT}"):
                Bucket.fault = None
                other = Checkpointer(ck.root, keep_last=1)
                other.save(1, state(6, 6, 6), overwrite=True)
                other.save(2, state(7, 7, 7))

        Bucket.fault = come_late
        with pytest.raises(StorageError, match=r"step-00000001/COMMIT: another process removed the files"):
            ck.save(1, state(0, 5, 0), overwrite=True)
        assert (ck.steps(), values(ck.path(2))) == ((2,), (7, 7, 7))
        assert not [name for name in Bucket.objects if name.startswith(f"b/run/{step_name(1)}/")]

    def test_it_fails_if_a_file_of_the_save_is_gone_behind_it(self, ck: Checkpointer) -> None:
        def remove_payload(count: int, verb: str, path: str) -> None:
            if verb == "put" and path.endswith(COMMIT):
                Bucket.fault = None
                del Bucket.objects[min(name for name in Bucket.objects if name.endswith(".safetensors"))]

        Bucket.fault = remove_payload
        with pytest.raises(StorageError, match=r"another process removed the files.*found no .*safetensors"):
            ck.save(1, state(0, 5, 0))
        assert not Bucket.objects

    @pytest.mark.parametrize("verb", ["list", "head"])
    def test_it_succeeds_if_the_store_does_not_answer_behind_it(self, ck: Checkpointer, verb: str) -> None:
        def refuse(count: int, asked: str, path: str) -> None:
            if asked == verb:
                raise PermissionError("denied")

        def begin_to_refuse(count: int, verb: str, path: str) -> None:
            if verb == "put" and path.endswith(COMMIT):
                Bucket.fault = refuse

        Bucket.answer = begin_to_refuse
        ck.save(1, state(0, 5, 0))
        Bucket.fault = Bucket.answer = None
        assert values(ck.path(1)) == (0, 5, 0)


class TestWhatOtherFoldersOfTheRunReferTo:
    @pytest.mark.parametrize("name", ["best", "kept/best"])
    def test_it_stays_whatever_they_are_called(self, name: str, tmp_path: Path, monkeypatch) -> None:
        ck = saved(Checkpointer(tmp_path, keep_last=1, dedup=True), 1)
        shardckpt.save(state(0, 1, 0), tmp_path / name, base=ck.path(1))
        ck.save(2, state(5, 5, 5), base=None)
        assert (ck.steps(), values(tmp_path / name)) == ((2,), (0, 1, 0))
        monkeypatch.setattr(retention, "ORPHAN_TTL_S", -1.0)
        assert shardckpt.prune(str(tmp_path), keep_last=1, unfinished_for=0).orphans == ()
        ck.save(3, state(5, 5, 5), base=None)
        assert values(tmp_path / name) == (0, 1, 0)
        shutil.rmtree(tmp_path / name)
        assert shardckpt.prune(str(tmp_path), unfinished_for=0).orphans == (step_name(1),)

    @pytest.mark.parametrize("name", ["best/ema", f"{step_name(2)}/ema", f"{step_name(1)}/ema"])
    @pytest.mark.parametrize("store", ["disk", "memory", "bucket"])
    def test_a_checkpoint_inside_another_one_keeps_its_base(self, store: str, name: str, tmp_path: Path) -> None:
        Bucket.reset()
        root = {"disk": str(tmp_path), "memory": f"memory://{tmp_path.name}/{len(name)}", "bucket": "bucket://b/run"}
        ck = Checkpointer(root[store], keep_last=2)
        ck.save(1, state(0, 1, 0), store_digests=True)
        ck.save(2, state(5, 5, 5))
        shardckpt.save(state(9, 9, 9), f"{ck.root}/best")
        shardckpt.save(state(0, 1, 0), f"{ck.root}/{name}", base=ck.path(1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ck.save(3, state(6, 6, 6))
            ck.save(4, state(6, 6, 6))
        assert (ck.steps(), values(f"{ck.root}/{name}")) == ((3, 4), (0, 1, 0))

    def test_of_a_step_that_is_a_link_the_link_goes(self, tmp_path: Path) -> None:
        ck = saved(Checkpointer(tmp_path, keep_last=1), 1)
        folder(tmp_path, 1).rename(tmp_path / "mine")
        folder(tmp_path, 1).symlink_to("mine")
        saved(ck, 2)
        assert (ck.steps(), sorted(os.listdir(tmp_path))) == ((2,), ["mine", step_name(2)])
        assert values(tmp_path / "mine") == (0, 1, 0)

    def test_of_two_folders_of_one_step_both_go(self, tmp_path: Path) -> None:
        ck = saved(Checkpointer(tmp_path, keep_last=1), 1)
        shutil.copytree(folder(tmp_path, 1), tmp_path / "step-1")
        saved(ck, 2)
        assert os.listdir(tmp_path) == [step_name(2)]
        shutil.copytree(folder(tmp_path, 2), tmp_path / "step-2")
        shutil.copytree(folder(tmp_path, 2), folder(tmp_path, 3))
        done = shardckpt.prune(str(tmp_path), keep_last=1)
        assert ([step.number for step in done.removed], done.incomplete) == ([2], ())
        assert os.listdir(tmp_path) == [step_name(3)]


class TestCheckpointer:
    def test_each_step_writes_what_changed_since_the_one_before(self, tmp_path: Path) -> None:
        ck = saved(Checkpointer(tmp_path, dedup=True), 1, 2, 3)
        assert [payload_bytes(folder(tmp_path, n)) for n in (1, 2, 3)] == [4096 + 3 * EACH] + [4096 + EACH] * 2
        assert bases(folder(tmp_path, 3)) == {f"../{step_name(1)}": 1}
        ck.async_save(4, state(0, 3, 0)).result()
        assert payload_bytes(folder(tmp_path, 4)) == 4096
        assert ck.restore(state()) == 4
        assert values(ck.path(4)) == (0, 3, 0)

    def test_after_a_restore_the_loaded_step_is_the_base_and_not_a_newer_one(self, tmp_path: Path) -> None:
        saved(Checkpointer(tmp_path, dedup=True), 1, 2)
        again = Checkpointer(tmp_path, dedup=True)
        assert again.restore(state(), step=1) == 1
        again.save(3, state(0, 2, 0))
        assert bases(folder(tmp_path, 3)) == {f"../{step_name(1)}": 1}, "b of step 2 is not read"
        again.save(4, state(0, 2, 0))
        assert bases(folder(tmp_path, 4)).keys() == {f"../{step_name(1)}", f"../{step_name(3)}"}

    def test_a_removed_step_leaves_what_others_refer_to_until_they_go(self, tmp_path: Path) -> None:
        ck = saved(Checkpointer(tmp_path, dedup=True, keep_last=2), 1, 2, 3)
        assert ck.steps() == (2, 3)
        assert [file.suffix for file in folder(tmp_path, 1).iterdir()] == [".safetensors"]
        assert values(ck.path(3)) == (0, 3, 0)
        listed = shardckpt.ls(str(tmp_path))
        assert ([step.number for step in listed.complete], listed.incomplete) == ([2, 3], ())
        saved(ck, 10, 11)
        assert values(ck.path(11)) == (1, 11, 0), "c is still that of step 1"
        assert folder(tmp_path, 1).exists()
        ck.save(12, state(1, 12, 5))
        ck.save(13, state(1, 13, 5))
        assert sorted(os.listdir(tmp_path)) == [step_name(n) for n in (10, 12, 13)]
        assert values(ck.path(13)) == (1, 13, 5)

    def test_garbage_of_a_day_is_not_what_is_referred_to(self, tmp_path: Path) -> None:
        saved(Checkpointer(tmp_path, dedup=True, keep_last=1), 1, 2)
        assert shardckpt.prune(str(tmp_path), unfinished_for=0).orphans == ()
        assert values(folder(tmp_path, 2)) == (0, 2, 0)
        (folder(tmp_path, 1) / "0mwqkzsavex3s13-00000-00.safetensors").write_bytes(b"of a dead save")
        assert shardckpt.prune(str(tmp_path), unfinished_for=0).orphans == (step_name(1),)
        assert values(folder(tmp_path, 2)) == (0, 2, 0)
        assert len(list(folder(tmp_path, 1).iterdir())) == 1

    def test_a_step_whose_base_is_gone_is_not_complete(self, tmp_path: Path) -> None:
        ck = saved(Checkpointer(tmp_path, dedup=True), 1, 2)
        ck.save(3, state(9, 9, 9))
        [file] = folder(tmp_path, 1).glob("*.safetensors")
        file.unlink()
        assert ck.steps() == (3,)
        faults = [step.fault for step in shardckpt.ls(str(tmp_path)).incomplete]
        assert "files in its base are missing" in faults[1]

    def test_nor_is_one_of_which_a_file_of_the_base_was_cut(self, tmp_path: Path) -> None:
        ck = saved(Checkpointer(tmp_path, dedup=True), 1, 2)
        [file] = folder(tmp_path, 1).glob("*.safetensors")
        os.truncate(file, file.stat().st_size - 1)
        assert ck.steps() == ()
        fault = shardckpt.ls(str(tmp_path)).incomplete[1].fault
        assert "files in its base are missing or end early" in fault
        assert file.name in fault

    def test_a_base_that_stays_keeps_its_own_files_when_nothing_refers_to_them_any_more(self, tmp_path: Path) -> None:
        ck = saved(Checkpointer(tmp_path, dedup=True, keep_last=1, keep_every=10), 10, 11)
        ck.save(12, state(5, 5, 5))
        assert ck.steps() == (10, 12)
        assert all(shardckpt.verify(ck.path(step)).ok for step in ck.steps())
        assert values(ck.path(10)) == (1, 10, 0)

    def test_saving_where_others_refer_to_keeps_what_they_need(self, tmp_path: Path) -> None:
        ck = saved(Checkpointer(tmp_path, dedup=True), 1, 2, 3)
        ck.save(1, state(7, 7, 7), overwrite=True)
        assert [values(ck.path(n)) for n in (1, 2, 3)] == [(7, 7, 7), (0, 2, 0), (0, 3, 0)]
        again = saved(Checkpointer(tmp_path, dedup=True, keep_last=1), 4)
        assert again.steps() == (4,)
        assert sorted(os.listdir(tmp_path)) == [step_name(1), step_name(4)]
        again.save(1, state(8, 8, 8))
        assert values(ck.path(4)) == (0, 4, 0)
        again.save(5, state(8, 8, 8))
        assert values(ck.path(5)) == (8, 8, 8)

    def test_a_step_can_be_written_whole_in_between(self, tmp_path: Path) -> None:
        ck = saved(Checkpointer(tmp_path, dedup=True), 1, 2)
        ck.save(3, state(0, 3, 0), base=None)
        saved(ck, 4)
        assert [payload_bytes(folder(tmp_path, n)) for n in (3, 4)] == [4096 + 3 * EACH, 4096 + EACH]
        assert bases(folder(tmp_path, 4)) == {f"../{step_name(3)}": 1}

    def test_saves_in_the_background_one_after_the_other_never_lose_their_base(self, tmp_path: Path) -> None:
        ck = Checkpointer(tmp_path, dedup=True, keep_last=1)
        for number in range(1, 9):
            handle = ck.async_save(number, state(number // 3, number, 0))
        handle.result()
        assert ck.steps() == (8,)
        assert values(ck.path(8)) == (2, 8, 0)
        assert len(os.listdir(tmp_path)) <= 3

    def test_a_damaged_newest_step_is_no_base(self, tmp_path: Path) -> None:
        ck = saved(Checkpointer(tmp_path, dedup=True), 1, 2)
        [manifest] = folder(tmp_path, 2).glob("*.json")
        manifest.write_bytes(manifest.read_bytes()[::-1])
        saved(ck, 3)
        assert bases(folder(tmp_path, 3)) == {f"../{step_name(1)}": 1}

    def test_in_a_bucket_as_on_a_disk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.0)
        Bucket.reset()
        root = "bucket://b/run"
        ck = saved(Checkpointer(root, dedup=True, keep_last=1), 1, 2, 3)
        assert values(ck.path(3)) == (0, 3, 0)
        assert shardckpt.verify(ck.path(3)).ok
        assert [step.is_base for step in read_run(FsspecStore(root)).steps] == [True, False]
        ck.save(1, state(7, 7, 7))
        assert values(ck.path(3)) == (0, 3, 0)
        assert values(ck.path(1)) == (7, 7, 7)
        Bucket.reset()

    def test_what_the_first_rank_cannot_read_is_told_to_all(self, two: Path) -> None:
        def body(rank: int, world: int) -> str:
            with pytest.raises((UsageError, RankError)) as caught:
                shardckpt.save(state(), two / "new", base=two / "nowhere")
            return str(caught.value)

        assert all("there is nothing here" in text for text in run(2, body))

    def test_links_out_of_the_run_are_no_matter(self, tmp_path: Path, tmp_path_factory) -> None:
        away = tmp_path_factory.mktemp("away")
        shardckpt.save(state(), away / "base", store_digests=True)
        (tmp_path / "base").symlink_to(away / "base")
        shardckpt.save(state(), tmp_path / step_name(1), base=tmp_path / "base")
        assert read_run(LocalStore(str(tmp_path))).steps[0].is_complete
        assert values(tmp_path / step_name(1)) == (0, 0, 0)
