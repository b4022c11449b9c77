"""A verdict as Markdown, for a job's page. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tuner.domain.units import counted
from tuner.freeze.fingerprint import describe_gpus
from tuner.regress.history import RollingView
from tuner.regress.run import RunResult
from tuner.regress.verdict import MetricVerdict, Word
from tuner.regress.words import describe_interval, describe_limit, verdict_value
from tuner.report.numbers import percent, signed_percent

_SIGNS: dict[Word, str] = {
    "ok": "✅ ok",
    "regressed": "❌ regressed",
    "improved": "✅ improved",
    "inconclusive": "❔ inconclusive",
    "not comparable": "⛔ not comparable",
}
_BARS = "▁▂▃▄▅▆▇█"


def run_markdown(result: RunResult, name: str) -> str:
    """Verdict, table, trend and cause."""
    frozen = result.frozen
    lines = [f"## chunktune: {_escape(name)}: {_SIGNS[result.verdict]}", ""]
    if frozen.simulated:
        lines += ["**SIMULATED**: measured on chunktune's simulated engine.", ""]
    if result.metrics:
        version = result.fingerprint.vllm_version or "of unknown version"
        lines += [
            f"{counted(result.starts, 'fresh start')} now against {frozen.measured.starts} at the freeze, "
            f"{describe_gpus(result.fingerprint.gpus)}, vLLM {version}.",
            "",
            "| metric | at the freeze | now | change | 95 % interval | tolerance | verdict |",
            "|---|--:|--:|--:|--:|--:|---|",
            *(_row(m) for m in result.metrics.values()),
            "",
        ]
    if result.limits:
        lines += ["| constraint | now | verdict |", "|---|--:|---|"]
        for limit in result.limits:
            now = describe_limit(limit).removesuffix(" now")
            note = f" ({_escape(limit.reason)})" if limit.reason else ""
            lines.append(f"| {_escape(limit.constraint)} | {now} | {_SIGNS[limit.verdict]}{note} |")
        lines.append("")
    lines += _section("Suspects", result.suspects)
    trends = [_trend(view) for view in result.rolling if view.runs]
    lines += _section("Trend", trends)
    lines += _section("Notes", result.notes)
    return "\n".join(lines).rstrip() + "\n"


def sparkline(values: Sequence[float]) -> str:
    """Small bars from the lowest to the highest value; all alike when they are."""
    if not values:
        return ""
    low, high = min(values), max(values)
    span = high - low
    if span <= 0:
        return _BARS[3] * len(values)
    return "".join(_BARS[round((v - low) / span * (len(_BARS) - 1))] for v in values)


def _row(m: MetricVerdict) -> str:
    name = f"**{m.metric}**" if m.gate else m.metric
    if m.baseline is None or m.now is None or m.change is None or m.ci95 is None:
        return f"| {name} | | | | | | {_SIGNS[m.verdict]} ({_escape(m.reason)}) |"
    tolerance = "" if m.tolerance is None else percent(m.tolerance)
    sign = _SIGNS[m.verdict] if m.gate else m.verdict
    return (
        f"| {name} | {verdict_value(m.metric, m.baseline)} | {verdict_value(m.metric, m.now)} "
        f"| {signed_percent(m.change)} | {describe_interval(m.ci95)} | {tolerance} | {sign} |"
    )


def _trend(view: RollingView) -> str:
    median = verdict_value(view.metric, view.median)
    drift = "" if view.drift is None else f", median {median} ({signed_percent(view.drift)} from the freeze)"
    left = f", {counted(view.left_out, 'regressed run')} left out" if view.left_out else ""
    return f"{view.metric}: {sparkline(view.trend)} over {counted(view.runs, 'run')}{drift}{left}"


def _section(title: str, items: Sequence[str]) -> list[str]:
    return [f"### {title}", "", *(f"- {_escape(item)}" for item in items), ""] if items else []


def _escape(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
