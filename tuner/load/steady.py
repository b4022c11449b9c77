"""Whether an open loop came to a steady state. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tuner.domain.observation import RequestRecord

_LEAST = 20
"""Fewer requests show no trend."""
_PARTS = 16
_TREND = 0.6
"""Kendall's tau of TTFT over arrival order, of the medians of `_PARTS` parts of the round."""
_GROWTH = 2.0
"""Median TTFT of the last quarter against the first, and below it against the third: still growing at the end."""
_STILL = 1.1
_SAME_LOAD = 1.5
"""Rate and prompt length may grow by so much between first and last quarter before they explain the rest."""


def queue_growth(records: Sequence[RequestRecord]) -> str:
    """A sentence when the queue of an open loop grew through the whole round; '' when it did not.

    Above capacity each request waits longer than the one before, so that every percentile says how long the round
    was and nothing about the server. Where the load itself grew (a trace), that is what the latencies show.
    """
    served = sorted((r for r in records if r.phase == "measured" and r.ttft_ms is not None), key=lambda r: r.intended_s)
    if len(served) < _LEAST:
        return ""
    ttfts = np.array([r.ttft_ms or 0.0 for r in served])
    quarters = _medians(ttfts, 4)
    if quarters[3] < _GROWTH * quarters[0] or quarters[3] < _STILL * quarters[2]:
        return ""
    if _kendall(_medians(ttfts, _PARTS)) < _TREND or _load_grew(served):
        return ""
    span_s = served[-1].intended_s - served[0].intended_s
    listed = ", ".join(f"{q:.0f}" for q in quarters)
    return (
        f"the queue grew through the round: TTFT P50 of its quarters was {listed} ms, at "
        f"{(len(served) - 1) / span_s:.3g} requests a second. The server cannot keep up with this rate, so latencies "
        "only tell how long the round was: lower workload.rate (of a trace, workload.speed), or give a concurrency"
    )


def _load_grew(served: Sequence[RequestRecord]) -> bool:
    quarter = len(served) // 4
    first, last = served[: quarter + 1], served[-quarter - 1 :]
    spans = [part[-1].intended_s - part[0].intended_s for part in (first, last)]
    prompts = [
        float(np.median([r.prompt_tokens or r.prompt_tokens_planned or 0 for r in part])) for part in (first, last)
    ]
    return spans[0] > _SAME_LOAD * spans[1] or prompts[1] > _SAME_LOAD * prompts[0]


def _medians(values: np.ndarray[tuple[int], np.dtype[np.float64]], parts: int) -> list[float]:
    return [float(np.median(part)) for part in np.array_split(values, parts)]


def _kendall(values: Sequence[float]) -> float:
    """Kendall's tau of values against their order: 1 where each is above the one before."""
    array = np.array(values)
    signs = np.sign(array[None, :] - array[:, None])[np.triu_indices(len(array), 1)]
    return float(signs.mean())
