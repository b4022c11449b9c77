"""What an experiment shows while it runs: a live table on a terminal, one line per event elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from types import TracebackType
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tuner.clock import SYSTEM_CLOCK, Clock
from tuner.domain.experiment import Results, Round, SettingId, Start
from tuner.domain.measurement import metric
from tuner.domain.units import counted, format_duration, printable
from tuner.report.numbers import metric_title, metric_value
from tuner.report.words import FAILED_STATES, STATE_WORDS, sentence

if TYPE_CHECKING:
    from tuner.experiment.design import Named, StartPlan, Step

BAR_WIDTH = 20
LEAST_BAR_WIDTH = 60
"""Columns of a terminal from which there is a bar beside the words."""
_OTHER_LINES = 6
"""Of the live view, beside the rows of its table."""


@dataclass
class _Row:
    """One setting as measured so far."""

    label: str
    values: list[float] = field(default_factory=list)
    rounds: int = 0
    cycle: int = -1
    """The latest cycle that it was measured in."""
    out: bool = False
    """Not in the latest complete cycle of its start, or not among the finalists."""


class SweepView:
    """The events of a sweep, a nightly run, a comparison or a bench, shown on stderr.

    Not a terminal, or `quiet`: plain text, one line per event. `quiet` keeps only failed starts and the messages
    that are not routine. `objective` is the path of the metric whose median the table shows. Call `close` on
    every path (or use `with`, which leaves the table on the screen where an error ends it): it gives the terminal
    back and may be called twice. Safe to call from one thread; the screen is redrawn by another.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        quiet: bool = False,
        objective: str = "ttft_ms.p90",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._quiet = quiet
        self._objective = objective
        self._clock = clock
        self._from_s = clock.monotonic_s()
        self._expected: tuple[int | None, float | None] = (None, None)
        self._outlook = ""
        self._ended = 0
        self._rows: dict[SettingId, _Row] = {}
        self._start = ""
        self._measured_here: set[SettingId] = set()
        self._cycle = -1
        self._round = ""
        self._step = ""
        self._step_from_s = self._from_s
        self._requests: tuple[int, int] | None = None
        self._plain = quiet or not self._console.is_terminal
        self._live: Live | None = None

    def __enter__(self) -> SweepView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        was_live = self._live is not None
        self.close()
        if kind is not None and was_live and self._rows:
            self._console.print(self._table())

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def resumed(self, results: Results) -> None:
        """What earlier runs of the same study measured, for the table. To be called before the first event."""
        for name, setting in results.settings():
            row = self._rows.setdefault(name, _Row(setting.label))
            for found in results.kept(name):
                self._count(row, found)

    # --- the events ---

    def expected(self, starts: int | None, seconds: float | None, text: str = "") -> None:
        """`starts` and `seconds` are of this run, what is over included; a terminal keeps the latest `text` in view."""
        self._expected, self._outlook = (starts, seconds), text
        parts = [counted(starts, "start")] if starts is not None else []
        parts += [f"about {format_duration(seconds)}"] if seconds is not None else []
        if text or parts:
            self._event(text or f"expected: {', '.join(parts)}")

    def start_began(self, number: int, plan: StartPlan) -> None:
        self._start = f"start {number}, {plan.label or plan.purpose}"
        self._cycle, self._measured_here = -1, set()
        planned = {named.id for named in plan.settings}
        for name, row in self._rows.items():
            row.out = (row.out and name not in planned) or (plan.purpose == "final" and name not in planned)
        self._enter("starting the engine")
        settings = f" with {counted(len(plan.settings), 'setting')}" if len(plan.settings) > 1 else ""
        self._event(f"{self._start}{settings}")
        self._show()

    def start_ready(self, start: Start) -> None:
        self._enter("")
        self._event(f"  ready after {format_duration(start.start_s)}")

    def round_began(self, start: Start, step: Step, attempt: int) -> None:
        if start.live and step.cycle > self._cycle >= 0:
            for name in self._measured_here:
                self._rows[name].out = self._rows[name].cycle < self._cycle
        self._cycle = step.cycle
        row = self._row(step.named)
        row.out = False
        again = f", attempt {attempt}" if attempt > 1 else ""
        self._round = f"cycle {step.cycle + 1}, round {step.position + 1}, {row.label}{again}"
        self._enter(self._round)

    def round_progress(self, done: int, total: int) -> None:
        """Cheap enough for every request. A count that begins anew is the round's, after its warm-up's."""
        if self._requests is not None and done < self._requests[0]:
            self._enter(self._round)
        self._requests = (done, total)

    def round_ended(self, row: Round, named: Named) -> None:
        shown = self._row(named)
        where = f"cycle {row.cycle + 1}, {shown.label}"
        self._enter("")
        if not row.kept:
            self._event(f"  {where}: round discarded: {row.reason or row.code}", on_terminal=True)
            return
        self._measured_here.add(named.id)
        value = self._count(shown, row)
        took = f" in {format_duration(row.load_s)}" if row.load_s else ""
        self._event(f"  {where}: {metric_title(self._objective)} {metric_value(self._objective, value)}{took}")

    def start_ended(self, start: Start) -> None:
        self._ended += 1
        self._enter("")
        detail = ": ".join(part for part in (start.cause, start.message) if part)
        if start.hint:
            detail = f"{sentence(detail)} {start.hint}"
        took = f" after {format_duration(start.time.total_s)}" if start.time.total_s else ""
        told = f"{self._start or f'start {start.number}'}: {STATE_WORDS[start.state]}{took}"
        self._start = ""
        text = f"{told}: {detail}" if detail else told
        self._event(text, even_quiet=start.state in FAILED_STATES, on_terminal=True)

    def stage(self, text: str) -> None:
        """What is being done now; it stands beside the running start."""
        self._enter(text)
        self._event(f"  {text}")

    def message(self, text: str, *, routine: bool = False) -> None:
        """A sentence that stays on the screen."""
        self._event(text, even_quiet=not routine, on_terminal=True)

    # --- how it looks ---

    def time_left_s(self) -> float | None:
        """Seconds until the expected end, None where it is not known or over."""
        seconds = self._expected[1]
        left = None if seconds is None else seconds - (self._clock.monotonic_s() - self._from_s)
        return left if left is not None and left > 0 else None

    def screen(self) -> RenderableType:
        """What a terminal shows at this moment."""
        parts: list[RenderableType] = [self._table()] if self._rows else []
        parts.append(self._overall())
        if self._start or self._step:
            parts.append(self._running())
        if self._outlook:
            parts.append(Text(printable(self._outlook), style="dim"))
        return Group(*parts)

    def _row(self, named: Named) -> _Row:
        return self._rows.setdefault(named.id, _Row(named.setting.label))

    def _count(self, row: _Row, found: Round) -> float | None:
        value = metric(found.measurement, self._objective)
        row.rounds, row.cycle = row.rounds + 1, found.cycle
        row.values += [] if value is None else [value]
        return value

    def _enter(self, step: str) -> None:
        self._step, self._step_from_s, self._requests = step, self._clock.monotonic_s(), None

    def _show(self) -> None:
        if self._plain or self._live is not None:
            return
        self._live = Live(
            get_renderable=self.screen,
            console=self._console,
            refresh_per_second=4,
            transient=True,
            redirect_stdout=False,
        )
        self._live.start()

    def _event(self, text: str, *, even_quiet: bool = False, on_terminal: bool = False) -> None:
        if even_quiet or (on_terminal if not self._plain else not self._quiet):
            self._console.print(Text(printable(text)), soft_wrap=self._plain)

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for heading in ("id", "setting", "rounds", f"{metric_title(self._objective)} so far", ""):
            left = heading in ("setting", "")
            table.add_column(heading, justify="left" if left else "right", no_wrap=True, overflow="ellipsis")
        rows = sorted(self._rows.items(), key=lambda item: item[1].out)
        room = max(self._console.height - _OTHER_LINES, 4)
        for name, row in rows[:room]:
            middle = median(row.values) if row.values else None
            cells = (str(name), row.label, str(row.rounds), metric_value(self._objective, middle))
            note = "left out" if row.out else ""
            table.add_row(*(Text(cell) for cell in (*cells, note)), style="dim" if row.out else None)
        if len(rows) > room:
            table.add_row("", Text(f"and {len(rows) - room} more"), "", "", "", style="dim")
        return table

    def _overall(self) -> Table:
        starts, seconds = self._expected
        left = self.time_left_s()
        done = counted(self._ended, "start") + (f" of about {starts}" if starts is not None else "")
        if seconds is None:
            return self._bar(f"{done} done", None, "")
        rest = f"about {format_duration(left)} left" if left is not None else "longer than expected"
        return self._bar(f"{done} done", 0.99 if left is None else 1 - left / seconds, rest)

    def _running(self) -> Table:
        name = ": ".join(part for part in (self._start, self._step) if part)
        if self._requests is not None and self._requests[1] > 0:
            done, total = self._requests
            return self._bar(name, done / total, f"{done}/{total} requests")
        return self._bar(name, None, format_duration(self._clock.monotonic_s() - self._step_from_s))

    def _bar(self, name: str, share: float | None, rest: str) -> Table:
        """Name, bar and rest on one line. Short of room, the name is cut; the rest stays whole."""
        row = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [Text(name, no_wrap=True, overflow="ellipsis")]
        row.add_column()
        if self._console.width >= LEAST_BAR_WIDTH:
            row.add_column(width=BAR_WIDTH, no_wrap=True)
            pulse = share is None
            cells.append(
                ProgressBar(total=1, completed=share or 0, pulse=pulse, width=BAR_WIDTH, complete_style="cyan")
            )
        row.add_column(no_wrap=True)
        row.add_row(*cells, Text(rest, style="dim"))
        return row
