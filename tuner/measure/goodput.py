"""Goodput: requests that met every latency limit of the profile, one by one.

A limit on a percentile of a round becomes a limit on each request: `ttft_ms.p99 <= 280` asks every
request for 280 ms. Of several limits on one latency the loosest counts, since a limit on the median
says nothing about a single request. Inter-token limits apply to the request's own gaps by the named
statistic (its P99, with few gaps its largest). After Zhong et al., "DistServe", OSDI 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tuner.domain.observation import RequestRecord
from tuner.domain.profile import Constraint
from tuner.measure.percentiles import QUANTILES, nearest_rank
from tuner.measure.samples import cached_share

Limits = dict[tuple[str, str], float]
"""(latency, statistic) to the limit in ms; the statistic is '' where a request has one value."""

_PER_REQUEST = ("ttft_ms", "ttft_cached_ms", "ttft_uncached_ms", "tpot_ms", "e2e_ms", "answer_ttft_ms")


def request_limits(constraints: Sequence[Constraint]) -> Limits:
    """The limits that one request can meet or miss; empty when the profile sets none."""
    limits: Limits = {}
    for constraint in constraints:
        latency, _, statistic = constraint.metric.partition(".")
        if constraint.op not in ("<", "<=") or statistic not in (*QUANTILES, "mean"):
            continue
        if latency == "itl_ms":
            limits[latency, statistic] = max(constraint.limit, limits.get((latency, statistic), 0.0))
        elif latency in _PER_REQUEST:
            limits[latency, ""] = max(constraint.limit, limits.get((latency, ""), 0.0))
    return limits


def is_good(record: RequestRecord, limits: Limits) -> bool:
    """Whether a request succeeded inside every limit; a limit on what it does not have is met."""
    if not record.ok:
        return False
    for (latency, statistic), limit in limits.items():
        value = _itl(record, statistic) if latency == "itl_ms" else _VALUES[latency](record)
        if value is not None and value > limit:
            return False
    return True


def _itl(record: RequestRecord, statistic: str) -> float | None:
    if not record.token_gaps_ms:
        return None
    if statistic == "mean":
        return float(np.mean(record.token_gaps_ms))
    return nearest_rank(sorted(record.token_gaps_ms), QUANTILES[statistic])


def _cached(record: RequestRecord) -> float | None:
    share = cached_share(record)
    return record.ttft_ms if share is not None and share >= 0.5 else None


def _uncached(record: RequestRecord) -> float | None:
    share = cached_share(record)
    return record.ttft_ms if share is not None and share < 0.5 else None


def _answer(record: RequestRecord) -> float | None:
    return None if record.first_answer_s is None else (record.first_answer_s - record.intended_s) * 1e3


_VALUES: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft_ms": lambda r: r.ttft_ms,
    "ttft_cached_ms": _cached,
    "ttft_uncached_ms": _uncached,
    "tpot_ms": lambda r: r.tpot_ms,
    "e2e_ms": lambda r: r.e2e_ms,
    "answer_ttft_ms": _answer,
}
