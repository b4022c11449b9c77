"""The one catalogue of knobs. Every `vllm serve` option that is not in it is a boot knob without an entry.

A *live* knob is read by vLLM's scheduler in each step, so that it can be switched while the engine is idle; a *boot*
knob needs a new start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tuner.domain.setting import CHUNK_KNOB, ReuseBudget, Scalar

BUDGET_PREFIX: Final = "reuse_budget."
THRESHOLD_KNOB: Final = "long_prefill_token_threshold"
ADAPTIVE_KNOB: Final = "long_prefill_token_threshold_adaptive"
CHUNKING_KNOB: Final = "enable_chunked_prefill"


@dataclass(frozen=True)
class Knob:
    """One knob that can be switched live."""

    name: str
    """vLLM's own name in snake case; those of the plug-in with the prefix `reuse_budget.`."""
    kind: type[int] | type[float] | type[bool]
    off: Scalar
    """The value with which the engine runs as if the knob were not set; None: not setting it."""
    help: str
    low: float = 0.0
    high: float = math.inf
    """Bounds of its value, both included."""
    rule: str = ""
    """When vLLM refuses it, or when it does nothing."""

    def takes(self, value: Scalar) -> bool:
        """Whether this is a value of the knob."""
        if value is None:
            return self.off is None
        if self.kind is bool or isinstance(value, bool | str):
            return self.kind is bool and isinstance(value, bool)
        whole = self.kind is float or float(value).is_integer()
        return whole and self.low <= value <= self.high

    @property
    def wants(self) -> str:
        """What it takes, in words: `a whole number from 1`, `a number from 0 to 1`, `true or false`."""
        if self.kind is bool:
            return "true or false"
        kind = "a whole number" if self.kind is int else "a number"
        return f"{kind} from {self.low:g}" + ("" if self.high >= _LARGEST else f" to {self.high:g}")


_LARGEST = 2**31 - 1


def _budget(name: str, help: str, rule: str = "") -> Knob:
    """Type, bounds and the value that means off are those of the budget itself."""
    field = ReuseBudget.model_fields[name]
    limits: dict[str, Any] = {}
    for found in (each for given in field.metadata for each in getattr(given, "metadata", [given])):
        limits |= {side: getattr(found, side) for side in ("ge", "le") if hasattr(found, side)}
    kind = float if field.annotation is float else int
    return Knob(BUDGET_PREFIX + name, kind, field.default, help, limits["ge"], limits["le"], rule)


_LIVE = (
    Knob(
        CHUNK_KNOB,
        int,
        None,
        "Tokens that one step may process: the chunk of a lone prefill, and the longest pause that a prefill puts "
        "between two tokens of the others.",
        low=1,
        rule="At least `max_num_seqs`; at least `max_model_len` with chunked prefill off.",
    ),
    Knob(
        THRESHOLD_KNOB,
        int,
        0,
        "At most so many tokens of one prompt in a step, unless it is alone in the batch.",
        rule="Does nothing at or above the chunk size; at most `max_model_len`.",
    ),
    Knob(
        ADAPTIVE_KNOB,
        bool,
        False,
        "Floors that threshold at a fair share: the chunk size over the number of queued and running requests.",
        rule="Does nothing without a threshold.",
    ),
    Knob(
        CHUNKING_KNOB,
        bool,
        True,
        "Lets a prompt be computed in several steps.",
        rule="Off, the chunk size has to be at least `max_model_len`.",
    ),
    Knob(
        "scheduler_reserve_full_isl",
        bool,
        True,
        "Admits a request only if its whole prompt fits into the KV pool, not only its first chunk.",
    ),
    Knob(
        "watermark",
        float,
        0.0,
        "Share of the KV blocks kept free when requests are admitted; fewer preemptions when memory is scarce.",
        high=0.999,
    ),
    Knob(
        "max_num_active_seqs",
        int,
        None,
        "Most requests that run at the same time, without shrinking what `max_num_seqs` sizes.",
        low=1,
        rule="At most `max_num_seqs`; at that number it does nothing.",
    ),
    _budget(
        "max_cached_blocks",
        "Retention: blocks of prefixes seen at least twice leave the head of the eviction queue, at most so many.",
    ),
    _budget("min_reuse_ratio", "Admission: waiting requests with at least this share of their blocks cached go first."),
    _budget(
        "max_hold_ms",
        "How long such a request may hold the others back, in milliseconds.",
        "Does nothing without `min_reuse_ratio`.",
    ),
    _budget(
        "yield_chunk_tokens",
        "Yielding: while such a request waits, running prefills get at most so many tokens a step.",
        "Does nothing without `min_reuse_ratio`.",
    ),
    _budget(
        "merge_below",
        "Merging: below this hit rate neighbouring chunks of a long prompt are merged; above it long prompts go in "
        "chunks.",
    ),
    _budget(
        "evict_above",
        "Eviction: above this share of the KV pool in use, cached blocks that nobody came back for are given up first.",
    ),
)
LIVE: Final[Mapping[str, Knob]] = {knob.name: knob for knob in _LIVE}
"""Every live knob by its name, in the order in which people read them."""


def is_live(name: str) -> bool:
    """Whether the knob can be switched while the engine is idle."""
    return name in LIVE
