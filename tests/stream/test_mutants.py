"""Traps of other weight streams, set on purpose: a claim that holds without each of them does not hold with it."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import shardckpt
from shardckpt.errors import ChecksumError, ShardckptError, StorageError
from shardckpt.plan.layout.box_codec import pack_message
from shardckpt.storage import local
from shardckpt.stream.format import delta_file, held_boxes
from shardckpt.stream.format.digest import Digest
from shardckpt.stream.format.stream_records import COMMIT, Version
from shardckpt.stream.publish import ledger, snapshot, version_writer
from shardckpt.stream.publish.ledger import Ledger
from shardckpt.stream.publish.publisher import Publisher
from shardckpt.stream.receive import mirror, staged_weights, subscriber, targets, version_chooser
from shardckpt.stream.receive.mirror import Mirror
from shardckpt.stream.receive.subscriber import Subscriber, SubscriberState
from tests.kit.ranks.forks import is_killed
from tests.kit.ranks.harness import outcomes

Patch = pytest.MonkeyPatch
SHAPES = {"a": (16, 4), "b": (5,)}


def build(number: int) -> dict[str, torch.Tensor]:
    """Return version `number`: one element more than before, and a norm."""
    a = torch.zeros(SHAPES["a"], dtype=torch.bfloat16)
    a[:number, 1] = torch.arange(1.0, number + 1)
    return {"a": a, "b": torch.full(SHAPES["b"], float(number), dtype=torch.bfloat16)}


def publish(url: Path, *numbers: int, restored: int | None = None) -> None:
    with shardckpt.Publisher(url, anchors=shardckpt.Anchors(max_bytes=1e9)) as each:
        if restored is not None:
            each.resume(build(restored))
        for number in numbers:
            each.publish(number, build(number)).result()


def require_version(into: Mapping[str, torch.Tensor], number: int) -> None:
    assert all(torch.equal(value, build(number)[name]) for name, value in into.items()), f"not version {number}"


class Engine:
    """An engine whose writes fail on request, after the first tensor; it counts what it writes."""

    def __init__(self) -> None:
        self.tensors, self.fails, self.written = build(0), False, 0

    def apply(self, changes: Any) -> None:
        for change in changes:
            tensor = self.tensors[change.name].view(-1)
            at = slice(None) if change.indices is None else change.indices
            tensor[at] = change.values
            self.written += len(change.values)
            if self.fails:
                raise RuntimeError("the device is gone")


# What is checked


def a_failed_version_is_in_the_next_one(folder: Path) -> None:
    """The store fails at the commit of version 2: the server gets its changes with version 3."""
    into = build(0)
    create = local.LocalStore.create
    with shardckpt.Publisher(folder) as each:
        each.publish(1, build(1)).result()
        local.LocalStore.create = fail_at_commit(create)
        try:
            with pytest.raises(StorageError):
                each.publish(2, build(2)).result()
        finally:
            local.LocalStore.create = create
        each.publish(3, build(3)).result()
    received = shardckpt.Subscriber(folder)
    received.stage(1).commit(into)
    received.stage().commit(into)
    require_version(into, 3)


def fail_at_commit(create: Any) -> Any:
    def fail(self: Any, name: str, **options: Any) -> Any:
        if name.endswith(COMMIT):
            raise StorageError("the store is gone")
        return create(self, name, **options)

    return fail


def a_killed_mirror_is_found(folder: Path) -> None:
    """A server is killed amid the change of its mirror; the next one has the version bit for bit."""
    url, held = folder / "stream", folder / "mirror"
    publish(url, 1, 2)

    def work() -> None:
        torch.set_num_threads(1)
        into = build(0)
        server = shardckpt.Subscriber(url, mirror=held)
        server.stage(1).commit(into)
        write = mirror.Mirror._write_held

        def die(self: Mirror) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        mirror.Mirror._write_held = die
        try:
            server.stage().commit(into)
        finally:
            mirror.Mirror._write_held = write

    assert is_killed(work)
    into = build(0)
    shardckpt.Subscriber(url, mirror=held).stage().commit(into)
    require_version(into, 2)


def a_failed_half_has_no_label(folder: Path) -> None:
    """An engine fails after the first tensor: the label says so, and the next version replaces all weights."""
    publish(folder, 1, 2, 3)
    server, engine = shardckpt.Subscriber(folder), Engine()
    server.stage(1).commit(engine)
    engine.fails = True
    with suppress(ShardckptError):
        server.stage(2).commit(engine)
    assert server.label == "poisoned:2" and server.state is SubscriberState.POISONED
    assert server.held is None
    engine.fails = False
    server.stage(3).commit(engine)
    require_version(engine.tensors, 3)
    assert server.label == "3"


def another_name_is_refused(folder: Path) -> None:
    """A target with another name is refused, not left in part."""
    publish(folder, 1)
    into = build(0)
    into["c"] = into.pop("b")
    with pytest.raises(ShardckptError):
        shardckpt.Subscriber(folder).stage().commit(into)
    assert not any(value.any() for value in into.values())


def order_is_seen(folder: Path) -> None:
    """Two elements of a mirror change places while no process holds it: the next one does not use it."""
    url, held = folder / "stream", folder / "mirror"
    publish(url, 1, 2)
    server = shardckpt.Subscriber(url, mirror=held)
    server.stage(1).commit(build(0))
    server.close()
    path = next(held.rglob("weights-*"))
    elements = np.frombuffer(path.read_bytes(), np.uint16).copy()
    first = np.flatnonzero(elements)[0]
    elements[[first, first + 1]] = elements[[first + 1, first]]
    path.write_bytes(elements.tobytes())
    into = build(0)
    shardckpt.Subscriber(url, mirror=held).stage().commit(into)
    require_version(into, 2)


def a_flipped_bit_is_seen(folder: Path) -> None:
    """A bit of the mirror's memory flips in an element that the next version changes in other bits, or not at all."""
    publish(folder, 1, 2)
    for place in (4 + 1, 0):
        server, into = shardckpt.Subscriber(folder), build(0)
        server.stage(1).commit(into)
        held = server._mirror
        assert held is not None
        a = next(box for box in held.boxes if box.name == "a")
        held.view(a)[place] ^= 1
        with pytest.raises(ChecksumError):
            server.stage().commit(into)
        require_version(into, 1)


