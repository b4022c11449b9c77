"""The decisions of the reuse budget, free of vLLM: the plug-in and the simulated engine both call them.

Five policies, each off at 0: retention, admission, yielding, chunk merging, eviction under pressure. Time is a
number of seconds that only has to grow. Standard library only.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from typing import Any, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
H = TypeVar("H", bound=Hashable)

LONG_PROMPT_TOKENS = 1024
"""Prompts above this go in chunks while the merging policy is on and does not merge."""
LONG_PROMPT_CHUNK = 512
"""The chunk of a long prompt where `long_prefill_token_threshold` is not set."""
HIT_WINDOW_ADMISSIONS = 64
MOST_AT_THE_FRONT = 64
"""No step admits more than a few requests, so no more are put in order for it."""
FILLED_UP_BELOW = 32
"""With fewer at the front those that belong there move up; not with each that comes or goes."""


@dataclass(frozen=True)
class Budget:
    """The settings, by the names and with the defaults that the tuner uses."""

    max_cached_blocks: int = 0
    min_reuse_ratio: float = 0.0
    max_hold_ms: float = 1000.0
    yield_chunk_tokens: int = 0
    merge_below: float = 0.0
    evict_above: float = 0.0

    def __post_init__(self) -> None:
        for name in ("max_cached_blocks", "yield_chunk_tokens"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be a whole number from 0, not {value!r}")
        for name in ("min_reuse_ratio", "merge_below", "evict_above"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
                raise ValueError(f"{name} must be a number from 0 to 1, not {value!r}")
        hold = self.max_hold_ms
        if isinstance(hold, bool) or not isinstance(hold, int | float) or not 0 <= hold < math.inf:
            raise ValueError(f"max_hold_ms must be a number of milliseconds from 0, not {hold!r}")

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> Budget:
        """The budget that a JSON object describes; ValueError names the setting that is unknown or out of range."""
        known = {each.name for each in fields(cls)}
        for name in raw:
            if name not in known:
                raise ValueError(f"unknown setting {name!r} (there are {', '.join(sorted(known))})")
        return cls(**raw)

    @property
    def off(self) -> bool:
        """True when no policy is on."""
        return not (self.max_cached_blocks or self.min_reuse_ratio or self.merge_below or self.evict_above)


@dataclass
class Counters:
    """What the policies did since the start; all only grow, except `protected_blocks` (how many are kept now)."""

    held_requests: int = 0
    hold_seconds: float = 0.0
    preferred_requests: int = 0
    protected_blocks: int = 0
    spared_blocks: int = 0
    yielded_steps: int = 0
    merged_chunks: int = 0
    early_evictions: int = 0

    def line(self) -> str:
        """`name=value` pairs with a space between, in a fixed order: what the log carries."""
        return " ".join(
            f"{name}={value:.3f}" if isinstance(value, float) else f"{name}={value}"
            for name, value in asdict(self).items()
        )

    @classmethod
    def from_line(cls, line: str) -> Counters:
        """The last counters that `line` wrote; ValueError where a pair is missing or not a number."""
        pairs = dict(pair.split("=", 1) for pair in line.split() if "=" in pair)
        counters = cls()
        for each in fields(cls):
            if each.name not in pairs:
                raise ValueError(f"no {each.name} among the counters: {line!r}")
            setattr(counters, each.name, type(getattr(counters, each.name))(pairs[each.name]))
        return counters


def needed_blocks(total_blocks: int, min_reuse_ratio: float) -> int:
    """The fewest cached blocks with `cached / total_blocks >= min_reuse_ratio`; 0 when there is no full block."""
    if total_blocks <= 0:
        return 0
    # The epsilon keeps a product such as 0.07 * 100 = 7.000000000000001 from asking for one block more.
    return min(total_blocks, max(1, math.ceil(min_reuse_ratio * total_blocks - 1e-9)))


def spare(ranks: Sequence[int]) -> list[int]:
    """Which blocks at the head of the eviction queue go to its tail: indices, in the order in which to append them.

    `ranks` are those blocks' ranks from the head on. The lowest among them is given up where it stands, a higher one
    is kept the longer; equal ranks keep their order.
    """
    lowest = min(ranks, default=0)
    if lowest == max(ranks, default=0):
        return []
    return sorted((index for index, rank in enumerate(ranks) if rank > lowest), key=ranks.__getitem__)


def overtakers(ranks: Sequence[int], cached: Sequence[bool]) -> int:
    """How many cached blocks of the lowest rank are given up before their turn when the others move away."""
    lowest = min(ranks, default=0)
    moved = next((index for index, rank in enumerate(ranks) if rank > lowest), len(ranks))
    return sum(1 for index in range(moved, len(ranks)) if ranks[index] == lowest and cached[index])


def yield_threshold(yield_chunk_tokens: int, long_prefills: int, block_size: int) -> int:
    """Tokens a step for each running prefill so that together they take `yield_chunk_tokens`; never under a block."""
    return max(block_size, yield_chunk_tokens // max(1, long_prefills))


def merging_threshold(
    configured: int, hit_rate: float | None, merge_below: float, *, long_prompts: bool
) -> tuple[int, bool]:
    """Tokens a step for one prompt (0: up to the step's budget), and whether that merges neighbouring chunks.

    `configured` is `long_prefill_token_threshold`; `hit_rate` is None until something was admitted; `long_prompts`
    says whether a prompt above LONG_PROMPT_TOKENS is being computed or waits. With merge_below = 0 nothing changes.
    """
    if merge_below <= 0:
        return configured, False
    if hit_rate is not None and hit_rate < merge_below:
        return 0, long_prompts
    return (configured or LONG_PROMPT_CHUNK) if long_prompts else 0, False


class HitWindow:
    """The share of prompt tokens found cached in the last admissions."""

    def __init__(self, admissions: int = HIT_WINDOW_ADMISSIONS) -> None:
        self._last: deque[tuple[int, int]] = deque()
        self._size = admissions
        self._cached = 0
        self._prompt = 0

    def admit(self, cached_tokens: int, prompt_tokens: int) -> None:
        """A request was admitted and found `cached_tokens` of its prompt in the cache."""
        self._last.append((cached_tokens, prompt_tokens))
        self._cached += cached_tokens
        self._prompt += prompt_tokens
        if len(self._last) > self._size:
            cached, prompt = self._last.popleft()
            self._cached -= cached
            self._prompt -= prompt

    @property
    def hit_rate(self) -> float | None:
        """From 0 to 1; None before the first admission."""
        return self._cached / self._prompt if self._prompt else None


@dataclass(frozen=True, eq=False)
class Front(Generic[K]):
    """Who goes first now: `keys` in order; `preferred` of them because their prefix is cached.

    Who leaves the line leaves its front too.
    """

    keys: list[K] = field(default_factory=list)
    preferred: list[K] = field(default_factory=list)

    def drop(self, key: K) -> None:
        """One of `keys` left."""
        self.keys.remove(key)
        if key in self.preferred:
            self.preferred.remove(key)


class WaitingLine(Generic[K, H]):
    """Which waiting requests go first: those with enough of their prefix cached, in order of arrival.

    A request that was overtaken is held; after `max_hold_s` it is no longer overtaken by later ones. Nobody is kept
    from running: a line only says who is asked first. What is known of a request is kept from its arrival until it
    leaves, and blocks are looked up once for all requests that ask for the same one.
    """

    def __init__(self, min_reuse_ratio: float, max_hold_s: float) -> None:
        self._ratio = min_reuse_ratio
        self._max_hold_s = max_hold_s
        self._arrivals = 0
        self._arrival: dict[K, int] = {}
        self._not_held: dict[K, None] = {}
        self._held_since_s: dict[K, float] = {}
        self._by_block: dict[H, dict[K, None]] = {}
        self._block_of: dict[K, H] = {}
        self._front: Front[K] | None = None
        self._front_cached: list[H] = []
        self._more_behind = False
        self._front_until_s = math.inf

    def __len__(self) -> int:
        return len(self._arrival)

    def arrive(self, key: K, chain: Sequence[H], shared_blocks: int) -> None:
        """`key` waits; `shared_blocks` of its blocks some earlier request had too, so only they can be cached."""
        self._arrival[key] = self._arrivals
        self._arrivals += 1
        self._not_held[key] = None
        needed = needed_blocks(len(chain), self._ratio)
        if 0 < needed <= shared_blocks:
            block = chain[needed - 1]
            self._block_of[key] = block
            self._by_block.setdefault(block, {})[key] = None
            if self._front is not None and block in self._front_cached:
                self._more_behind = True
                self._fill_up()

    def leave(self, key: K, now_s: float) -> float | None:
        """`key` was admitted or cancelled. Returns for how many seconds it was held, None where it never was."""
        if self._arrival.pop(key, None) is None:
            return None
        if self._front is not None and key in self._front.keys:
            self._front.drop(key)
            self._fill_up()
        block = self._block_of.pop(key, None)
        if block is not None:
            group = self._by_block[block]
            del group[key]
            if not group:
                del self._by_block[block]
        if key in self._not_held:
            del self._not_held[key]
            return None
        return now_s - self._held_since_s.pop(key)

    def front(self, now_s: float, is_cached: Callable[[H], object]) -> Front[K]:
        """Who goes first now, and from now on counts those that they overtake as held.

        The same object as before while enough are at the front, the same blocks are cached and nobody's hold ran out.
        """
        cached = list(filter(is_cached, self._by_block))
        if self._front is None or cached != self._front_cached or now_s >= self._front_until_s:
            self._front_cached = cached
            self._front = self._decide(now_s, cached)
        return self._front

    def _fill_up(self) -> None:
        """Decide anew where the front has become too short."""
        if self._front and len(self._front.preferred) < (FILLED_UP_BELOW if self._more_behind else 1):
            self._front = None

    def _decide(self, now_s: float, cached: Sequence[H]) -> Front[K]:
        self._front_until_s = math.inf
        groups = [self._by_block[block] for block in cached]
        self._more_behind = sum(map(len, groups)) > MOST_AT_THE_FRONT
        preferred = [key for group in groups for key in islice(group, MOST_AT_THE_FRONT)]
        if not preferred:
            return Front()
        by_arrival = self._arrival.__getitem__
        preferred.sort(key=by_arrival)
        del preferred[MOST_AT_THE_FRONT:]
        first = dict.fromkeys(preferred)
        self._hold_those_before(preferred[-1], first, now_s)
        for key, since_s in self._held_since_s.items():
            if now_s < since_s + self._max_hold_s:
                self._front_until_s = since_s + self._max_hold_s
                break
            first[key] = None
        order = preferred.copy() if len(first) == len(preferred) else sorted(first, key=by_arrival)
        return Front(order, preferred)

    def _hold_those_before(self, last: K, first: Mapping[K, None], now_s: float) -> None:
        arrival = self._arrival
        until = arrival[last]
        overtaken = []
        for key in self._not_held:
            if arrival[key] >= until:
                break
            if key not in first:
                overtaken.append(key)
        for key in overtaken:
            del self._not_held[key]
            self._held_since_s[key] = now_s
