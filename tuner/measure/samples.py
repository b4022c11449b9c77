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


_COLLECTED_ALLOWED = 0.25
"""Share of answers: a machine that is short of CPUs holds back some, a gateway all or those of one of its paths."""


def collected(records: Sequence[RequestRecord]) -> str:
    """Why these answers prove no time between tokens: something on the way collected them; '' when they do."""
    several = [r for r in records if r.ok and (r.token_gaps_ms or (r.output_tokens or 0) > r.choices)]
    at_once = sum(r.collected for r in several)
    if at_once <= _COLLECTED_ALLOWED * len(several):
        return ""
    return (
        f"{at_once} of {len(several)} answers arrived in one piece, or in few: something between the engine and us "
        "(a gateway, a proxy) collects the stream, so the time between tokens is not known"
    )


def _ttfts(records: Iterable[RequestRecord]) -> Sample:
    return _each([r.ttft_ms for r in records])


def _each(values: Sequence[float | None]) -> Sample:
    return Sample(np.array([v for v in values if v is not None], dtype=np.float64))


class Samples:
    """The latencies of a round by name, each sorted out when it is first asked for.

    Failed requests are in none of them.
    """

    def __init__(self, observation: RoundObservation) -> None:
        self._observation = observation
        self._good = [r for r in measured(observation) if r.ok]
        self._known: dict[str, Sample | None] = {}
        self.collected = collected(self._good)
        """Why there are no times between tokens ('' when there are)."""

    @property
    def groups(self) -> list[str]:
        """Names of the classes that requests belong to."""
        return sorted({r.group for r in self._good if r.group})

    def get(self, name: str) -> Sample | None:
        """A latency such as `ttft_ms`, or `groups.<class>` for the TTFT of one class.

        None for a name that is no latency, and for the split by cache where the server does not
        report cached tokens.
        """
        if name not in self._known:
            self._known[name] = self._sort_out(name)
        return self._known[name]

    def _sort_out(self, name: str) -> Sample | None:
        good = self._good
        match name:
            case "ttft_ms":
                return _ttfts(good)
            case "cold_ttft_ms":
                return _ttfts(cold(self._observation))
            case "ttft_cached_ms" | "ttft_uncached_ms":
                if not reports_cache(self._observation.records):
                    return None
                shares = [(r, cached_share(r)) for r in good]
                wanted = name == "ttft_cached_ms"
                return _ttfts(r for r, share in shares if share is not None and (share >= 0.5) is wanted)
            case "itl_ms":
                return _gaps([] if self.collected else [r for r in good if not r.collected])
            case "tpot_ms":
                return _each([] if self.collected else [r.tpot_ms for r in good if not r.collected])
            case "e2e_ms":
                return _each([r.e2e_ms for r in good])
            case "answer_ttft_ms":
                return _answers(good)
        if name.startswith("groups."):
            return _ttfts(r for r in good if r.group == name.removeprefix("groups."))
        return None


def _gaps(good: Sequence[RequestRecord]) -> Sample:
    owners = np.repeat(np.arange(len(good)), [len(r.token_gaps_ms) for r in good])
    return Sample(np.array([gap for r in good for gap in r.token_gaps_ms], dtype=np.float64), owners)


def _answers(good: Sequence[RequestRecord]) -> Sample:
    """Time to the answer's own first token, of a load in which some request thought first."""
    thought = any(r.first_answer_s is not None and r.first_answer_s != r.first_token_s for r in good)
    if not thought:
        return _each([])
    return _each([None if r.first_answer_s is None else (r.first_answer_s - r.intended_s) * 1e3 for r in good])
