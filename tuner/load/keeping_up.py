"""Did the client keep up? Pure decisions over what the round noted about itself."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.domain.observation import ClientStats, RequestRecord

LATE_MS = 20.0
"""Lateness that is nobody's business, whatever the latencies are."""
LATE_SHARE = 0.20
"""Above `LATE_MS`, lateness may be this share of the median time to first token."""
IDLE_MS = 2.0
"""Time between two requests of a slot that is nobody's business, however short the requests are."""
IDLE_SHARE = 0.05
"""Above `IDLE_MS`, a slot may be idle for this share of the mean time of a request: so much the server waits for us."""


def loop_lags_ms(ticks_late_s: Sequence[float], interval_s: float) -> list[float]:
    """Lag as an event at any moment would have met it, from how late each tick of a timer came; ms.

    A loop that was blocked for 200 ms misses many ticks and reports one: the missed ones are filled in
    (G. Tene's correction for coordinated omission).
    """
    lags: list[float] = []
    for late in ticks_late_s:
        lag = max(late, 0.0)
        lags.append(lag * 1e3)
        while lag > interval_s:
            lag -= interval_s
            lags.append(lag * 1e3)
    return lags


def client_stats(
    records: Sequence[RequestRecord],
    lags_ms: Sequence[float],
    *,
    max_in_flight: int,
    asked_in_flight: int | None,
    busy_in_flight: float | None,
) -> ClientStats:
    """The verdict on the client. `busy_in_flight` is the mean in flight of the closed loop while it ran."""
    late = sorted((r.sent_s - r.intended_s) * 1e3 for r in records if r.phase != "cold" and r.error_code != "refused")
    ttfts = sorted(t for r in records if (t := r.ttft_ms) is not None)
    spans = [s for r in records if (s := r.e2e_ms) is not None]
    lags = sorted(lags_ms)
    late_p99 = _rank(late, 0.99)
    lag_p99 = _rank(lags, 0.99)
    allowed = max(LATE_MS, LATE_SHARE * (_rank(ttfts, 0.5) or 0.0))
    reasons: list[str] = []
    if late_p99 is not None and late_p99 > allowed:
        reasons.append(f"requests were sent up to {late_p99:.0f} ms late (P99), {allowed:.0f} ms are allowed")
    if lag_p99 is not None and lag_p99 > allowed:
        reasons.append(f"the event loop lagged by {lag_p99:.0f} ms (P99), {allowed:.0f} ms are allowed")
    span = sum(spans) / len(spans) if spans else 0.0
    idle_allowed = max(IDLE_MS, IDLE_SHARE * span)
    lag_mean = sum(lags) / len(lags) if lags else 0.0
    if spans and lag_mean > idle_allowed:
        reasons.append(f"the event loop lagged by {lag_mean:.1f} ms on average, requests took {span:.0f} ms")
    if asked_in_flight and busy_in_flight and (asked_in_flight - busy_in_flight) / busy_in_flight * span > idle_allowed:
        reasons.append(f"{busy_in_flight:.1f} requests were in flight, {asked_in_flight} were asked for")
    return ClientStats(
        late_sends_p99_ms=late_p99,
        max_in_flight=max_in_flight,
        asked_in_flight=asked_in_flight,
        loop_lag_p99_ms=lag_p99,
        limited=bool(reasons),
        limited_reason="; ".join(reasons),
    )


def mean_in_flight(spans: Sequence[tuple[float, float]], from_s: float, to_s: float) -> float | None:
    """Mean number of (begin, end) spans open between two times; None for an empty stretch."""
    if to_s <= from_s:
        return None
    open_s = sum(max(0.0, min(end, to_s) - max(begin, from_s)) for begin, end in spans)
    return open_s / (to_s - from_s)


def _rank(ordered: Sequence[float], q: float) -> float | None:
    """Nearest rank: the smallest value with at least a share `q` at or below it."""
    if not ordered:
        return None
    index = -(-round(q * 1e6) * len(ordered) // 1_000_000) - 1
    return ordered[max(0, min(index, len(ordered) - 1))]
