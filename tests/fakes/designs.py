"""A design that measures what a test names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tuner.domain.experiment import Results, Start
from tuner.domain.setting import CHUNK_KNOB, Scalar
from tuner.experiment.design import Named, StartPlan, Step


@dataclass
class CyclesOf:
    """A design that measures the same settings in whole cycles, on so many starts."""

    settings: Sequence[Named]
    cycles: int = 2
    starts: int = 1
    live: bool = True
    args: dict[str, Scalar] = field(default_factory=lambda: {CHUNK_KNOB: 8192})
    insists: bool = False
    """Asks for a step again until it is kept."""

    def next_start(self, results: Results) -> StartPlan | None:
        number = len(results.starts)
        if number >= self.starts:
            return None
        return StartPlan("search", f"start {number + 1}", self.args, tuple(self.settings), live=self.live)

    def next_step(self, results: Results, start: Start) -> Step | None:
        mine = [r for r in results.rounds if r.start == start.number]
        first = min((r.cycle for r in mine), default=results.next_cycle)
        for cycle in range(first, first + self.cycles):
            for position, named in enumerate(self.settings):
                done = [r for r in mine if (r.cycle, r.setting) == (cycle, named.id)]
                if not (any(r.kept for r in done) if self.insists else done):
                    return Step(named, cycle, position)
        return None