def bytes_are_verified(folder: Path) -> None:
    """Two files of one size change places, and a byte of each kind of file changes."""
    publish(folder, 1, 2)
    delta = next((folder / Version(1, 2).folder).glob("delta-*"))
    data = bytearray(delta.read_bytes())
    data[-1] ^= 1
    delta.write_bytes(data)
    server, into = shardckpt.Subscriber(folder), build(0)
    server.stage(1).commit(into)
    with pytest.raises(ShardckptError, match="hash"):
        server.stage()
    require_version(into, 1)


def an_update_has_one_version_only(folder: Path) -> None:
    """A server that follows each version reads and writes its changes once."""
    publish(folder, 1)
    server, engine = shardckpt.Subscriber(folder), Engine()
    server.stage().commit(engine)
    for number in range(2, 9):
        publish(folder, number, restored=number - 1)
        staged = server.stage()
        assert staged.weights.versions == 1, "earlier versions are combined again"
        before = engine.written
        staged.commit(engine)
        assert engine.written - before == 1 + 5, "more than the changes is written"
        require_version(engine.tensors, number)


def a_number_is_published_once(folder: Path) -> None:
    """A publisher that starts again publishes the same number with other weights: servers know it as a later one."""
    publish(folder, 1, 2)
    server, into = shardckpt.Subscriber(folder), build(0)
    first = server.stage().commit(into)
    commit = (folder / first.folder / COMMIT).read_bytes()
    with suppress(ShardckptError), shardckpt.Publisher(folder) as each:
        each.publish(2, build(7)).result()
    assert (folder / first.folder / COMMIT).read_bytes() == commit
    second = server.stage().commit(into)
    assert second > first and second.number == 2
    require_version(into, 7)


def workers_vote(folder: Path) -> None:
    """One of two workers cannot apply: neither does."""
    publish(folder, 1, 2)

    def work(rank: int, world: int) -> str:
        server, into = shardckpt.Subscriber(folder), build(0)
        server.stage(1).commit(into)
        staged = server.stage()
        if rank == 1:
            into["c"] = into.pop("b")
        with suppress(ShardckptError):
            staged.commit(into)
        return f"{server.label} {int(into['a'].any(1).sum())}"

    assert [each.value for each in outcomes(2, work, timeout=60)] == ["1 1", "1 1"]


