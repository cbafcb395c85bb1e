"""Durability claims in a history, and which must hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from random import Random
from typing import Any, NamedTuple, Protocol, cast

from shardckpt.errors import ShardckptError
from shardckpt.native.commit import COMMIT, Commit, decode_commit
from shardckpt.native.manifest_json import decode_manifest
from shardckpt.native.run_directory import step_name
from shardckpt.native.step_copies import LOCAL, MEMORY, StepCopy
from shardckpt.tiers.peers.node_files import Node
from tests.simulation.scheduler import HistoryError

Medium = object  # a disk, or a file system in memory: has a tier's files on one node
_MAX_READ = 64  # `COMMIT` files and manifests whose attempts are remembered


class TierMedia(Protocol):
    """One tier's media on all nodes."""

    @property
    def version(self) -> int:
        """Counts changes, or only removals if each medium loses files one by one."""

    def find_living(self) -> Mapping[str, Any]:
        """Return the current media by node name."""

    def list_files(self, medium: Any, /) -> Mapping[str, bytearray]:
        """Return the files on a medium by name, such as `step-00000001/COMMIT`."""


class ClaimedPlace(NamedTuple):
    """A place on a node that may have a part of a claimed copy."""

    node: Node
    medium: Medium | None  # None if there was none, or if it lost its files
    # Newer attempt that retention kept instead of the claimed one; None while the claimed one is there.
    successor: TierClaim | None = None


class TierClaim(NamedTuple):
    """Claim that an attempt survives failures, by its copy in a tier."""

    content: int
    tier: str
    most_lost: int  # machines that may be lost
    places: tuple[ClaimedPlace, ...]  # on all nodes of the job


@dataclass
class _StartedCall:
    """A collective call that asks what a step survives."""

    emptied: int  # how often the root had been emptied
    # By tier and node: the medium when the rank that reports for the node asked.
    media: dict[tuple[str, str], Medium | None] = field(default_factory=dict)


class HeldFiles(NamedTuple):
    """Files on a medium."""

    machine: str  # machine of the node
    is_lost: bool
    files: Mapping[str, bytearray]  # content by file name


