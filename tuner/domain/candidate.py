"""One configuration to try: vLLM options, and a prefix reuse budget."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from tuner.domain.base import Argument, Document

Scalar = int | float | Argument | bool | None
"""A value of a `vllm serve` option; None leaves the option out."""

CHUNK_KNOB = "max_num_batched_tokens"
"""vLLM's name for tokens a step, the chunk of a lone prefill."""


_LARGEST = 2**31 - 1


class ReuseBudget(Document):
    """The five policies of the scheduler plug-in; 0 turns one off, all off is the stock scheduler.

    `max_hold_ms` and `yield_chunk_tokens` only matter while `min_reuse_ratio` is above 0.
    """

    max_cached_blocks: Annotated[int, Field(ge=0, le=_LARGEST)] = 0
    min_reuse_ratio: float = Field(default=0.0, ge=0.0, le=1.0)
    max_hold_ms: float = Field(default=1000.0, ge=0.0, le=_LARGEST)
    yield_chunk_tokens: Annotated[int, Field(ge=0, le=_LARGEST)] = 0
    merge_below: float = Field(default=0.0, ge=0.0, le=1.0)
    evict_above: float = Field(default=0.0, ge=0.0, le=1.0)

    @model_validator(mode="before")
    @classmethod
    def _numbers(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name, given in value.items():
                if isinstance(given, bool):
                    raise ValueError(f"{name} is a number; 0 turns it off")
        return value

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
