"""Relative difference of a loss that another order of sums explains.

A sum of n terms in any order has a relative error of at most about `lambda * sqrt(n) * u` (Higham and Mary, "A new
approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019, theorem 2.4), except with a
probability of `2 * exp(-lambda**2 / 2)` for each sum. Here n is the longest sum of a layer, the largest dimension of a
parameter, times the number of parameters, as each feeds the next. Results of layers are rounded once more to the dtype
of the parameters.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

_LAMBDA = 4.0
_UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_ACCUMULATED = 2.0**-24  # unit roundoff of sums: kernels sum in float32 or better


class LossFactors(NamedTuple):
    """Properties of a model on which its rounding errors depend."""

    dtypes: tuple[str, ...] = ()  # dtypes of the parameters
    largest: int = 1  # largest dimension of a parameter
    number: int = 0  # number of parameters


def loss_rtol(params: LossFactors) -> float:
    """Return the relative difference of the loss of one step that reordered sums explain."""
    stored = max(
        (_UNIT_ROUNDOFF.get(dtype, _UNIT_ROUNDOFF["bfloat16"]) for dtype in params.dtypes), default=_ACCUMULATED
    )
    count = max(params.number, 1)
    sums = min(stored, _ACCUMULATED) * sqrt(params.largest * count)
    rounding = stored * sqrt(count) if stored > _ACCUMULATED else 0.0
    return _LAMBDA * (sums + rounding)
