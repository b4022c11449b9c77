"""Engine starts out of a script, for nights that start no engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.fakes.frozen_trials import round_of
from tuner.regress.starts import Arm, StartResult


@dataclass
class ScriptedStarts:
    """A starter that answers with TTFT P90 values by arm; the last one repeats for ever."""

    ttft_p90_ms: dict[str, Sequence[float]]
    throughput: dict[str, float] = field(default_factory=dict)
    rounds: int = 3
    model_revision: str | None = None
    order: list[str] = field(default_factory=list)
    """Arms in the order in which they were started."""

    async def start(self, arm: Arm, number: int) -> StartResult:
        before = self.order.count(arm.name)
        self.order.append(arm.name)
        values = self.ttft_p90_ms[arm.name]
        p90 = values[min(before, len(values) - 1)]
        rate = self.throughput.get(arm.name, 40.0)
        return StartResult(
            rounds=[round_of(p90 * (1 + wobble), rate * (1 - wobble)) for wobble in wobbles(self.rounds)],
            model_revision=self.model_revision,
        )


def wobbles(count: int) -> list[float]:
    """Small deviations that cancel."""
    return [0.004 * (i - (count - 1) / 2) for i in range(count)]
