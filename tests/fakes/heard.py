"""Events written down in order, for tests of what people are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tuner.domain.experiment import Round, Start
from tuner.experiment.design import Named, StartPlan, Step
from tuner.experiment.events import Silent


@dataclass
class Heard(Silent):
    """`on_round(n)` is called when the n-th round begins."""

    on_round: Callable[[int], None] = lambda _: None
    order: list[str] = field(default_factory=list)
    """Starts and rounds."""
    messages: list[str] = field(default_factory=list)
    """Without routine ones."""
    told: list[str] = field(default_factory=list)
    """Every message, and the sentences of `expected`."""
    expectations: list[tuple[int | None, float | None]] = field(default_factory=list)
    """Starts and seconds of the whole experiment, each time they were told."""
    rounds: int = 0

    def expected(self, starts: int | None, seconds: float | None, text: str = "") -> None:
        self.expectations.append((starts, seconds))
        self.told += [text] if text else []

    def start_began(self, number: int, plan: StartPlan) -> None:
        self.order.append(f"began {plan.label}")

    def start_ready(self, start: Start) -> None:
        self.order.append("ready")

    def round_began(self, start: Start, step: Step, attempt: int) -> None:
        self.rounds += 1
        self.order.append(f"round {step.named.id} attempt {attempt}")
        self.on_round(self.rounds)

    def round_ended(self, row: Round, named: Named) -> None:
        self.order.append(f"{row.state} {named.id}")

    def start_ended(self, start: Start) -> None:
        self.order.append(f"ended {start.state}")

    def message(self, text: str, *, routine: bool = False) -> None:
        self.told.append(text)
        self.messages += [] if routine else [text]
