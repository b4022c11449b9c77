"""What a sweep shows while it runs: a live table on a terminal, one line per event elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tuner.clock import SYSTEM_CLOCK, Clock
from tuner.domain.measurement import higher_is_better, metric
from tuner.domain.experiment import Trial
from tuner.domain.units import counted, format_duration, printable
from tuner.report.answer import FAILED_STATES, STATE_WORDS, limit_text, trial_label
from tuner.report.numbers import metric_title, metric_value
from tuner.report.pace import share_done, step_left_s, time_left_s

ROWS_SHOWN = 12
BAR_WIDTH = 20
LEAST_BAR_WIDTH = 8
"""Where less room is left beside the words, there is no bar."""


class SweepView:
    """Progress of a sweep on stderr. Not a terminal, or `quiet`: plain text, one line per event.

    `quiet` keeps only failed trials and the messages that are not routine. Call `close` on every path (or
    use `with`, which leaves the finished trials on the screen where an error ends it): it gives the terminal
    back and may be called twice. Safe to call from one thread; the screen is redrawn by another.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        quiet: bool = False,
        metric_path: str = "ttft_ms.p90",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._quiet = quiet
        self._metric = metric_path
        self._clock = clock
        self._total = 0
        self._unit = "trial"
        self._finished = 0
        self._finished_s: list[float] = []
        self._trials: list[Trial] = []
        self._best: Trial | None = None
        self._current: str | None = None
        self._trial_from_s = clock.monotonic_s()
        self._stage: str | None = None
        self._stage_from_s = clock.monotonic_s()
        self._stage_history: dict[str, list[float]] = {}
        self._round: tuple[int, int] | None = None
        self._plain = quiet or not self._console.is_terminal
        self._live: Live | None = None

    def __enter__(self) -> SweepView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        was_live = self._live is not None
        self.close()
        if kind is not None and was_live and self._trials:
            self._console.print(self._table(self._trials))

    # --- what the study calls ---

    def study_started(
        self, total_trials: int, earlier: Sequence[Trial] = (), *, kind: str = "study", unit: str = "trial"
    ) -> None:
        """How many trials there will be; those in `earlier` are measured already and count as finished.

        `unit` is what is counted. Trials compete and bear their number; anything else is called by its label.
        """
        self._total, self._finished, self._unit = total_trials, len(earlier), unit
        for trial in earlier:
            self._note(trial)
        self._event(f"{kind}: {counted(total_trials, unit)}")
        if earlier:
            self.message(f"continuing: {counted(len(earlier), unit)} measured earlier", routine=True)
        if not self._plain:
            self._live = Live(
                get_renderable=self._screen,
                console=self._console,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=False,
            )
            self._live.start()

    def replanned(self, total_trials: int, reason: str = "") -> None:
        """More is known about how many there will be; the reason, where there is one, stays on the screen."""
        self._total = total_trials
        if reason:
            self.message(reason)

    def trial_started(self, number: int, label: str) -> None:
        self._current = self._name(number, label)
        self._trial_from_s = self._clock.monotonic_s()
        self._enter_stage(None)
        self._event(f"[{self._finished + 1}/{max(self._total, self._finished + 1)}] {self._current}: started")

    def stage(self, text: str) -> None:
        """The step under way, such as "starting the engine"; equal texts are equal steps for the forecast."""
        self._enter_stage(text)
        self._event(f"  {text}")

    def round_progress(self, done: int, total: int) -> None:
        """Requests finished out of those that this round sends; cheap enough for every request."""
        self._round = (done, total)

    def trial_finished(self, trial: Trial) -> None:
        self._enter_stage(None)
        self._finished += 1
        self._note(trial)
        self._current = None
        left = self.time_left_s()
        rest = f", {format_duration(left)} left" if left else ""
        self._event(
            f"[{self._finished}/{max(self._total, self._finished)}] {self._name(trial.number, trial_label(trial))}: "
            f"{_result(trial, self._metric)}{rest}",
            even_quiet=trial.state in FAILED_STATES,
        )

    def message(self, text: str, *, routine: bool = False) -> None:
        """A sentence that stays on the screen; a `routine` one is no warning."""
        if routine and self._quiet:
            return
        if self._plain or self._live is None:
            self._write(text)
        else:
            self._live.console.print(Text(printable(text)))

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    # --- how it looks ---

    def time_left_s(self) -> float | None:
        """The forecast: seconds to the end of the study, None before a trial has finished."""
        spent = self._clock.monotonic_s() - self._trial_from_s if self._current else 0.0
        return time_left_s(self._finished_s, self._total - self._finished, spent)

    @property
    def _competing(self) -> bool:
        return self._unit == "trial"

    def _name(self, number: int, label: str) -> str:
        return f"trial {number}, {label}" if self._competing else label

    def _note(self, trial: Trial) -> None:
        self._trials.append(trial)
        if trial.time.total_s > 0:
            self._finished_s.append(trial.time.total_s)
        if self._beats(trial):
            self._best = trial

    def _beats(self, trial: Trial) -> bool:
        value = _value(trial, self._metric)
        if not self._competing:
            return False
        if value is None or trial.state != "completed" or trial.violations:
            return False
        best = None if self._best is None else _value(self._best, self._metric)
        if best is None:
            return True
        return value > best if higher_is_better(self._metric) else value < best

    def _enter_stage(self, text: str | None) -> None:
        now = self._clock.monotonic_s()
        if self._stage is not None:
            took = now - self._stage_from_s
            self._stage_history.setdefault(self._stage, []).append(took)
            if self._round is not None:
                self._event(f"  {self._stage}: {counted(self._round[1], 'request')} in {format_duration(took)}")
        self._stage, self._stage_from_s, self._round = text, now, None

    def _event(self, text: str, *, even_quiet: bool = False) -> None:
        if self._plain and (even_quiet or not self._quiet):
            self._write(text)

    def _write(self, text: str) -> None:
        self._console.print(Text(printable(text)), soft_wrap=True)

    def _screen(self) -> RenderableType:
        parts: list[RenderableType] = []
        if self._trials:
            parts.append(self._table(self._shown()))
        parts.append(self._overall())
        if self._current or self._stage:
            parts.append(self._step())
        return Group(*parts)

    def _shown(self) -> list[Trial]:
        """The latest trials, and the best one however old it is."""
        latest = self._trials[-ROWS_SHOWN:]
        return latest if self._best is None or self._best in latest else [self._best, *latest[1:]]

    def _table(self, trials: Sequence[Trial]) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        names = ("trial", "configuration") if self._competing else (self._unit,)
        for heading in (*names, metric_title(self._metric), "result"):
            table.add_column(heading, justify="right" if heading == "trial" else "left", overflow="ellipsis")
        for trial in trials:
            best = trial is self._best
            value = metric_value(self._metric, _value(trial, self._metric))
            state = "best so far" if best else _state(trial)
            name = (str(trial.number), trial_label(trial)) if self._competing else (trial_label(trial),)
            cells = (*name, value, state)
            table.add_row(*(Text(c) for c in cells), style="bold green" if best else _style(trial))
        return table

    def _overall(self) -> Table:
        left = self.time_left_s()
        rest = f"about {format_duration(left)} left" if left is not None else f"time left after the first {self._unit}"
        return self._bar(
            f"{self._finished} of {counted(self._total, self._unit)}", self._finished, max(self._total, 1), rest
        )

    def _bar(self, name: str, done: float | None, total: float, rest: str) -> Table:
        """Name, bar and rest on one line: short of room the bar shrinks first, then the name; the rest stays whole."""
        row = Table.grid(padding=(0, 1))
        room = self._console.width - len(rest) - 1
        width = min(BAR_WIDTH, room - len(name) - 1)
        row.add_column(overflow="ellipsis", no_wrap=True, max_width=max(room, 1))
        cells: list[RenderableType] = [Text(name)]
        if width >= LEAST_BAR_WIDTH:
            row.add_column(width=width)
            pulse = done is None
            bar = ProgressBar(total=total, completed=done or 0, pulse=pulse, width=width, complete_style="cyan")
            cells.append(bar)
        row.add_column(no_wrap=True)
        row.add_row(*cells, Text(rest, style="dim"))
        return row

    def _step(self) -> Table:
        elapsed = self._clock.monotonic_s() - self._stage_from_s
        name = ": ".join(part for part in (self._current, self._stage) if part)
        if self._round is not None:
            done, total = self._round
            left = step_left_s(elapsed, done, total)
            rest = f"{done}/{total}" + (f", {format_duration(left)} left" if left is not None else "")
            return self._bar(name, done, total, rest)
        earlier = self._stage_history.get(self._stage or "", [])
        share = share_done(elapsed, earlier)
        spent = format_duration(elapsed)
        if share is None:
            return self._bar(name, None, 1, spent)
        left = max(sorted(earlier)[len(earlier) // 2] - elapsed, 0.0)
        return self._bar(name, share, 1, f"{spent}, about {format_duration(left)} left")


def _value(trial: Trial, path: str) -> float | None:
    return None if trial.median is None else metric(trial.median, path)


def _state(trial: Trial) -> str:
    if trial.cause:
        return f"{STATE_WORDS[trial.state]}: {trial.cause}"
    return f"outside {_rule(trial.violations[0])}" if trial.violations else STATE_WORDS[trial.state]


def _rule(violation: str) -> str:
    return violation.partition(": ")[0]


def _style(trial: Trial) -> str | None:
    return None if trial.state == "completed" and not trial.violations else "yellow"


def _result(trial: Trial, path: str) -> str:
    if trial.median is not None and trial.state in ("completed", "infeasible", "pruned"):
        value = f"{metric_title(path)} {metric_value(path, _value(trial, path))}"
        outside = f", outside {', '.join(map(limit_text, trial.violations))}" if trial.violations else ""
        stopped = ", stopped early" if trial.state == "pruned" else ""
        cause = f" ({trial.cause}: {trial.message})" if trial.cause and trial.message else ""
        return f"{value}{outside}{stopped}{cause}"
    detail = ": ".join(part for part in (trial.cause, trial.message) if part)
    return f"{STATE_WORDS[trial.state]}{': ' + detail if detail else ''}"
