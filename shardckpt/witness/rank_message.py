"""Messages from ranks about one training step, and their merge on rank 0.

Tensor names are a compressed text, which is the same for ranks with equal names: it is read once.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from shardckpt.errors import UsageError
from shardckpt.witness.digests import SampleDigests
from shardckpt.witness.records.step_records import (
    NO_FLOAT,
    BatchDigests,
    Environment,
    RankValues,
    Setting,
    StateDigests,
    StepRecord,
    TensorDigest,
    float_bits,
)

MAX_SAMPLES = 1024  # maximum samples of a batch of all ranks whose digests are kept one by one
MAX_TENSORS = 6000  # maximum digests of tensors in a record; more are joined by module

_LOW = np.uint64(0xFFFFFFFF)
_RANK_FACTOR, _FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


@dataclass(frozen=True)
class RankStep:
    """One rank's digests and results for a training step."""

    step: int
    environment: Environment
    loss: int = NO_FLOAT  # bits of the loss; `NO_FLOAT` without one
    grad_norm: int = NO_FLOAT  # bits of the gradient norm; `NO_FLOAT` without one
    batch: SampleDigests | None = None  # digests of the batch; None if the caller gave none
    first_batch: SampleDigests | None = None  # digests of the batch of the run's first step; None if unknown
    last_batch: SampleDigests | None = None  # digests of the batch of the step before; None if unknown
    random_before: Mapping[str, int] | None = None  # digests of random generators before the step, by name
    random_after: Mapping[str, int] | None = None  # the same after the step
    # Digests of the state before the step; None unless it is the first after a save or a restore.
    before: StateDigests | None = None
    after: StateDigests | None = None
    used: StateDigests | None = None  # digests of the state at the first step of the optimizer of a resumed run


@dataclass(frozen=True)
class MergedStep:
    """All ranks' digests and results for a training step, with the environment."""

    record: StepRecord
    environment: Environment  # environment of all ranks
    first_batch: BatchDigests | None  # batch of the run's first step; None if unknown
    last_batch: BatchDigests | None  # batch of the step before; None if unknown


def read_float(name: str, value: Any) -> int:
    """Return a number's bits, which may be a tensor; `NO_FLOAT` for None."""
    if value is None:
        return NO_FLOAT
    if isinstance(value, DTensor):
        value = value.full_tensor()  # a number has no rows that torch 2.9 could misplace
    if isinstance(value, torch.Tensor):
        value = value.detach()
    try:
        return float_bits(float(value))
    except Exception as error:  # any type may define __float__
        raise UsageError(f"`{name}` must be a number", found=repr(value)) from error


def encode_rank_step(part: RankStep) -> bytes:
    """Return a rank's step as the message to rank 0."""
    content = {
        "step": part.step,
        "environment": [getattr(part.environment, name) for name in Environment.__slots__],
        "floats": [part.loss, part.grad_norm],
        "batches": [part.batch, part.first_batch, part.last_batch],
        "random": [part.random_before, part.random_after],
        "states": [_pack_state(part.before), _pack_state(part.after), _pack_state(part.used)],
    }
    return json.dumps(content, separators=(",", ":")).encode("ascii")


def _pack_state(state: StateDigests | None) -> object:
    if state is None:
        return None
    names = json.dumps([[name, each.part, each.dtype] for name, each in state.tensors.items()])
    digests = np.array([each.digest for each in state.tensors.values()], "<u4").tobytes()
    return [
        base64.b64encode(zlib.compress(names.encode("ascii"), 1)).decode("ascii"),
        base64.b64encode(digests).decode("ascii"),
        [[name, *each] for name, each in state.settings.items()],
        dict(state.ties),
    ]


def merge_rank_steps(messages: Sequence[bytes]) -> MergedStep:
    """Return the step as all ranks saw it."""
    parts = [json.loads(message) for message in messages]
    floats = list(zip(*(part["floats"] for part in parts), strict=True))
    batches = [_merge_batches([part["batches"][at] for part in parts]) for at in range(3)]
    random = [_merge_random([part["random"][at] for part in parts]) for at in range(2)]
    states = [_merge_states([part["states"][at] for part in parts]) for at in range(3)]
    loss, grad_norm = (() if set(values) == {NO_FLOAT} else values for values in floats)
    record = StepRecord(
        parts[0]["step"],
        batches[0],
        loss,
        grad_norm,
        random_before=random[0],
        random_after=random[1],
        before=states[0],
        after=states[1],
        used=states[2],
    )
    return MergedStep(record, _merge_environments(parts), batches[1], batches[2])


