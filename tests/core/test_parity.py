"""Training with sharded parameters gives the numbers of the unsharded model with averaged gradients."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from harness import run
from models import CASES, PLAIN, Case, built, case
from reference import Training, adamw, compare, product, sgd
from under_test import TORCH, Strategy, core, shard

STRATEGIES = (Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD)
ACCUMULATION = ((1, False), (2, True), (2, False))


def torch_can(which: Case, orig: bool) -> bool:
    return not TORCH or which.torch in ("yes", "orig" if orig else "flat")


def difference(
    which: Case, world: int, *, strategy: Strategy, orig: bool, accumulation=(1, False), optimizer=adamw, **more
):
    """What parts the case from its unsharded twin under these settings."""
    plain = built(which)
    settings = {"sharding_strategy": strategy, "use_orig_params": orig, **more}
    model = which.cut(copy.deepcopy(plain), lambda module: shard(module, **settings))
    micro, no_sync = accumulation
    how = Training(optimizer, steps=3 if micro == 1 else 2, micro=micro, no_sync=no_sync)
    replicated = strategy is Strategy.NO_SHARD or world == 1
    return compare(which, model, plain, how, orig=orig, replicated=replicated)


def table(which: Case, world: int, rows: list[dict]) -> None:
    """Run the rows of settings in one group of ranks; all rows that differ are told."""

    def body(rank, world):
        warnings.simplefilter("ignore")
        found = {}
        for row in rows:
            try:
                wrong = difference(which, world, **row)
            except Exception as error:
                raise RuntimeError(f"{which} with {row}") from error
            if wrong:
                found[str(row)] = wrong[:4]
        return found

    assert run(world, body, timeout=60)[0] == {}


ROWS = product(strategy=STRATEGIES, orig=(False, True), accumulation=ACCUMULATION)


@pytest.mark.parametrize("which", CASES, ids=str)
def test_the_full_product_on_two_ranks(which):
    rows = [
        {**row, "optimizer": (sgd, adamw)[index % 2]} for index, row in enumerate(ROWS) if torch_can(which, row["orig"])
    ]
    if not rows:
        pytest.skip("torch is wrong")
    table(which, 2, rows)


def pairs(which: Case, world: int) -> list[dict]:
    """A row with and one without original parameters; over all cases each pair of settings comes up."""
    turn = CASES.index(which) + world
    return [
        {"strategy": STRATEGIES[(turn + orig) % 3], "orig": orig, "accumulation": ACCUMULATION[(turn // 3 + orig) % 3]}
        for orig in (False, True)
        if torch_can(which, orig)
    ]


@pytest.mark.parametrize("which", CASES, ids=str)
def test_pairs_of_settings_on_one_rank(which):
    some(which, 1)


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("which", CASES, ids=str)
def test_pairs_of_settings_on_more_ranks(which, world):
    some(which, world)


def some(which: Case, world: int) -> None:
    rows = pairs(which, world)
    if not rows:
        pytest.skip("torch is wrong")
    table(which, world, rows)


def test_both_optimizers_with_every_strategy_on_two_ranks():
    table(PLAIN, 2, product(strategy=STRATEGIES, orig=(False, True), optimizer=(adamw, sgd)))


def test_two_ranks_give_the_bits_of_the_unsharded_model():
    """Halving is exact, so that with two ranks nothing may differ at all."""

    def body(rank, world):
        found = []
        for row in product(strategy=STRATEGIES, orig=(False, True)):
            plain = built(PLAIN)
            model = PLAIN.cut(
                copy.deepcopy(plain),
                lambda m, r=row: shard(m, sharding_strategy=r["strategy"], use_orig_params=r["orig"]),
            )
            exact = Training(sgd, close=lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=0))
            found += compare(
                PLAIN, model, plain, exact, orig=row["orig"], replicated=row["strategy"] is Strategy.NO_SHARD
            )
        return found

    assert run(2, body)[0] == []


@pytest.mark.parametrize("name", ["mlp", "nested", "called three times", "checkpoint(unit)"])
def test_prefetch_and_limiter_change_no_number(name):
    before, after = core.BackwardPrefetch.BACKWARD_PRE, core.BackwardPrefetch.BACKWARD_POST
    rows = [
        {
            "backward_prefetch": None,
            "forward_prefetch": True,
            "limit_all_gathers": False,
            "strategy": Strategy.FULL_SHARD,
        },
        {
            "backward_prefetch": before,
            "forward_prefetch": True,
            "limit_all_gathers": True,
            "strategy": Strategy.FULL_SHARD,
        },
        {
            "backward_prefetch": after,
            "forward_prefetch": False,
            "limit_all_gathers": False,
            "strategy": Strategy.FULL_SHARD,
        },
        {
            "backward_prefetch": None,
            "forward_prefetch": False,
            "limit_all_gathers": True,
            "strategy": Strategy.SHARD_GRAD_OP,
        },
        {
            "backward_prefetch": after,
            "forward_prefetch": True,
            "limit_all_gathers": True,
            "strategy": Strategy.SHARD_GRAD_OP,
        },
    ]
    table(case(name), 2, [{"orig": index % 2 == 0, **row} for index, row in enumerate(rows)])


def test_zero_grad_that_keeps_tensors_is_the_same():
    def body(rank, world):
        found = []
        for orig in (False, True):
            plain = built(PLAIN)
            model = PLAIN.cut(copy.deepcopy(plain), lambda m, o=orig: shard(m, use_orig_params=o))

            def optimizer(parameters):
                made = sgd(parameters)
                made.zero_grad = lambda: torch.optim.SGD.zero_grad(made, set_to_none=False)
                return made

            found += compare(PLAIN, model, plain, Training(optimizer), orig=orig, replicated=False)
        return found

    assert run(2, body)[0] == []


def test_eval_and_no_grad_forwards_between_steps_change_nothing():
    def body(rank, world):
        found = []
        for row in product(strategy=STRATEGIES, orig=(False, True)):
            plain = built(PLAIN)
            model = PLAIN.cut(
                copy.deepcopy(plain),
                lambda m, r=row: shard(m, sharding_strategy=r["strategy"], use_orig_params=r["orig"]),
            )
            replicated = row["strategy"] is Strategy.NO_SHARD
            for _ in range(2):
                with torch.no_grad():
                    torch.testing.assert_close(model.eval()(PLAIN.batch(rank, 9)), plain(PLAIN.batch(rank, 9)))
                model.train()
                found += compare(PLAIN, model, plain, Training(sgd, steps=1), orig=row["orig"], replicated=replicated)
        return found

    assert run(2, body)[0] == []
