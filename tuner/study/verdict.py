"""Which setting is frozen and why: one decision, for the frozen file, the table and the sentence alike. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tuner.domain.experiment import STOCK_ID, Contrast, Results, SettingId, Verdict
from tuner.domain.measurement import metric
from tuner.domain.setting import Setting
from tuner.measure.contrast import Estimate
from tuner.study.estimate import Evidence, contrast_of, rank
from tuner.study.finals import completed_finals
from tuner.study.ledger import read_failures
from tuner.study.problem import Problem, Registry
from tuner.study.search import GroupSearch, named_in

ERROR = 0.03
"""Probability, over all challengers together, that a setting is said to be better than stock when none is."""
SURE = 0.9
"""Probability with which a setting has to meet every constraint before it is frozen in stock's place."""
ANSWERED_SLACK = 0.03
"""A share of the requested output tokens that is smaller than stock's by more than this is less."""
EVEN = 0.5
"""Stock counts as meeting the constraints from this probability on."""


@dataclass(frozen=True)
class Decision:
    """What a study amounts to."""

    verdict: Verdict
    winner: SettingId | None
    """The setting to freeze: stock's id for the verdict `stock`; None for `none`."""
    setting: Setting | None
    sentence: str
    """The verdict in plain English, with its figures."""
    contrast: Contrast | None = None
    """The winner against stock in the first objective; None for stock itself, or where stock has no level."""
    bound: float | None = None
    """Simultaneous lower bound of its improvement over stock, relative; what the verdict `better` rests on."""
    p_feasible: float | None = None
    """Probability that the winner meets every constraint."""
    leader: SettingId | None = None
    """The best of the finals that meets every constraint with enough probability, stock included."""
    literal: str = ""
    """What the start with the frozen command said; empty when there was none."""
    literal_agrees: bool | None = None
    """Whether its level lies in the prediction interval of the finals; None when there was no such start."""


def decide(problem: Problem, results: Results, registry: Registry) -> Decision:
    """The verdict on what was measured so far; `none` while no final start is through."""
    return _Finals(problem, results, registry).decide()


