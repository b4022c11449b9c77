"""Verdicts in words and numbers for people. Pure."""

from __future__ import annotations

from tuner.domain.measurement import Interval
from tuner.regress.limits import LimitVerdict
from tuner.regress.verdict import MetricVerdict
from tuner.report.numbers import metric_unit, metric_value, short, signed_percent


def describe(m: MetricVerdict) -> str:
    """`25.2 ms against 23.7 ms, +6.4 % (95 % interval +3.1 % to +9.9 %)`."""
    if m.baseline is None or m.now is None or m.change is None:
        return m.reason or "not measured"
    values = f"{verdict_value(m.metric, m.now)} against {verdict_value(m.metric, m.baseline)}"
    interval = "" if m.ci95 is None else f" (95 % interval {describe_interval(m.ci95)})"
    return f"{values}, {signed_percent(m.change)}{interval}"


def verdict_value(path: str, value: float | None) -> str:
    """`metric_value` with three figures for times too: whole milliseconds would hide a change of some percent."""
    return f"{short(value)} ms" if value is not None and metric_unit(path) == "ms" else metric_value(path, value)


def describe_interval(interval: Interval) -> str:
    """`+3.1 % to +9.9 %`."""
    return f"{signed_percent(interval[0])} to {signed_percent(interval[1])}"


def describe_limit(limit: LimitVerdict) -> str:
    """`283.4 ms now`, precise enough to tell it from the limit; a share as the constraint writes it."""
    if limit.now is None:
        return "not measured"
    unit = metric_unit(limit.metric)
    return f"{limit.now:.4g}{'' if unit in ('', '%') else f' {unit}'} now"
