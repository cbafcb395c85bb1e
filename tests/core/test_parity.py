"""Training with sharded parameters gives the numbers of the unsharded model with averaged gradients."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable

import pytest
import torch

from tests.kit.models.models import CASES, PLAIN, Case, Mix, built, case, tokens
from tests.kit.models.reference import Training, adamw, compare, product, sgd
from tests.kit.models.under_test import STYLES, TORCH, Strategy, Style, core, sharder
from tests.kit.ranks.harness import run

FULL, GRAD_OP, NONE = Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP, Strategy.NO_SHARD
STRATEGIES = (FULL, GRAD_OP, NONE)
HYBRID = (Strategy.HYBRID_SHARD, Strategy._HYBRID_SHARD_ZERO2)
ACCUMULATION = ((1, False), (2, True), (2, False))  # micro batches, all but the last without reduction
Row = tuple[Case, dict]


def torch_can(which: Case, style: Style, **row) -> bool:
    if not TORCH:
        return True
    if not style.wraps:
        return which.torch != "no"
    held_low = row.get("low") and row.get("accumulation") == (2, True)
    return which.torch in ("yes", style.value) and not row.get("offload") and not held_low


def difference(
    which: Case,
    world: int,
    *,
    style: Style,
    strategy: Strategy = FULL,
    accumulation=(1, False),
    optimizer=adamw,
    low=False,
    steps=2,
    equal=True,
    by_pieces=True,
    **more,
):
    """What parts the case from its unsharded twin under these settings."""
    plain = built(which)
    model = which.cut(copy.deepcopy(plain), sharder(style, strategy, low=low, **more))
    micro, no_sync = accumulation
    how = Training(optimizer, steps=steps, micro=micro, no_sync=no_sync, low=low, equal=equal, by_pieces=by_pieces)
    how.replicas = 2 if strategy in HYBRID else 1
    replicated = strategy is NONE or world == 1
    return compare(which, model, plain, how, orig=style is not Style.FLAT, replicated=replicated)


def table(world: int, rows: list[Row], timeout: float = 120.0) -> None:
    """Train the rows, cases with settings, in one group of ranks; report all rows that differ."""
    rows = [(which, row) for which, row in rows if torch_can(which, **row)]
    if not rows:
        pytest.skip("torch is wrong")

    def body(rank, world):
        warnings.simplefilter("ignore")
        found = {}
        for which, row in rows:
            try:
                wrong = difference(which, world, **row)
            except Exception as error:
                raise RuntimeError(f"{which} with {row}") from error
            if wrong:
                found[f"{which} with {row}"] = wrong[:4]
        return found

    assert run(world, body, timeout=timeout)[0] == {}


def of(which: Case, rows: list[dict]) -> list[Row]:
    return [(which, row) for row in rows]


# ------------------------------------------------------------------------------------------------- the tables


def names(cases: list[Case]) -> str:
    return ", ".join(map(str, cases))


@pytest.mark.parametrize("cases", [CASES[start : start + 7] for start in range(0, len(CASES), 7)], ids=names)
def test_every_case_on_two_ranks(cases):
    """Each case with each style, each strategy and each kind of accumulation; over all cases these meet each other."""
    rows = [(which, row) for which in cases for row in turns(which, 2, STRATEGIES)]
    optimizers = ({"optimizer": sgd}, {"optimizer": adamw})
    table(2, [(which, once_accumulated({**row, **optimizers[i % 2]})) for i, (which, row) in enumerate(rows)])


@pytest.mark.slow
@pytest.mark.parametrize("cases", [CASES[start : start + 4] for start in range(0, len(CASES), 4)], ids=names)
def test_every_case_with_every_style_and_strategy_on_two_ranks(cases):
    """Each style with each strategy, and each of both with each kind of accumulation."""
    places = product(style=enumerate(Style), strategy=enumerate(STRATEGIES))
    rows = [
        once_accumulated(
            {
                "style": style,
                "strategy": strategy,
                "accumulation": ACCUMULATION[(i + j) % 3],
                "optimizer": (sgd, adamw)[(i + j) % 2],
            }
        )
        for (i, style), (j, strategy) in (place.values() for place in places)
    ]
    table(2, [row for which in cases for row in of(which, rows)])


def once_accumulated(row: dict) -> dict:
    """A row of one step if it accumulates, of two if not; one and three ranks go on after they accumulated."""
    return {**row, "steps": 2 if row["accumulation"] == (1, False) else 1}


BOTH = (False, True)
AXES = {
    "checkpointed": BOTH,
    "frozen": BOTH,
    "tied": BOTH,
    "style": tuple(Style),
    "low": BOTH,
    "offload": BOTH,
    "accumulation": ACCUMULATION,
    "strategy": STRATEGIES,
}
"""All settings of a model and its training."""


def mixed(row: dict) -> Row:
    """A row of settings with the part of it that is the model's made a case."""
    kind = {name: row[name] for name in ("checkpointed", "frozen", "tied")}
    rest = {name: value for name, value in row.items() if name not in kind}
    name = " ".join(name for name, on in kind.items() if on) or "plain"
    which = Case(name, lambda: Mix(**kind), tokens, torch="orig" if kind["frozen"] else "yes")
    return which, {**rest, "optimizer": sgd, "steps": 2 if rest["accumulation"][0] == 1 else 1, "equal": False}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: s.name)
