"""What a design is: given what was measured so far, which start and which round come next. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from tuner.domain.experiment import Purpose, Results, SettingId, Start
from tuner.domain.setting import ReuseBudget, Scalar, Setting

SWITCH_REFUSED: Final = "switch_refused"
"""Code of the row of a setting that the running engine does not take."""


@dataclass(frozen=True)
class Named:
    """A setting under the id that files and Optuna know it by."""

    id: SettingId
    setting: Setting


@dataclass(frozen=True)
class StartPlan:
    """One engine start."""

    purpose: Purpose
    label: str
    """For people: `search`, `final 2 of 3`, `chunk 512`."""
    engine_args: dict[str, Scalar]
    """vLLM options of the start, in snake case, without the live scheduler's."""
    settings: tuple[Named, ...]
    """What it is going to measure, as far as that is known before."""
    live: bool
    """Settings are switched within the start. False: the one setting is what the engine is started with."""
    reuse_budget: ReuseBudget | None = None
    """Of a start that is not live; a live one switches it."""
    live_budget: bool = False
    """A live start: whether some setting has a reuse budget, which not every vLLM and model can serve."""


@dataclass(frozen=True)
class Step:
    """One round."""

    named: Named
    cycle: int
    """Rounds of one cycle share arrivals and lengths; from `Results.next_cycle`, or the cycle under way."""
    position: int
    """From 0: how many settings of the cycle come before."""


class Design(Protocol):
    """Decides from the results alone, so that a killed run continues where the files end.

    A cycle that a start did not finish is never completed on another one: its rounds are used only for pairs
    within their start.
    """

    def next_start(self, results: Results) -> StartPlan | None:
        """The next start, or None when the experiment is done. StudyStopped when it cannot go on."""
        ...

    def next_step(self, results: Results, start: Start) -> Step | None:
        """The next round on the running start (its rounds are in `results`), or None to stop the engine.

        `start` holds what was read back: `effective_args`, `stock_chunk`.
        """
        ...


class StudyStopped(Exception):
    """The experiment cannot go on: the start that says why."""

    def __init__(self, start: Start) -> None:
        super().__init__(start.message)
        self.start = start