class Claims:
    """A run's claims that rest on copies in tiers."""

    def __init__(self, nodes: Mapping[str, Node], media: Mapping[str, TierMedia]) -> None:
        self._nodes, self._media = nodes, media
        self._claims: list[TierClaim] = []
        self._lost: set[Medium] = set()
        self._versions: dict[str, int] = {}
        self.has_rivals = False  # jobs with tiers run at once and replace each other's captures
        self._seen: dict[object, Counter[tuple[str, int]]] = {}
        self._emptied = 0
        self._started: dict[object, _StartedCall] = {}
        self._order: dict[int, int] = {}
        self._attempts: Mapping[int, int] = {}

    # Claims

    def start(self, call: object, number: int, nodes: Collection[str], node: str | None) -> None:
        """Record that a rank asks what a step survives."""
        # The node reports what its medium has after this, and may lose the medium before the answer.
        started = self._started.setdefault(call, _StartedCall(self._emptied))
        if node is not None:
            started.media |= {(tier, node): media.find_living().get(node) for tier, media in self._media.items()}
        if self.has_rivals:
            self._note_copies(call, step_name(number), nodes)

    def check(self, call: object, content: int, copy: StepCopy, nodes: Collection[str]) -> None:
        """Check that a tier has a copy, and record the claim, unless other jobs may replace the copy."""
        started = self._started[call]
        if self.has_rivals:
            self._require_seen(call, content, copy, nodes)
        elif started.emptied == self._emptied:
            self._add(
                content, copy, [ClaimedPlace(self._nodes[n], started.media.get((copy.tier, n))) for n in sorted(nodes)]
            )

    def _note_copies(self, call: object, folder: str, nodes: Collection[str]) -> None:
        """Record the copies before a rank asks for claims: another job may replace them meanwhile."""
        self._seen.setdefault(call, Counter())
        self._seen[call] |= self._count_copies(folder, nodes, self._media)

    def _require_seen(self, call: object, content: int, copy: StepCopy, nodes: Collection[str]) -> None:
        """Require that a claimed copy existed at some time since a rank first asked. Raises HistoryError."""
        self._note_copies(call, _find_folder(copy), nodes)
        found, places = self._seen[call][copy.tier, content], self._list_places(copy, nodes)
        if found < len(copy.survives) and not any(self._is_lost(each.medium) for each in places):
            raise HistoryError(f"attempt {content} is claimed to survive {copy.survives}, but was on {found} machines")

    def _list_places(self, copy: StepCopy, nodes: Collection[str]) -> list[ClaimedPlace]:
        living = self._media[copy.tier].find_living()
        return [ClaimedPlace(self._nodes[name], living.get(name)) for name in sorted(nodes)]

    def _add(self, content: int, copy: StepCopy, places: Sequence[ClaimedPlace]) -> None:
        """Record a claimed copy in a tier. Raises HistoryError if too few machines have it."""
        most_lost = len(copy.survives) - 1
        held = self._list_held(copy.tier, [(each.node.name, each.medium) for each in places if each.medium is not None])
        found = _count_machines(held, _find_folder(copy), content)
        if found <= most_lost:
            raise HistoryError(f"attempt {content} is claimed to survive {copy.survives}, but is on {found} machines")
        claim = TierClaim(content, copy.tier, most_lost, tuple(places))
        if claim not in self._claims:
            self._claims.append(claim)

    def _count_copies(self, folder: str, nodes: Collection[str], tiers: Iterable[str]) -> Counter[tuple[str, int]]:
        """Count the machines that have each attempt to save a step, by tier and attempt."""
        found: Counter[tuple[str, int]] = Counter()
        for tier in tiers:
            living = self._media[tier].find_living()
            held = self._list_held(tier, [(name, each) for name, each in living.items() if name in nodes])
            for content, count in _count_attempts(held, folder).items():
                found[tier, content] = count
        return found

    def _list_held(self, tier: str, media: Iterable[tuple[str, Medium]]) -> list[HeldFiles]:
        """Return what a tier's media have, with the names of their nodes."""
        list_files = self._media[tier].list_files
        return [HeldFiles(self._nodes[name].machine, self._is_lost(each), list_files(each)) for name, each in media]

    def newest(self, nodes: Collection[str]) -> TierClaim | None:
        """Return the newest claim that must hold for a job: only failures that it names have happened since."""
        ordered = sorted(self._claims, key=lambda claim: self._order.get(claim.content, 0))
        return next((claim for claim in reversed(ordered) if self._survives(claim, nodes)), None)

    def holds(self, claim: TierClaim, nodes: Collection[str]) -> bool:
        """Return True while a claim must hold for a job on some nodes."""
        return claim in self._claims and self._survives(claim, nodes)

    def _survives(self, claim: TierClaim, nodes: Collection[str]) -> bool:
        """Return True if a job on some nodes reaches enough places of a claim."""
        lost = {each.node.machine for each in claim.places if not self._is_reachable(each, nodes)}
        if claim.tier != MEMORY or not claim.most_lost:
            return len(lost) <= claim.most_lost
        media, folder = self._media[MEMORY], step_name(self._attempts[claim.content])
        living = [each for each in media.find_living().values() if not self._is_lost(each)]
        held = [media.list_files(each.medium) for each in claim.places if not each.successor and each.medium in living]
        return len(lost) <= (0 if _has_other_save(folder, claim.content, held) else claim.most_lost)

    def _is_reachable(self, place: ClaimedPlace, nodes: Collection[str]) -> bool:
        """Return True if a job reaches a place's part of a claimed attempt, or of its newer replacement."""
        if place.medium is None or self._is_lost(place.medium) or place.node.name not in nodes:
            return False
        return place.successor is None or self._survives(place.successor, nodes)

    def _is_lost(self, medium: Medium | None) -> bool:
        return medium in self._lost

    def give_up(self, nodes: Collection[str] | None = None) -> None:
        """Drop the claims that a job does not know: the run continues without their captures."""
        self._claims = [] if nodes is None else [claim for claim in self._claims if self.holds(claim, nodes)]

    def follow(self, attempts: Mapping[int, int]) -> None:
        """Replace claimed attempts, which retention may remove, by newer complete ones in the same tier."""
        self._attempts = attempts
        if len(attempts) != len(self._order):
            self._order = {each: at for at, each in enumerate(attempts)}
        for tier, media in self._media.items():
            if media.version != self._versions.get(tier, 0):
                self._versions[tier] = media.version
                self._note_successors(tier, attempts)
                if tier == LOCAL:
                    self._follow_disks(attempts)

    def _note_successors(self, tier: str, attempts: Mapping[int, int]) -> None:
        """Record which newer attempts replaced those that left their places: they may be on other nodes."""
        claimed = [claim for claim in self._claims if claim.tier == tier and len(self._nodes) > 1]
        if not claimed:
            return
        copies: Counter[tuple[str, int]] | None = None
        held = {medium: self._media[tier].list_files(medium) for medium in self._media[tier].find_living().values()}
        for claim in claimed:
            folder = step_name(attempts[claim.content])
            gone = {
                each.medium
                for each in claim.places
                if each.medium in held and claim.content not in [at for at, _ in _read_marks(folder, held[each.medium])]
            }
            if not gone:
                continue
            copies = self._count_all_copies(tier) if copies is None else copies
            successor = self._find_successor(claim, copies, held)
            if successor is not None:
                places = (p._replace(successor=successor) if p.medium in gone else p for p in claim.places)
                self._claims[self._claims.index(claim)] = claim._replace(places=tuple(places))

    def _find_successor(
        self,
        claim: TierClaim,
        copies: Mapping[tuple[str, int], int],
        held: Mapping[Medium, Mapping[str, bytearray]],
    ) -> TierClaim | None:
        """Return the newest attempt that survives as much as a claimed earlier one; None without one."""
        after = takewhile(lambda each: each != claim.content, reversed(self._order))
        newest = next((each for each in after if copies.get((claim.tier, each), 0) > claim.most_lost), None)
        if newest is None:
            return None
        folder = step_name(self._attempts[newest])
        places = (
            ClaimedPlace(self._nodes[name], medium)
            for name, medium in self._media[claim.tier].find_living().items()
            if self._is_lost(medium) or newest in [at for at, _ in _read_marks(folder, held[medium])]
        )
        return TierClaim(newest, claim.tier, copies[claim.tier, newest] - 1, tuple(places))

    def _count_all_copies(self, tier: str) -> Counter[tuple[str, int]]:
        """Count the machines that have each attempt to save any step, by tier and attempt."""
        held = self._list_held(tier, self._media[tier].find_living().items())
        folders = {name.partition("/")[0] for each in held for name in each.files if "/" in name}
        copies = Counter[tuple[str, int]]()
        for folder in folders:
            for content, count in _count_attempts(held, folder).items():
                if count:
                    copies[tier, content] += count
        return copies

    def _follow_disks(self, attempts: Mapping[int, int]) -> None:
        """Claim less for attempts on disks if newer ones are complete on fewer machines."""
        claimed = [claim for claim in self._claims if claim.tier == LOCAL and claim.most_lost]
        if not claimed:
            return
        order = {each: at for at, each in enumerate(attempts)}
        copies = self._count_all_copies(LOCAL)
        for claim in claimed:
            newer = [count for (_, at), count in copies.items() if order.get(at, -1) > order[claim.content]]
            if newer and min(newer) <= claim.most_lost:
                self._claims[self._claims.index(claim)] = claim._replace(most_lost=max(min(newer) - 1, 0))

    # What is lost

    def empty_root(self) -> None:
        """Drop all claims: a run that sees its emptied root continues with later claims."""
        self._claims.clear()
        self._emptied += 1

    def lose(self, medium: Medium) -> None:
        """Record that a medium is gone, or has a flipped bit: its content is lost."""
        self._lost.add(medium)

    def clear(self, medium: Medium) -> None:
        """Record that a medium's current content is lost; later writes are not."""
        self._claims = [_clear(claim, medium) for claim in self._claims]

    def flip(self, tier: str, random: Random) -> str:
        """Damage a file in a tier; return its name, empty if no node has files there."""
        media = self._media[tier]
        held = [(node, each, _list_steps(media, each)) for node, each in media.find_living().items()]
        full = [each for each in held if each[2]]
        if not full:
            return ""
        node, medium, files = random.choice(full)
        name = random.choice(sorted(files))
        files[name][-1 - random.randrange(len(files[name]))] ^= 1 << random.randrange(8)
        self.lose(medium)
        return f"{node}: {name}"


