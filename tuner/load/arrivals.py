"""When requests are due. Pure: a seeded generator in, times out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from tuner.domain.units import TokenRange

_GOLDEN = (5**0.5 - 1) / 2


def due_times_s(rng: np.random.Generator, rate: float, burstiness: float, count: int) -> list[float]:
    """The first `count` of `endless_due_s`."""
    return list(islice(endless_due_s(rng, rate, burstiness), count))


def endless_due_s(rng: np.random.Generator, rate: float, burstiness: float) -> Iterator[float]:
    """Ascending times from 0 at `rate` a second: gaps are gamma with shape `burstiness` and mean 1/rate.

    1 is a Poisson process; below 1 arrivals come in bursts, above 1 they are more regular.
    """
    at_s = 0.0
    while True:
        yield at_s
        at_s += float(rng.gamma(burstiness, 1.0 / (rate * burstiness)))


def spread(rng: np.random.Generator, bounds: TokenRange, count: int) -> list[int]:
    """`count` whole numbers that cover the inclusive range evenly, in random order.

    Every round gets the same lengths in another order, so that rounds differ by what the server does and
    not by what they drew, and a closed loop does not run in step.
    """
    low, high = bounds
    share = (np.arange(count) + 0.5) / max(count, 1)
    values = low + np.floor(share * (high - low + 1)).astype(int)
    rng.shuffle(values)
    return [int(v) for v in values]


def endless_spread(start: float, bounds: TokenRange, position: int) -> int:
    """The number at `position` of an endless sequence that covers the inclusive range evenly from any start on.

    Multiples of the golden ratio, modulo 1 (a Weyl sequence); `start` in [0, 1) shifts it.
    """
    low, high = bounds
    return low + int((start + position * _GOLDEN) % 1.0 * (high - low + 1))


def deal(rng: np.random.Generator, weights: list[float], count: int) -> list[int]:
    """`count` indices in proportion to `weights` (largest remainders), in random order."""
    total = sum(weights)
    exact = [w / total * count for w in weights]
    shares = [int(e) for e in exact]
    by_remainder = sorted(range(len(weights)), key=lambda i: exact[i] - shares[i], reverse=True)
    for i in by_remainder[: count - sum(shares)]:
        shares[i] += 1
    dealt = np.repeat(np.arange(len(weights)), shares)
    rng.shuffle(dealt)
    return [int(d) for d in dealt]
