"""Steps on a time line: what is planned when, and when it is over. Knows no clock; the caller says what time it is."""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass

from tuner.sim.core import Core, Step, Token
from tuner.sim.cost import StepCost


@dataclass(frozen=True)
class Timing:
    """How step costs become durations."""

    depth: int = 2
    """Steps planned at once: 2 as with vLLM's async scheduling (the default on a GPU), 1 without."""
    step_overhead_ms: float = 0.0
    """Time between the end of a step and the start of the next that no table knows; hidden at depth 2."""
    scale: float = 1.0
    """Factor on every step's time."""
    noise: float = 0.0
    """Spread of a step's time (standard deviation of its logarithm)."""
    seed: int = 0


class Pipeline:
    """Plans steps as soon as vLLM would and ends them in order."""

    def __init__(self, core: Core, cost: StepCost, timing: Timing) -> None:
        self.core = core
        self.busy_s = 0.0
        """Time that the device has computed, all steps ended or under way."""
        self._cost = cost
        self._timing = timing
        self._random = random.Random(timing.seed)
        self._under_way: deque[tuple[Step, float]] = deque()
        self._device_free_s = -math.inf

    @property
    def due_s(self) -> float | None:
        """When `advance` has to be called next; None while nothing runs."""
        return self._under_way[0][1] if self._under_way else None

    def advance(self, now_s: float) -> list[tuple[float, list[Token]]]:
        """End every step that is over by `now_s` and plan what can be planned: (end, tokens) of each step ended.

        A step that follows without a pause starts when the one before it ended, also when this is called late.
        """
        ended: list[tuple[float, list[Token]]] = []
        self._fill(now_s)
        while self._under_way and self._under_way[0][1] <= now_s:
            step, end_s = self._under_way.popleft()
            ended.append((end_s, self.core.finish(step, end_s)))
            self._fill(end_s)
        return ended

    def ahead_s(self, now_s: float) -> float:
        """The part of `busy_s` that lies after `now_s`."""
        return max(0.0, self._device_free_s - now_s) if self._under_way else 0.0

    def _fill(self, now_s: float) -> None:
        while len(self._under_way) < self._timing.depth and self.core.unfinished:
            step = self.core.plan(now_s)
            if step is None:
                return
            ms = self._cost.step_ms(step.shape) * self._timing.scale
            if self._timing.noise:
                ms *= math.exp(self._random.gauss(0.0, self._timing.noise))
            overhead_s = 0.0 if self._under_way else self._timing.step_overhead_ms / 1e3
            start_s = max(self._device_free_s, now_s + overhead_s)
            self._device_free_s = start_s + ms / 1e3
            self.busy_s += ms / 1e3
            self._under_way.append((step, self._device_free_s))