def ranks_vote(folder: Path) -> None:
    """One of two ranks cannot write: the version is not published, and both know it."""

    def work(rank: int, world: int) -> str:
        each = shardckpt.Publisher(folder)
        weights = {f"{name} {at}": value for at in (0, 1) for name, value in build(1).items()}
        each.publish(1, weights).result()
        if rank == 1:

            def fail(*_: object, **__: object) -> Any:
                raise StorageError("the disk is broken")

            version_writer.write_changes = fail
        for value in weights.values():
            value.add_(1)
        try:
            each.publish(2, weights).result()
        except ShardckptError:
            return "told"
        return "published"

    assert [each.value for each in outcomes(2, work, timeout=60)] == ["told", "told"]
    assert shardckpt.Subscriber(folder).stage().version.number == 1


def a_resume_knows_its_weights(folder: Path) -> None:
    """A publisher with other weights than the newest version writes changes that are right all the same."""
    publish(folder, 1, 2, 3)
    with shardckpt.Publisher(folder) as each:
        assert each.resume(build(5)) is None
        each.publish(6, build(6)).result()
    into = build(0)
    shardckpt.Subscriber(folder).stage().commit(into)
    require_version(into, 6)


def a_publisher_is_replaced(folder: Path) -> None:
    """Of two publishers the earlier one is told."""
    one, other = shardckpt.Publisher(folder), shardckpt.Publisher(folder)
    one.publish(1, build(1)).result()
    other.publish(2, build(2)).result()
    with pytest.raises(shardckpt.errors.PublisherReplacedError):
        one.publish(3, build(3)).result()


# What is broken


def snapshots_move_before_the_commit(patch: Patch) -> None:
    """slime#2119: what a failed version changed is lost for ever."""
    write = Publisher._write

    def write_early(self: Publisher, task: Any, plan: Any, ranks: Any, copied: Any) -> None:
        try:
            write(self, task, plan, ranks, copied)
        except BaseException:
            self._promote(self._base_token)
            raise

    patch.setattr(Publisher, "_write", write_early)


def mirrors_are_believed(patch: Patch) -> None:
    """SkyRL#1902: a crash amid an XOR in place, and the marker is still old."""

    def open_blindly(self: Mirror, folder: str) -> Any:
        digest = Mirror.digest_all
        record: list[Any] = []
        load = mirror.load

        def keep(kind: Any, data: Any, **options: Any) -> Any:
            record.append(load(kind, data, **options))
            return record[-1]

        mirror.load = keep
        Mirror.digest_all = lambda *_: {name: Digest.from_hex(text) for name, text in record[-1].digests.items()}
        try:
            return read_held(self, folder)
        finally:
            mirror.load, Mirror.digest_all = load, digest

    read_held = Mirror._read_held
    patch.setattr(Mirror, "_read_held", open_blindly)
    patch.setattr(subscriber, "find_wrong_digests", lambda *_: [])


def labels_stay_after_a_failed_half(patch: Patch) -> None:
    """vLLM: patch 1 applied, patch 2 raised, the old version's label."""
    commit = Subscriber._commit

    def keep(self: Subscriber, staged: Any, into: Any) -> Any:
        applied = self._applied
        try:
            return commit(self, staged, into)
        except ShardckptError:
            self._state, self._failed, self._applied = SubscriberState.READY, None, applied
            raise

    patch.setattr(Subscriber, "_commit", keep)


def other_names_only_warn(patch: Patch) -> None:
    """SkyRL: skipped, absent from the base checkpoint."""
    apply = targets.TensorTarget.apply
    patch.setattr(targets.TensorTarget, "check", lambda *_: None)
    patch.setattr(
        targets.TensorTarget,
        "apply",
        lambda self, changes: apply(self, (each for each in changes if each.name in self._arrays)),
    )


def digests_see_no_order(patch: Patch) -> None:
    """verl: XOR over hashes of elements; a sum is no better."""

    def add(values: Any, shape: Any = (), box: Any = None) -> Digest:
        total = int(np.asarray(values, np.uint64).sum())
        return Digest(total, 0)

    def change(shape: Any, itemsize: int, positions: Any, old: Any, new: Any) -> Digest:
        return add(new) - add(old)

    for module in (snapshot, mirror, staged_weights, held_boxes):
        for name, each in (("digest_box", add), ("digest_changes", change)):
            if hasattr(module, name):
                patch.setattr(module, name, each)


def mirrors_are_not_read(patch: Patch) -> None:
    """A change adds to the digests of the last version, whatever the mirror has now."""
    patch.setattr(Mirror, "digest_held", lambda self, names: {name: self.digests[name] for name in names})