@pytest.mark.parametrize("style", list(Style), ids=lambda s: s.value)
def test_the_full_product_on_two_ranks(style, strategy):
    table(2, [mixed(row) for row in product(**{**AXES, "style": [style], "strategy": [strategy]})])


def covering(axes: dict[str, tuple], turn: int, strength: int = 2) -> list[dict]:
    """Few rows in which each so many values of different axes come together."""
    every = product(**axes)
    every = every[turn % len(every) :] + every[: turn % len(every)]
    combinations = [set(itertools.combinations(row.items(), strength)) for row in every]
    missing, rows = set().union(*combinations), []
    while missing:
        best = max(range(len(every)), key=lambda each: len(missing & combinations[each]))
        rows.append(every[best])
        missing -= combinations[best]
    return rows


def pairwise(turn: int, **axes: tuple) -> list[Row]:
    """Rows that bring every two settings together."""
    return [mixed(row) for row in covering({**AXES, **axes}, turn)]


@pytest.mark.shown_by("::test_every_two_settings_together_on_two_ranks")
@STYLES
def test_every_three_settings_together_on_two_ranks(style):
    """Of the full product, which `pytest -m slow` trains, a tenth."""
    turn = 101 * list(Style).index(style)
    table(2, [mixed(row) for row in covering({**AXES, "style": (style,)}, turn, strength=3)])


def test_every_two_settings_together_on_two_ranks():
    table(2, pairwise(14))


@pytest.mark.parametrize("world", [1, 3, 4])
def test_every_two_settings_together_on_other_numbers_of_ranks(world):
    table(world, pairwise(7 * world))


def test_every_two_settings_together_on_replicas_of_groups():
    table(4, pairwise(3, strategy=HYBRID))


@pytest.mark.shown_by("[0]", "1")
@pytest.mark.parametrize("part", range(2))
def test_every_case_on_one_rank(part):
    table(1, [(which, row) for which in CASES[part::2] for row in turns(which, 1, STRATEGIES)])


DIVIDED = (
    "mlp",
    "one unit",
    "tied in the root",
    "tied across units",
    "frozen unit and frozen part",
    "unused everywhere",
    "used on some ranks",
    "nested",
    "called three times",
    "part of the outputs by rank",
    "mixed dtypes",
    "scalars and strides",
)
"""Cases in which the number of ranks changes the shards and reductions; the others are about order and containers."""


def on_more_ranks(world: int, strategies: tuple[Strategy, ...], is_wanted: Callable[[Case], bool]) -> list[Row]:
    """A row a case; with the number of ranks the style moves on."""
    rows = [(which, turns(which, world, strategies)[(i + world) % 3]) for i, which in enumerate(CASES)]
    return [row for row in rows if is_wanted(row[0])]


@pytest.mark.shown_by("core/test_hybrid.py::test_four_ranks_train_as_the_unsharded_model", "replicas")
@pytest.mark.parametrize(("world", "strategies"), [(3, STRATEGIES), (4, HYBRID)], ids=["three", "replicas"])
def test_cases_on_more_ranks(world, strategies):
    """Three ranks divide no size evenly; four are replicas of groups."""
    rows = on_more_ranks(world, strategies, lambda which: which.name in DIVIDED)
    assert len(rows) == len(DIVIDED)
    table(world, [(which, row if world == 3 else once_accumulated(row)) for which, row in rows])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize(
    ("world", "strategies"),
    [(3, STRATEGIES), (4, STRATEGIES), (4, HYBRID)],
    ids=["three", "four", "replicas"],
)
def test_every_case_on_more_ranks(world, strategies, part):
    table(world, on_more_ranks(world, strategies, lambda which: CASES.index(which) % 2 == part))


