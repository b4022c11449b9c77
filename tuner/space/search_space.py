"""From a profile's space to the values that each knob takes. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tuner.domain.profile import KnobRange, KnobSpec, Profile
from tuner.domain.setting import CHUNK_KNOB, ReuseBudget, Scalar, Setting
from tuner.errors import ProfileError
from tuner.space.alignment import DEFAULT_BLOCK_SIZE, is_aligned, nearest_aligned
from tuner.space.knobs import BUDGET_PREFIX, LIVE

_MOST_VALUES = 4096
"""Of one range with a step of its own."""
_SPREAD_OVER = 17
"""Values of a range without a step."""
_AN_OCTAVE = 2
_AN_OCTAVE_UNREFINED = 8


@dataclass(frozen=True)
class Dimension:
    """A knob and the values it takes, in the order of the profile, or rising where it gave a range."""

    name: str
    """Knobs of the reuse budget carry the prefix `reuse_budget.`."""
    values: tuple[Scalar, ...]


@dataclass(frozen=True)
class SearchSpace:
    """The knobs of a study."""

    dimensions: tuple[Dimension, ...]

    @property
    def size(self) -> int:
        """Number of combinations, inert ones included."""
        return math.prod(len(d.values) for d in self.dimensions)

    def combinations(self) -> Iterator[dict[str, Scalar]]:
        """Every combination, in an order that covers the space early (see `spread`)."""
        for values in itertools.product(*(spread(d.values) for d in self.dimensions)):
            yield dict(zip((d.name for d in self.dimensions), values, strict=True))


def setting_of(values: dict[str, Scalar]) -> Setting:
    """The setting of one combination."""
    knobs = {name: value for name, value in values.items() if not name.startswith(BUDGET_PREFIX)}
    budget = {n.removeprefix(BUDGET_PREFIX): value for n, value in values.items() if n.startswith(BUDGET_PREFIX)}
    return Setting(knobs=knobs, reuse_budget=ReuseBudget.model_validate(budget) if budget else None)


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


def search_space(profile: Profile) -> SearchSpace:
    """The profile's space; ProfileError for a value that a knob does not take."""
    unit = declared_block_size(profile)
    refine = profile.space.refine
    given = dict(profile.space.knobs) | {BUDGET_PREFIX + n: spec for n, spec in profile.space.reuse_budget.items()}
    return SearchSpace(tuple(_dimension(name, spec, unit, refine) for name, spec in given.items()))


def declared_block_size(profile: Profile) -> int:
    """The KV block size that the profile itself sets, else vLLM's default."""
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


def _dimension(name: str, spec: KnobSpec, unit: int, refine: bool) -> Dimension:
    values = _of_range(name, spec, unit, refine) if isinstance(spec, KnobRange) else tuple(_distinct(spec))
    knob = LIVE.get(name)
    for value in values:
        if knob is not None and not knob.takes(value):
            raise ProfileError(f"space.{name}: {value!r} is refused; it takes {knob.wants}", "See docs/knobs.md.")
        if name == CHUNK_KNOB and isinstance(value, int):
            check_alignment(value, unit)
    return Dimension(name, values)


def _of_range(name: str, spec: KnobRange, unit: int, refine: bool) -> tuple[Scalar, ...]:
    if name != CHUNK_KNOB:
        continuous = name in LIVE and LIVE[name].kind is float
        whole = not continuous and all(v is None or float(v).is_integer() for v in (spec.low, spec.high, spec.step))
        values = _geometric(spec, _SPREAD_OVER) if spec.log else _even(name, spec, _SPREAD_OVER, whole=whole)
        return tuple(_distinct([round(v) if whole else float(f"{v:.4g}") for v in values]))
    if not all(v is None or float(v).is_integer() for v in (spec.low, spec.high, spec.step)):
        raise ProfileError(f"space.{name}: low, high and step are whole numbers of tokens")
    for end in (spec.low, spec.high, *([spec.step] if spec.step is not None else [])):
        check_alignment(int(end), unit)
    if spec.log:
        octaves = math.log2(spec.high / spec.low)
        count = max(2, round(octaves * (_AN_OCTAVE if refine else _AN_OCTAVE_UNREFINED)) + 1)
        values = _geometric(spec, count)
    else:
        values = _even(name, spec, _SPREAD_OVER, whole=True)
    return tuple(_distinct([nearest_aligned(round(v), unit) for v in values]))


def _even(name: str, spec: KnobRange, most: int, *, whole: bool) -> list[float]:
    if spec.step is None:
        count = min(most, int(spec.high - spec.low) + 1) if whole else most
        step = (spec.high - spec.low) / max(count - 1, 1)
    else:
        step = spec.step
        count = math.floor((spec.high - spec.low) / step + 1e-9) + 1
        if count > _MOST_VALUES:
            raise ProfileError(
                f"space.{name}: the range has {count} values, at most {_MOST_VALUES} are taken", "Give a larger step."
            )
    return [spec.low + i * step for i in range(count)]


def _geometric(spec: KnobRange, count: int) -> list[float]:
    ratio = spec.high / spec.low
    return [spec.low * ratio ** (i / (count - 1)) for i in range(count)]


def _distinct(values: Sequence[Scalar]) -> list[Scalar]:
    """Without repeats; true is not 1 here."""
    return list({(type(v), v): v for v in values}.values())
