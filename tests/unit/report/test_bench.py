"""The table of `bench` at the widths of real terminals."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from tests.fakes import studies
from tuner.domain.measurement import Latency
from tuner.domain.profile import Constraint
from tuner.domain.setting import STOCK
from tuner.report.bench import BenchResult


def measured(cycles: int = 3, *, start: dict[str, Any] | None = None, **changes: Any) -> BenchResult:
    """A server of this machine, with every latency there is and numbers as long as they get."""
    long = Latency(p50=12345.6, p90=23456.7, p99=34567.8, mean=14567.8, n=1200)
    fields: dict[str, Any] = {
        "rounds": [row for n in range(cycles) for row in studies.cycle(n, 1, {"stock": (STOCK, 1142.0)}, n + 1)],
        "median": studies.measurement(1142.0).model_copy(update={"ttft_uncached_ms": long, "cold_ttft_ms": long}),
        "ci95": {"ttft_ms.p90": (1131.2, 1150.4), "ttft_uncached_ms.p90": (22345.6, 24567.8)},
    }
    label = {"label": "http://127.0.0.1:8000"}
    return BenchResult(studies.start(1, "bench", **{**label, **(start or {})}), **{**fields, **changes})


def shown(result: BenchResult, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(result)
    return out.getvalue()


@pytest.mark.parametrize("width", [60, 79, 80, 118])
def test_every_latency_is_one_whole_line(width: int) -> None:
    text = shown(measured(), width)
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= width
    assert "…" not in text
    row = next(line for line in lines if line.startswith("ttft_uncached"))
    assert row.split()[1:7] == ["12,346", "23,457", "22,346", "to", "24,568", "34,568"]
    assert (row.split()[7:] == ["14,568", "1200"]) is (width >= 80)
    assert not any(mark in text for mark in "┃│┏└")


def test_the_title_counts_the_rounds_that_count() -> None:
    assert "http://127.0.0.1:8000, median of 3 rounds, times in ms" in shown(measured(), 80)
    assert "median of 1 round, times in ms" in shown(measured(1), 80)
    kept, lost = measured(2).rounds
    interrupted = measured(rounds=[kept, studies.discarded(lost, "warm cache")], start={"state": "interrupted"})
    assert "median of 1 round, then interrupted" in shown(interrupted, 80)


def test_a_simulated_server_is_labelled() -> None:
    assert "SIMULATED" not in shown(measured(), 80)
    assert shown(measured(start={"simulated": True}), 80).startswith("SIMULATED: no engine and no GPU were measured")


def test_a_broken_limit_is_in_words() -> None:
    limits = [Constraint.parse(text) for text in ("itl_ms.p99 <= 50", "ttft_ms.p90 <= 2000")]
    text = shown(measured(constraints=limits), 80)
    assert "outside itl_ms.p99 <= 50 (147 ms)" in text
    assert "ttft_ms.p90 <=" not in text


def test_without_a_round_there_is_the_reason() -> None:
    failed = {"state": "load_failed", "cause": "warm_cache", "message": "[b]2 of 2[/b]"}
    text = shown(measured(0, median=None, ci95={}, start=failed), 80)
    assert "no round counts" in text
    assert "warm_cache: [b]2 of 2[/b]" in text