def turns(which: Case, world: int, strategies: tuple[Strategy, ...]) -> list[dict]:
    """A row a style; over all cases each pair of settings comes up."""
    turn = CASES.index(which) + world
    return [
        {
            "style": style,
            "strategy": strategies[(turn + index) % len(strategies)],
            "accumulation": ACCUMULATION[(turn // 3 + index) % 3],
        }
        for index, style in enumerate(Style)
    ]


@pytest.mark.shown_by("[2-*]", "4-*")
@pytest.mark.parametrize(("world", "answers"), [(2, (1, 2)), (4, (1, 2, 4))])
def test_full_parameters_kept_as_slices(world, answers):
    """`reshard_after_forward` as a number: a bool in all but name on two ranks, a slice of the whole on four."""
    rows = product(style=[Style.EACH], reshard_after_forward=answers)
    held_back = {"style": Style.EACH, "reshard_after_forward": 2, "accumulation": (2, True), "steps": 1}
    others = [(case(name), held_back) for name in ("nested", "checkpoint(unit)", "called three times")]
    table(world, [*of(PLAIN, rows), *others])


def test_full_parameters_of_the_root_freed_after_forward_too():
    options = {"style": Style.EACH, "reshard_after_forward": True}
    cases = [case(name) for name in ("mlp", "nested", "called three times")]
    table(2, [(which, {**options, "accumulation": kind}) for which, kind in zip(cases, ACCUMULATION, strict=True)])


OPTIMIZERS = product(style=Style, strategy=STRATEGIES, optimizer=(adamw, sgd), steps=[3], by_pieces=[False])


def test_both_optimizers_with_every_strategy_on_two_ranks():
    """Each optimizer with each style and each strategy: every other row of the product."""
    table(2, of(PLAIN, OPTIMIZERS[::2] if len(OPTIMIZERS) % 2 else OPTIMIZERS[::4] + OPTIMIZERS[3::4]))


@pytest.mark.slow
def test_both_optimizers_with_every_style_and_strategy_on_two_ranks():
    table(2, of(PLAIN, OPTIMIZERS))


def test_two_ranks_give_the_bits_of_the_unsharded_model():
    """Halving is exact, so that with two ranks nothing may differ at all."""

    def bits(found, wanted):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)

    def body(rank, world):
        found = []
        for row in product(style=Style, strategy=STRATEGIES):
            plain = built(PLAIN)
            model = PLAIN.cut(copy.deepcopy(plain), sharder(**row))
            exact = Training(sgd, close=bits, by_pieces=False)
            found += compare(
                PLAIN, model, plain, exact, orig=row["style"] is not Style.FLAT, replicated=row["strategy"] is NONE
            )
        return found

    assert run(2, body)[0] == []


@pytest.mark.shown_by("[nested]", "mlp", "called three times")
@pytest.mark.parametrize("name", ["mlp", "nested", "called three times", "checkpoint(unit)"])
def test_prefetch_and_limiter_change_no_number(name):
    before, after = core.BackwardPrefetch.BACKWARD_PRE, core.BackwardPrefetch.BACKWARD_POST
    rows = [
        {
            "backward_prefetch": None,
            "forward_prefetch": True,
            "limit_all_gathers": False,
            "strategy": FULL,
        },
        {
            "backward_prefetch": before,
            "forward_prefetch": True,
            "limit_all_gathers": True,
            "strategy": FULL,
        },
        {
            "backward_prefetch": after,
            "forward_prefetch": False,
            "limit_all_gathers": False,
            "strategy": FULL,
        },
        {
            "backward_prefetch": None,
            "forward_prefetch": False,
            "limit_all_gathers": True,
            "strategy": GRAD_OP,
        },
        {
            "backward_prefetch": after,
            "forward_prefetch": True,
            "limit_all_gathers": True,
            "strategy": GRAD_OP,
        },
    ]
    styles = (Style.ORIGINAL, Style.FLAT)
    table(2, of(case(name), [{"style": styles[index % 2], **row} for index, row in enumerate(rows)]))


def test_zero_grad_that_keeps_tensors_is_the_same():
    def optimizer(parameters):
        made = sgd(parameters)
        made.zero_grad = lambda: torch.optim.SGD.zero_grad(made, set_to_none=False)
        return made

    table(2, of(PLAIN, product(style=Style, optimizer=[optimizer], by_pieces=[False])))


def test_eval_and_no_grad_forwards_between_steps_change_nothing():
    def body(rank, world):
        found = []
        for row in product(style=Style, strategy=STRATEGIES):
            plain = built(PLAIN)
            model = PLAIN.cut(copy.deepcopy(plain), sharder(**row))
            optimizers = [sgd(model.parameters()), sgd(plain.parameters())]
            for _ in range(2):
                with torch.no_grad():
                    torch.testing.assert_close(model.eval()(PLAIN.batch(rank, 9)), plain(PLAIN.batch(rank, 9)))
                model.train()
                made = iter(optimizers)  # a forward may leave full parameters to be seen
                how = Training(lambda _, made=made: next(made), steps=1, equal=False)
                orig, replicated = row["style"] is not Style.FLAT, row["strategy"] is NONE
                found += compare(PLAIN, model, plain, how, orig=orig, replicated=replicated)
        return found

    assert run(2, body)[0] == []
