"""What may have caused a regression. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tuner.domain.experiment import Fingerprint
from tuner.freeze.fingerprint import Difference, differences
from tuner.regress.history import HistoryRow
from tuner.regress.verdict import MetricVerdict, Word
from tuner.report.numbers import signed_percent


def name_suspects(
    verdict: Word,
    changes: Sequence[Difference],
    now: Fingerprint,
    history: Sequence[HistoryRow],
    stock: Mapping[str, MetricVerdict],
) -> list[str]:
    """Sentences, the strongest suspect first; empty when there is nothing to explain.

    A change since the last run that was ok is stronger than one since the freeze.
    """
    if verdict not in ("regressed", "inconclusive"):
        return []
    last_ok = next((row for row in reversed(history) if row.verdict in ("ok", "improved")), None)
    recent = [] if last_ok is None else differences(last_ok.fingerprint, now)
    named = [
        f"{c.field} changed since the last run that was ok ({last_ok.time}): {c.frozen} then, {c.now} now"
        for c in recent
        if last_ok is not None
    ]
    fresh = {c.field for c in recent}
    named += [str(c) for c in changes if c.field not in fresh]
    named += [
        f"the machine: the stock setting changed too ({name} {signed_percent(m.change)})"
        for name, m in stock.items()
        if m.verdict in ("regressed", "inconclusive") and m.change is not None
    ]
    if not named:
        named.append(
            "nothing that is recorded has changed (vLLM, driver, model revision): check the machine itself, "
            "its clocks, its temperature and what else runs on it"
        )
    return named
