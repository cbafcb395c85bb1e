"""A save that is killed or fails at any storage operation: a reader sees the old or the new, bit for bit."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import shardckpt
from shardckpt.errors import IncompleteError, ShardckptError, SourceNotFoundError, StorageError
from shardckpt.native.commit import COMMIT
from shardckpt.offline.verify import verify
from shardckpt.storage import local, local_publication, retry
from shardckpt.storage.local_publication import LocalPublication
from tests.kit.ranks.forks import is_killed
from tests.kit.stores.bucket import Bucket, Dead, break_at, commit_comes_first, mend
from tests.kit.stores.clocks import days_pass
from tests.kit.stores.disk import failing_at, killing_at
from tests.kit.stores.faulty import DROP, LOST, Fault, Faulty


def state_of(seed: int) -> dict:
    torch.manual_seed(seed)
    model = nn.Linear(40, 30)
    optim = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.rand(2, 40)).sum().backward()
    optim.step()
    return {"model": model, "optim": optim, "step": seed, "long": torch.rand(40_000)}


def loaded(path: Path | str) -> int | None:
    """Return which state a reader gets, None where it gets none; nothing but a whole one passes."""
    try:
        found = shardckpt.load(path)
    except SourceNotFoundError:
        return None
    except IncompleteError as error:  # files of a first save that no COMMIT names
        assert "never committed" in str(error)
        return None
    expected = state_of(found["step"])
    assert torch.equal(found["model"]["weight"], expected["model"].weight)
    assert torch.equal(found["long"], expected["long"])
    momentum = expected["optim"].state[expected["model"].bias]["momentum_buffer"]
    assert torch.equal(found["optim"]["state"]["bias"]["momentum_buffer"], momentum)
    return int(found["step"])


def seen(path: Path | str) -> int | None:
    """Return what `loaded` does, where every byte is as it was written."""
    found = loaded(path)
    assert found is None or verify(str(path)).ok
    return found


Prepare = Callable[[Path], None]
Save = Callable[..., None]


def first(path: Path) -> None:
    del path


def second(path: Path) -> None:
    shardckpt.save(state_of(1), path)


def in_the_background(state: dict, path: Path | str, *, overwrite: bool) -> None:
    handle = shardckpt.async_save(state, path, overwrite=overwrite)
    for value in [*state["model"].parameters(), state["long"]]:
        value.data.fill_(99)
    handle.result()


def as_a_step(state: dict, path: Path | str, *, overwrite: bool) -> None:
    """Save as the next step of the run that `path` is, in the background; the step before goes."""
    assert overwrite
    handle = shardckpt.Checkpointer(path, keep_last=1).async_save(state["step"], state)
    state["long"].fill_(99)
    handle.result()


def newest(path: Path | str) -> int | None:
    """Return which state the newest complete step of a run holds; every complete one holds its own."""
    steps = [(each.number, shardckpt.Checkpointer(path).path(each.number)) for each in shardckpt.ls(path).complete]
    assert [seen(place) for _, place in steps] == [number for number, _ in steps]
    return steps[-1][0] if steps else None


def killed_at(path: Path, k: int, save: Save, value: int = 2) -> bool:
    """Save in a child that is killed before its k-th change of the disk; tell whether it was."""

    def work() -> None:
        torch.set_num_threads(1)  # the parent's other ones did not come along

        def tear(name: str, args: tuple) -> None:
            if name == "write":
                os.pwrite(args[0], args[1][: len(args[1]) // 2], os.lseek(args[0], 0, os.SEEK_CUR))

        with killing_at(k, tear):
            save(state_of(value), path, overwrite=True)

    return is_killed(work)


def prepared_paths(folder: Path, prepare: Prepare) -> Iterator[tuple[int, Path]]:
    """Yield 1, 2, ... without end, each with a path of its own for a checkpoint."""
    for k in itertools.count(1):
        path = folder / str(k) / "c"
        path.parent.mkdir(parents=True)
        prepare(path)
        yield k, path


def kill_matrix(folder: Path, prepare: Prepare, allowed: set[int | None], save: Save = shardckpt.save) -> int:
    """Kill a save at every operation; return how many there were."""
    for k, path in prepared_paths(folder, prepare):
        was_killed = killed_at(path, k, save)
        found = seen(path)
        assert found in (allowed if was_killed else {2}), f"a kill at operation {k} leaves {found}"
        shardckpt.save(state_of(3), path, overwrite=True)
        assert loaded(path) == 3, f"the save after a kill at operation {k} failed"
        assert os.listdir(path.parent) == ["c"], f"a kill at operation {k} left something for good"
        if not was_killed:
            return k - 1
    raise AssertionError("unreachable")


def fault_matrix(folder: Path, prepare: Prepare, allowed: set[int | None]) -> int:
    """Let every operation fail in turn; return how many there were."""
    for k, path in prepared_paths(folder, prepare):
        failed = False
        with failing_at(k) as count:
            try:
                shardckpt.save(state_of(2), path, overwrite=True)
            except StorageError:
                failed = True
        found = seen(path)
        assert found in ({2, *allowed} if failed else {2}), f"operation {k} broke, error: {failed}: {found}"
        shardckpt.save(state_of(3), path, overwrite=True)
        assert seen(path) == 3
        assert os.listdir(path.parent) == ["c"]
        if count() < k:
            return k - 1
    raise AssertionError("unreachable")


CASES = [pytest.param(first, {None, 2}, id="first"), pytest.param(second, {1, 2}, id="overwrite")]


@pytest.mark.parametrize(("prepare", "allowed"), CASES)
def test_a_kill_leaves_the_old_or_the_new_and_the_next_save_succeeds(tmp_path: Path, prepare, allowed) -> None:
    operations = kill_matrix(tmp_path, prepare, allowed)
    print(f"killed at each of {operations} operations")
    assert operations >= 20


@pytest.mark.parametrize(("prepare", "allowed"), CASES)
def test_so_does_a_kill_while_a_save_goes_on_in_the_background(tmp_path: Path, prepare, allowed) -> None:
    operations = kill_matrix(tmp_path, prepare, allowed, in_the_background)
    print(f"killed at each of {operations} operations")
    assert operations >= 20


@pytest.mark.parametrize(("prepare", "allowed"), CASES)
def test_a_failing_operation_is_told_and_leaves_the_old_or_the_new(tmp_path: Path, prepare, allowed) -> None:
    operations = fault_matrix(tmp_path, prepare, allowed)
    print(f"failed at each of {operations} operations")
    assert operations >= 20


class TestWithoutExchange:
    """NFS, CephFS, SMB and sshfs do not exchange folders: the files of a save are put into the old folder."""

    @pytest.fixture(autouse=True)
    def without_exchange(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(local_publication, "exchange", lambda *_: False)

    @pytest.mark.parametrize("save", [shardckpt.save, in_the_background], ids=["save", "async"])
    def test_a_kill_leaves_the_old_or_the_new_and_the_next_save_succeeds(self, tmp_path: Path, save: Save) -> None:
        operations = kill_matrix(tmp_path, second, {1, 2}, save)
        print(f"killed at each of {operations} operations")
        assert operations >= 20

    def test_a_failing_operation_is_told_and_leaves_the_old_or_the_new(self, tmp_path: Path) -> None:
        operations = fault_matrix(tmp_path, second, {1, 2})
        print(f"failed at each of {operations} operations")
        assert operations >= 20

    def test_a_step_that_is_saved_again_can_be_restored_after_a_kill_at_any_moment(self, tmp_path: Path) -> None:
        def save_again(state: dict, path: Path, *, overwrite: bool) -> None:
            shardckpt.Checkpointer(path).save(7, state, overwrite=overwrite)

        for k in itertools.count(1):
            run = tmp_path / str(k)
            save_again(state_of(1), run, overwrite=False)
            was_killed = killed_at(run, k, save_again)
            into = state_of(3)
            assert shardckpt.Checkpointer(run).restore(into) == 7, f"a kill at operation {k}"
            assert into["step"] in ({1, 2} if was_killed else {2})
            assert torch.equal(into["long"], state_of(into["step"])["long"])
            if not was_killed:
                return

    def test_a_copy_over_a_step_leaves_the_old_or_the_new(self, tmp_path: Path) -> None:
        def put(value: float, path: Path) -> None:
            shardckpt.save({"w": torch.full((9,), value)}, path)

        def copy_over(_state: dict, path: Path, *, overwrite: bool) -> None:
            shardckpt.copy(tmp_path / "new", path, overwrite=overwrite)

        put(2.0, tmp_path / "new")
        for k in itertools.count(1):
            run = tmp_path / str(k)
            put(1.0, run / "step-1")
            was_killed = killed_at(run / "step-1", k, copy_over)
            assert [step.number for step in shardckpt.ls(run).complete] == [1], f"a kill at operation {k}"
            assert shardckpt.load(run / "step-1")["w"][0] in ((1, 2) if was_killed else (2,))
            if not was_killed:
                return

    def test_what_a_killed_save_left_in_the_folder_goes_when_it_is_old(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "c"
        second(path)
        shardckpt.save(state_of(2), path, overwrite=True)
        complete = len(os.listdir(path))
        assert killed_at(path, 16, shardckpt.save)
        shardckpt.save(state_of(3), path, overwrite=True)
        assert len(os.listdir(path)) > complete, "the files may be of a save under way"
        days_pass(monkeypatch)
        shardckpt.save(state_of(4), path, overwrite=True)
        assert loaded(path) == 4 and len(os.listdir(path)) == complete


def test_a_kill_while_a_step_is_saved_and_the_one_before_removed_leaves_one_of_them(tmp_path: Path) -> None:
    k, was_killed, before = 0, True, 1
    as_a_step(state_of(before), tmp_path, overwrite=True)
    while was_killed:
        k += 1
        was_killed = killed_at(tmp_path, k, as_a_step, before + 1)
        found = newest(tmp_path)
        assert found in ({before, before + 1} if was_killed else {before + 1}), f"a kill at operation {k}: {found}"
        before = found
    print(f"killed at each of {k - 1} operations")
    assert k > 30


# A store without rename: replacing COMMIT is the only flip.

TARGET = "bucket://b/c"


def fails(save: Save, target: str) -> bool:
    """Save over what is there; return True if that raises."""
    try:
        save(state_of(2), target, overwrite=True)
    except (Dead, ShardckptError):
        return True
    return False


def bucket_matrix(how: str, allowed: set[int | None], save: Save = shardckpt.save) -> int:
    """Break every request of a save in turn; return how many there were."""
    k = 0
    while True:
        k += 1
        Bucket.reset()
        if 1 in allowed:
            shardckpt.save(state_of(1), TARGET)
        break_at(k, how)
        failed = fails(save, TARGET)
        made = mend()
        found = seen(TARGET)
        assert found in (allowed if failed else {2}), f"request {k} {how}: a reader sees {found}"
        assert how != "error" or found is not None or not Bucket.objects, f"request {k} left {sorted(Bucket.objects)}"
        shardckpt.save(state_of(3), TARGET, overwrite=True)
        assert seen(TARGET) == 3
        assert len(Bucket.objects) <= 5, f"the save after request {k} {how} left {sorted(Bucket.objects)}"
        if made < k:
            return k - 1


@pytest.fixture
def bucket(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.0)
    yield
    Bucket.reset()


@pytest.mark.parametrize("how", ["killed", "unheard", "error"])
@pytest.mark.parametrize("allowed", [{None, 2}, {1, 2}], ids=["first", "overwrite"])
@pytest.mark.parametrize("save", [shardckpt.save, in_the_background], ids=["save", "async"])
def test_without_rename_a_reader_sees_the_old_or_the_new(bucket, how: str, allowed, save: Save) -> None:
    requests = bucket_matrix(how, allowed, save)
    print(f"{how} at each of {requests} requests")
    assert requests >= 7


def last_step(path: Path | str) -> int | None:
    """Return which state the newest complete step of a run holds."""
    steps = shardckpt.ls(path).complete
    return loaded(shardckpt.Checkpointer(path).path(steps[-1].number)) if steps else None


def request_matrix(
    arm: Callable[[int], None], heal: Callable[[], int], place: str, save: Save, look: Look, stride: int = 1
) -> int:
    """Break every request of a save over another one in turn; return how many there were.

    Args:
        arm: Breaks the store at its k-th request.
        heal: Mends it; returns how many requests came.
        place: A folder for the places to save to.
        save: Saves there.
        look: Returns which state a reader sees there.
        stride: Break every so many requests alone.
    """
    k, made = 1 - stride, 1
    while made >= k:
        k += stride
        target = f"{place}/{k}"
        save(state_of(1), target, overwrite=True)
        arm(k)
        failed = fails(save, target)
        made = heal()
        found = look(target)
        assert found in ({1, 2} if failed else {2}), f"request {k}: a reader sees {found}"
        if k % 3 == 0:
            save(state_of(3), target, overwrite=True)
            assert look(target) == 3, f"the save after request {k} failed"
    return made


Look = Callable[[str], int | None]


@pytest.mark.filterwarnings("ignore:step .* is saved, but old ones")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("how", ["killed", "unheard", "error"])
def test_without_rename_steps_are_saved_and_removed_so_too(bucket, how: str) -> None:
    Bucket.reset()
    requests = request_matrix(lambda k: break_at(k, how), mend, "bucket://b", as_a_step, newest)
    print(f"{how} at each of {requests} requests")
    assert requests >= 15


# S3 itself: at the k-th request the connection breaks, before or after it took effect, and stays broken.


def s3_matrix(s3: Faulty, place: str, save: Save, look: Look, stride: int) -> int:
    def arm(k: int) -> None:
        def rule(number: int, method: str, path: str) -> Fault:
            return None if number < k else LOST if number == k and k // stride % 2 else DROP

        s3.arm(rule)

    def heal() -> int:
        made = len(s3.requests)
        s3.heal()
        return made

    return request_matrix(arm, heal, place, save, look, stride)


@pytest.mark.shown_by("::test_without_rename_steps_are_saved_and_removed_so_too", "steps")
@pytest.mark.shown_by("[overwrite]", "async")
@pytest.mark.filterwarnings("ignore:step .* is saved, but old ones")
@pytest.mark.usefixtures("s3_driver")
@pytest.mark.parametrize(
    ("save", "look", "stride"),
    [(shardckpt.save, loaded, 3), (in_the_background, loaded, 3), (as_a_step, last_step, 7)],
    ids=["overwrite", "async", "steps"],
)
def test_on_s3_a_reader_sees_the_old_or_the_new(
    s3: Faulty, s3_bucket: str, save: Save, look: Look, stride: int
) -> None:
    requests = s3_matrix(s3, f"{s3_bucket}/c", save, look, stride)
    print(f"cut off at every {stride}. of {requests} requests, in turn before and after it took effect")
    assert requests >= 10


@pytest.mark.usefixtures("s3_driver")
def test_on_s3_a_first_save_is_there_or_not(s3: Faulty, s3_bucket: str) -> None:
    k, made = 0, 1
    while made >= k:
        k += 1
        place, failed = f"{s3_bucket}/{k}", False
        s3.arm(lambda number, method, path, k=k: None if number < k else LOST if number == k and k % 2 else DROP)
        try:
            shardckpt.save(state_of(2), place)
        except StorageError:
            failed = True
        made = len(s3.requests)
        s3.heal()
        assert loaded(place) in ({None, 2} if failed else {2}), f"request {k}"
    print(f"cut off at each of {k - 1} requests")
    assert k > 8


@pytest.mark.shown_by("::test_a_kill_leaves_the_old_or_the_new_and_the_next_save_succeeds")
class TestMutants:
    """The matrices would be worth nothing if they stayed green for these."""

    def test_writing_in_place_turns_the_kill_matrix_red(self, tmp_path: Path, monkeypatch) -> None:
        def in_place(self, name: str):
            return local.LocalStore(self.target).create(name)

        monkeypatch.setattr(LocalPublication, "create", in_place)
        with pytest.raises((AssertionError, ShardckptError)):
            kill_matrix(tmp_path, second, {1, 2})

    def test_an_error_that_nobody_hears_turns_the_fault_matrix_red(self, tmp_path: Path, monkeypatch) -> None:
        whole = local.LocalWriter.close

        def deaf(self) -> None:
            try:
                whole(self)
            except StorageError:
                return

        monkeypatch.setattr(local.LocalWriter, "close", deaf)
        with pytest.raises((AssertionError, ShardckptError)):
            fault_matrix(tmp_path, second, {1, 2})

    @pytest.mark.parametrize("how", ["killed", "error"])
    def test_a_commit_that_comes_first_turns_the_bucket_matrix_red(self, bucket, monkeypatch, how: str) -> None:
        commit_comes_first(monkeypatch)
        with pytest.raises((AssertionError, ShardckptError)):
            bucket_matrix(how, {1, 2})

    def test_a_step_without_its_commit_does_not_exist(self, tmp_path: Path) -> None:
        second(tmp_path / "c")
        (tmp_path / "c" / COMMIT).unlink()
        with pytest.raises(ShardckptError, match="never committed"):
            shardckpt.load(tmp_path / "c")
