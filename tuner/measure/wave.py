"""The wave: a closed loop whose requests march in step, so that the phase decides the tail.

With equal outputs, requests that begin together end together and begin together again. Where in its
wave a round happens to be cut then moves P90 by tens of percent between rounds of one configuration.
"""

from __future__ import annotations

import math

import numpy as np

from tuner.domain.observation import RoundObservation
from tuner.measure.samples import measured

_IN_STEP = 0.5
"""Mean resultant length of the send phases (0: spread evenly, 1: all at once) from which it is a wave."""


def in_step(observation: RoundObservation) -> float | None:
    """How much the sends of a closed loop keep step, 0 to 1; None where the question has no meaning.

    The Rayleigh statistic of send times on a circle whose length is the loop's period, the largest
    over periods near the mean request time (Mardia and Jupp, "Directional Statistics", 2000, 6.3).
    """
    asked = observation.client.asked_in_flight
    requests = [r for r in measured(observation) if r.ok and r.e2e_ms is not None]
    if asked is None or asked < 4 or len(requests) < 3 * asked:
        return None
    period_s = float(np.median([r.e2e_ms or 0.0 for r in requests])) / 1e3
    if period_s <= 0:
        return None
    sends = np.array([r.sent_s for r in requests])
    periods = period_s * np.linspace(0.9, 1.1, 41)
    phases = 2 * math.pi * sends[None, :] / periods[:, None]
    return float(np.abs(np.exp(1j * phases).mean(axis=1)).max())


def wave_warning(observation: RoundObservation) -> str | None:
    """A sentence when the round ran in waves, with what to change; None when it did not."""
    strength = in_step(observation)
    if strength is None or strength < _IN_STEP:
        return None
    lengths = {r.output_tokens for r in measured(observation) if r.ok}
    hint = (
        "every answer has the same length: give output_tokens a range such as [8, 24]"
        if len(lengths) == 1
        else "spread output_tokens over a wider range"
    )
    return (
        f"requests ran in waves ({strength:.2f} in step of 1), whose phase moves the tail from round to round; {hint}"
    )
