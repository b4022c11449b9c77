"""From the requests of a round to the values that each latency is made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tuner.domain.observation import RequestRecord, RoundObservation
from tuner.measure.percentiles import Values


@dataclass(frozen=True)
class Sample:
    """The values of one latency in one round, ms, and which request each came from.

    `owners` is None where every request gives one value; values of one request are not independent.
    """

    values: Values
    owners: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None


def measured(observation: RoundObservation) -> list[RequestRecord]:
    """The requests that count, failures included."""
    return [r for r in observation.records if r.phase == "measured"]


def cold(observation: RoundObservation) -> list[RequestRecord]:
    """Closed loop: the burst that opens the round. Open loop: the first request of each prefix."""
    if observation.client.asked_in_flight is None:
        return [r for r in observation.records if r.prefix_first and r.phase != "warmup"]
    return [r for r in observation.records if r.phase == "cold"]


def reports_cache(records: Iterable[RequestRecord]) -> bool:
    """Whether the server said of any request how much of its prompt was cached."""
    return any(r.cached_tokens is not None for r in records)


def cached_share(record: RequestRecord) -> float | None:
    """Share of the prompt that was cached, of a server that reports it; None without a prompt length."""
    prompt = record.prompt_tokens if record.prompt_tokens is not None else record.prompt_tokens_planned
    return None if not prompt else (record.cached_tokens or 0) / prompt


def _ttfts(records: Iterable[RequestRecord]) -> Sample:
    return _each([r.ttft_ms for r in records])


def _each(values: Sequence[float | None]) -> Sample:
    return Sample(np.array([v for v in values if v is not None], dtype=np.float64))


def samples(observation: RoundObservation) -> dict[str, Sample]:
    """Every latency of a round by its name; failed requests are in none of them.

    `groups.<class>` holds the TTFT of one class. The split by cache is left out where the server
    does not report cached tokens.
    """
    good = [r for r in measured(observation) if r.ok]
    values = {
        "ttft_ms": _ttfts(good),
        "cold_ttft_ms": _ttfts(cold(observation)),
        "itl_ms": _gaps(good),
        "tpot_ms": _each([r.tpot_ms for r in good]),
        "e2e_ms": _each([r.e2e_ms for r in good]),
        "answer_ttft_ms": _answers(good),
    }
    if reports_cache(observation.records):
        shares = [(r, cached_share(r)) for r in good]
        values["ttft_cached_ms"] = _ttfts(r for r, share in shares if share is not None and share >= 0.5)
        values["ttft_uncached_ms"] = _ttfts(r for r, share in shares if share is not None and share < 0.5)
    for name in sorted({r.group for r in good if r.group}):
        values[f"groups.{name}"] = _ttfts(r for r in good if r.group == name)
    return values


def _gaps(good: Sequence[RequestRecord]) -> Sample:
    owners = np.repeat(np.arange(len(good)), [len(r.token_gaps_ms) for r in good])
    return Sample(np.array([gap for r in good for gap in r.token_gaps_ms], dtype=np.float64), owners)


def _answers(good: Sequence[RequestRecord]) -> Sample:
    """Time to the answer's own first token, of a load in which some request thought first."""
    thought = any(r.first_answer_s is not None and r.first_answer_s != r.first_token_s for r in good)
    if not thought:
        return _each([])
    return _each([None if r.first_answer_s is None else (r.first_answer_s - r.intended_s) * 1e3 for r in good])
