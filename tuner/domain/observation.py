"""What a round saw, before any statistics: requests, samples and counters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Phase = Literal["warmup", "cold", "measured"]


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it. Times are seconds on the round's monotonic clock.

    A failed request has `error` set; it may still have times, and they never enter a latency.
    """

    index: int
    phase: Phase
    intended_s: float
    """When it was due: the open loop's schedule, or the moment the slot was free."""
    sent_s: float
    first_token_s: float | None = None
    """First delta with a generated token (content, reasoning or tool call; empty text counts)."""
    first_answer_s: float | None = None
    """First delta of the answer itself; later than `first_token_s` for reasoning models."""
    last_token_s: float | None = None
    finished_s: float | None = None
    token_gaps_ms: list[float] = field(default_factory=list)
    """Times between successive token-bearing deltas of one choice, ms; one choice after the other."""
    deltas: int = 0
    """Token-bearing deltas received."""
    collected: bool = False
    """Most tokens arrived together with the one before them: something held them back, nothing tells their times."""
    keep_alives: int = 0
    """Deltas without text that were no tokens, by the count of `usage`."""
    choices: int = 1
    """Answers to this one request (`n`)."""
    finish_reason: str | None = None
    """Why the answer ended: of several choices the first reason that is no normal end."""
    prompt_tokens_planned: int | None = None
    output_tokens_planned: int | None = None
    prompt_tokens: int | None = None
    """From `usage`."""
    output_tokens: int | None = None
    """From `usage`, of all choices together; deltas may carry several tokens."""
    cached_tokens: int | None = None
    """From `usage.prompt_tokens_details`, where the server gives it."""
    group: str = ""
    """Class or tenant, for loads that have them."""
    prefix_first: bool = False
    """True for the first request of its prefix in this round."""
    status: int | None = None
    error: str | None = None
    """Why it failed, in a few words; None for a success."""
    error_code: str | None = None
    """`auth`, `http_error`, `stream_error`, `cut`, `abnormal_end`, `timeout`, `refused`, `no_token`, `stalled`."""

    @property
    def ok(self) -> bool:
        return self.error is None and self.first_token_s is not None

    @property
    def ttft_ms(self) -> float | None:
        """From the intended time (so that a late client shows) to the first token; ms."""
        return None if not self.ok or self.first_token_s is None else (self.first_token_s - self.intended_s) * 1e3

    @property
    def e2e_ms(self) -> float | None:
        return None if not self.ok or self.last_token_s is None else (self.last_token_s - self.intended_s) * 1e3

    @property
    def tpot_ms(self) -> float | None:
        """Mean time per output token after the first of its choice; None for one token, and for one delta of many."""
        if not self.ok or self.first_token_s is None or self.last_token_s is None or self.deltas == self.choices:
            return None
        after_first = (self.output_tokens or 0) - self.choices
        if after_first < 1:
            return None
        if self.choices > 1:
            return sum(self.token_gaps_ms) / after_first
        return (self.last_token_s - self.first_token_s) * 1e3 / after_first


@dataclass(slots=True)
class ClientStats:
    """How well the client itself kept up."""

    late_sends_p99_ms: float | None
    max_in_flight: int
    asked_in_flight: int | None
    """The closed loop's concurrency; None for an open loop."""
    loop_lag_p99_ms: float | None
    limited: bool
    limited_reason: str = ""


@dataclass(slots=True)
class RoundObservation:
    """Everything a round's client saw."""

    records: list[RequestRecord]
    client: ClientStats
    started_s: float
    measured_from_s: float
    """When the first measured request was sent."""
    measured_to_s: float
    """When the last measured request ended."""
    discarded: str = ""
    """Why the round does not count ('' when it does)."""
    discard_code: str = ""
    """The stable code of that: `warm_cache`, `too_many_failures`, `answers_differ`, `prompts_differ`, `queue_grows`,
    `client_limited`, `engine_died`, `engine_stalled`, or the code that most failed requests share (`auth`,
    `http_error`)."""


@dataclass(slots=True)
class MemorySample:
    """One look at one device (or at the host's process tree)."""

    at_s: float
    device: str
    used_bytes: int
    utilization: float | None = None
    """0 to 1."""
    engine_bytes: int | None = None
    """What the engine's own processes use, where the source tells them apart."""


@dataclass(slots=True)
class MemoryTimeline:
    """Samples of a span of time, with where they come from."""

    source: Literal["nvml", "host", "simulated", "unavailable"]
    samples: list[MemorySample]
    total_bytes: dict[str, int]
    """Capacity by device."""
    reason: str = ""
    """Why `unavailable`, or what is missing ('' when nothing is)."""


@dataclass(slots=True)
class CounterDelta:
    """What `/metrics` says about a span of time; None where it cannot be said, with the reason."""

    prefix_hit_rate: float | None = None
    prompt_tokens: float | None = None
    engine_steps: float | None = None
    preemptions: float | None = None
    kv_cache_usage_peak: float | None = None
    kv_cache_tokens: int | None = None
    requests_finished: float | None = None
    requests_left: float | None = None
    """Running or waiting when the span ended."""
    server_ttft_mean_ms: float | None = None
    plugin: dict[str, float] = field(default_factory=dict)
    """The scheduler plug-in's own counters over the span."""
    reasons: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class MemoryBreakdown:
    """The parts of device memory that the engine's log tells apart; bytes, None when it is silent."""

    weights_bytes: int | None = None
    activation_peak_bytes: int | None = None
    kv_pool_bytes: int | None = None
    kv_in_use_peak_bytes: int | None = None