def _clear(claim: TierClaim, medium: Medium) -> TierClaim:
    """Return a claim and the newer ones after it, without a medium's content."""
    places = (
        place._replace(
            medium=None if place.medium is medium else place.medium,
            successor=None if place.successor is None else _clear(place.successor, medium),
        )
        for place in claim.places
    )
    return claim._replace(places=tuple(places))


def _list_steps(media: TierMedia, medium: Medium) -> dict[str, bytearray]:
    """Return a medium's nonempty step files by name."""
    return {name: data for name, data in media.list_files(medium).items() if name.startswith("step-") and data}


def _find_folder(copy: StepCopy) -> str:
    return copy.path.rpartition("/")[2]


def _read_marks(folder: str, files: Mapping[str, bytearray]) -> Iterator[tuple[int, Commit]]:
    """Yield a step's attempt and `COMMIT` if both its marks are there and readable."""
    try:
        commit = _decode_commit(bytes(files[f"{folder}/{COMMIT}"]))
        yield _read_attempt(bytes(files[f"{folder}/{commit.manifest}"])), commit
    except (KeyError, ShardckptError):
        return


def _has_other_save(folder: str, content: int, held: Iterable[Mapping[str, bytearray]]) -> bool:
    """Return True if a node has marks from another save of a step: its files may not be copied yet."""
    return any(at != content for files in held for at, _ in _read_marks(folder, files))


