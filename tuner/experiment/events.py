"""What an experiment tells whoever watches: the report room has a view for people, tests take `Silent`."""

from __future__ import annotations

from typing import Protocol

from tuner.domain.experiment import Round, Start
from tuner.experiment.design import Named, StartPlan, Step


class Events(Protocol):
    """In the order of the experiment; none of them may block or raise."""

    def expected(self, starts: int | None, seconds: float | None, text: str = "") -> None:
        """How many starts and seconds the whole experiment takes, as far as it is known; `text` is a sentence."""

    def start_began(self, number: int, plan: StartPlan) -> None:
        """An engine is being launched (or a running server is asked)."""

    def start_ready(self, start: Start) -> None:
        """It is ready; `start` holds what was read back."""

    def round_began(self, start: Start, step: Step, attempt: int) -> None:
        """Attempt 1 is the first; a discarded round is driven again."""

    def round_progress(self, done: int, total: int) -> None:
        """Requests of the round that have ended."""

    def round_ended(self, row: Round, named: Named) -> None: ...

    def start_ended(self, start: Start) -> None: ...

    def stage(self, text: str) -> None:
        """What is being done now, in a few words: `warming up`, `stopping the engine`."""

    def message(self, text: str, *, routine: bool = False) -> None:
        """A sentence for people; a `routine` one is no warning."""


class Silent:
    """Events that nobody watches."""

    def expected(self, starts: int | None, seconds: float | None, text: str = "") -> None:
        pass

    def start_began(self, number: int, plan: StartPlan) -> None:
        pass

    def start_ready(self, start: Start) -> None:
        pass

    def round_began(self, start: Start, step: Step, attempt: int) -> None:
        pass

    def round_progress(self, done: int, total: int) -> None:
        pass

    def round_ended(self, row: Round, named: Named) -> None:
        pass

    def start_ended(self, start: Start) -> None:
        pass

    def stage(self, text: str) -> None:
        pass

    def message(self, text: str, *, routine: bool = False) -> None:
        pass
