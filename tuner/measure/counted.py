"""What we sent against what the server counted: whether its counters are about our requests."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.domain.observation import CounterDelta, RequestRecord
from tuner.domain.units import counted as number_of


def not_ours(records: Sequence[RequestRecord], counters: CounterDelta) -> str:
    """Why the server's counters over a round are not about its requests alone; '' when they agree, or cannot be told.

    `records` are all requests of the span. A failed one may have been counted or not, and one with several answers
    counts once or once for each.
    """
    several = max((r.choices for r in records), default=1)
    most = sum(r.choices if r.error is None else several for r in records)
    return others_use_it(counters, sent=len(records), answered=sum(r.error is None for r in records), most=most)


def others_use_it(counters: CounterDelta, *, sent: int, answered: int, most: int) -> str:
    """`not_ours` of so many requests, of which the server may have finished `most`."""
    finished, left = counters.requests_finished, counters.requests_left
    if finished is not None and finished > most:
        return (
            f"the server finished {number_of(round(finished), 'request')} meanwhile, we sent {sent}: others use it, "
            "so its counters are not about this load"
        )
    if finished is not None and finished < answered:
        return (
            f"the server finished {number_of(round(finished), 'request')} meanwhile, {answered} of ours were answered: "
            "several servers stand behind this address, or its counters are another's"
        )
    if left is not None and left > sent - answered:
        return (
            f"{number_of(round(left), 'request')} still ran or waited at the server when ours had ended: others use "
            "it, so its counters are not about this load"
        )
    return ""


def disowned(counters: CounterDelta, reason: str) -> CounterDelta:
    """Nothing of these counters but the size of the pool, which is the same whoever uses it."""
    names = ("prefix_hit_rate", "engine_steps", "preemptions", "kv_cache_usage_peak")
    kept = {name: why for name, why in counters.reasons.items() if name == "kv_cache_tokens"}
    return CounterDelta(kv_cache_tokens=counters.kv_cache_tokens, reasons={**dict.fromkeys(names, reason), **kept})
