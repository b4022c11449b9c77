"""The engine in real time: requests in, tokens out when their step is over."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from tuner.clock import Clock
from tuner.sim.boot import Plan
from tuner.sim.core import Core, Request, Token
from tuner.sim.cost import StepCost
from tuner.sim.pipeline import Pipeline
from tuner.sim.prom import GAPS, SECONDS, TOKENS, WHOLE, Histogram
from tuner.sim.request import FinishReason


@dataclass(frozen=True, slots=True)
class Delta:
    """One token of an answer; the last one has a reason."""

    token: int
    finished: FinishReason | None
    cached_tokens: int
    output_tokens: int


@dataclass
class Latencies:
    """vLLM's histograms, as the engine saw the requests."""

    first_token: Histogram = field(default_factory=lambda: Histogram(SECONDS))
    between_tokens: Histogram = field(default_factory=lambda: Histogram(GAPS))
    whole: Histogram = field(default_factory=lambda: Histogram(WHOLE))
    queued: Histogram = field(default_factory=lambda: Histogram(WHOLE))
    step_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    prompt: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    output: Histogram = field(default_factory=lambda: Histogram(TOKENS))


class LiveEngine:
    """Runs a `Core` on the clock. `run` is one task; `generate` is called by any number."""

    def __init__(self, plan: Plan, core: Core, cost: StepCost, clock: Clock) -> None:
        self.plan = plan
        self.core = core
        self.latencies = Latencies()
        self.finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self.peak_usage = 0.0
        """Largest share of KV blocks in use since the start."""
        self._clock = clock
        self._pipeline = Pipeline(core, cost, plan.timing)
        self._last_token_s: dict[str, float] = {}
        self._answers: dict[str, asyncio.Queue[Delta]] = {}
        self._woken = asyncio.Event()
        self._numbers = itertools.count()
        self._started_s = clock.monotonic_s()
        self._looked: tuple[float, float] = (self._started_s, 0.0)
        self._utilization = 0.0

    async def run(self) -> None:
        """Until cancelled. Sleeps to absolute times, so that no lateness adds up."""
        while True:
            self._woken.clear()
            for end_s, tokens in self._pipeline.advance(self._clock.monotonic_s()):
                self._deliver(end_s, tokens)
            self.peak_usage = max(self.peak_usage, self.core.pool.usage)
            due_s = self._pipeline.due_s
            wait_s = None if due_s is None else due_s - self._clock.monotonic_s()
            if wait_s is not None and wait_s <= 0:
                # Between two steps whoever waits to send or to arrive gets its turn.
                await asyncio.sleep(0)
                continue
            try:
                await asyncio.wait_for(self._woken.wait(), wait_s)
            except TimeoutError:
                continue

    async def generate(
        self, prompt: Sequence[int], max_tokens: int, stop_after: int | None
    ) -> AsyncGenerator[Delta, None]:
        """The tokens of one request, the last with its reason. Leaving early aborts the request."""
        request = Request(
            id=f"sim-{next(self._numbers)}",
            tokens=list(prompt),
            max_tokens=max_tokens,
            arrived_s=self._clock.monotonic_s(),
            stop_after=stop_after,
        )
        answer: asyncio.Queue[Delta] = asyncio.Queue()
        self._answers[request.id] = answer
        self.core.add(request)
        self._woken.set()
        try:
            while True:
                delta = await answer.get()
                yield delta
                if delta.finished is not None:
                    return
        finally:
            del self._answers[request.id]
            self._last_token_s.pop(request.id, None)
            if request.finished is None:
                self.core.abort(request, self._clock.monotonic_s())
                self.finished["abort"] += 1
                self._woken.set()

    def take_peak_usage(self) -> float:
        """The largest share of KV blocks in use since this was last asked, at least the share now."""
        peak = max(self.peak_usage, self.core.pool.usage)
        self.peak_usage = self.core.pool.usage
        return peak

    def utilization(self) -> float:
        """Share of time that the device computed since this was last asked (over at least 50 ms)."""
        now_s = self._clock.monotonic_s()
        busy_s = self._pipeline.busy_s - self._pipeline.ahead_s(now_s)
        since_s, busy_before_s = self._looked
        if now_s - since_s >= 0.05:
            self._utilization = min(1.0, max(0.0, (busy_s - busy_before_s) / (now_s - since_s)))
            self._looked = (now_s, busy_s)
        return self._utilization

    def _deliver(self, end_s: float, tokens: Sequence[Token]) -> None:
        step_tokens = len(tokens)
        for token in tokens:
            request = token.request
            before_s = self._last_token_s.get(request.id)
            if token.number == 1:
                step_tokens += request.prompt_tokens
                self.latencies.first_token.observe(end_s - request.arrived_s)
                self.latencies.queued.observe((request.admitted_s or request.arrived_s) - request.arrived_s)
            elif before_s is not None:
                self.latencies.between_tokens.observe(end_s - before_s)
            self._last_token_s[request.id] = end_s
            if token.finished is not None:
                del self._last_token_s[request.id]
                self.finished[token.finished] += 1
                self.latencies.whole.observe(end_s - request.arrived_s)
                self.latencies.prompt.observe(request.prompt_tokens)
                self.latencies.output.observe(request.output_tokens)
            answer = self._answers.get(request.id)
            if answer is not None:
                answer.put_nowait(Delta(token.token, token.finished, request.cached_tokens or 0, token.number))
        if tokens:
            self.latencies.step_tokens.observe(step_tokens)
