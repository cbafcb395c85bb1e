"""Phases of a bucket: each transition of the table happens to a real bucket, and no other happens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from tests.kit.models.under_test import TORCH
from tests.kit.ranks.harness import run

pytestmark = pytest.mark.skipif(TORCH, reason="looks at phases of our engine")
if not TORCH:
    from shardckpt.core import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from shardckpt.core.params import unsharded_params
    from shardckpt.core.params.unsharded_params import BUCKET_TRANSITIONS, BucketPhase, UnshardedParams
    from shardckpt.core.runtime import fsdp_unit

Found = set[tuple[str, str, str]]


@contextmanager
def recorded() -> Iterator[Found]:
    """Yield the transitions that happen inside."""
    found: Found = set()
    start = unsharded_params.start_all_gathers

    def started(buckets, **settings):
        before = [bucket.phase.name for bucket in buckets]
        start(buckets, **settings)
        found.update((name, start.__name__, bucket.phase.name) for name, bucket in zip(before, buckets, strict=True))

    def record(method):
        @functools.wraps(method)
        def call(self, *args, **settings):
            before = self.phase.name
            try:
                return method(self, *args, **settings)
            finally:
                found.add((before, method.__name__, self.phase.name))

        return call

    with pytest.MonkeyPatch.context() as patch:
        for module in (unsharded_params, fsdp_unit):
            patch.setattr(module, start.__name__, started)
        for name in {name for _, name, _ in BUCKET_TRANSITIONS} - {start.__name__}:
            patch.setattr(UnshardedParams, name, record(getattr(UnshardedParams, name)))
        yield found


def train(model: nn.Module) -> None:
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()


def keeps_parameters_after_forward() -> None:
    model = nn.Sequential(fully_shard(nn.Linear(4, 4), reshard_after_forward=False), nn.Linear(4, 4))
    model = fully_shard(model, reshard_after_forward=False)
    model(torch.ones(2, 4))
    train(model)


def keeps_parameters_after_backward() -> None:
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4))))
    model.set_reshard_after_backward(False)
    train(model)
    model[1](torch.ones(2, 4)).sum().backward()


def shards_nothing() -> None:
    train(FullyShardedDataParallel(nn.Linear(4, 4), sharding_strategy=ShardingStrategy.NO_SHARD))


def fails_while_a_unit_is_gathered() -> None:
    model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4)), fully_shard(nn.Linear(4, 4))))
    model.set_modules_to_forward_prefetch([*model])
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 3))
    train(model)


def waits_twice() -> None:
    model = fully_shard(nn.Linear(4, 4))
    bucket = model._fsdp_state.unit.buckets[0]
    bucket.unsharded.start_all_gather()
    bucket.unsharded.wait_all_gather()
    bucket.unsharded.wait_all_gather()
    bucket.unsharded.reshard()


SCENARIOS: list[Callable[[], None]] = [
    keeps_parameters_after_forward,
    keeps_parameters_after_backward,
    shards_nothing,
    fails_while_a_unit_is_gathered,
    waits_twice,
]


def happened() -> Found:
    def body(rank, world):
        with recorded() as found:
            for scenario in SCENARIOS:
                scenario()
        return found

    return set().union(*run(2, body))


def test_the_table_of_bucket_phases_is_what_happens():
    found = happened()
    allowed = {(before.name, name, after.name) for before, name, after in BUCKET_TRANSITIONS}
    assert found - allowed == set(), "transitions outside of the table"
    assert allowed - found == set(), "transitions that no scenario has"


def test_only_kept_parameters_have_versions():
    """What a user may not change is recorded with the phase, and forgotten with it."""

    def body(rank, world):
        model = fully_shard(nn.Linear(4, 4), reshard_after_forward=False)
        unsharded = model._fsdp_state.unit.buckets[0].unsharded
        found = []
        for act in (lambda: model(torch.ones(2, 4)), model.unshard, lambda: model(torch.ones(2, 4)), model.reshard):
            act()
            found.append((unsharded.phase, unsharded.kept is not None))
        return found

    kept = (BucketPhase.KEPT, True)
    assert run(2, body) == [[kept, (BucketPhase.UNSHARDED, False), kept, (BucketPhase.SHARDED, False)]] * 2