def _merge_environments(parts: Sequence[Mapping[str, Any]]) -> Environment:
    """Return the environment on all ranks; texts that differ between ranks name the rank."""
    all_ranks = [Environment(*part["environment"]) for part in parts]
    first = all_ranks[0]
    return replace(
        first,
        layout=_combine(np.array([[each.layout] for each in all_ranks], np.uint64), range(len(parts)))[0],
        is_deterministic=all(each.is_deterministic for each in all_ranks),
        rtol=max(each.rtol for each in all_ranks),
        versions=_merge_texts([each.versions for each in all_ranks]),
        flags=_merge_texts([each.flags for each in all_ranks]),
    )


def _merge_texts(all_ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    merged: dict[str, str] = {}
    for rank, texts in enumerate(all_ranks):
        for name, text in texts.items():
            known = merged.setdefault(name, text)
            if known != text and all_ranks[0].get(name) != text and " on rank " not in known:
                merged[name] = f"{known}, {text} on rank {rank}"
    return merged


def _merge_batches(all_ranks: Sequence[Sequence[Any] | None]) -> BatchDigests | None:
    given = [SampleDigests(each[0], tuple(each[1])) if each else SampleDigests(0, ()) for each in all_ranks]
    if not any(all_ranks):
        return None
    counts = tuple(len(each.samples) for each in given)
    multisets = tuple(sum(each.samples) & 0xFFFFFFFF for each in given)
    samples = tuple(each.samples for each in given) if sum(counts) <= MAX_SAMPLES else ()
    return BatchDigests(tuple(each.ordered for each in given), multisets, counts, samples)


def _merge_random(all_ranks: Sequence[Mapping[str, int] | None]) -> dict[str, RankValues] | None:
    names = list(dict.fromkeys(name for each in all_ranks for name in each or ()))
    return {name: tuple((each or {}).get(name, 0) for each in all_ranks) for name in names} or None


def _merge_states(all_ranks: Sequence[Any]) -> StateDigests | None:
    if not any(all_ranks):
        return None
    by_names: dict[str, list[int]] = {}
    for rank, packed in enumerate(all_ranks):
        if packed:
            by_names.setdefault(packed[0], []).append(rank)
    totals: dict[str, TensorDigest] = {}
    uneven: set[str] = set()
    for names, ranks in by_names.items():
        digests = np.array([np.frombuffer(base64.b64decode(all_ranks[rank][1]), "<u4") for rank in ranks], np.uint64)
        differs = (digests != digests[0]).any(0).tolist()
        for (name, part, dtype), digest, is_uneven in zip(
            _read_names(names), _combine(digests, ranks), differs, strict=True
        ):
            if is_uneven and part == "buffer":
                uneven.add(name)
            known = totals[name].digest if name in totals else 0
            totals[name] = TensorDigest(part, dtype, (known + digest) & 0xFFFFFFFF)
    settings: dict[str, Setting] = {}
    for rank, packed in enumerate(all_ranks):
        for name, part, text in packed[2] if packed else ():
            known_setting = settings.setdefault(name, Setting(part, text))
            if known_setting.text != text and " on rank " not in known_setting.text:
                settings[name] = Setting(part, f"{known_setting.text}, {text} on rank {rank}")
    ties = {name: first for packed in all_ranks if packed for name, first in packed[3].items()}
    return StateDigests(_join_by_module(totals), settings, ties, frozenset(uneven))


@lru_cache(maxsize=8)
def _read_names(packed: str) -> list[list[Any]]:
    rows: list[list[Any]] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return rows


def _combine(digests: np.ndarray[Any, Any], ranks: Sequence[int]) -> list[int]:
    """Return one digest for each column of `(rank, tensor)`; ranks that swap digests change it."""
    mixed = (digests + np.array(ranks, np.uint64)[:, None] * _RANK_FACTOR) * _FACTOR
    mixed = (mixed ^ (mixed >> np.uint64(29))) * _FACTOR
    combined: list[int] = ((mixed ^ (mixed >> np.uint64(32))).sum(0, dtype=np.uint64) & _LOW).tolist()
    return combined


def _join_by_module(tensors: dict[str, TensorDigest]) -> dict[str, TensorDigest]:
    """Join tensor digests within modules until there are at most `MAX_TENSORS`."""
    depth = max((name.count(".") for name in tensors), default=0)
    while len(tensors) > MAX_TENSORS and depth > 0:
        joined: dict[str, TensorDigest] = {}
        for name, each in tensors.items():
            short = ".".join(name.split(".")[:depth])
            known = joined.get(short)
            digest = each.digest if known is None else (known.digest * 31 + each.digest) & 0xFFFFFFFF
            joined[short] = TensorDigest(each.part, each.dtype if known is None else known.dtype, digest)
        tensors, depth = joined, depth - 1
    return tensors
