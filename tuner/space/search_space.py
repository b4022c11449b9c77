"""From a profile's space to the candidates it holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from tuner.domain.setting import CHUNK_KNOB, Setting, ReuseBudget, Scalar
from tuner.domain.profile import KnobRange, KnobSpec, Profile
from tuner.errors import ProfileError
from tuner.space.alignment import DEFAULT_BLOCK_SIZE, is_aligned, nearest_aligned

BUDGET_PREFIX = "reuse_budget."
_STEPS_AN_OCTAVE = 8
_LISTED = 100_000


@dataclass(frozen=True)
class Choices:
    """A knob that takes one of these values."""

    name: str
    values: tuple[Scalar, ...]

    @property
    def count(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Range:
    """A numeric knob from `low` to `high`, both included; `step` None is continuous."""

    name: str
    low: float
    high: float
    step: float | None
    log: bool
    integer: bool

    @property
    def count(self) -> int | None:
        """How many values it has; None when there is no end to them."""
        if self.step is not None:
            return math.floor((self.high - self.low) / self.step + 1e-9) + 1
        return int(self.high - self.low) + 1 if self.integer else None

    @property
    def values(self) -> tuple[Scalar, ...]:
        """Its values, for a range that has an end."""
        count = self.count
        if count is None:
            raise ValueError(f"{self.name} is continuous")
        step = self.step or 1
        raw = (self.low + i * step for i in range(count))
        return tuple(int(v) for v in raw) if self.integer else tuple(raw)


Knob = Choices | Range


@dataclass(frozen=True)
class SearchSpace:
    """The knobs of a study; `reuse_budget` knobs carry the prefix `reuse_budget.`."""

    knobs: tuple[Knob, ...]

    @property
    def size(self) -> int | None:
        """Number of different combinations; None when it is not finite, or too large to list them."""
        counts = [knob.count for knob in self.knobs]
        size = math.prod(c for c in counts if c is not None)
        return None if None in counts or size > _LISTED else size

    def combinations(self) -> Iterator[dict[str, Scalar]]:
        """Every combination of a finite space, in an order that covers it early (see `spread`)."""
        for values in itertools.product(*(spread(knob.values) for knob in self.knobs)):
            yield dict(zip((knob.name for knob in self.knobs), values, strict=True))

    def candidate(self, values: dict[str, Scalar]) -> Setting:
        """The candidate of one combination; a reuse budget that is all off is none."""
        knobs = {name: value for name, value in values.items() if not name.startswith(BUDGET_PREFIX)}
        budget_values = {
            name.removeprefix(BUDGET_PREFIX): value for name, value in values.items() if name.startswith(BUDGET_PREFIX)
        }
        budget = ReuseBudget.model_validate(budget_values) if budget_values else None
        return Setting(knobs=knobs, reuse_budget=None if budget is None or budget.off else budget)


def spread(values: tuple[Scalar, ...]) -> tuple[Scalar, ...]:
    """The middle first, then the middles of what is left: a search that is cut short has seen all regions."""
    if len(values) <= 2:
        return values
    order: list[Scalar] = []
    spans = [(0, len(values))]
    while spans:
        low, high = spans.pop(0)
        if low >= high:
            continue
        middle = (low + high) // 2
        order.append(values[middle])
        spans += [(low, middle), (middle + 1, high)]
    return tuple(order)


def search_space(profile: Profile, block_size: int | None = None) -> SearchSpace:
    """The profile's space, checked: ProfileError for an unaligned chunk size or an empty knob.

    `block_size` is what the engine really uses, once known; before that the profile's own, else 16.
    """
    block = block_size or declared_block_size(profile)
    knobs = [_knob(name, spec, block) for name, spec in profile.space.knobs.items()]
    for name, spec in profile.space.reuse_budget.items():
        knob = _knob(BUDGET_PREFIX + name, spec, block)
        _check_budget(knob)
        knobs.append(knob)
    return SearchSpace(tuple(knobs))


def declared_block_size(profile: Profile) -> int:
    """The KV block size as far as the profile tells, else vLLM's default."""
    declared = profile.engine.args.get("block_size")
    if isinstance(declared, int) and not isinstance(declared, bool):
        return declared
    return profile.engine.block_size or DEFAULT_BLOCK_SIZE


def check_alignment(chunk_size: int, block_size: int) -> None:
    """ProfileError for a chunk that is no whole number of blocks; names the neighbours."""
    if is_aligned(chunk_size, block_size):
        return
    below = max(block_size, chunk_size // block_size * block_size)
    above = max(block_size, -(-chunk_size // block_size) * block_size)
    near = f"{below} or {above}" if below != above else f"{above}"
    raise ProfileError(
        f"space.{CHUNK_KNOB}: {chunk_size} is no multiple of the KV block of {block_size} tokens",
        f"Take {near}, or set engine.args.block_size if the engine uses another block.",
    )


def _knob(name: str, spec: KnobSpec, block: int) -> Knob:
    if isinstance(spec, KnobRange):
        return _range(name, spec, block)
    values = tuple(dict.fromkeys(spec))
    if name == CHUNK_KNOB:
        for value in values:
            if isinstance(value, bool) or not isinstance(value, int):
                raise ProfileError(f"space.{name}: {value!r} is no number of tokens")
            check_alignment(value, block)
    return Choices(name, values)


def _range(name: str, spec: KnobRange, block: int) -> Knob:
    integer = all(v is None or float(v).is_integer() for v in (spec.low, spec.high, spec.step))
    if name != CHUNK_KNOB:
        return Range(name, spec.low, spec.high, spec.step, spec.log, integer)
    if not integer:
        raise ProfileError(f"space.{name}: low, high and step are whole numbers of tokens")
    check_alignment(int(spec.low), block)
    check_alignment(int(spec.high), block)
    if spec.log:
        # A log range in Optuna takes no step, so its values would not be whole blocks: a geometric grid is.
        octaves = math.log2(spec.high / spec.low)
        count = max(2, round(octaves * _STEPS_AN_OCTAVE) + 1)
        raw = (spec.low * 2 ** (octaves * i / (count - 1)) for i in range(count))
        return Choices(name, tuple(dict.fromkeys(nearest_aligned(round(v), block) for v in raw)))
    step = int(spec.step or block)
    check_alignment(step, block)
    return Range(name, spec.low, spec.high, step, log=False, integer=True)


def _check_budget(knob: Knob) -> None:
    ends = knob.values if isinstance(knob, Choices) else (knob.low, knob.high)
    for value in ends:
        field = knob.name.removeprefix(BUDGET_PREFIX)
        try:
            ReuseBudget.model_validate({field: value})
        except ValidationError as error:
            why = error.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
            raise ProfileError(
                f"space.{knob.name}: {value!r} is outside what the plug-in takes: {why}",
                "docs/knobs.md has what each of its policies takes.",
            ) from None
