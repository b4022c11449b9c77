"""A setting: values of the knobs, and a prefix reuse budget among them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field, field_validator, model_validator

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


class Setting(Document):
    """Values of the knobs, by vLLM's names in snake case, laid over the profile's `engine.args`.

    The one without any is `stock`: what `vllm serve` runs with the profile's own options. A reuse budget
    whose policies are all off is stored as None, so that equal settings compare equal.
    """

    knobs: dict[str, Scalar] = Field(default_factory=dict)
    reuse_budget: ReuseBudget | None = None

    @field_validator("reuse_budget")
    @classmethod
    def _none_when_off(cls, value: ReuseBudget | None) -> ReuseBudget | None:
        return None if value is None or value.off else value

    @property
    def is_stock(self) -> bool:
        """True for the setting without any knob."""
        return not self.knobs and self.reuse_budget is None

    @property
    def chunk(self) -> int | None:
        """The chunk size in tokens; None where the setting leaves it to the profile or to vLLM."""
        value = self.knobs.get(CHUNK_KNOB)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def key(self) -> str:
        """Equal for equal settings, whatever the order of their knobs."""
        budget = self.reuse_budget.to_json() if self.reuse_budget else None
        return json.dumps([self.knobs, budget], sort_keys=True)

    @property
    def label(self) -> str:
        """For people: `stock`, `chunk 512`, `chunk 512, min_reuse_ratio 0.8`."""
        if self.knobs.get("enable_chunked_prefill") is False and self.reuse_budget is None:
            return "no_chunking"
        parts = [f"chunk {value}" if name == CHUNK_KNOB else f"{name} {value}" for name, value in self.knobs.items()]
        if self.reuse_budget is not None:
            given = self.reuse_budget.model_dump(exclude_defaults=True)
            parts += [f"{name} {value:g}" for name, value in given.items()]
        return ", ".join(parts) or "stock"

    def engine_args(self, base: Mapping[str, Scalar]) -> dict[str, Scalar]:
        """The profile's options with these knobs laid over them."""
        return {**base, **self.knobs}

    def flat(self) -> dict[str, Any]:
        """The knobs in one mapping for files and tables, the reuse budget under its own key."""
        budget = {} if self.reuse_budget is None else {"reuse_budget": self.reuse_budget.to_json()}
        return {**self.knobs, **budget}


STOCK: Final = Setting()