class _Finals:
    def __init__(self, problem: Problem, results: Results, registry: Registry) -> None:
        self.problem = problem
        self.registry = registry
        self.results = results
        self.path = problem.objective.metrics[0]
        self.starts = [s.number for s in completed_finals(results)]
        search = [s.number for s in results.starts if s.purpose == "search"]
        self.evidence = Evidence(problem, results, self.starts, more_starts=search, final=True)
        out = read_failures(results).out
        measured = [n for n in self.evidence.ids if n not in out]
        self.challengers = [n for n in measured if n != STOCK_ID]
        self.p = {n: self.evidence.p_feasible(n) for n in measured}
        sure = [n for n in measured if self.p[n] >= SURE]
        self.leader = next(iter(self._ranked(sure)), None)

    def decide(self) -> Decision:
        unmeasured = self._unmeasured()
        if unmeasured:
            return Decision("none", None, None, unmeasured)
        if not self.starts:
            return Decision("none", None, None, "No final start was completed, so there is no verdict.")
        refused = next((s for s in self.results.starts if s.purpose == "literal" and s.state == "infeasible"), None)
        if refused is not None:
            sentence = f"Nothing can be frozen: the command to be frozen does not start ({refused.message})."
            return Decision("none", None, None, sentence, leader=self.leader)
        sure = [n for n in self.challengers if self.p[n] >= SURE and not self._answers_less(n)]
        if self.p.get(STOCK_ID, 0.0) >= EVEN:
            best = self._best([n for n in sure if self._beats_stock(n)])
            return self._better(best) if best is not None else self._stock()
        best = self._best(sure)
        return self._better(best) if best is not None else self._none()

    def _ranked(self, names: list[SettingId]) -> list[SettingId]:
        """By the objective. Where all are of one group, over its search and finals together and with what neighbours
        show: the order of settings that differ little, not how far they are from stock."""
        measured = self.evidence.ranked(names)
        for group in self.problem.groups:
            search = GroupSearch(self.problem, group, self.registry, self.results, purposes=("search", "final"))
            found = {n: search.standings[n].costs for n in measured if n in search.standings}
            if len(found) == len(measured):
                return rank(found)
        return measured

    def _unmeasured(self) -> str:
        """Which metric of the objective no round has, and why; '' where each was measured, or nothing was."""
        rounds = [r.measurement for r in self.results.rounds if r.kept]
        for path in self.problem.objective.metrics if rounds else ():
            if all(metric(m, path) is None for m in rounds):
                reason = rounds[0].unmeasured.get(path.partition(".")[0])
                return f"{path}, which the profile optimizes, was not measured{f': {reason}' if reason else ''}."
        return ""

    def _best(self, names: list[SettingId]) -> SettingId | None:
        """The best by the objective. A setting with a reuse budget has to beat the best one without: a plug-in that
        brings nothing is a dependency that nobody needs."""
        order = self._ranked(names)
        plain = next((n for n in order if self._setting(n).reuse_budget is None), None)
        for name in order:
            if name == plain or plain is None or self._surely_better(name, plain):
                return name
        return plain

    def _surely_better(self, one: SettingId, other: SettingId) -> bool:
        gains = self.evidence.gains(one, other)
        return gains is not None and gains[0].quantile(ERROR) > 0

    def _bound(self, name: SettingId) -> float | None:
        """Lower bound of the gain over stock on the scale of the objective, simultaneous over the challengers."""
        gains = self.evidence.gains(name, STOCK_ID)
        return None if gains is None else gains[0].quantile(ERROR / max(1, len(self.challengers)))

    def _beats_stock(self, name: SettingId) -> bool:
        bound = self._bound(name)
        return bound is not None and bound > 0 and self._failed(name) <= self._failed(STOCK_ID)

    def _failed(self, name: SettingId) -> float:
        """Failed requests a round."""
        seen = [r.measurement.failed_requests or 0 for r in self.evidence.rounds(name)]
        return sum(seen) / len(seen) if seen else math.inf

    def _answers_less(self, name: SettingId) -> bool:
        """Whether it gives clearly less of the tokens that were asked for than stock: faster for that reason alone."""
        mine, stock = self._answered(name), self._answered(STOCK_ID)
        return mine is not None and stock is not None and mine < stock - ANSWERED_SLACK

    def _answered(self, name: SettingId) -> float | None:
        seen = [r.measurement.answered_share for r in self.evidence.rounds(name)]
        known = [share for share in seen if share is not None]
        return sum(known) / len(known) if known else None

    def _setting(self, name: SettingId) -> Setting:
        return named_in(self.results, name, self.problem)

    # --- sentences ---

    def _better(self, name: SettingId) -> Decision:
        contrast = contrast_of(self.evidence, name, self.path)
        words = f"{_upper(self._label(name))} {_meets(self.problem, self.p[name])}"
        if self.p.get(STOCK_ID, 0.0) < EVEN:
            compared = f"; its {self.path} is {_against(contrast)}" if contrast is not None else ""
            sentence = f"{self._stock_breaks()} {words}{compared}."
        else:
            changed = f" changes {self.path} by {_change(contrast)} against stock" if contrast is not None else ""
            meets = f" and {_meets(self.problem, self.p[name])}" if self.problem.constraints else ""
            sentence = f"{_upper(self._label(name))}{changed}{meets}."
        return self._decision("better", name, sentence, contrast)

    def _stock(self) -> Decision:
        best = next(iter(self._ranked(self.challengers)), None)
        if best is None:
            return self._decision("stock", STOCK_ID, "Stock is kept: no other setting could be measured in the finals.")
        contrast = contrast_of(self.evidence, best, self.path)
        changed = f"changed {self.path} by {_change(contrast)}" if contrast is not None else "was the best"
        sentence = f"Stock is kept: {self._label(best)}, the best of the finals, {changed}; {self._why_not(best)}."
        return self._decision("stock", STOCK_ID, sentence)

    def _why_not(self, name: SettingId) -> str:
        if self.p[name] < SURE:
            return f"it meets {self._worst(name)} only with a probability of {self.p[name]:.2f}"
        bound = self._bound(name)
        if bound is None or bound <= 0:
            gains = self.evidence.gains(name, STOCK_ID)
            worse = gains is not None and gains[0].interval()[1] < 0
            return "that is worse than stock" if worse else "that is not significantly different from stock"
        if self._answers_less(name):
            return f"it answered {self._answered(name):.0%} of what was asked, less than stock".replace("%", " %")
        if self._failed(name) > self._failed(STOCK_ID):
            return "more of its requests failed than of stock's"
        return "it is not significantly better than the setting without the reuse budget"

    def _none(self) -> Decision:
        order = sorted(self.challengers, key=lambda n: -self.p[n])
        nearest = ""
        if order:
            nearest = (
                f" The setting nearest to it, {self._label(order[0])}, meets {self._worst(order[0])} with a "
                f"probability of {self.p[order[0]]:.2f}; {SURE:g} is needed."
            )
        return Decision(
            "none", None, None, f"Nothing can be frozen. {self._stock_breaks()}{nearest}", leader=self.leader
        )

    def _stock_breaks(self) -> str:
        if STOCK_ID not in self.p:
            return "Stock could not be measured."
        return f"Stock breaks {self._worst(STOCK_ID)}."

    def _worst(self, name: SettingId) -> str:
        return min(self.evidence.checks(name), key=lambda check: check.p).text

    def _label(self, name: SettingId) -> str:
        return "stock" if name == STOCK_ID else f"setting {name} ({self._setting(name).label})"

    def _decision(self, verdict: Verdict, name: SettingId, sentence: str, contrast: Contrast | None = None) -> Decision:
        literal, agrees = self._literal(name)
        bound = self._bound(name) if name != STOCK_ID else None
        return Decision(
            verdict,
            name,
            self._setting(name),
            f"{sentence} {literal}" if agrees is False else sentence,
            contrast,
            None if bound is None else -math.expm1(-bound),
            self.p.get(name),
            self.leader,
            literal,
            agrees,
        )

    # --- the literal start ---

    def _literal(self, name: SettingId) -> tuple[str, bool | None]:
        """The start with the frozen command against the interval in which the finals predict it (95 %)."""
        numbers = [s.number for s in self.results.starts if s.purpose == "literal" and s.state == "completed"]
        literal = Evidence(self.problem, self.results, numbers, more_starts=self.starts)
        there = literal.level(name, self.path) if numbers else None
        here = self.evidence.level(name, self.path)
        if there is None or here is None:
            return "", None
        scale = self.evidence.scale(self.path)
        predicted = Estimate(here.value, math.hypot(here.se, there.se), min(here.df, there.df))
        low, high = predicted.interval()
        agrees = low <= there.value <= high
        span = f"{scale.back(low):.4g} to {scale.back(high):.4g}"
        off = scale.change(there.value - here.value, here.value)
        by = "" if off is None else f", {abs(off):.1%} {'above' if off > 0 else 'below'} the level of the finals"
        measured = f"the start with the frozen command measured {self.path} at {scale.back(there.value):.4g}"
        if agrees:
            return f"{_upper(measured)}, as the finals predict ({span}).", True
        return f"The literal start differs: {measured}{by.replace('%', ' %')}, where they predict {span}.", False


def _meets(problem: Problem, p: float) -> str:
    if not problem.constraints:
        return "can be frozen"
    what = "the constraint" if len(problem.constraints) == 1 else "every constraint"
    return f"meets {what} with a probability of {p:.2f}"


def _change(contrast: Contrast) -> str:
    """`-12.3 % (95 % interval -14.7 to -9.8 %)`."""
    assert contrast.ci95 is not None
    low, high = (100 * v for v in contrast.ci95)
    return f"{100 * contrast.change:+.1f} % (95 % interval {low:+.1f} to {high:+.1f} %)"


def _against(contrast: Contrast) -> str:
    """`4.5 % higher than stock's (95 % interval +2.0 to +7.1 %)`."""
    assert contrast.ci95 is not None
    low, high = (100 * v for v in contrast.ci95)
    side = "higher" if contrast.change > 0 else "lower"
    return f"{100 * abs(contrast.change):.1f} % {side} than stock's (95 % interval {low:+.1f} to {high:+.1f} %)"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
