"""Engines that are wrong on purpose: named checks of the suite must fail under each."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.core import test_kept_tensors, test_parity, test_sharding
from tests.kit.models.front_ends import FRONT_ENDS
from tests.kit.models.models import PLAIN
from tests.kit.models.under_test import STYLES, TORCH, Strategy, Style
from tests.kit.ranks.harness import RanksError

pytestmark = pytest.mark.skipif(TORCH, reason="the engine's own parts are replaced")
if not TORCH:
    from shardckpt.core.comm.collectives import ShardGroup
    from shardckpt.core.comm.streams import ResizableStorage
    from shardckpt.core.modules.autograd_hooks import GradientWatch
    from shardckpt.core.params.gradient_reduction import ReduceOptions
    from shardckpt.core.params.param_bucket import Bucket

FULL, GRAD_OP = Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP
Check = Callable[[Style], None]


def nothing_is_sharded(patch: pytest.MonkeyPatch) -> None:
    """Every rank holds everything and averages over all; training itself goes on right."""
    original = Bucket.__init__

    def whole(self, members, group, *rest):
        original(self, members, ShardGroup(None, replicate=group.shard), *rest)

    patch.setattr(Bucket, "__init__", whole)


def gradients_are_not_averaged(patch: pytest.MonkeyPatch) -> None:
    """Ranks sum their gradients and nobody divides."""
    patch.setattr(ReduceOptions, "divisors", lambda self, world: (1.0, 1.0))


def gradients_stay_at_home(patch: pytest.MonkeyPatch) -> None:
    """Each rank takes its part of its own gradient, as if all had the same."""
    original = ShardGroup.reduce_scatter

    def own(self, out, whole, what, custom=None, **settings):
        pending = original(self, out.clone(), whole, what, custom, **settings)
        out.copy_(whole.view(self.size, -1)[self.rank]).mul_(self.size)
        return pending

    patch.setattr(ShardGroup, "reduce_scatter", own)


def nothing_is_freed(patch: pytest.MonkeyPatch) -> None:
    """Full parameters are gathered again and again, into memory that is never given back."""
    patch.setattr(ResizableStorage, "free", lambda *_, **__: None)


def gradients_are_not_watched(patch: pytest.MonkeyPatch) -> None:
    """Only results of units tell of a backward."""
    patch.setattr(GradientWatch, "notify", lambda self, leaf=None: None)


def holds_its_share(style: Style) -> None:
    test_sharding.test_a_rank_holds_its_share_between_iterations(FULL, 2, style)


def keeps_the_root_alone(style: Style) -> None:
    test_sharding.test_between_forward_and_backward_only_what_the_strategy_keeps_is_whole(FULL, ("",), style)


def leaves_nothing_whole(style: Style) -> None:
    test_sharding.test_g29_a_forward_without_gradients_leaves_nothing_whole(FULL, style)


def issues_its_collectives(style: Style) -> None:
    test_sharding.test_each_strategy_issues_its_collectives_and_no_other(FULL, 9, 5, 0, style)


def has_sizes_of_its_units(style: Style) -> None:
    test_sharding.test_sizes_are_those_of_the_units(2, style)


def trains_as_unsharded(style: Style) -> None:
    test_parity.table(2, [(PLAIN, {"style": style, "strategy": strategy}) for strategy in (FULL, GRAD_OP)])


def reduces_what_a_loss_of_kept_tensors_gives(style: Style) -> None:
    test_kept_tensors.test_a_parameter_that_is_unfrozen_later_is_told_of(FRONT_ENDS[list(Style).index(style)])


CAUGHT: list[tuple[Callable[[pytest.MonkeyPatch], None], Check]] = [
    (nothing_is_sharded, holds_its_share),
    (nothing_is_sharded, issues_its_collectives),
    (nothing_is_sharded, has_sizes_of_its_units),
    (gradients_are_not_averaged, trains_as_unsharded),
    (gradients_stay_at_home, trains_as_unsharded),
    (nothing_is_freed, holds_its_share),
    (nothing_is_freed, keeps_the_root_alone),
    (nothing_is_freed, leaves_nothing_whole),
    (gradients_are_not_watched, reduces_what_a_loss_of_kept_tensors_gives),
]


@pytest.mark.shown_by("core/test_sharding.py::test_a_rank_holds_its_share_between_iterations")
@STYLES
@pytest.mark.parametrize(("mutant", "check"), CAUGHT, ids=lambda each: each.__name__)
def test_a_wrong_engine_is_caught(mutant, check, style, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        check(style)
    assert not isinstance(caught.value, RanksError), "a finding, not a rank that fell over"
