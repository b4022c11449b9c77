"""Percentiles by one method, nearest rank: an observed value, never one between two.

The q-th percentile of n sorted values is the value at rank ceil(q * n), counted from 1 (Hyndman and
Fan, "Sample Quantiles in Statistical Packages", 1996, definition 1). P99 of 1..100 is 99.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tuner.domain.measurement import Latency

Values = npt.NDArray[np.float64]

QUANTILES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}


def rank(n: int, q: float) -> int:
    """The rank, 1 to n, of the q-th percentile (0 < q <= 1) of n values."""
    if n < 1:
        raise ValueError("no percentile of nothing")
    if not 0 < q <= 1:
        raise ValueError(f"q is a share between 0 and 1, not {q}")
    # 0.07 * 100 is 7.000000000000001 in binary: rounded before the ceiling, or it would be rank 8.
    return min(n, max(1, math.ceil(round(q * n, 9))))


def nearest_rank(sorted_values: Sequence[float] | Values, q: float) -> float:
    """The q-th percentile (q a share, 0.99 for P99) of values that are sorted already."""
    return float(sorted_values[rank(len(sorted_values), q) - 1])


def least_sample(q: float) -> int:
    """The fewest values that can carry the q-th percentile: below, it is nothing but the maximum.

    Ten for P90, a hundred for P99.
    """
    return math.ceil(round(1 / (1 - q), 9))


def latency(values: Sequence[float] | Values) -> Latency | None:
    """The distribution of some values, milliseconds; None for none."""
    array = np.sort(np.asarray(values, dtype=np.float64))
    if array.size == 0:
        return None
    return Latency(
        p50=nearest_rank(array, 0.50),
        p90=nearest_rank(array, 0.90),
        p99=nearest_rank(array, 0.99),
        mean=float(array.mean()),
        n=int(array.size),
    )
