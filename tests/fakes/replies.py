"""Rounds without a socket: what an honest server would send, event by event, for tests to put faults into."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.fakes.scripted_server import DONE, event, usage_chunk
from tuner.domain.measurement import Measurement
from tuner.domain.observation import CounterDelta, MemoryBreakdown, MemoryTimeline, RequestRecord, RoundObservation
from tuner.domain.profile import Constraint
from tuner.load.discard import COUNTS
from tuner.load.exchange import Exchange
from tuner.load.observe import observe
from tuner.load.plan import Arrivals, PlannedRequest, RoundPlan
from tuner.measure import measure_round

TTFT_S, ITL_S = 0.08, 0.02


@dataclass
class Answer:
    """One answer on its way: the events with their times after the request was sent, and how it ends."""

    number: int
    planned: PlannedRequest
    events: list[tuple[float, bytes]]
    status: int | None = 200
    failure: tuple[str, str] | None = None

    @property
    def ends_s(self) -> float:
        return max([at_s for at_s, _ in self.events], default=0.001)


def token(text: str = "tok", finish: str | None = None, index: int = 0) -> bytes:
    """An event with one token of a completion."""
    return event({"choices": [{"index": index, "text": text, "finish_reason": finish}]})


def honest(
    number: int,
    planned: PlannedRequest,
    *,
    tokens: int | None = None,
    finish: str = "length",
    cached: int | None = 0,
    ttft_s: float = TTFT_S,
    itl_s: float = ITL_S,
    prompt: int | None = None,
) -> Answer:
    """What vLLM sends: every token when it is made, the last with the finish reason, `usage`, `[DONE]`."""
    count = tokens if tokens is not None else planned.output_tokens or 1
    events = [(ttft_s + i * itl_s, token(finish=finish if i == count - 1 else None)) for i in range(count)]
    end_s = ttft_s + (count - 1) * itl_s + 0.0005
    told = prompt if prompt is not None else planned.prompt_tokens or 0
    return Answer(number, planned, [*events, (end_s, usage_chunk(told, count, cached)), (end_s, DONE)])


Fault = Callable[[Answer], Answer]


@dataclass
class Server:
    """Plays a closed loop (or, by `rate`, an open one) of requests against answers, each changed by `fault`."""

    requests: int = 40
    concurrency: int = 4
    rate: float | None = None
    outputs: Sequence[int] = (6, 8, 10, 12)
    prompt: int = 200
    fault: Fault = field(default=lambda answer: answer)
    answer: Callable[..., Answer] = honest
    lags_ms: Sequence[float] = (0.1,)
    warmth: int = 160
    """Tokens of each prompt but the first that are cached."""

    def plan(self, **more: Any) -> RoundPlan:
        cold = 0 if self.rate else self.concurrency
        total = self.requests + cold
        planned = [
            PlannedRequest(
                b"", self.prompt, self.outputs[i % len(self.outputs)], at_s=i / self.rate if self.rate else None
            )
            for i in range(total)
        ]
        arrivals = replace(Arrivals.of(planned, None if self.rate else self.concurrency), firsts_are_cold=False)
        return RoundPlan("r1", "/v1/completions", (arrivals,), reports_cached_tokens=True, reports_finish=True, **more)

    def round(self, plan: RoundPlan | None = None) -> RoundObservation:
        plan = plan or self.plan()
        exchanges: list[Exchange] = []
        free = [0.0] * self.concurrency
        total = plan.lead.count or 0
        for number in range(total):
            request = plan.lead.request(number)
            slot = min(range(len(free)), key=free.__getitem__)
            sent_s = request.at_s if request.at_s is not None else free[slot]
            answer = self.fault(self.answer(number, request, cached=self.warmth if number else 0))
            exchange = Exchange(
                request, number, "cold" if number < plan.lead.cold else "measured", sent_s, 0, not number
            )
            exchange.framer, exchange.status, exchange.failure = None, answer.status, answer.failure
            exchange.times = [sent_s + at_s for at_s, _ in answer.events]
            exchange.pieces = [data for _, data in answer.events]
            exchange.end_s = sent_s + answer.ends_s
            free[slot] = exchange.end_s
            exchanges.append(exchange)
        records = [
            e.read(reports_cached_tokens=plan.reports_cached_tokens, reports_finish=plan.reports_finish)
            for e in exchanges
        ]
        return observe(
            plan, exchanges, records, self.lags_ms, started_s=0.0, max_in_flight=self.concurrency, stopped=COUNTS
        )


def counted(observation: RoundObservation) -> CounterDelta:
    """The counters of a server that served this round and nothing else."""
    good = [r for r in observation.records if r.ok]
    prompts = sum(r.prompt_tokens or 0 for r in good)
    return CounterDelta(
        prefix_hit_rate=sum(r.cached_tokens or 0 for r in good) / prompts if prompts else None,
        engine_steps=400.0,
        preemptions=0.0,
        kv_cache_usage_peak=0.3,
        kv_cache_tokens=20_480,
        requests_finished=float(sum(r.status == 200 and r.deltas > 0 for r in observation.records)),
        requests_left=0.0,
    )


def measured(
    observation: RoundObservation, counters: CounterDelta | None = None, limits: Sequence[str] = ()
) -> Measurement:
    """The measurement of a round."""
    return measure_round(
        observation,
        counters or counted(observation),
        MemoryTimeline("unavailable", [], {}, "not asked for"),
        MemoryBreakdown(),
        [Constraint.parse(limit) for limit in limits],
        block_size=16,
    )


def failed(observation: RoundObservation) -> list[RequestRecord]:
    return [r for r in observation.records if not r.ok]
