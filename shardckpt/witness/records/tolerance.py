"""Relative loss difference that reordered sums explain.

Summing n terms in any order has a relative error up to about `lambda * sqrt(n) * u` (Higham and Mary, "A new approach
to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4). Each sum exceeds it with
probability `2 * exp(-lambda**2 / 2)`. Here n is a layer's longest sum (the largest parameter dimension) times the
number of parameters, as each feeds the next. Layers round their results once more to the parameters' dtype.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

_LAMBDA = 4.0
_UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_ACCUMULATED = 2.0**-24  # kernels sum in float32 or better


class LossFactors(NamedTuple):
    """Model properties on which rounding errors depend."""

    dtypes: tuple[str, ...] = ()  # parameter dtypes
    largest: int = 1  # largest parameter dimension
    number: int = 0  # parameters


def loss_rtol(params: LossFactors) -> float:
    """Return the relative loss difference that reordered sums explain in one step."""
    stored = max(
        (_UNIT_ROUNDOFF.get(dtype, _UNIT_ROUNDOFF["bfloat16"]) for dtype in params.dtypes), default=_ACCUMULATED
    )
    count = max(params.number, 1)
    sums = min(stored, _ACCUMULATED) * sqrt(params.largest * count)
    rounding = stored * sqrt(count) if stored > _ACCUMULATED else 0.0
    return _LAMBDA * (sums + rounding)
