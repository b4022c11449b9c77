"""What one round sends: bodies made ready beforehand, and when they are due."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tuner.domain.observation import Phase
from tuner.web import LARGEST_REPLY_BYTES


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request, serialized: the round spends no time on it but sending."""

    body: bytes
    prompt_tokens: int | None
    """None where the length is the server's to say (bodies from a file)."""
    output_tokens: int | None
    group: str = ""
    prefix: int | None = None
    """Which shared prefix it begins with; None: one of its own."""
    at_s: float | None = None
    """Open loop: when it is due, seconds after the start of the round."""


def longest_reply_bytes(output_tokens: int | None) -> int:
    """More than any server sends for so many tokens: 64 KiB each (log probabilities of many candidates have some
    KiB), LARGEST_REPLY_BYTES at most, and that where the number is the server's to say."""
    if output_tokens is None:
        return LARGEST_REPLY_BYTES
    return min(LARGEST_REPLY_BYTES, (1 << 20) + (output_tokens << 16))


@dataclass(frozen=True)
class Arrivals:
    """One arrival process: a closed loop (`concurrency`) or a schedule (`at_s` of its requests).

    `count` requests; None: it runs beside the others until they are done. `request(i)` is the same for
    the same i, and may be made on demand.
    """

    request: Callable[[int], PlannedRequest]
    count: int | None
    concurrency: int | None = None
    """Closed loop: kept in flight. None: each request goes out at its `at_s`, whatever the server does."""
    cold: int = 0
    """So many first requests are the cold burst."""
    firsts_are_cold: bool = False
    """Open loop: the first request of each prefix is cold, not measured."""

    @classmethod
    def of(cls, requests: Sequence[PlannedRequest], concurrency: int | None) -> Arrivals:
        """A round's leading process: a closed loop whose first burst is cold, or (None) an open one by `at_s`."""
        return cls(
            request=requests.__getitem__,
            count=len(requests),
            concurrency=concurrency,
            cold=concurrency or 0,
            firsts_are_cold=concurrency is None,
        )

    @classmethod
    def together(cls, requests: Sequence[PlannedRequest]) -> Arrivals:
        """All at once, as a warm-up sends them."""
        return cls(request=requests.__getitem__, count=len(requests), concurrency=len(requests))


@dataclass(frozen=True)
class RoundPlan:
    """A round, ready to be driven. `arrivals[0]` leads: its measured requests span the measured part."""

    key: str
    path: str
    """Below the server's base, such as `/v1/completions`."""
    arrivals: tuple[Arrivals, ...]
    phase: Phase = "measured"
    """`warmup`: nothing in it is measured, nothing discards it."""
    must_start_cold: bool = True
    """The first request must find nothing cached, else the round is discarded."""
    cached_allowance: int = 0
    """Tokens that every prompt of this server begins with (a chat template): cached is no proof of warmth."""
    reports_cached_tokens: bool = False
    """`usage` without `cached_tokens` then means none."""
    reports_finish: bool = False
    """An answer without a finish reason was then cut."""
    exact_prompts: bool = True
    """The server has to count as many prompt tokens as planned; False where prompts are estimates."""
    exact_answers: bool = True
    """Answers have to be as long as asked for; False where they end where the model ends them."""
    labels: tuple[str, ...] = field(default=())
    """What the reader of the numbers has to know about this load."""

    @property
    def lead(self) -> Arrivals:
        return self.arrivals[0]

    @property
    def expected_lanes(self) -> int:
        """Connections to open before the round; an open loop opens more when it needs them."""
        return sum(a.concurrency if a.concurrency is not None else 8 for a in self.arrivals)
