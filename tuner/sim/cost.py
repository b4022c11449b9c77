"""How long one engine step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tuner.sim.tables import estimator


@dataclass(frozen=True, slots=True)
class StepShape:
    """What one step computes: chunks of prompts, and sequences that decode one token each."""

    prefills: tuple[tuple[int, int], ...]
    """(new tokens, tokens computed before) of each prompt chunk."""
    decodes: tuple[int, ...]
    """Context length of each decoding sequence."""

    @property
    def tokens(self) -> int:
        return sum(new for new, _ in self.prefills) + len(self.decodes)


class StepCost(Protocol):
    """Time of one step on the pretended hardware."""

    def step_ms(self, shape: StepShape) -> float:
        """Milliseconds; 0 for an empty step."""
        ...


@dataclass(frozen=True, slots=True)
class LinearCost:
    """A made-up cost for tests and for machines without the tables: a floor, and a price per token."""

    floor_ms: float = 10.0
    per_token_ms: float = 0.05

    def step_ms(self, shape: StepShape) -> float:
        return self.floor_ms + self.per_token_ms * shape.tokens if shape.tokens else 0.0


class MeasuredCost:
    """Step times from the tables for one model, GPU and tensor parallelism.

    Everything that is not attention costs what a batch of that many tokens costs. Prompt attention is one
    kernel over the step's chunks: the tables know equal chunks, so the time of equal chunks of the mean size
    is scaled by the true number of query-key pairs. Decode attention goes by the mean context, which is exact
    for a kernel that is bound by reading the cache.
    """

    def __init__(self, cost_model: str, gpu: str, tp: int) -> None:
        """UsageError when the tables are not installed or do not know the model, GPU or parallelism."""
        self._tables = estimator(cost_model, gpu, tp)
        self._cache: dict[StepShape, float] = {}
        # The tables are read at the first question; asked here, so that no request waits for that.
        self.step_ms(StepShape(((64, 0), (64, 64)), (128, 128)))
        self.step_ms(StepShape((), (128,)))

    def step_ms(self, shape: StepShape) -> float:
        if not shape.tokens:
            return 0.0
        known = self._cache.get(shape)
        if known is None:
            if len(self._cache) > 100_000:
                self._cache.clear()
            known = self._cache[shape] = self._estimate(shape)
        return known

    def _estimate(self, shape: StepShape) -> float:
        new = sum(n for n, _ in shape.prefills)
        count = len(shape.decodes)
        context = max(1, round(sum(shape.decodes) / count)) if count else 1
        if not new:
            return float(self._tables.decode_step_latency(count, context, 1))
        _, shared, prompt_attention, decode_attention = self._tables.mixed_step_breakdown(new, count, new, 1, 0)
        if count:
            decode_attention = self._tables.mixed_step_breakdown(1, count, context, 1, 0)[3]
        if any(done for _, done in shape.prefills) or len(shape.prefills) > 1:
            prompt_attention = self._prompt_attention_ms(shape.prefills)
        return float(shared + prompt_attention + decode_attention)

    def _prompt_attention_ms(self, prefills: Sequence[tuple[int, int]]) -> float:
        k = len(prefills)
        mean_new = max(1, round(sum(n for n, _ in prefills) / k))
        mean_done = round(sum(done for _, done in prefills) / k)
        equal = self._tables.run_static_per_op(
            k, 1, mean_new + mean_done, 1, mean_done, 1.0, 1.0, mode="static_ctx", stride=32
        )[0]
        attention = sum(ms for name, ms, *_ in equal if "attention" in name)
        pairs = sum(n * (done + (n + 1) / 2) for n, done in prefills)
        equal_pairs = k * mean_new * (mean_done + (mean_new + 1) / 2)
        return float(attention * pairs / equal_pairs)
