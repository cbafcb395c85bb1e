"""Write one version: this rank's changes, then the commit, and an anchor if one is due. On a thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from shardckpt.checkpoint.save.handle import AsyncSaveTask
from shardckpt.checkpoint.save.planner import SaveOptions, capture_error
from shardckpt.checkpoint.save.session import Saver
from shardckpt.encodings.typed_json import decode, encode
from shardckpt.events.warn_user import warn_user
from shardckpt.plan.layout.box_codec import pack_message, unpack_message
from shardckpt.ranks.linked_group import LinkedGroup
from shardckpt.storage.resolve_url import open_place
from shardckpt.stream.format.anchor import ROOT
from shardckpt.stream.format.delta_file import write_changes
from shardckpt.stream.format.digest import Digest
from shardckpt.stream.format.stream_records import ANCHOR, DeltaFile, Version
from shardckpt.stream.publish.ledger import Attempt, Ledger
from shardckpt.stream.publish.snapshot import FoundChanges, Snapshot

__all__ = ["PublishPlan", "VersionWriter", "decode_digests", "encode_digests"]


class PublishPlan(NamedTuple):
    """Rank 0's answer to a rank that has flattened its weights."""

    stream: str
    version: Version
    token: str
    base: Version | None
    base_token: str  # of the version in the rank's buffers; empty without a base
    has_anchor: bool


class VersionWriter:
    """Writes a version together with the other ranks' writers."""

    def __init__(
        self, url: str, plan: PublishPlan, ranks: LinkedGroup, ledger: Ledger, attempt: Attempt | None
    ) -> None:
        self._url, self._plan, self._ranks = url, plan, ranks
        self._ledger, self._attempt = ledger, attempt  # used on rank 0 alone
        self._saver = Saver(ranks)

    def write(self, task: AsyncSaveTask, copied: Snapshot | Exception) -> None:
        """Publish the version; an error on one rank is raised on all. Collective."""
        plan = self._plan
        message = capture_error(lambda: self._write_own(task, copied))
        if plan.base is None:
            # Receivers need the anchor of a version without a base, so it comes first.
            arrays = {} if isinstance(copied, Exception) else copied.candidate_arrays()
            refusal = message if isinstance(message, Exception) else None
            with task.phase("anchor"):
                failure = capture_error(lambda: self._save_anchor(arrays, refusal))
            message = failure if isinstance(failure, Exception) else message
        with task.phase("publish"):
            self._ranks.ask_rank0(f"publishing version {plan.version} to {self._url}", message, self._decide)

    def finish(self, task: AsyncSaveTask, snapshot: Snapshot) -> None:
        """Write all weights of the published version if they are due, and remove old versions. Collective.

        The version stays if this fails.
        """
        if not self._plan.has_anchor:
            return
        if self._plan.base is not None:
            with task.phase("anchor"):
                failure = capture_error(lambda: self._save_anchor(snapshot.published_arrays(), None))
            if isinstance(failure, Exception):
                warn_user(f"version {self._plan.version} of {self._url} is published, but its anchor failed: {failure}")
                return
        if self._ranks.rank == 0:
            self._ledger.note_anchor()
            failure = capture_error(self._ledger.prune)
            if isinstance(failure, Exception):
                warn_user(f"old versions of {self._url} could not be removed: {failure}")

    def _write_own(self, task: AsyncSaveTask, copied: Snapshot | Exception) -> bytes:
        if isinstance(copied, Exception):
            raise copied
        with task.phase("write"):
            file, found = self._write_changes(copied)
        task.recorder.values |= {
            "nbytes": 0 if file is None else file.nbytes,
            "changed": found.changed,
            "elements": sum(box.box.volume for box in copied.plan.boxes),
        }
        return pack_message([encode(file) if file else None, found.changed, encode_digests(found.digests)])

    def _write_changes(self, snapshot: Snapshot) -> tuple[DeltaFile | None, FoundChanges]:
        plan = self._plan
        if plan.base is None:
            return None, FoundChanges((), snapshot.digest_all(), 0)
        found = snapshot.find_changes()
        if not found.encoded:
            return None, found
        name = f"delta-{self._ranks.rank:05d}-{plan.token[:8]}.safetensors"
        store, folder = open_place(self._url), plan.version.folder
        return write_changes(store, folder, name, plan.stream, plan.version, found.encoded), found

    def _decide(self, messages: list[bytes]) -> list[bytes]:
        """Commit the version. On rank 0."""
        files, changed, digests = zip(*(unpack_message(each)[0] for each in messages), strict=True)
        named = [decode(DeltaFile, each, where="a rank's answer") for each in files if each is not None]
        assert self._attempt is not None, "rank 0 started it"
        self._ledger.commit(self._attempt, named, [decode_digests(each) for each in digests], sum(changed))
        return [b""] * len(messages)

    def _save_anchor(self, arrays: Mapping[str, Any], refusal: Exception | None) -> None:
        url = f"{self._url}/{self._plan.version.folder}/{ANCHOR}"
        options = SaveOptions(url, overwrite=True, checksums=True, custom_metadata={})
        self._saver.save({ROOT: arrays}, options, refusal)


def encode_digests(digests: Mapping[str, Digest]) -> dict[str, str]:
    """Return digests as JSON has them."""
    return {name: digest.hex() for name, digest in digests.items()}


def decode_digests(digests: Mapping[str, str]) -> dict[str, Digest]:
    """Invert `encode_digests`."""
    return {name: Digest.from_hex(text) for name, text in digests.items()}
