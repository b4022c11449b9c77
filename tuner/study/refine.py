"""Chunk sizes between those that were measured: around the best, and where a constraint begins to bind. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tuner.domain.experiment import SettingId
from tuner.domain.profile import Constraint
from tuner.study.estimate import COUNTS, Evidence

GRID = 128
SMALL = 512
"""Below this chunk size the grid is the chunk unit itself."""
NEAR = 1.25
"""Chunk sizes whose ratio is at most this are close enough: the best is not looked for between them."""
TARGETS = (0.5, 0.7, 0.9, 0.97, 0.99)
"""Probabilities of meeting a limit for which a chunk size is looked for. One start leaves the level uncertain by as
much as starts differ, so the finals need settings on both sides of the one that should just pass."""
WORTH = 0.10
"""A limit is approached beside settings whose cost is at most this above the leader's."""

UNCERTAIN = 0.04
"""A limit is approached unless the objective is worse by more than this beyond it: noise may hide a gain."""


@dataclass(frozen=True)
class Point:
    """A measured setting that differs from the leader in the chunk size alone, or the leader itself."""

    id: SettingId
    chunk: int
    cost: float
    """On the scale of the first objective, relative to the leader's; lower is better."""
    p: float
    """Probability that it meets the constraints."""


def new_chunks(evidence: Evidence, leader: SettingId, family: Sequence[Point], unit: int) -> list[int]:
    """Chunk sizes that are worth measuring next; none when the grid is fine enough everywhere that matters.

    `family` is ordered by chunk size; `unit` is what every chunk size is a multiple of.
    """
    at = next((i for i, point in enumerate(family) if point.id == leader), None)
    if at is None:
        return []
    known = {point.chunk for point in family}
    wanted = [*_around(family, at, unit), *_at_limits(evidence, family, unit)]
    return [chunk for chunk in dict.fromkeys(wanted) if chunk not in known]


def grid_step(chunk: int, unit: int) -> int:
    """The grid at a chunk size: 128 tokens, the unit itself where chunks are small."""
    return unit * math.ceil(GRID / unit) if chunk >= SMALL else unit


def _around(family: Sequence[Point], at: int, unit: int) -> Iterator[int]:
    """The middle between the leader and each neighbour that likely meets the limits."""
    for low, high in pairwise(family[max(0, at - 1) : at + 2]):
        other = low if high is family[at] else high
        if high.chunk / low.chunk > NEAR and other.p >= 0.5:
            step = grid_step(low.chunk, unit)
            chunk = round(math.sqrt(low.chunk * high.chunk) / step) * step
            if low.chunk < chunk < high.chunk:
                yield chunk


def _at_limits(evidence: Evidence, family: Sequence[Point], unit: int) -> Iterator[int]:
    """Where each constraint is met with each of the target probabilities, if the objective gains towards the limit."""
    for constraint in evidence.problem.constraints:
        if constraint.metric in COUNTS or constraint.metric.startswith("memory.") or constraint.op == "==":
            continue
        for target in TARGETS:
            room = [_room(evidence, point, constraint, target) for point in family]
            for (low, a), (high, b) in pairwise(zip(family, room, strict=True)):
                if a is not None and b is not None and (a < 0) != (b < 0) and _pays(low, high, a):
                    yield from _crossing(low.chunk, high.chunk, a, b, unit)


def _room(evidence: Evidence, point: Point, constraint: Constraint, target: float) -> float | None:
    """How far inside the limit the setting is, on the scale, if it has to meet it with the target probability."""
    level = evidence.level(point.id, constraint.metric)
    if level is None:
        return None
    limit = evidence.scale(constraint.metric).limit(constraint.limit)
    if constraint.op.startswith("<"):
        return limit - level.quantile(target)
    return level.quantile(1 - target) - limit


def _pays(low: Point, high: Point, room_of_low: float) -> bool:
    inside, outside = (high, low) if room_of_low < 0 else (low, high)
    return min(inside.cost, outside.cost) <= WORTH and outside.cost < inside.cost + UNCERTAIN


def _crossing(low: int, high: int, a: float, b: float, unit: int) -> Iterator[int]:
    """The chunk size at which the room is 0, by interpolation on logarithms, rounded to the side that has room."""
    exact = math.exp(math.log(low) + (math.log(high) - math.log(low)) * a / (a - b))
    step = grid_step(int(exact), unit)
    chunk = (math.floor(exact / step) if a >= 0 else math.ceil(exact / step)) * step
    if low < chunk < high:
        yield chunk
