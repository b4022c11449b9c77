"""The simulated engine in virtual time: a load in, times out, in as long as the arithmetic takes.

core = Core(SchedulerConfig(max_num_batched_tokens=512, ...))
results = run_closed_loop(core, MeasuredCost(...), prompts, concurrency=32)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tuner.sim.core import Core, Request, Token
from tuner.sim.cost import StepCost
from tuner.sim.pipeline import Pipeline, Timing


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: token ids, output length, and when it is sent (ignored by the closed loop)."""

    prompt: Sequence[int]
    output_tokens: int
    at_s: float = 0.0
    group: str = ""


@dataclass(slots=True)
class Answer:
    """When things happened to one request, in virtual seconds."""

    ask: Ask
    sent_s: float
    first_token_s: float | None = None
    finished_s: float | None = None
    token_times_s: list[float] = field(default_factory=list)
    cached_tokens: int | None = None
    preemptions: int = 0

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_token_s is None else (self.first_token_s - self.sent_s) * 1e3


def run_open(core: Core, cost: StepCost, asks: Iterable[Ask], timing: Timing | None = None) -> list[Answer]:
    """Send each request at its `at_s`; answers in the order of `asks`."""
    run = _Run(core, cost, timing)
    for ask in asks:
        run.send_at(ask, ask.at_s)
    return run.to_the_end(iter(()))


def run_closed_loop(
    core: Core,
    cost: StepCost,
    asks: Iterable[Ask],
    *,
    concurrency: int,
    timing: Timing | None = None,
    think_s: float = 0.0,
    stagger_s: float = 0.0,
    api_s: float = 0.0,
) -> list[Answer]:
    """Keep `concurrency` requests in flight until `asks` is used up; answers in the order sent.

    `think_s` passes between an answer and the next request of its slot; the first requests arrive `stagger_s`
    apart; `api_s` is what the server's front end adds before a request reaches the scheduler, which counts in its
    time to first token.
    """
    source = iter(asks)
    run = _Run(core, cost, timing, think_s=think_s, api_s=api_s)
    for slot in range(concurrency):
        ask = next(source, None)
        if ask is None:
            break
        run.send_at(ask, slot * stagger_s)
    return run.to_the_end(source)


class _Run:
    def __init__(
        self, core: Core, cost: StepCost, timing: Timing | None, *, think_s: float = 0.0, api_s: float = 0.0
    ) -> None:
        self._core = core
        self._pipeline = Pipeline(core, cost, timing or Timing())
        self._arrivals: list[tuple[float, int, Answer]] = []
        self._answers: list[Answer] = []
        self._by_request: dict[str, Answer] = {}
        self._think_s = think_s
        self._api_s = api_s

    def send_at(self, ask: Ask, at_s: float) -> None:
        answer = Answer(ask, at_s)
        heapq.heappush(self._arrivals, (at_s + self._api_s, len(self._answers), answer))
        self._answers.append(answer)

    def to_the_end(self, more: Iterator[Ask]) -> list[Answer]:
        while True:
            due_s = self._pipeline.due_s
            if self._arrivals and (due_s is None or self._arrivals[0][0] <= due_s):
                now_s = self._arrivals[0][0]
                while self._arrivals and self._arrivals[0][0] <= now_s:
                    self._arrive(heapq.heappop(self._arrivals))
            elif due_s is not None:
                now_s = due_s
            else:
                return self._answers
            for end_s, tokens in self._pipeline.advance(now_s):
                for token in tokens:
                    self._note(token, end_s, more)

    def _arrive(self, arrival: tuple[float, int, Answer]) -> None:
        at_s, number, answer = arrival
        request = Request(f"r{number}", list(answer.ask.prompt), answer.ask.output_tokens, at_s)
        self._by_request[request.id] = answer
        self._core.add(request)

    def _note(self, token: Token, end_s: float, more: Iterator[Ask]) -> None:
        request = token.request
        answer = self._by_request[request.id]
        answer.token_times_s.append(end_s)
        if answer.first_token_s is None:
            answer.first_token_s = end_s
            answer.cached_tokens = request.cached_tokens
        if token.finished is None:
            return
        answer.finished_s = end_s
        answer.preemptions = request.preemptions
        del self._by_request[request.id]
        following = next(more, None)
        if following is not None:
            self.send_at(following, end_s + self._think_s)