@lru_cache(_MAX_READ)
def _decode_commit(data: bytes) -> Commit:
    """Decode a `COMMIT`. Raises ShardckptError."""
    return decode_commit(data)


@lru_cache(_MAX_READ)
def _read_attempt(manifest: bytes) -> int:
    """Return a manifest's attempt. Raises ShardckptError."""
    return int(cast(Any, decode_manifest(manifest).tree)["content"])


def _count_attempts(held: Sequence[HeldFiles], folder: str) -> dict[int, int]:
    """Count the machines that have each attempt to save a step, by attempt."""
    contents = {content for each in held for content, _ in _read_marks(folder, each.files)}
    return {content: _count_machines(held, folder, content) for content in contents}


def _count_machines(held: Sequence[HeldFiles], folder: str, content: int) -> int:
    """Return how many machines have each file in a copy, at least; a lost medium may have had all."""
    read = [mark for each in held if not each.is_lost for mark in _read_marks(folder, each.files)]
    marks = [commit for found, commit in read if found == content]
    if not marks:
        return len({each.machine for each in held if each.is_lost})
    commit = max(marks, key=lambda each: each.save)
    return min(_count_equal(held, f"{folder}/{name}") for name in (*commit.files, commit.manifest, COMMIT))


def _count_equal(held: Sequence[HeldFiles], name: str) -> int:
    """Return how many machines have equal bytes of a file, at most; a machine with a lost medium counts."""
    machines: dict[bytes, set[str]] = {}
    for each in held:
        data = None if each.is_lost else each.files.get(name)
        if data is not None:
            machines.setdefault(bytes(data), set()).add(each.machine)
    most = max(map(len, machines.values()), default=0)
    return most + len({each.machine for each in held if each.is_lost})