def sizes_are_enough(patch: Patch) -> None:
    """ModelExpress: the size and the time of a file are "verified"."""

    class Same(str):
        def __eq__(self, other: object) -> bool:
            return True

        def __ne__(self, other: object) -> bool:
            return False

        __hash__ = str.__hash__

    patch.setattr(
        delta_file,
        "hashlib",
        SimpleNamespace(sha256=lambda data: SimpleNamespace(hexdigest=lambda: Same(hashlib.sha256(data).hexdigest()))),
    )


def updates_start_at_the_anchor(patch: Patch) -> None:
    """ModelExpress#709: the k-th update applies k."""
    plan = version_chooser.plan_chain
    patch.setattr(version_chooser, "plan_chain", lambda target, held, *rest: plan(target, None, *rest))


def epochs_are_used_again(patch: Patch) -> None:
    """A publisher that starts again writes over the last epoch."""

    def join(self: Ledger) -> None:
        self._epoch = max(self.folder.find_last_epoch(), 1)

    patch.setattr(Ledger, "_claim", join)
    patch.setattr(Ledger, "_require_ours", lambda *_: None)
    create = ledger.StreamFolder.create

    def overwrite(self: Any, name: str, record: Any) -> bool:
        if name.endswith(COMMIT):
            with suppress(OSError):
                os.unlink(f"{self.url}/{name}")
        return create(self, name, record)

    patch.setattr(ledger.StreamFolder, "create", overwrite)


def ranks_do_not_vote(patch: Patch) -> None:
    """A rank that failed says nothing, and the others publish."""
    write = version_writer.VersionWriter._write_own

    def hide(self: Any, task: Any, copied: Any) -> bytes:
        try:
            return write(self, task, copied)
        except ShardckptError:
            return pack_message([None, 0, {}])

    patch.setattr(version_writer.VersionWriter, "_write_own", hide)


def workers_do_not_vote(patch: Patch) -> None:
    """Each worker applies what it can."""

    def alone(self: Subscriber, ranks: Any, into: Any, version: Any) -> Any:
        return subscriber.as_target(into)

    patch.setattr(Subscriber, "_prepare", alone)


def resumes_accept_any_digest(patch: Patch) -> None:
    """A publisher that starts again takes its weights for those of the newest version."""
    resume = Ledger.resume

    def accept(self: Ledger, parts: Sequence[Mapping[str, Digest]], token: str) -> Version | None:
        newest = next(self.folder.iter_commits())
        digests = {name: Digest.from_hex(text) for name, text in newest.digests.items()}
        return resume(self, [digests], token)

    patch.setattr(Ledger, "resume", accept)


def publishers_are_not_replaced(patch: Patch) -> None:
    """Nobody looks for a later publisher."""
    claim = Ledger._claim
    patch.setattr(Ledger, "_claim", lambda self: None if self._epoch else claim(self))
    patch.setattr(Ledger, "_require_ours", lambda *_: None)


MUTANTS: dict[Callable[[Patch], None], Callable[[Path], None]] = {
    snapshots_move_before_the_commit: a_failed_version_is_in_the_next_one,
    mirrors_are_believed: a_killed_mirror_is_found,
    labels_stay_after_a_failed_half: a_failed_half_has_no_label,
    other_names_only_warn: another_name_is_refused,
    digests_see_no_order: order_is_seen,
    mirrors_are_not_read: a_flipped_bit_is_seen,
    sizes_are_enough: bytes_are_verified,
    updates_start_at_the_anchor: an_update_has_one_version_only,
    epochs_are_used_again: a_number_is_published_once,
    ranks_do_not_vote: ranks_vote,
    workers_do_not_vote: workers_vote,
    resumes_accept_any_digest: a_resume_knows_its_weights,
    publishers_are_not_replaced: a_publisher_is_replaced,
}
"""Each mutant, and the claim that finds it."""


@pytest.mark.parametrize("claim", MUTANTS.values(), ids=lambda claim: claim.__name__)
def test_each_claim_holds(claim: Callable[[Path], None], tmp_path: Path) -> None:
    claim(tmp_path)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_each_mutant_is_found(mutant: Callable[[Patch], None], tmp_path: Path, monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, ShardckptError, pytest.fail.Exception)):
        MUTANTS[mutant](tmp_path)
