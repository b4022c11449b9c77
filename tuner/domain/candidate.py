"""One configuration to try: vLLM options, and a prefix reuse budget."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from tuner.domain.base import Argument, Document

Scalar = int | float | Argument | bool | None
"""A value of a `vllm serve` option; None leaves the option out."""

CHUNK_KNOB = "max_num_batched_tokens"
"""vLLM's name for tokens a step, the chunk of a lone prefill."""


class ReuseBudget(Document):
    """The five policies of the scheduler plug-in; 0 turns one off, all off is the stock scheduler.

    `max_hold_ms` and `yield_chunk_tokens` only matter while `min_reuse_ratio` is above 0.
    """

    max_cached_blocks: NonNegativeInt = 0
    min_reuse_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    max_hold_ms: NonNegativeFloat = 1000.0
    yield_chunk_tokens: NonNegativeInt = 0
    merge_below: float = Field(default=0.0, ge=0.0, le=1.0)
    evict_above: float = Field(default=0.0, ge=0.0, le=1.0)

    @property
    def off(self) -> bool:
        """True when every policy is off, so that the stock scheduler serves."""
        return not (self.max_cached_blocks or self.min_reuse_ratio or self.merge_below or self.evict_above)


class Candidate(Document):
    """Options by vLLM's names in snake case, laid over the profile's `engine.args`."""

    knobs: dict[str, Scalar]
    reuse_budget: ReuseBudget | None = None

    def engine_args(self, base: dict[str, Scalar]) -> dict[str, Scalar]:
        """The profile's options with this candidate's laid over them."""
        return {**base, **self.knobs}

    @property
    def effective_budget(self) -> ReuseBudget | None:
        """The reuse budget, or None when it changes nothing."""
        return None if self.reuse_budget is None or self.reuse_budget.off else self.reuse_budget
