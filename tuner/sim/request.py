"""What the simulated scheduler works on: its options, requests, steps and tallies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from tuner.sim.cost import StepShape

FinishReason = Literal["length", "stop", "abort"]


@dataclass(frozen=True)
class SchedulerConfig:
    """The options that scheduling depends on, under vLLM's names; sizes in tokens."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    block_size: int = 16
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    max_num_scheduled_tokens: int | None = None
    max_num_active_seqs: int | None = None
    watermark: float = 0.0
    scheduler_reserve_full_isl: bool = True


@dataclass(eq=False, slots=True)
class Request:
    """One sequence. `tokens` starts as the prompt and grows; `max_tokens` is at least 1."""

    id: str
    tokens: list[int]
    max_tokens: int
    arrived_s: float
    stop_after: int | None = None
    """Tokens after which the end token comes; None: never before `max_tokens`."""
    prompt_tokens: int = field(init=False)
    computed: int = 0
    pending: int = 0
    """Output tokens of planned steps that are not there yet."""
    in_flight: int = 0
    """Planned steps that have not run."""
    stale: int = 0
    """Those of them that were planned before the last preemption."""
    blocks: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    in_chunks: bool = False
    """Its last planned share did not reach the end of what is known of it (vLLM's `is_prefill_chunk`)."""
    remembered: int = 0
    """Blocks of this request that the prefix cache knows."""
    cached_tokens: int | None = None
    """Prompt tokens found cached at the first admission; None before it."""
    preemptions: int = 0
    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished: FinishReason | None = None

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.tokens)

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens


@dataclass(frozen=True, slots=True)
class Part:
    """One request's share of a step."""

    request: Request
    tokens: int
    computed_before: int
    samples: bool
    life: int
    """The request's preemptions when this was planned."""


@dataclass(frozen=True, slots=True)
class Step:
    """A planned step."""

    parts: list[Part]
    shape: StepShape


@dataclass(frozen=True, slots=True)
class Token:
    """A token that a finished step brought."""

    request: Request
    token: int
    number: int
    """Which of the request's output tokens this is, from 1."""
    finished: FinishReason | None
    """Why the request ended with it."""


@dataclass(slots=True)
class Totals:
    """What vLLM counts, since the start. `steps` are those that brought a token, as vLLM counts them."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    all_steps: int = 0
    prefill_chunks: int = 0
    """Shares of steps that computed a part of a prompt."""
    prefills: int = 0
    """Prompts computed to their end."""
    step_tokens: int = 0
    """Prompt tokens (of prompts done) and generated tokens of `steps`."""
