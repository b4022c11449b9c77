"""From what came back to the observation of a round. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.domain.observation import RequestRecord, RoundObservation
from tuner.load.discard import Discard, judge, warm_start
from tuner.load.exchange import Exchange
from tuner.load.keeping_up import client_stats, mean_in_flight
from tuner.load.plan import RoundPlan

AT_ONCE_MS = 0.2
"""No engine makes two tokens of one answer within this time; tokens that were held back arrive so."""
LONG_MS = 20.0
"""Below this an answer is too short to tell the two apart, and below `LONG_LAGS` times the lag of our event loop,
which holds back what comes while it is blocked."""
LONG_LAGS = 5.0


def observe(
    plan: RoundPlan,
    exchanges: Sequence[Exchange],
    records: Sequence[RequestRecord],
    lags_ms: Sequence[float],
    *,
    started_s: float,
    max_in_flight: int,
    stopped: Discard,
) -> RoundObservation:
    """The observation, with the verdict on whether the round counts.

    `records` are read from `exchanges`, in the order they were sent; `lags_ms` are of our event loop (`loop_lags_ms`);
    `stopped` is the code and sentence of what ended the round early.
    """
    lead = [r for r, e in zip(records, exchanges, strict=True) if e.source == 0]
    measured = [r for r in lead if r.phase != "cold"] or lead
    ends = [r.finished_s for r in measured if r.finished_s is not None]
    busy = None
    asked = plan.lead.concurrency
    if asked and lead:
        # The closed loop is full until its last request is sent; after that it may run dry.
        spans = [(r.sent_s, r.finished_s) for r in lead if r.finished_s is not None]
        busy = mean_in_flight(spans, started_s, max(r.sent_s for r in lead))
    client = client_stats(records, lags_ms, max_in_flight=max_in_flight, asked_in_flight=asked, busy_in_flight=busy)
    for record in records:
        record.collected = came_at_once(record, client.loop_lag_p99_ms or 0.0)
    code, why = judge(plan, records, stopped, _warm_start(plan, exchanges, records), client.limited_reason)
    return RoundObservation(
        records=list(records),
        client=client,
        started_s=started_s,
        measured_from_s=min((r.sent_s for r in measured), default=started_s),
        measured_to_s=max(ends, default=started_s),
        discarded=why,
        discard_code=code,
    )


def came_at_once(record: RequestRecord, lag_ms: float) -> bool:
    """Whether most tokens of an answer arrived together with the one before them, though it took long."""
    if record.deltas and record.deltas <= record.choices < (record.output_tokens or 0):
        return True
    gaps = record.token_gaps_ms
    if (record.e2e_ms or 0.0) < max(LONG_MS, LONG_LAGS * lag_ms):
        return False
    return 2 * sum(gap < AT_ONCE_MS for gap in gaps) > len(gaps)


def _warm_start(plan: RoundPlan, exchanges: Sequence[Exchange], records: Sequence[RequestRecord]) -> int | None:
    if not records or not plan.must_start_cold:
        return None
    prefix = exchanges[0].request.prefix
    same = [r for r, e in zip(records, exchanges, strict=True) if e.request.prefix == prefix]
    return warm_start(records[0], same if prefix is not None else records[:1], plan.cached_allowance)
